"""The same without scripts: WATCH, read, decide here, and write what changed if nobody wrote meanwhile (MULTI, EXEC).

No I/O. Each decision does what the script of its name does, and its parts what the functions of their names do there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from .connections import Command, Conversation
from .scripts import EXTEND, FORCE, FORGOTTEN, LEAVE, LOOK, PATIENCE, RELEASE, RETENTION, Call

#: How often to begin again since others wrote meanwhile; one of those that write gets through each time.
ROUNDS = 100
#: What a record says of a holder: its token, when it acquired, its lock_delay, and who it is.
_HOLDING = re.compile(rb"(\d+) (\d+) (\d+) (.*)", re.DOTALL)


def transact(call: Call, *after: Command) -> Conversation[list[Any]]:
    """Carry *call* out as its script would, and return its answer and those to *after*.

    Two round trips; one to look. An error of Redis is an answer: nothing was carried out then.
    """
    locks = dict.fromkeys(keys for keys, _ in _parts(call))
    reads = (read for keys in locks for read in _reads(keys))
    # MULTI already here: were it refused among the writes, they would be carried out unguarded. No reads
    # behind it: a Redis whose memory is full has no place to queue anything.
    begin: tuple[Command, ...] = ("WATCH", *chain(*locks)), ("TIME",), *reads, ("MULTI",)
    end: tuple[Command, ...] = ("EXEC",), *after
    answer: Any = None
    writes: list[Command] = []
    for _ in range(ROUNDS):
        found = yield (*begin, *end) if call.script is LOOK else begin
        found, answers = found[: len(begin)], found[len(begin) :]
        error = _first_error([*found, *answers[:1]])
        if not error:
            answer, writes = _decided(call, found[1:-1])
        if not (error or answers):
            answers = yield (*writes, *end)
            queued, answers = answers[: len(writes)], answers[len(writes) :]
            done = answers[0] if isinstance(answers[0], list) else answers[:1]
            error = _first_error([*queued, *done])
        if error:
            return (yield from _refused(error, call, answer, writes))
        if answers[0] is not None:
            return [answer, *answers[1:]]
    return [ResponseError(f"others wrote meanwhile, {ROUNDS} times in a row")]


def _reads(keys: tuple[str, ...]) -> list[Command]:
    record, *ordered = keys
    sets = (("ZRANGE", key, 0, -1, "WITHSCORES") for key in ordered)
    return [("HGETALL", record), *sets, ("PTTL", record), ("PTTL", ordered[0])]


def _frees(owner: Any, write: Any) -> bool:
    """Return whether *write* removes something of *owner*, or what a holding has reserved."""
    verb, *_, last = write
    is_removal = verb in {"ZREM", "HDEL", "DEL"}
    return is_removal and (last == b"available" or str(owner).encode() in last)


def _refused(
    error: ResponseError, call: Call, answer: Any, writes: Sequence[Command]
) -> Conversation[list[Any]]:
    """Leave the connection as it was found. If the memory is full, carry out what frees this owner's.

    Nobody else has this owner, so that needs no look; nor is anybody woken, or remembered to have ended.
    """
    is_freeing = isinstance(error, OutOfMemoryError) and call.script in {RELEASE, FORCE, LEAVE}
    removals = [*filter(partial(_frees, call.args[1]), writes)] if is_freeing else []
    # The first two fail where a transaction has ended, or has not begun: nobody minds.
    _, _, *answers = yield (("DISCARD",), ("UNWATCH",), *removals)
    return [(_first_error(answers) or answer) if is_freeing else error]


def _first_error(answers: Sequence[Any]) -> ResponseError | None:
    return next((answer for answer in answers if isinstance(answer, ResponseError)), None)


# What becomes of the lock.


def _parts(call: Call) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Return what is asked of each lock: its keys, what doorbells begin with, and the other arguments."""
    if call.script is LOOK:
        return [((key, f"{key}:h", f"{key}:q", f"{key}:a"), ("",)) for key in call.keys]
    if call.script is not EXTEND:
        return [(call.keys, call.args)]
    return [
        (call.keys[2 * i : 2 * i + 2], ("", *call.args[3 * i : 3 * i + 3]))
        for i in range(len(call.keys) // 2)
    ]


def _decided(call: Call, found: Sequence[Any]) -> tuple[Any, list[Command]]:
    """Return the answer of *call* where its reads were answered *found*, and what is to be written."""
    time, *found = found
    answers, locks = list[Any](), dict[tuple[str, ...], _Lock]()
    for keys, words in _parts(call):
        bells, *args = (word.encode() if isinstance(word, str) else word for word in words)
        # The same lock may be extended twice.
        if (lock := locks.get(keys)) is None:
            count = len(_reads(keys))
            lock = locks[keys] = _Lock(keys, bells, time, found[:count])
            found = found[count:]
        answers.append(getattr(lock, f"decide_{call.script.name}")(*args))
    writes = [write for lock in locks.values() for write in lock.writes()]
    return (answers if call.script in {EXTEND, LOOK} else answers[0]), writes


class _Lock:
    """One lock: what was read, and what becomes of it. *others* are writes that are no change of these."""

    def __init__(
        self, keys: tuple[str, ...], bells: Any, time: Sequence[bytes], found: Sequence[Any]
    ) -> None:
        seconds, microseconds = map(int, time)
        fields, *ordered, record_lives, holders_live = found
        self.keys, self.bells, self.now = keys, bells, seconds * 1_000_000 + microseconds
        self.fields: dict[bytes, bytes] = dict(_pairs(fields))
        sets = [{member: int(float(score)) for member, score in _pairs(each)} for each in ordered]
        self.holders, self.queue, self.alive = sets if len(sets) == 3 else (*sets, {}, {})
        self.state: list[dict[bytes, Any]] = [self.fields, self.holders, self.queue, self.alive]
        self.read = [{**each} for each in self.state]
        #: For how many ms they live, and are to live.
        self.lives: dict[str, int] = {keys[0]: record_lives, keys[1]: holders_live}
        self.kept: dict[str, int] = {}
        self.others: list[Command] = []

    def writes(self) -> Iterator[Command]:
        for key, before, now in zip(self.keys, self.read, self.state, strict=False):
            is_record = key == self.keys[0]
            for member in before.keys() - now.keys():
                yield "HDEL" if is_record else "ZREM", key, member
            for member, value in now.items():
                if before.get(member) != value:
                    yield (
                        ("HSET", key, member, value) if is_record else ("ZADD", key, value, member)
                    )
        yield from (("PEXPIRE", key, left) for key, left in self.kept.items())
        yield from self.others

    # The decisions.

    def decide_acquire(self, owner: bytes, mode: bytes, ttl: int, *more: Any) -> list[Any]:
        min_hold, lock_delay, name, holder, callers, is_fair = more
        self.expire()
        if owner in self.holders:
            self.holders[owner] = max(self.holders[owner], self.now + ttl)
            return [1, self.described(owner)[0]]
        if self.is_noted(b"revoked", owner):
            return self.busy()
        is_free = not self.holders or mode == self.fields.get(b"mode") == b"s"
        is_free = is_free and self.number(b"available") <= self.now
        if not is_free or self.is_behind(owner, mode, is_fair):
            if callers:
                self.stand_in_line(mode + owner)
                self.fields[b"w:" + owner] = b"%d" % callers
            return self.busy()
        token = max(self.number(b"token") + 1, self.now)
        self.fields |= {
            b"token": b"%d" % token,
            b"mode": mode,
            b"available": b"%d" % self.now if mode == b"x" else b"0",
            b"name": name,
            b"h:" + owner: b"%d %d %d %b" % (token, self.now, lock_delay, holder),
        }
        self.holders[owner] = self.now + ttl
        if mode == b"x":
            self.hold_back(self.now + min_hold)
        self.keep(self.now + ttl + lock_delay)
        if self.queue:
            self.leave(owner)
        return [1, token]

    def decide_release(self, owner: bytes, is_final: bytes, min_hold: int) -> int:
        if is_final:
            self.leave(owner)
        if self.holders.get(owner, 0) > self.now:
            _, acquired, *_ = self.described(owner)
            self.forget(owner)
            if min_hold:
                self.hold_back(acquired + min_hold)
            self.note(b"ended", owner)
            if is_final:
                self.note(b"revoked", owner)
            self.wake()
            return 1
        self.expire()
        answer = 1 if self.is_noted(b"ended", owner) else 2 if self.holders else 0
        if is_final and not self.is_noted(b"revoked", owner):
            self.note(b"revoked", owner)
            self.keep(self.now)
        if is_final or answer == 0:
            self.wake()
        return answer

    def decide_extend(self, owner: bytes, ttl: int, behind: int) -> int:
        ends = self.holders.get(owner, 0)
        if ends > self.now and self.number(b"b:" + owner) != behind:
            self.fields[b"b:" + owner] = b"%d" % behind
        if self.now < ends < self.now + ttl:
            self.holders[owner] = self.now + ttl
            self.keep(self.now + ttl)
        return int(ends > self.now)

    def decide_take_over(self, owner: bytes, former: bytes, ttl: int, holder: bytes) -> int:
        self.expire()
        if owner in self.holders:
            return 1
        if former not in self.holders:
            return 0
        described = self.described(former)
        self.forget(former)
        self.fields[b"h:" + owner] = b"%d %d %d %b" % (*described[:3], holder)
        self.holders[owner] = self.now + ttl
        self.keep(self.now + ttl)
        return 1

    def decide_look(self) -> list[Any]:
        name, mode = self.fields.get(b"name", b""), self.fields.get(b"mode", b"x")
        waiting = (who[1:] for who, patience in self.alive.items() if patience > self.now)
        waiters = sum(max(1, self.number(b"w:" + owner)) for owner in waiting)
        self.expire()
        available = self.number(b"available") - self.now
        answer = [name, self.number(b"token"), available, waiters, mode]
        for owner, ends in self.holders.items():
            _, acquired, *_, holder = self.described(owner)
            behind = self.number(b"b:" + owner)
            answer += owner, ends - self.now, self.now - acquired, holder, behind
        return answer

    def decide_force(self, owner: bytes, token: bytes) -> int:
        self.expire()
        is_reserved = not (owner or self.holders) and self.fields.get(b"token") == token
        if not is_reserved and owner not in self.holders:
            return 0
        if owner:
            self.forget(owner)
        self.fields[b"token"] = b"%d" % max(self.number(b"token") + 1, self.now)
        if not self.holders:
            self.fields.pop(b"available", None)
        self.keep(self.now)
        self.wake()
        return 1

    def decide_leave(self, owner: bytes) -> int:
        left = self.leave(owner)
        self.expire()
        self.wake()
        return left

    def decide_keep(self, *waiters: bytes) -> int:
        for waiter in waiters:
            if waiter in self.queue:
                self.stay(waiter)
            else:
                self.ring(waiter[1:])
        self.expire()
        if self.number(b"available") <= self.now:
            self.wake()
        return 1

    # What they are made of.

    def number(self, name: bytes) -> int:
        value = self.fields.get(name, b"")
        return int(value) if value.isdigit() else 0

    def described(self, owner: bytes) -> tuple[int, int, int, bytes]:
        if not (found := _HOLDING.fullmatch(self.fields.get(b"h:" + owner, b""))):
            return 0, 0, 0, b""
        return int(found[1]), int(found[2]), int(found[3]), found[4]

    def keep(self, ends: int) -> None:
        wanted = max(0, -((self.now - ends) // 1000)) + RETENTION * 1000
        for key, left in self.lives.items():
            if left < wanted - 600_000:
                self.lives[key] = self.kept[key] = wanted

    def hold_back(self, instant: int) -> None:
        if instant > self.now and instant > self.number(b"available"):
            self.fields[b"available"] = b"%d" % instant
            left = -((self.now - instant) // 1000)
            self.others.append(("SET", f"{self.keys[0]}:r", "", "PX", left))
            self.keep(instant)

    def forget(self, owner: bytes) -> None:
        del self.holders[owner]
        self.fields.pop(b"h:" + owner, None)
        self.fields.pop(b"b:" + owner, None)
        if not self.holders:
            # Redis drops an empty set, and how long it was to be kept: the next one is kept for ever.
            self.lives[self.keys[1]] = -1

    def expire(self) -> None:
        for owner, ends in list(self.holders.items()):
            if ends <= self.now:
                self.hold_back(ends + self.described(owner)[2])
                self.forget(owner)

    def waiters(self) -> Iterator[tuple[bytes, bytes]]:
        for waiter in self.queue:
            if self.alive.get(waiter, 0) > self.now:
                yield waiter[:1], waiter[1:]

    def is_behind(self, owner: bytes, mode: bytes, is_fair: bytes) -> bool:
        if mode == b"x" and not is_fair:
            return False
        for other, who in self.waiters():
            if who == owner:
                return False
            if b"x" in {mode, other}:
                return True
        return False

    def ring(self, owner: bytes) -> None:
        # Once, however often it was rung before.
        bell = self.bells + owner
        self.others += ("DEL", bell), ("RPUSH", bell, 1), ("PEXPIRE", bell, 10_000)

    def wake(self) -> None:
        has_readers, is_first = bool(self.holders), True
        if has_readers and self.fields.get(b"mode") != b"s":
            return
        for mode, owner in self.waiters():
            if mode == b"x":
                if is_first and not has_readers:
                    self.ring(owner)
                return
            is_first = False
            self.ring(owner)

    def stand_in_line(self, waiter: bytes) -> None:
        self.queue.setdefault(waiter, max(max(self.queue.values(), default=0) + 1, self.now))
        self.stay(waiter)
        for other, patience in list(self.alive.items()):
            if patience <= self.now - round(FORGOTTEN * 1_000_000):
                self.queue.pop(other, None)
                self.fields.pop(b"w:" + other[1:], None)
                del self.alive[other]

    def stay(self, waiter: bytes) -> None:
        self.alive[waiter] = self.now + round(PATIENCE * 1_000_000)
        self.kept |= dict.fromkeys(self.keys[2:], 60_000)

    def leave(self, owner: bytes) -> int:
        places = [mode + owner for mode in (b"x", b"s") if mode + owner in self.queue]
        for place in places:
            del self.queue[place]
            self.alive.pop(place, None)
            self.fields.pop(b"w:" + owner, None)
        self.others.append(("DEL", self.bells + owner))
        return len(places)

    def note(self, place: bytes, owner: bytes) -> None:
        noted = owner + b" " + self.fields.get(place, b"")
        self.fields[place] = noted[: 8 * (len(owner) + 1)]

    def is_noted(self, place: bytes, owner: bytes) -> bool:
        return owner in self.fields.get(place, b"")

    def busy(self) -> list[Any]:
        ends, last = max(((ends, owner) for owner, ends in self.holders.items()), default=(0, b""))
        ends = max(ends, self.number(b"available"))
        return [0, self.described(last)[3], ends - self.now if ends > self.now else -1]


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
