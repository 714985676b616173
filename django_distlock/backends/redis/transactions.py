"""The same without scripts: WATCH, read, decide here, and write if nobody wrote meanwhile (MULTI, EXEC). No I/O.

Each function here does what the one of its name does in scripts, and each decision what the script of its name does.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from redis.exceptions import OutOfMemoryError, ResponseError

from .scripts import EXTEND, FORCE, FORGOTTEN, LEAVE, LOOK, PATIENCE, RELEASE, RETENTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .connections import Command, Conversation
    from .scripts import Call

#: How often to begin again since others wrote meanwhile; one of those that write gets through each time.
ROUNDS = 100
#: What a record says of a holder: its token, when it acquired, its min_hold and lock_delay, and who it is.
_HOLDING = re.compile(rb"(\d+) (\d+) (\d+) (\d+) (.*)", re.DOTALL)


# What is asked.


def transact(call: Call, *after: Command) -> Conversation[list[Any]]:
    """Carry *call* out as its script would, and return its answer and those to *after*.

    Two round trips; one to look. An error of Redis is an answer: nothing was carried out then.
    """
    attempt = _look if call.script is LOOK else _change
    for _ in range(ROUNDS):
        answers = yield from attempt(call, after)
        if answers:
            return answers
    return [ResponseError(f"others wrote meanwhile, {ROUNDS} times in a row")]


def _look(call: Call, after: Sequence[Command]) -> Conversation[list[Any]]:
    """Read, if nobody writes meanwhile; else return no answers."""
    # Not between MULTI and EXEC: a Redis whose memory is full has no place to queue anything.
    asked = _begin(call)
    answers = yield (*asked, ("EXEC",), *after)
    found, done, more = answers[: len(asked)], answers[len(asked)], answers[len(asked) + 1 :]
    if error := _first_error([*found, done]):
        return (yield from _refused(error))
    answer, _ = _decided(call, found[1:-1])
    return [answer, *more] if done is not None else []


def _change(call: Call, after: Sequence[Command]) -> Conversation[list[Any]]:
    """Read, decide, and write if nobody wrote meanwhile; else return no answers."""
    found = yield _begin(call)
    if error := _first_error(found):
        return (yield from _refused(error))
    answer, writes = _decided(call, found[1:-1])
    # With nothing to write, EXEC still tells whether what was read belongs together.
    answers = yield (*writes, ("EXEC",), *after)
    queued, done, more = answers[: len(writes)], answers[len(writes)], answers[len(writes) + 1 :]
    if error := _first_error([*queued, done, *(done if isinstance(done, list) else ())]):
        return (yield from _refused(error, answer, _removals(call)))
    return [answer, *more] if done is not None else []


def _begin(call: Call) -> tuple[Command, ...]:
    """Return what watches the keys, tells all that has to be known, and begins to write."""
    reads: list[Command] = []
    if call.script is EXTEND:
        for record, holders, owner, _ in _leases(call):
            reads += ("ZSCORE", holders, owner), ("PTTL", record), ("PTTL", holders)
    else:
        record, *ordered = call.keys
        reads.append(("HGETALL", record))
        reads += (("ZRANGE", key, 0, -1, "WITHSCORES") for key in ordered)
        reads += ("PTTL", record), ("PTTL", ordered[0])
    # MULTI already here: were it refused among the writes, they would be carried out unguarded.
    return ("WATCH", *call.keys), ("TIME",), *reads, ("MULTI",)


def _refused(
    error: ResponseError, answer: Any = None, removals: Sequence[Command] = ()
) -> Conversation[list[Any]]:
    """Leave the connection as it was found; what only frees memory is carried out even if it is full."""
    # They fail where a transaction has ended, or has not begun: nobody minds.
    yield (("DISCARD",), ("UNWATCH",))
    if not (removals and isinstance(error, OutOfMemoryError)):
        return [error]
    answers = yield removals
    return [_first_error(answers) or answer]


def _removals(call: Call) -> list[Command]:
    """Return what sets free what *call* is to free, without a look, since nobody else has this owner.

    Not all that its script does: nobody is woken, nor is it remembered who gave it back.
    """
    commands: list[Command] = []
    if call.script in {RELEASE, FORCE, LEAVE}:
        record, holders, queue, alive = call.keys
        bells, owner, *is_final = map(str, call.args)
        if call.script is not LEAVE:
            commands += ("ZREM", holders, owner), ("HDEL", record, f"h:{owner}")
        if call.script is FORCE:
            commands.append(("HDEL", record, "available"))
        elif call.script is LEAVE or "1" in is_final:
            places = f"x{owner}", f"s{owner}"
            commands += (
                ("ZREM", queue, *places),
                ("ZREM", alive, *places),
                ("DEL", f"{bells}{owner}"),
            )
    return commands


def _first_error(answers: Sequence[Any]) -> ResponseError | None:
    return next((answer for answer in answers if isinstance(answer, ResponseError)), None)


# What becomes of the lock.


def _decided(call: Call, found: Sequence[Any]) -> tuple[Any, list[Command]]:
    """Return the answer of *call* where its reads were answered *found*, and what is to be written."""
    if call.script is EXTEND:
        return _extend(call, found)
    bells, *args = (arg.encode() if isinstance(arg, str) else arg for arg in call.args)
    lock = _Lock(call.keys, bells, found)
    return getattr(lock, f"decide_{call.script.name}")(*args), lock.writes


def _extend(call: Call, found: Sequence[Any]) -> tuple[list[int], list[Command]]:
    now, leases = _instant(found[0]), _leases(call)
    told = list(zip(leases, found[1::3], found[2::3], found[3::3], strict=True))
    # The same lock may be among them twice.
    ends = {lease[1:3]: int(float(score or 0)) for lease, score, _, _ in told}
    lives = {key: ms for lease, _, *both in told for key, ms in zip(lease[:2], both, strict=True)}
    kept: list[int] = []
    writes: list[Command] = []
    for record, holders, owner, ttl in leases:
        kept.append(int(ends[holders, owner] > now))
        if now < ends[holders, owner] < now + ttl:
            ends[holders, owner] = now + ttl
            writes += ("ZADD", holders, now + ttl, owner), *_keeping(lives, (record, holders), ttl)
    return kept, writes


def _leases(call: Call) -> list[tuple[str, str, str, int]]:
    parts = call.keys[::2], call.keys[1::2], map(str, call.args[::2]), map(int, call.args[1::2])
    return list(zip(*parts, strict=True))


class _Lock:
    """One lock as it was read. What is changed in it is put down in *writes* too, for Redis to carry out."""

    def __init__(self, keys: tuple[str, ...], bells: Any, found: Sequence[Any]) -> None:
        time, fields, holders, queue, alive, *lives = found
        self.keys, self.bells, self.now = keys, bells, _instant(time)
        self.fields: dict[bytes, bytes] = dict(_pairs(fields))
        self.holders, self.queue, self.alive = (
            {member: int(float(score)) for member, score in _pairs(each)}
            for each in (holders, queue, alive)
        )
        self.lives: dict[str, int] = dict(zip(keys, lives, strict=False))
        self.writes: list[Command] = []

    # The decisions.

    def decide_acquire(self, owner: bytes, mode: bytes, ttl: int, *more: Any) -> list[Any]:
        min_hold, lock_delay, name, holder, is_queued, is_fair = more
        self.expire()
        if owner in self.holders:
            self.hold(owner, max(self.holders[owner], self.now + ttl))
            return [1, self.described(owner)[0]]
        if self.is_noted(b"revoked", owner):
            return self.busy()
        is_free = not self.holders or mode == self.fields.get(b"mode") == b"s"
        if (
            self.number(b"available") > self.now
            or not is_free
            or self.is_behind(owner, mode, is_fair)
        ):
            if is_queued:
                self.stand_in_line(mode + owner)
            return self.busy()
        token = max(self.number(b"token") + 1, self.now)
        self.put(
            (b"token", token),
            (b"mode", mode),
            (b"available", self.now if mode == b"x" else 0),
            (b"name", name),
            (b"h:" + owner, b"%d %d %d %d %b" % (token, self.now, min_hold, lock_delay, holder)),
        )
        self.hold(owner, self.now + ttl)
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

    def decide_take_over(self, owner: bytes, former: bytes, ttl: int, holder: bytes) -> int:
        self.expire()
        if owner in self.holders:
            return 1
        if former not in self.holders:
            return 0
        ends, described = self.holders[former], self.described(former)
        self.forget(former)
        self.put((b"h:" + owner, b"%d %d %d %d %b" % (*described[:4], holder)))
        self.hold(owner, max(ends, self.now + ttl))
        self.keep(self.now + ttl)
        return 1

    def decide_look(self) -> list[Any]:
        name, mode = self.fields.get(b"name", b""), self.fields.get(b"mode", b"x")
        waiters = sum(patience > self.now for patience in self.alive.values())
        self.expire()
        available = self.number(b"available") - self.now
        answer = [name, self.number(b"token"), available, waiters, mode]
        for owner, ends in self.holders.items():
            answer += owner, ends - self.now, self.described(owner)[4]
        return answer

    def decide_force(self, owner: bytes, token: bytes) -> int:
        self.expire()
        is_reserved = not (owner or self.holders) and self.fields.get(b"token") == token
        if not is_reserved and owner not in self.holders:
            return 0
        if owner:
            self.forget(owner)
        self.put((b"token", max(self.number(b"token") + 1, self.now)))
        if not self.holders:
            self.put((b"available", 0))
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

    def described(self, owner: bytes) -> tuple[int, int, int, int, bytes]:
        if not (found := _HOLDING.fullmatch(self.fields.get(b"h:" + owner, b""))):
            return 0, 0, 0, 0, b""
        return int(found[1]), int(found[2]), int(found[3]), int(found[4]), found[5]

    def write(self, *command: str | int | bytes) -> None:
        self.writes.append(command)

    def put(self, *changed: tuple[bytes, bytes | int]) -> None:
        pairs = [
            (name, b"%d" % value if isinstance(value, int) else value) for name, value in changed
        ]
        self.fields.update(pairs)
        self.write("HSET", self.keys[0], *chain.from_iterable(pairs))

    def hold(self, owner: bytes, ends: int) -> None:
        self.holders[owner] = ends
        self.write("ZADD", self.keys[1], ends, owner)

    def keep(self, ends: int) -> None:
        self.writes += _keeping(self.lives, self.keys[:2], ends - self.now)

    def hold_back(self, instant: int) -> None:
        if instant > self.now and instant > self.number(b"available"):
            self.put((b"available", instant))
            left = -(-(instant - self.now) // 1000)
            self.write("SET", f"{self.keys[0]}:r", "", "PX", left)
            self.keep(instant)

    def forget(self, owner: bytes) -> None:
        del self.holders[owner]
        self.fields.pop(b"h:" + owner, None)
        self.write("ZREM", self.keys[1], owner)
        self.write("HDEL", self.keys[0], b"h:" + owner)
        if not self.holders:
            # Redis drops an empty set, and how long it was to be kept: the next one is kept for ever.
            self.lives[self.keys[1]] = -1

    def expire(self) -> None:
        for owner, ends in list(self.holders.items()):
            if ends <= self.now:
                self.hold_back(ends + self.described(owner)[3])
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
        self.write("DEL", self.bells + owner)
        self.write("RPUSH", self.bells + owner, 1)
        self.write("PEXPIRE", self.bells + owner, 10_000)

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
        _, _, queue, alive = self.keys
        ticket = max(max(self.queue.values(), default=0) + 1, self.now)
        self.write("ZADD", queue, "NX", ticket, waiter)
        self.stay(waiter)
        for other, patience in self.alive.items():
            if other != waiter and patience <= self.now - round(FORGOTTEN * 1_000_000):
                self.write("ZREM", queue, other)
                self.write("ZREM", alive, other)

    def stay(self, waiter: bytes) -> None:
        _, _, queue, alive = self.keys
        self.alive[waiter] = self.now + round(PATIENCE * 1_000_000)
        self.write("ZADD", alive, self.alive[waiter], waiter)
        self.write("PEXPIRE", queue, 60_000)
        self.write("PEXPIRE", alive, 60_000)

    def leave(self, owner: bytes) -> int:
        places = [mode + owner for mode in (b"x", b"s") if mode + owner in self.queue]
        for place in places:
            del self.queue[place]
            self.write("ZREM", self.keys[2], place)
            self.write("ZREM", self.keys[3], place)
        self.write("DEL", self.bells + owner)
        return len(places)

    def note(self, place: bytes, owner: bytes) -> None:
        noted = owner + b" " + self.fields.get(place, b"")
        self.put((place, noted[: 8 * (len(owner) + 1)]))

    def is_noted(self, place: bytes, owner: bytes) -> bool:
        return owner in self.fields.get(place, b"")

    def busy(self) -> list[Any]:
        ends, last = max(((ends, owner) for owner, ends in self.holders.items()), default=(0, b""))
        ends = max(ends, self.number(b"available"))
        return [0, self.described(last)[4], ends - self.now if ends > self.now else -1]


def _instant(time: Sequence[bytes]) -> int:
    seconds, microseconds = map(int, time)
    return seconds * 1_000_000 + microseconds


def _keeping(lives: dict[str, int], keys: Sequence[str], lifetime: int) -> Iterator[Command]:
    """Make *keys* outlive what ends in *lifetime* microseconds. *lives*: how long they live, in ms."""
    wanted = max(0, -(-lifetime // 1000)) + RETENTION * 1000
    for key in keys:
        # Nearly as long is long enough, and saves a write.
        if lives[key] < wanted - 600_000:
            lives[key] = wanted
            yield "PEXPIRE", key, wanted


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
