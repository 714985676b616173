"""Exclusive locks without scripts: WATCH, read, decide, and write if no other client wrote meanwhile (MULTI, EXEC).

No I/O. Acquires, releases, extends and looks. The keys are those of the scripts, so what processes with scripts hold,
share or reserve by min_hold is respected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from redis.exceptions import ResponseError

from .connections import Command, Conversation
from .scripts import (
    ACQUIRE,
    EXTEND,
    LAST,
    LOOK,
    MARK,
    RELEASE,
    RETENTION,
    Call,
    Script,
)

#: How many times a transaction is tried while other clients change the lock.
ROUNDS = 100
#: A holder in the record: the token, the time of the grant, and the description of the holder.
_HOLDING = re.compile(rb"(\d+) (\d+) (.*)", re.DOTALL)


def transact(call: Call, *after: Command) -> Conversation[list[Any]]:
    """Do in two round trips what the script of *call* does; return its answer and the answers to *after*.

    An error of Redis is returned as the answer: then nothing was written.
    """
    parts = list(_parts(call))
    reads: list[Command] = []
    for keys, _ in parts:
        reads += ("HGETALL", keys[0]), ("PTTL", keys[0])
        reads += (("ZRANGE", readers, 0, -1, "WITHSCORES") for readers in keys[1:])
    watched = [key for keys, _ in parts for key in keys]
    # MULTI comes with the reads: were it refused among the writes, these would be carried out without the comparison.
    # No read comes after MULTI: Redis queues no command when its memory is full.
    begin: tuple[Command, ...] = ("WATCH", *watched), ("TIME",), *reads, ("MULTI",)
    for _ in range(ROUNDS):
        found = yield begin
        error = _first_error(found)
        if error is None:
            answers, writes = list[Any](), list[Command]()
            read = iter(found[2:])
            for keys, args in parts:
                lock = _LockRecord(keys, found[1], *islice(read, 1 + len(keys)))
                answers.append(_VERBS[call.script](lock, *args))
                writes += lock.writes
            told = yield (*writes, ("EXEC",), *after)
            done = told[len(writes)]
            error = _first_error([*told[: len(writes) + 1], *(done if type(done) is list else ())])
            if error is None and done is not None:
                answer = answers if call.script in {EXTEND, LOOK} else answers[0]
                return [answer, *told[len(writes) + 1 :]]
        if error is not None:
            # Send both, of which one fails, because it is not known whether MULTI was carried out.
            yield (("DISCARD",), ("UNWATCH",))
            return [error]
    return [ResponseError(f"others wrote meanwhile, {ROUNDS} times in a row")]


def _first_error(answers: Sequence[Any]) -> ResponseError | None:
    return next((answer for answer in answers if isinstance(answer, ResponseError)), None)


def _parts(call: Call) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Yield the record and the readers of each lock, and the arguments for it."""
    keys, args = iter(call.keys), iter(call.args)
    if call.script is LOOK:
        yield from ((each[:2], ()) for each in zip(keys, keys, keys, strict=True))
    elif call.script is EXTEND:
        yield from (
            ((next(keys),), (owner, ttl)) for owner, ttl, _ in zip(*[args] * 3, strict=True)
        )
    else:
        yield call.keys[:2], call.args[1:]  # without the first argument, for doorbells


class _LockRecord:
    """One lock as it was read, and the *writes* that will change it."""

    def __init__(
        self,
        keys: tuple[str, ...],
        time: Sequence[bytes],
        fields: Sequence[bytes],
        kept: int,
        readers: Sequence[bytes] = (),
    ) -> None:
        self.record = keys[0]
        self.now = int(time[0]) * 1_000_000 + int(time[1])
        self.fields = dict(_pairs(fields))
        since, lasts, owner = (self.fields.get(b"lease") or b"0 0 ").decode().split(" ", 2)
        ends = {owner: int(since) + int(lasts)}
        self.is_shared = ends[owner] <= self.now and bool(readers)
        if self.is_shared:
            ends = {owner.decode(): int(float(end)) for owner, end in _pairs(readers)}
        self.holders = {owner: end for owner, end in ends.items() if end > self.now}
        #: How many milliseconds Redis keeps the record.
        self.kept = kept
        self.writes: list[Command] = []

    def acquire(self, owner: str, mode: str, ttl: int, *more: Any) -> bytes | list[Any] | None:
        _, name, holder, *_ = more
        if owner in self.holders:
            token, acquired, _ = self.described(owner)
            self.set(holder=f"{token} {acquired} {holder}")
            self.hold(owner, ttl)
            return b"%d" % token
        available, is_revoked = self.number("available"), self.is_noted("revoked", owner)
        if self.is_noted("ended", owner) and not is_revoked:
            return None
        if self.holders or available > self.now or is_revoked:
            last = max(self.holders, key=lambda each: (self.holders[each], each), default="")
            ends = max(self.holders.get(last, 0), available)
            return [self.described(last)[2], ends - self.now if ends > self.now else -1]
        token = max(self.number("token") + 1, self.now)
        if b"token" not in self.fields:
            self.set(name=name)
        self.set(token=token, holder=f"{token} {self.now} {holder}")
        self.hold(owner, ttl)
        return b"%d" % token

    def release(self, owner: str, is_final: str = "", _min_hold: int = 0) -> int:
        if was_held := owner in self.holders:
            self.writes.append(("HDEL", self.record, "lease"))
            self.note("ended", owner)
        if is_final and not self.is_noted("revoked", owner):
            self.note("revoked", owner)
            self.keep(self.now)
        return 1 if was_held or self.is_noted("ended", owner) else 2 if self.holders else 0

    def extend(self, owner: str, ttl: int) -> int:
        if owner not in self.holders:
            return 0
        self.hold(owner, ttl)
        return 1

    def look(self) -> list[Any] | None:
        mode, available = b"s" if self.is_shared else b"x", self.number("available") - self.now
        answer = [self.fields.get(b"name", b""), self.number("token"), available, None, mode]
        for owner, ends in self.holders.items():
            _, acquired, holder = self.described(owner)
            answer += owner.encode(), ends - self.now, self.now - acquired, holder
        return answer if self.holders or available > 0 else None

    # The parts of the verbs.

    def number(self, name: str) -> int:
        return int(self.fields.get(name.encode(), b"0"))

    def described(self, owner: str) -> tuple[int, int, bytes]:
        field = f"h:{owner}" if self.is_shared else "holder"
        found = _HOLDING.fullmatch(self.fields.get(field.encode(), b""))
        return (int(found[1]), int(found[2]), found[3]) if found and owner else (0, 0, b"")

    def set(self, **fields: str | int) -> None:
        self.writes.append(("HSET", self.record, *chain(*fields.items())))

    def hold(self, owner: str, ttl: int) -> None:
        """Extend the holding to *ttl* from now, and never shorten it."""
        ends = max(self.holders.get(owner, 0), self.now + ttl)
        self.set(lease=f"{self.now} {ends - self.now} {owner}")
        self.keep(ends)

    def keep(self, ends: int) -> None:
        """Keep the record until RETENTION after *ends*, or longer."""
        self.kept = max(self.kept, -((self.now - ends) // 1000) + RETENTION * 1000)
        self.writes.append(("PEXPIRE", self.record, self.kept))

    def note(self, field: str, owner: str) -> None:
        """Add *owner* to the last eight owners in *field*."""
        noted = f"{owner[:MARK]} {self.fields.get(field.encode(), b'').decode()}"
        self.set(**{field: noted[:LAST]})

    def is_noted(self, field: str, owner: str) -> bool:
        return owner[:MARK].encode() in self.fields.get(field.encode(), b"")


_VERBS: dict[Script, Callable[..., Any]] = {
    ACQUIRE: _LockRecord.acquire,
    RELEASE: _LockRecord.release,
    EXTEND: _LockRecord.extend,
    LOOK: _LockRecord.look,
}


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
