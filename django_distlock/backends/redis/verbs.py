"""The verbs of a lock in Redis: the commands, and the meaning of their answers. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import unquote

from redis import exceptions
from redis.exceptions import ResponseError

from django_distlock.engine import values
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Release,
    Request,
    Secret,
    batches,
)
from django_distlock.exceptions import Contended, LockBackendError, NotSupported
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_LISTED, key_label, lock_of, place_of, printable

from . import scripts
from .connections import Command, Conversation, NoAnswer
from .scripts import Call, Script
from .sources import DISK, RedisSettings
from .unscripted import transact

#: Locks that one script renews, or that are looked at together: other clients wait while the script runs.
BATCH = 250
#: Locks that one script looks at: its answer is read while the server runs the next script.
LOOKED_AT = 25
#: Hints for errors of Redis: the driver's class of the error, the word that begins it inside a script, the hint.
_HINTS = (
    (exceptions.MovedError, "MOVED", "it belongs to a cluster: say so with OPTIONS 'cluster': True"),
    (exceptions.NoPermissionError, "NOPERM", "if its user may not run scripts, set OPTIONS 'scripting': False"),
    (exceptions.OutOfMemoryError, "OOM", "its memory is full, and it drops nothing, rightly: give it more (maxmemory)"),
    (exceptions.ReadOnlyError, "READONLY", "it is a replica: name the master"),
    (exceptions.AuthenticationError, "unauthenticated", "it wants a password"),
)  # fmt: skip
#: The advice for features that need scripts.
WITHOUT_SCRIPTS = "Only scripts do it: let its user run them, and leave out OPTIONS 'scripting'."
_RELEASES = {0: Release.GONE, 1: Release.RELEASED, 2: Release.TAKEN}

#: Makes a key of the cache, with its prefix and version.
MakeKey = Callable[[str], str]
_SAMPLE = "distlock-sample"
#: The text whose key shows what the cache adds to keys; and the long form of the label "".
PROBE, _PLAIN = f"distlock:{{{_SAMPLE}}}", "distlock:{}"
#: For how many locks a process caches the keys.
_REMEMBERED = 2048


class Keys:
    """The keys of one lock: *all* is what scripts get as KEYS, *bells* the beginning of the doorbells' keys.

    *line* is the record after which the queue is named: for a place, the record of all places.
    """

    def __init__(self, record: str, line: str) -> None:
        self.record, self.bells = record, f"{line}:b:"
        self.all = record, f"{record}:h", f"{line}:q", f"{line}:a"

    def bell(self, owner: str) -> str:
        return Secret(self.bells + owner)


@lru_cache(_REMEMBERED)
def label_of(made: object) -> str:
    """Return as a label what a cache adds to keys; *made* is its key for PROBE. ValueError if that hides the lock's key."""
    before, _sample, after = str(made).partition(_SAMPLE)
    if not (before.endswith("{") and after.startswith("}")) or "{}" in str(made):
        msg = (
            f"the cache's key function, or its KEY_PREFIX, makes {made!r} of a key: let it keep the key as it is, "
            "and add no {}; a hash tag such as {shop} may be added"
        )
        raise ValueError(msg)
    template = before + after
    return "" if template == _PLAIN else key_label(template)


def check_key_functions(*make_keys: MakeKey) -> None:
    """ValueError if one of them hides the key of a lock; what fails now, as outside of a tenant, is asked again at each use."""
    made = list[object]()
    with suppress(Exception):
        made.extend(make_key(PROBE) for make_key in make_keys)
    for each in made:
        label_of(each)


def joint_label(labels: Sequence[str]) -> str:
    """Return one label for servers with these *labels*: the common one if all are equal."""
    return labels[0] if len({*labels}) == 1 else " ".join(label or _PLAIN for label in labels)


def split_label(key: str) -> tuple[str, str]:
    """Return the label of *key*, maybe "", and the rest of *key*."""
    label, _bar, rest = key.partition("|")
    return (label, rest) if "{}" in label else ("", key)


@lru_cache(_REMEMBERED)
def keys_of(key: str) -> Keys:
    """Return the keys on the server for the lock *key*."""
    return Keys(record_of(key), record_of(lock_of(key)))


def record_of(key: str) -> str:
    """Return the record's key, uncached, because listings ask for thousands."""
    label, rest = split_label(key)
    return key_space(label).record(rest)


@lru_cache(_REMEMBERED)
def key_space(label: str) -> KeySpace:
    return KeySpace(label)


class KeySpace:
    """The keys of all locks with one *label*. The part in braces puts the keys of one lock into one slot of a cluster."""

    def __init__(self, label: str) -> None:
        before, _braces, after = (unquote(label) or _PLAIN).partition("{}")
        self._before, self._after = f"{before}{{", f"}}{after}"
        before, after = (
            re.sub(r"([*?\[\]\\])", r"\\\1", part) for part in (self._before, self._after)
        )
        #: The pattern by which SCAN finds all records, and other keys of locks.
        self.pattern = f"{before}*{after}*"

    def record(self, key: str) -> str:
        """Return the key of the record of *key*, which has no label.

        The number of a place comes last, outside the braces: all places of a lock share its slot.
        """
        place = place_of(key)
        return f"{self._before}{lock_of(key)}{self._after}{'' if place is None else place}"

    def key_of(self, record: str) -> str | None:
        """Return the key of the lock of *record*, without a label; None if that is not a record with this label."""
        line, _, place = record[len(self._before) :].partition(self._after)
        key = f"{line}{place}"
        is_record = record == self.record(key) and not {"{", "}"} & {*key}
        return key if is_record and line else None


class RedisVerbs:
    """The requests of one alias to its Redis: by scripts, or by transactions where scripts are not allowed.

    *batch*: the most locks for one script.
    """

    def __init__(self, alias: str, options: RedisSettings, *, batch: int) -> None:
        self._alias = alias
        self._is_fair = "1" if options.fair else ""
        self._replicas = options.wait_replicas
        self._after: tuple[Command, ...] = ()
        if self._replicas:
            # Half of the time in which the answer must come.
            self._after = (("WAIT", self._replicas, microseconds(options.io_timeout) // 2000),)
        self._waits_for_disk = options.wait_disk
        self._batch = batch
        self._has_scripts = options.scripting

    def acquire(self, request: Request, *, queued: bool) -> Conversation[Grant | Busy]:
        call = self._call(
            scripts.ACQUIRE,
            request,
            _mode(request),
            microseconds(request.ttl),
            microseconds(request.min_hold),
            _listed_name(request.name),
            request.holder.to_json(),
            "1" if queued else "",
            self._is_fair,
            request.waiter,
            *(() if request.place is None else "1"),
        )
        answer, *replicas = yield from self._answers(call, *self._after)
        if answer is None:
            raise LockBackendError(
                self._alias, "the request came after the lock had been given back"
            )
        if isinstance(answer, list):
            holder, left = answer[0], _left(answer[1])
            return Busy(Holder.from_json(holder), left, reserved=bool(left and not holder))
        if replicas or self._waits_for_disk:
            try:
                yield from self._confirm(replicas)
            except LockBackendError:
                yield from self.release(replace(request, min_hold=0.0))
                raise
        return Grant(int(answer))

    def release(self, request: Request, *, for_good: bool = False) -> Conversation[Release]:
        """Release the lock; with *for_good*, the server refuses later requests of this owner."""
        (answer,) = yield from self._answers(self._release_call(request, "1" if for_good else ""))
        return _RELEASES[answer]

    def give_back(self, request: Request) -> Conversation[Release]:
        """Release the lock for good, and wake nobody, because the caller tries again."""
        call = Call(scripts.RELEASE, keys_of(request.key).all, ("", request.owner, "1", 0))
        (answer,) = yield from self._answers(call)
        return _RELEASES[answer]

    def raise_token(self, request: Request, token: int) -> Conversation[bool]:
        """Give the holding this *token*, so that later tokens are higher; return False if the lock is not held."""
        (answer,) = yield from self._answers(self._call(scripts.RAISE, request, token))
        return bool(answer == 1)

    def revoke(self, requests: Sequence[Request]) -> Conversation[list[Release | Exception]]:
        """Release the locks for good: the server refuses later requests of these owners."""
        calls = [self._release_call(each, "1") for each in requests]
        return [self._released(each) for each in (yield from self._together(calls))]

    def extend(self, requests: Sequence[Request]) -> Conversation[list[bool]]:
        kept: list[bool] = []
        counts: list[Any] = []
        for some in batches(requests, self._batch):
            names = [keys_of(each.key).all[: 2 if each.shared else 1] for each in some]
            args = [(each.owner, microseconds(each.ttl), _mode(each)) for each in some]
            call = Call(scripts.EXTEND, tuple(chain(*names)), tuple(chain(*args)))
            answer, *replicas = yield from self._answers(call, *self._after)
            counts += replicas if any(answer) else ()
            kept += [one == 1 for one in answer]
        if any(kept):
            yield from self._confirm(counts)
        return kept

    def take_over(self, request: Request, former: str) -> Conversation[bool]:
        if not self._has_scripts:
            raise NotSupported(self._alias, "Lease.attach()", WITHOUT_SCRIPTS)
        args = former, microseconds(request.ttl), request.holder.to_json()
        call = self._call(scripts.TAKE_OVER, request, *args)
        answer, *replicas = yield from self._answers(call, *self._after)
        if answer == 1:
            yield from self._confirm(replicas)
        return bool(answer == 1)

    def probe(self, request: Request) -> Conversation[Busy | None]:
        (found,) = yield from self.probe_all([request])
        return found

    def probe_all(self, requests: Sequence[Request]) -> Conversation[list[Busy | None]]:
        looks = yield from self._looks([each.key for each in requests])
        return [answer and _busy(answer) for answer in looks]

    def held(self, keys: Sequence[str]) -> Conversation[list[Held]]:
        """Return the locks with these *keys*, at most BATCH."""
        answers = yield from self._looks(keys)
        found = zip(keys, answers, strict=True)
        return [shown for key, answer in found if answer for shown, _ in _held(answer, key)]

    def end_holding(self, key: str, owner_digest: str) -> Conversation[bool]:
        """End a holding, or a reservation (min_hold), which has no owner; return whether there was one."""
        (found,) = yield from self._looks([key])
        keys, is_ended = keys_of(key), False
        for shown, owner in _held(found, key) if found else ():
            if shown.owner_digest == owner_digest:
                call = Call(scripts.FORCE, keys.all, (keys.bells, owner, f"{shown.token}"))
                (answer,) = yield from self._answers(call)
                is_ended |= answer == 1
        if is_ended and self._has_scripts:
            # Rings the next waiter; a waiter that is not rung looks again.
            with suppress(LockBackendError):
                yield from self._answers(Call(scripts.LEAVE, keys.all, (keys.bells, "")))
        return is_ended

    def enqueue(self, request: Request) -> Conversation[None]:
        """Take a position in the queue for any place of a lock, or keep it."""
        yield from self._answers(self._of_position(scripts.ENQUEUE, request))

    def dequeue(self, request: Request) -> Conversation[None]:
        yield from self._answers(self._of_position(scripts.LEAVE, request))

    def _of_position(self, script: Script, request: Request) -> Call:
        keys = keys_of(request.key)
        return Call(script, keys.all, (keys.bells, Secret(request.waiter)))

    def listen(self, bell: str, seconds: float) -> Conversation[None]:
        """Wait on the server for up to *seconds* until the doorbell *bell* rings."""
        try:
            (answer,) = yield (("BLPOP", bell, f"{max(seconds, 0.001):.3f}"),)
        except NoAnswer:  # the connection is closed
            return
        # UNBLOCKED: the server has just become a replica.
        if isinstance(answer, ResponseError) and not str(answer).startswith("UNBLOCKED"):
            raise LockBackendError(self._alias, f"Redis refused BLPOP: {answer}") from answer

    def _confirm(self, replicas: Sequence[Any]) -> Conversation[None]:
        """Raise LockBackendError unless each of *replicas*, answers of WAIT, is enough, and the disk has the writes.

        WAITAOF is sent after the script's answer, because a refusal need not reach the disk.
        """
        for answer in replicas:
            if not isinstance(answer, int) or answer < self._replicas:
                problem = f"{answer} of {self._replicas} replicas (OPTIONS 'wait_replicas') confirmed the lock"
                raise LockBackendError(self._alias, problem)
        if not self._waits_for_disk:
            return
        (answer,) = yield (("WAITAOF", 1, 0, round(DISK * 1000)),)
        if isinstance(answer, ResponseError):
            problem = f"Redis refused WAITAOF: {answer} (OPTIONS 'wait_disk' needs Redis 7.2 or later, with appendonly yes)"
            raise LockBackendError(self._alias, problem) from answer
        if answer[0] < 1:
            problem = f"Redis did not write the lock to its disk within {DISK:g} seconds (OPTIONS 'wait_disk')"
            raise LockBackendError(self._alias, problem)

    def _released(self, answer: Any) -> Release | Exception:
        try:
            return _RELEASES[self._checked(answer)]
        except LockBackendError as error:
            return error

    def _release_call(self, request: Request, is_final: str) -> Call:
        more = is_final, microseconds(request.min_hold)
        return self._call(scripts.RELEASE, request, *(more if any(more) else ()))

    def _call(self, script: Script, request: Request, *args: Any) -> Call:
        keys = keys_of(request.key)
        return Call(script, keys.all, (keys.bells, request.owner, *args))

    def _looks(self, keys: Iterable[str]) -> Conversation[list[Any]]:
        """Return the answer of LOOK for each of *keys*, None for a free lock."""
        records = map(record_of, keys)
        looks = [(record, f"{record}:h", f"{record}:a") for record in records]
        some = batches(looks, min(LOOKED_AT, self._batch))
        calls = [Call(scripts.LOOK, tuple(chain(*each)), ()) for each in some]
        found = yield from self._together(calls)
        return [answer for each in found for answer in self._checked(each)]

    def _answers(self, call: Call, *after: Command) -> Conversation[list[Any]]:
        """Run *call* and the commands *after*, and return all answers; LockBackendError if Redis refuses *call*."""
        if self._has_scripts:
            answers = yield (call, *after)
            if isinstance(answers[0], exceptions.NoScriptError):
                answers = yield (call.by_text, *after)
        else:
            answers = yield from transact(call, *after)
        self._checked(answers[0])
        return answers

    def _together(self, calls: Sequence[Call]) -> Conversation[list[Any]]:
        """Send *calls*, which may be carried out twice, together, and return the answers; an error is an answer."""
        if not self._has_scripts:
            answers = []
            for call in calls:
                answers += yield from transact(call)
            return answers
        answers = yield calls
        if any(isinstance(answer, exceptions.NoScriptError) for answer in answers):
            answers = yield [call.by_text for call in calls]
        return answers

    def _checked(self, answer: Any) -> Any:
        if not isinstance(answer, Exception):  # Exception, as LOADING is not a ResponseError
            return answer
        text = str(answer)
        if "non local key" in text:  # the slot is being moved, and a script has emptied a key
            raise Contended(
                self._alias, f"Redis is moving the lock to another server: {text}"
            ) from answer
        hints = (
            f": {hint}" for kind, word, hint in _HINTS if isinstance(answer, kind) or word in text
        )
        raise LockBackendError(self._alias, f"Redis refused: {text}{next(hints, '')}") from answer


def _busy(answer: list[Any]) -> Busy:
    """Return the holder in *answer*, that of LOOK, as a Busy."""
    holdings = list(_holdings(answer))
    left = max([_left(answer[2]) or 0.0, *(left for _, left, *_ in holdings)])
    return Busy(holdings[-1][3] if holdings else None, left, reserved=not holdings)


def _mode(request: Request) -> str:
    return "s" if request.shared else "x"


def microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)


@lru_cache
def _listed_name(name: str) -> str:
    return printable(name, LONGEST_LISTED)


def _held(answer: list[Any], key: str) -> Iterator[tuple[Held, str]]:
    name, token, reserved, waiters, mode = answer[:5]
    holdings = list(_holdings(answer))
    if is_reserved := not holdings and int(reserved) > 0:
        holdings = [("", int(reserved) / 1e6, None, None)]
    for owner, left, age, holder in holdings:
        shown = Held(
            name=name.decode(errors="backslashreplace"),
            key=key,
            holder=holder,
            remaining=left,
            token=int(token),
            owner_digest=values.digest_of_reservation(int(token))
            if is_reserved
            else values.digest(owner),
            shared=mode == b"s" and not is_reserved,
            waiters=None if waiters is None else int(waiters),
            reserved=is_reserved,
            age=age,
        )
        yield shown, owner


def _holdings(answer: list[Any]) -> Iterator[tuple[str, float, float | None, Holder | None]]:
    found = iter(answer[5:])
    for owner, left, age, holder in zip(*[found] * 4, strict=True):
        text = owner.decode(errors="backslashreplace")
        yield text, int(left) / 1e6, int(age) / 1e6, Holder.from_json(holder)


def _left(left: Any) -> float | None:
    return int(left) / 1e6 if int(left) >= 0 else None
