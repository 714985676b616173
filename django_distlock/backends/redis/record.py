"""One lock as it was read from Redis, and what becomes of it, command by command: no I/O. See scripts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .scripts import FORGOTTEN, PATIENCE, RETENTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .conversation import Command

_HOLDING = re.compile(rb"(\d+) (\d+) (\d+) (\d+) (.*)", re.DOTALL)
_READERS, _WRITERS = b"s", b"x"


class Holding(NamedTuple):
    """What a record says of one holder. Times are microseconds."""

    token: int = 0
    acquired: int = 0
    min_hold: int = 0
    lock_delay: int = 0
    holder: bytes = b""

    @classmethod
    def parsed(cls, text: bytes) -> Holding:
        """Return the holding that a record has as *text*."""
        found = _HOLDING.fullmatch(text)
        if found is None:
            return cls()
        token, acquired, min_hold, lock_delay = map(int, found.groups()[:4])
        return cls(token, acquired, min_hold, lock_delay, found[5])

    @property
    def text(self) -> bytes:
        """How a record has it."""
        return b"%d %d %d %d %b" % self


@dataclass(slots=True)
class Record:
    """One lock. What is changed in it is put down in *writes* too, for Redis to carry out.

    Each method does what the function of its name does in the scripts.
    """

    keys: tuple[str, ...]
    bells: str
    now: int
    fields: dict[bytes, bytes]
    holders: dict[bytes, int] = field(default_factory=dict)
    queue: dict[bytes, int] = field(default_factory=dict)
    alive: dict[bytes, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    writes: list[Command] = field(default_factory=list)

    @staticmethod
    def reads(keys: Sequence[str]) -> tuple[Command, ...]:
        """Return the commands that tell all of a lock."""
        record, *ordered = keys
        ranges = tuple(("ZRANGE", key, 0, -1, "WITHSCORES") for key in ordered)
        return ("TIME",), ("HGETALL", record), *ranges, ("PTTL", record), ("PTTL", ordered[0])

    @classmethod
    def read(cls, keys: tuple[str, ...], bells: str, found: Sequence[Any]) -> Record:
        """Return the lock that answered *found* to reads()."""
        time, fields, holders, queue, alive, *left = found
        record = cls(keys, bells, instant(time), dict(_pairs(fields)))
        record.holders, record.queue, record.alive = map(_scores, (holders, queue, alive))
        record.left = dict(zip(keys, left, strict=False))
        return record

    def number(self, name: bytes) -> int:
        """Return a field that is a number; 0 if there is none."""
        value = self.fields.get(name, b"")
        return int(value) if value.isdigit() else 0

    def described(self, owner: bytes) -> Holding:
        """Return what is known of a holder."""
        return Holding.parsed(self.fields.get(b"h:" + owner, b""))

    @property
    def is_shared(self) -> bool:
        """Whether the last who got it were readers."""
        return self.fields.get(b"mode") == _READERS

    def put(self, *changed: tuple[bytes, bytes | int]) -> None:
        """Set fields."""
        pairs = [
            (name, value if isinstance(value, bytes) else b"%d" % value) for name, value in changed
        ]
        self.fields.update(pairs)
        self._write("HSET", self.keys[0], *(word for pair in pairs for word in pair))

    def hold(self, owner: bytes, ends: int) -> None:
        """Have a lease end at this instant."""
        self.holders[owner] = ends
        self._write("ZADD", self.keys[1], ends, owner)

    def keep(self, ends: int) -> None:
        """Have Redis keep what is known for long enough after this instant."""
        self.writes += keeping(self.left, self.keys[:2], ends - self.now)

    def hold_back(self, instant: int) -> None:
        """Let nobody have it before this instant."""
        if instant > self.now and instant > self.number(b"available"):
            self.put((b"available", instant))

    def forget(self, owner: bytes) -> None:
        """Have this owner hold it no more."""
        del self.holders[owner]
        self.fields.pop(b"h:" + owner, None)
        self._write("ZREM", self.keys[1], owner)
        self._write("HDEL", self.keys[0], b"h:" + owner)
        if not self.holders:
            # Redis drops an empty set, and how long it was to be kept: the next one is kept for ever.
            self.left[self.keys[1]] = -1

    def expire(self) -> None:
        """Forget whose lease has ended."""
        for owner, ends in list(self.holders.items()):
            if ends <= self.now:
                self.hold_back(ends + self.described(owner).lock_delay)
                self.forget(owner)

    def waiters(self) -> Iterator[tuple[bytes, bytes]]:
        """Go over mode and owner of the waiters that are alive, in the order of their tickets."""
        for waiter in self.queue:
            if self.alive.get(waiter, 0) > self.now:
                yield waiter[:1], waiter[1:]

    def ring(self, owner: bytes) -> None:
        """Ring a waiter's doorbell, once however often it was rung before."""
        bell = self.bells.encode() + owner
        self._write("DEL", bell)
        self._write("RPUSH", bell, 1)
        self._write("PEXPIRE", bell, 10_000)

    def wake(self) -> None:
        """Wake the first writer, or all readers before the first writer; with readers inside, no writer."""
        has_readers, is_first = bool(self.holders), True
        if has_readers and not self.is_shared:
            return
        for mode, owner in self.waiters():
            if mode == _WRITERS:
                if is_first and not has_readers:
                    self.ring(owner)
                return
            is_first = False
            self.ring(owner)

    def stand_in_line(self, waiter: bytes) -> None:
        """Take or keep a place in the queue, and drop those that were silent for long."""
        _, _, queue, alive = self.keys
        ticket = max(max(self.queue.values(), default=0) + 1, self.now)
        self._write("ZADD", queue, "NX", ticket, waiter)
        self.stay(waiter)
        for other, patience in self.alive.items():
            if other != waiter and patience <= self.now - _microseconds(FORGOTTEN):
                self._write("ZREM", queue, other)
                self._write("ZREM", alive, other)

    def stay(self, waiter: bytes) -> None:
        """Have a waiter be alive for its patience from now."""
        _, _, queue, alive = self.keys
        self.alive[waiter] = self.now + _microseconds(PATIENCE)
        self._write("ZADD", alive, self.alive[waiter], waiter)
        self._write("PEXPIRE", queue, 60_000)
        self._write("PEXPIRE", alive, 60_000)

    def leave(self, owner: bytes) -> int:
        """Give up a place in the queue; tell how many there were."""
        _, _, queue, alive = self.keys
        places = [mode + owner for mode in (_WRITERS, _READERS) if mode + owner in self.queue]
        for place in places:
            del self.queue[place]
            self._write("ZREM", queue, place)
            self._write("ZREM", alive, place)
        self._write("DEL", self.bells.encode() + owner)
        return len(places)

    def note(self, place: bytes, owner: bytes) -> None:
        """Note an owner: the last eight in a field are known."""
        noted = owner + b" " + self.fields.get(place, b"")
        self.put((place, noted[: 8 * (len(owner) + 1)]))

    def is_noted(self, place: bytes, owner: bytes) -> bool:
        """Tell whether an owner was noted."""
        return owner in self.fields.get(place, b"")

    def busy(self) -> list[Any]:
        """Return the answer that somebody else has it."""
        ends, last = max(((ends, owner) for owner, ends in self.holders.items()), default=(0, b""))
        ends = max(ends, self.number(b"available"))
        return [0, self.described(last).holder, ends - self.now if ends > self.now else -1]

    def _write(self, *command: str | int | bytes) -> None:
        self.writes.append(command)


def instant(time: Sequence[bytes]) -> int:
    """Return what TIME answered in microseconds."""
    seconds, microseconds = map(int, time)
    return seconds * 1_000_000 + microseconds


def keeping(left: dict[str, int], keys: Sequence[str], lifetime: int) -> Iterator[Command]:
    """Make *keys* outlive what ends in *lifetime* microseconds. *left*: how long they live, in ms."""
    wanted = max(0, -(-lifetime // 1000)) + RETENTION * 1000
    for key in keys:
        # Nearly as long is long enough, and saves a write.
        if left[key] < wanted - 600_000:
            left[key] = wanted
            yield "PEXPIRE", key, wanted


def _scores(found: Sequence[bytes]) -> dict[bytes, int]:
    return {member: int(float(score)) for member, score in _pairs(found)}


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)
