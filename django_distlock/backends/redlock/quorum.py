"""The verbs of Redlock and its OPTIONS: the verbs of Redis on all servers, and what their answers mean together.

No I/O, except repeated releases in the background.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

from redis.exceptions import ResponseError

from django_distlock.backends.redis.backend import ask_facts
from django_distlock.backends.redis.connections import Conversation, ask
from django_distlock.backends.redis.sources import RedisSettings, check_connection_options
from django_distlock.backends.redis.verbs import (
    BATCH,
    RedisVerbs,
    key_space,
    keys_of,
    split_label,
)
from django_distlock.conf import check_values, checked_ttl
from django_distlock.engine.leftovers import until_done
from django_distlock.engine.steps import Steps
from django_distlock.engine.values import Busy, Grant, Held, Release, Request, batches
from django_distlock.exceptions import (
    Contended,
    LockBackendError,
    LockOutcomeUnknown,
    root_cause,
)
from django_distlock.ground import clock
from django_distlock.ground.naming import with_label

from . import votes
from .servers import Servers
from .votes import Count, Election, Question

_T = TypeVar("_T")
#: A generator that yields questions, and is sent the counts of their answers.
Verb = Steps[Question, _T]

#: A ttl for which servers have the longest time for their answers.
UNHURRIED = 10.0
#: The smallest number of servers of which one may fail.
FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class RedlockOptions:
    """The OPTIONS of RedlockBackend. Times are seconds.

    *servers* are URLs, which may hold passwords, or aliases of CACHES; *options* are for redis-py, with all URLs.
    """

    servers: Sequence[str] = field(default=(), repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    fencing: bool = False
    restart_guard: bool = True
    longest_ttl: float | None = None
    durable: bool = False
    server_timeout: float | None = None
    connect_timeout: float | None = None
    allow_eviction: bool = False

    def __post_init__(self) -> None:
        is_list = isinstance(self.servers, (list, tuple))
        if not is_list or not all(isinstance(server, str) for server in self.servers):
            raise TypeError("'servers' must be a list of URLs or of aliases of CACHES.")
        number = len(self.servers)
        if number < FEWEST or number % 2 == 0:
            msg = f"'servers' must be {FEWEST}, 5 or another odd number of servers, not {number}."
            raise ValueError(msg)
        check_values(self)
        check_connection_options(self.options)
        if self.longest_ttl is not None:
            checked_ttl(self.longest_ttl, "'longest_ttl'")


class RedlockVerbs:
    """The verbs of one alias: each runs the verb of Redis on all *servers*, and returns what a majority answers.

    *least_uptime*: for how many seconds a server must have been up before it may grant a lock.
    """

    def __init__(
        self,
        alias: str,
        servers: Servers,
        options: RedlockOptions,
        *,
        least_uptime: float,
    ) -> None:
        self._alias = alias
        self._servers = servers
        self._names = servers.names
        self._options = options
        self._least_uptime = least_uptime
        self._most = votes.majority(len(servers.names))
        self._everybody = range(len(servers.names))
        self._redis = RedisVerbs(alias, RedisSettings(), batch=BATCH)

    def acquire(self, request: Request, *, queued: bool) -> Verb[Grant | Busy]:
        """Try to acquire the lock on a majority. After a refusal, release what single servers have granted, for good."""
        verb = partial(self._redis.acquire, queued=queued)
        question = self._question(verb, request, Count.is_elected)
        question.least_uptime = self._least_uptime
        ballot: Count = yield question
        outcome = ballot.election()
        if outcome is Election.WON:
            return (yield from self._fence(request, ballot))
        if outcome is Election.UNREACHABLE and ballot.unsure:
            self._fail(ballot)  # without a release, as the same owner may ask again
        yield from self._give_back(request, ballot)
        if outcome is Election.UNREACHABLE:
            self._fail(ballot)
        return ballot.busy()

    def _fence(self, request: Request, ballot: Count) -> Verb[Grant | Busy]:
        """Write the token to a majority before it is used, so that no later token is lower."""
        if not self._options.fencing:
            return Grant(None)
        granted = ballot.of(Grant)
        token = max(ballot.answers[server].token for server in granted)
        # Servers that grant the lock later write the token as well.
        voters, verb = granted | ballot.pending, partial(self._redis.raise_token, token=token)
        count: Count = yield self._question(verb, request, _has_agreed, voters)
        if count.says_yes():
            return Grant(token)
        # Those that failed in the first round were not asked.
        count.failures |= ballot.failures
        count.errors += ballot.errors
        if count.unsure:
            self._need_most(count)  # raises without a release, as the same owner may ask again
        yield from self._give_back(request, ballot)
        self._need_most(count)
        return Busy()

    def release(self, request: Request) -> Verb[Release]:
        """Release the lock on all servers. The lock was lost only if a majority says so."""
        # For good, because a late try may reach a server that hung after this release.
        verb = partial(self._redis.release, for_good=True)
        count: Count = yield self._question(verb, request, _has_agreed)
        if count.says_yes() is False:
            is_taken = Release.TAKEN in count.answers.values()
            return Release.TAKEN if is_taken else Release.GONE
        self._need_most(count)
        return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Verb[list[bool]]:
        kept: list[bool] = []
        for some in batches(requests, BATCH):
            kept += yield from self._extend(some)
        return kept

    def _extend(self, requests: Sequence[Request]) -> Verb[list[bool]]:
        count: Count = yield self._ask(
            lambda server: self._redis.extend([_at(server, each) for each in requests]),
            lambda count: bool(count.answers) and None not in count.says_kept(),
            min(request.ttl for request in requests),
        )
        said = count.says_kept()
        if not said or None in said:
            if any(each is not None for each in said):
                # Each of them alone, so that the others are extended.
                problem = "too few servers can be used for some of the locks"
                raise Contended(self._alias, problem)
            self._fail(count)
        return [*map(bool, said)]

    def take_over(self, request: Request, former: str) -> Verb[bool]:
        """Take the lease over on a majority of servers; without a majority, release what was taken over."""
        verb = partial(self._redis.take_over, former=former)
        count: Count = yield self._question(verb, request, _has_agreed)
        said = count.says_yes()
        if said:
            return True
        if said is None and count.unsure:
            self._fail(count)  # without a release, as the same owner may ask again
        yield from self._give_back(request, count)
        if said is None:
            self._fail(count)
        return False

    def probe(self, request: Request) -> Verb[Busy | None]:
        count: Count = yield self._question(self._redis.probe, request, Count.is_seen)
        self._need_most(count)
        seen = count.favourite()
        # Servers that failed may have the same holder.
        if not seen or len(seen) + len(count.failures) < self._most:
            return None
        return votes.longest(seen)

    def probe_all(self, requests: Sequence[Request]) -> Verb[list[Busy | None]]:
        found: list[Busy | None] = []
        for each in requests:
            busy = yield from self.probe(each)
            found.append(busy)
        return found

    def dequeue(self, request: Request) -> Verb[None]:
        """Give up the position in the queues."""
        count: Count = yield self._question(
            self._redis.dequeue, request, lambda count: len(count.answers) >= self._most
        )
        self._need_most(count)

    def doorbells(self, request: Request) -> list[str]:
        """Return the key of the doorbell of *request* on each server."""
        keys = (_key_on(server, request.key) for server in self._everybody)
        return [keys_of(key).bell(request.waiter) for key in keys]

    def end_holding(self, key: str, owner_digest: str) -> Verb[bool]:
        count: Count = yield self._ask(
            lambda server: self._redis.end_holding(_key_on(server, key), owner_digest)
        )
        self._need_most(count)
        return any(count.answers.values())

    def held(self, key: str | None, is_ours: Callable[[str], bool], label: str) -> Verb[list[Held]]:
        """Return the locks that a majority may hold: that with *key*, or all with *label* whose keys pass *is_ours*."""
        count: Count = yield self._ask(lambda server: self._held_on(server, key, is_ours, label))
        self._need_most(count)
        seen: dict[tuple[str, str], list[Held]] = {}
        for each in chain(*count.answers.values()):
            seen.setdefault((each.key, each.owner_digest), []).append(each)
        # As in probe(), servers that failed may have the same holder.
        least = self._most - len(count.failures)
        holders: dict[str, list[Held]] = {}  # by key, what most servers say
        for (lock, _digest), found in sorted(seen.items()):
            if len(found) >= least and len(found) > len(holders.get(lock, ())):
                holders[lock] = found
        return [self._agreed(found) for found in holders.values()]

    def _held_on(
        self, server: int, key: str | None, is_ours: Callable[[str], bool], label: str
    ) -> Conversation[list[Held]]:
        keys = [key] if key else (yield from _keys_on(server, is_ours, label))
        found: list[Held] = []
        for some in batches(keys, BATCH):
            on_server = {_key_on(server, each): each for each in some}
            shown = yield from self._redis.held([*on_server])
            found += (replace(each, key=on_server[each.key]) for each in shown)
        return found

    def _agreed(self, seen: Sequence[Held]) -> Held:
        tokens = Counter(each.token for each in seen)
        return replace(
            max(seen, key=attrgetter("remaining")),
            token=tokens.most_common(1)[0][0] if self._options.fencing else None,
            waiters=max(each.waiters or 0 for each in seen),
            age=max(each.age or 0.0 for each in seen),
        )

    def _give_back(self, request: Request, ballot: Count) -> Verb[None]:
        """Release the lock on all servers that granted it or may have; wait for those that granted it.

        In the background, repeat the release on those that granted it or whose vote was lost, until they answer.
        """
        granted = {server for server, answer in ballot.answers.items() if _is_grant(answer)}
        if servers := granted | ballot.pending | ballot.unsure:
            count: Count = yield self._question(
                self._redis.give_back,
                request,
                lambda count: not granted & count.pending,
                servers,
            )
            if silent := (granted | ballot.unsure) - count.answers.keys():
                job = partial(self._release_on, request, silent)
                until_done(self._alias, job, clock.lease_time() + request.ttl)

    def _release_on(self, request: Request, servers: Iterable[int]) -> None:
        """In a background thread, release what *servers* may have granted; LockBackendError if one fails."""
        count = self._servers.ask(
            self._question(self._redis.give_back, request, lambda _: False, servers)
        )
        if count.failures:
            self._fail(count)

    def _question(
        self,
        verb: Callable[[Request], Conversation[Any]],
        request: Request,
        is_decided: Callable[[Count], bool],
        servers: Iterable[int] | None = None,
    ) -> Question:
        """Return the question that asks *servers*, by default all, to carry out *verb*."""
        return self._ask(
            lambda server: verb(_at(server, request)), is_decided, request.ttl, servers
        )

    def _ask(
        self,
        converse: Callable[[int], Conversation[Any]],
        is_decided: Callable[[Count], bool] = lambda _: False,
        ttl: float = UNHURRIED,
        servers: Iterable[int] | None = None,
    ) -> Question:
        """Return a question to *servers*, by default all, that ends when *is_decided* returns True.

        *converse* returns the conversation with one server. By default, the question waits for all servers.
        """
        asked = self._everybody if servers is None else servers
        conversations = {server: converse(server) for server in asked}
        within = votes.server_timeout(ttl, self._options.server_timeout)
        connecting = votes.connect_timeout(ttl, self._options.connect_timeout)
        return Question(conversations, is_decided, within, connecting)

    def _need_most(self, count: Count) -> None:
        """Raise LockBackendError if so many servers failed that the others are no majority."""
        if len(self._names) - len(count.failures) < self._most:
            self._fail(count)

    def _fail(self, count: Count) -> NoReturn:
        """Raise LockBackendError, or LockOutcomeUnknown if a server may have carried the request out."""
        said = dict.fromkeys(count.answers, "it answered")
        said |= dict.fromkeys(count.of(Grant), "it granted the lock, and has or had it back")
        said |= dict.fromkeys(count.of(Busy), "it refused: somebody has the lock")
        failures = count.failures
        said |= failures
        good, total, errors = len(self._names) - len(failures), len(self._names), count.errors
        causes = {
            name: said.get(server, "was not waited for") for server, name in enumerate(self._names)
        }
        kind = LockOutcomeUnknown if count.unsure else LockBackendError
        why = f"{self._most} must be" if good < self._most else f"no {self._most} of them agree"
        problem = f"{good} of {total} Redis servers can be used, {why}"
        said_by_drivers = [root_cause(error) for error in errors]
        raise kind(self._alias, problem, causes) from (
            ExceptionGroup("what the servers' drivers say", said_by_drivers) if errors else None
        )


def _at(server: int, request: Request) -> Request:
    """Return *request* with its key on this *server*."""
    key = _key_on(server, request.key)
    return request if key == request.key else replace(request, key=key)


@lru_cache(1024)
def _key_on(server: int, key: str) -> str:
    label, rest = split_label(key)
    return with_label(_of_server(server, label), rest) if " " in label else key


def _of_server(server: int, label: str) -> str:
    """Return the part of *label* for this *server*; see joint_label()."""
    return label.split(" ")[server] if " " in label else label


def _keys_on(server: int, is_ours: Callable[[str], bool], label: str) -> Conversation[list[str]]:
    space = key_space(_of_server(server, label))
    # A dict, because SCAN may return a key twice.
    keys: dict[str, None] = {}
    cursor = b""
    while cursor != b"0":
        answer = yield from ask(("SCAN", cursor or b"0", "MATCH", space.pattern, "COUNT", 1000))
        if isinstance(answer, ResponseError):
            raise answer
        cursor, records = answer
        texts = (record.decode(errors="backslashreplace") for record in records)
        found = filter(None, map(space.key_of, texts))
        keys |= dict.fromkeys(filter(is_ours, (with_label(label, each) for each in found)))
    return [*keys]


def seconds_up(*, durable: bool) -> Conversation[float]:
    """Return for how many seconds the server has been up, or infinity if a restart loses no data."""
    facts = yield from ask_facts()
    if isinstance(facts, Exception):
        text = f"{facts} (OPTIONS 'restart_guard' needs it: ACL SETUSER <user> +info)"
        raise ResponseError(text) from facts
    if durable and facts.get("aof_enabled") == "1":
        return math.inf
    # The server counts whole seconds, of which the first may be short, and less than 0 after its clock was set back.
    return max(0, int(facts["uptime_in_seconds"]) - 1)


def _has_agreed(count: Count) -> bool:
    return count.says_yes() is not None


def _is_grant(answer: Any) -> bool:
    return answer is True or isinstance(answer, Grant)
