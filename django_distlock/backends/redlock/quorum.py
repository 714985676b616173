"""The verbs of Redlock and its OPTIONS: the requests to all servers, and the result of their answers.

No I/O, but to ask again in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeVar

from django_distlock.backends.redis.sources import check_connection_options
from django_distlock.backends.redis.verbs import BATCH, key_space, microseconds, split_label
from django_distlock.conf import check_values, checked_ttl
from django_distlock.engine.leftovers import until_done
from django_distlock.engine.steps import Steps
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Release,
    Request,
    SecretBytes,
    batches,
    digest,
)
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, root_cause
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_LISTED, printable, with_label

from . import votes
from .scripts import ACQUIRE, EXTEND, FORCE, LOOK, RAISE, RELEASE, TAKE_OVER
from .servers import Servers, packed
from .votes import Count, Election, Question

_T = TypeVar("_T")
#: A generator that yields questions, and is sent the count of their answers.
Verb = Steps[Question, _T]

#: A ttl with which servers have the longest time for their answers.
UNHURRIED = 10.0
#: The fewest servers of which one may fail.
FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class RedlockOptions:
    """The OPTIONS of RedlockBackend. Times are seconds.

    *servers* are URLs, which may hold passwords, or aliases of CACHES; *options* are redis-py's, for all URLs.
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
    """The verbs of one alias on its *servers*.

    *guard*: seconds that a server must have been up before it may grant; 0: no guard.
    """

    def __init__(
        self,
        alias: str,
        servers: Servers,
        options: RedlockOptions,
        *,
        guard: float,
    ) -> None:
        self._alias = alias
        self._servers = servers
        self._places = servers.places
        self._options = options
        self._guard = guard
        self._most = votes.majority(len(servers.places))
        self._everybody = range(len(servers.places))

    def acquire(self, request: Request, *, queued: bool) -> Verb[Grant | Busy]:
        """Try to acquire the lock on a majority; without one, release at once what was granted."""
        calls = self._calls(
            self._everybody,
            ACQUIRE,
            [request.key],
            request.owner,
            _sent(),
            microseconds(request.ttl),
            printable(request.name, LONGEST_LISTED),
            request.holder.to_json(),
            f"{self._guard:.3f}",
            "1" if self._options.durable else "",
            self._servers.subscribed_channel() if queued else "",
        )
        ballot: Count = yield self._question(calls, request.ttl, Count.is_elected)
        outcome = ballot.election()
        if outcome is Election.WON:
            return (yield from self._fence(request, ballot))
        yield from self._give_back(request, ballot)
        if outcome is Election.UNREACHABLE:
            self._fail(ballot, were_votes=True)
        return ballot.busy()

    def _fence(self, request: Request, ballot: Count) -> Verb[Grant | Busy]:
        """Write the token to a majority before it is used, so that no later token is lower."""
        if not self._options.fencing:
            return Grant(None)
        if known := ballot.agreed_token():
            return Grant(known)
        token = max(ballot.answers[server][1] for server in ballot.where(votes.YES))
        voters = ballot.where(votes.YES) | ballot.pending
        # Servers that grant the lock later write the token as well.
        calls = self._calls(voters, RAISE, [request.key], request.owner, token)
        count: Count = yield self._question(calls, request.ttl, _has_agreed)
        if count.says_yes():
            return Grant(token)
        yield from self._give_back(request, ballot)
        self._need_most(count)
        return Busy()

    def release(self, request: Request) -> Verb[Release]:
        """Release the lock on all servers. It was lost only if a majority says so. A waiter leaves the queues."""
        args = request.owner, _sent(), self._servers.channel
        calls = self._calls(self._everybody, RELEASE, [request.key], *args)
        count: Count = yield self._question(calls, request.ttl, _has_agreed)
        if count.says_yes() is False:
            return Release.TAKEN if count.where(votes.TAKEN) else Release.GONE
        self._need_most(count)
        return Release.RELEASED

    def extend(self, requests: Sequence[Request]) -> Verb[list[bool]]:
        kept: list[bool] = []
        for some in batches(requests, BATCH):
            args: list[str | int] = []
            for each in some:
                args += each.owner, microseconds(each.ttl)
            calls = self._calls(self._everybody, EXTEND, [each.key for each in some], *args)
            ttl = min(request.ttl for request in some)
            count: Count = yield self._question(
                calls, ttl, lambda c: bool(c.answers) and None not in c.says_kept()
            )
            said = count.says_kept()
            if not said or None in said:
                self._fail(count)
            kept += map(bool, said)
        return kept

    def take_over(self, request: Request, former: str) -> Verb[bool]:
        """Take the lease over on a majority; without one, release what was taken over."""
        ttl, holder = microseconds(request.ttl), request.holder.to_json()
        calls = self._calls(
            self._everybody, TAKE_OVER, [request.key], request.owner, former, ttl, holder, _sent()
        )
        count: Count = yield self._question(calls, request.ttl, _has_agreed)
        said = count.says_yes()
        if said:
            return True
        yield from self._give_back(request, count)
        if said is None:
            self._fail(count)
        return False

    def probe(self, request: Request) -> Verb[Busy | None]:
        calls = self._calls(self._everybody, LOOK, [request.key])
        count: Count = yield self._question(calls, request.ttl, Count.is_seen)
        self._need_most(count)
        seen = count.favourite()
        # Servers that failed may know the same owner.
        if not seen or len(seen) + len(count.failures) < self._most:
            return None
        return Busy(Holder.from_json(seen[0][2]), max(answer[1] for answer in seen) / 1e6)

    def probe_all(self, requests: Sequence[Request]) -> Verb[list[Busy | None]]:
        found: list[Busy | None] = []
        for each in requests:
            busy = yield from self.probe(each)
            found.append(busy)
        return found

    def force(self, key: str, owner_digest: str) -> Verb[bool]:
        count: Count = yield self._question(self._calls(self._everybody, LOOK, [key]))
        owners = {answer[0] for (answer,) in count.answers.values() if answer}
        ended = 0
        for owner in owners:
            if digest(owner.decode()) == owner_digest:
                calls = self._calls(self._everybody, FORCE, [key], owner)
                count = yield self._question(calls)
                ended += len(count.where(votes.YES))
        self._need_most(count)
        return ended > 0

    def held(self, key: str | None, is_ours: Callable[[str], bool], label: str) -> Verb[list[Held]]:
        """Return the locks that a majority has: all with the *label* that one *is_ours*, or the one with this *key*."""
        lost = Count(len(self._places), frozenset())
        keys = {server: [key or ""] for server in self._everybody}
        if key is None:
            keys = yield from self._keys(is_ours, label, lost)
        seen: dict[tuple[str, bytes], list[list[Any]]] = {}
        for first in range(0, max(map(len, keys.values())), BATCH):
            some = {server: each[first : first + BATCH] for server, each in keys.items()}
            calls = {
                server: self._calls([server], LOOK, each)[server]
                for server, each in some.items()
                if each and server not in lost.failures
            }
            if calls:
                count: Count = yield self._question(calls)
                lost.add_failures(count)
                for server, answers in count.answers.items():
                    for each, answer in zip(some[server], answers, strict=True):
                        if answer:
                            seen.setdefault((each, answer[0]), []).append(answer)
        self._need_most(lost)
        return [_held(*lock, seen[lock]) for lock in sorted(seen) if len(seen[lock]) >= self._most]

    def _keys(
        self, is_ours: Callable[[str], bool], label: str, lost: Count
    ) -> Verb[dict[int, list[str]]]:
        spaces = [key_space(_of_server(server, label)) for server in self._everybody]
        # SCAN may return a key twice.
        keys: dict[int, dict[str, None]] = {server: {} for server in self._everybody}
        cursors = dict.fromkeys(self._everybody, b"0")
        while cursors:
            calls = {
                server: packed("SCAN", at, "MATCH", spaces[server].pattern, "COUNT", 1000)
                for server, at in cursors.items()
            }
            count: Count = yield self._question(calls)
            lost.add_failures(count)
            found = count.answers.items()
            cursors = {server: cursor for server, (cursor, _) in found if cursor != b"0"}
            for server, (_, records) in found:
                texts = (record.decode(errors="backslashreplace") for record in records)
                found_here = filter(None, map(spaces[server].key_of, texts))
                all_keys = (with_label(label, each) for each in found_here)
                keys[server] |= dict.fromkeys(filter(is_ours, all_keys))
        return {server: list(found) for server, found in keys.items()}

    def _give_back(self, request: Request, ballot: Count) -> Verb[None]:
        """Release the lock on all servers that granted it or may have; wait for the answers of the former only.

        Servers that granted it, or whose vote was lost, are asked again in the background until they answer.
        Places in queues are kept.
        """
        granted = ballot.where(votes.YES)
        if servers := granted | ballot.pending | ballot.unsure:
            calls = self._calls(servers, RELEASE, [request.key], request.owner, _sent(), "")
            count: Count = yield self._question(
                calls, request.ttl, lambda count: not granted & count.pending
            )
            if silent := (granted | ballot.unsure) - count.answers.keys():
                # Of the same instant: it leaves alone what its owner is granted later.
                again = {server: calls[server] for server in silent}
                job = partial(self._insist, again, request.ttl)
                until_done(self._alias, job, clock.lease_time() + request.ttl)

    def _insist(self, calls: dict[int, bytes], ttl: float) -> None:
        """Send *calls*, which all servers must answer, from a thread of the background."""
        count = self._servers.ask(self._question(calls, ttl))
        if count.failures:
            self._fail(count)

    def _question(
        self,
        calls: dict[int, bytes],
        ttl: float = UNHURRIED,
        is_decided: Callable[[Count], bool] = lambda _: False,
    ) -> Question:
        """Return a question that ends when *is_decided*; by default it waits for all servers."""
        within = votes.server_timeout(ttl, self._options.server_timeout)
        connecting = votes.connect_timeout(ttl, self._options.connect_timeout)
        return Question(calls, is_decided, within, connecting)

    def _calls(
        self, servers: Iterable[int], script: str, keys: Sequence[str], *args: str | bytes | int
    ) -> dict[int, bytes]:
        # By the records on a server, which may be the same on all.
        made: dict[tuple[str, ...], bytes] = {}
        calls = {}
        for server in servers:
            records = tuple(_record_on(server, key) for key in keys)
            if records not in made:
                made[records] = SecretBytes(packed("EVAL", script, len(keys), *records, *args))
            calls[server] = made[records]
        return calls

    def _need_most(self, count: Count) -> None:
        """Raise the error if so many servers failed that the others are no majority."""
        if len(self._places) - len(count.failures) < self._most:
            self._fail(count)

    def _fail(self, count: Count, *, were_votes: bool = False) -> NoReturn:
        """Raise LockBackendError, or LockOutcomeUnknown if a server may have carried the request out."""
        said = dict.fromkeys(count.answers, "it answered")
        failures = dict(count.failures)
        if were_votes:
            said |= dict.fromkeys(count.where(votes.YES), "it granted the lock, and had it back")
            said |= dict.fromkeys(count.where(votes.NO), "it refused: somebody has the lock")
            for server in count.where(votes.GUARDED):
                left = count.answers[server][1]
                failures[server] = f"it started lately, and grants nothing for {left} s more"
        said |= failures
        good, total, errors = len(self._places) - len(failures), len(self._places), count.errors
        causes = {
            place: said.get(server, "was not waited for")
            for server, place in enumerate(self._places)
        }
        kind = LockOutcomeUnknown if count.unsure else LockBackendError
        problem = f"{good} of {total} Redis servers can be used, {self._most} must be"
        said_by_drivers = [root_cause(error) for error in errors]
        raise kind(self._alias, problem, causes) from (
            ExceptionGroup("what the servers' drivers say", said_by_drivers) if errors else None
        )


@lru_cache(1024)
def _record_on(server: int, key: str) -> str:
    label, rest = split_label(key)
    return key_space(_of_server(server, label)).record(rest)


def _of_server(server: int, label: str) -> str:
    """Return the part of *label* that is of one *server*; see joint_label()."""
    return label.split(" ")[server] if " " in label else label


def _sent() -> int:
    """Return a number that orders the requests of one owner, which one machine sends."""
    return int(clock.wait_time() * 1_000_000)


def _has_agreed(count: Count) -> bool:
    return count.says_yes() is not None


def _held(key: str, owner: bytes, answers: Sequence[list[Any]]) -> Held:
    _, left, holder, name, *_ = max(answers, key=lambda answer: answer[1])
    return Held(
        name=name.decode(errors="backslashreplace"),
        key=key,
        holder=Holder.from_json(holder),
        remaining=left / 1e6,
        token=max(answer[4] for answer in answers) or None,
        owner_digest=digest(owner.decode(errors="backslashreplace")),
        waiters=max(answer[6] for answer in answers),
        age=max(answer[5] for answer in answers) / 1e6,
    )
