"""What each script makes of a lock, in Python: functions of what was read. No I/O; contracts: see scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .record import Holding, Record, instant, keeping
from .scripts import ACQUIRE, EXTEND, FORCE, KEEP, LEAVE, LOOK, RELEASE, TAKE_OVER, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .conversation import Command


def reads(call: Call) -> tuple[Command, ...]:
    """Return the commands that tell all that decide() has to know."""
    if call.script is not EXTEND:
        return Record.reads(call.keys)
    each = (
        (("ZSCORE", holders, owner), ("PTTL", record), ("PTTL", holders))
        for record, holders, owner, _ in _leases(call)
    )
    return ("TIME",), *(command for commands in each for command in commands)


def decide(call: Call, found: Sequence[Any]) -> tuple[Any, list[Command]]:
    """Return the answer of *call* where reads() were answered *found*, and what is to be written."""
    if call.script is EXTEND:
        return _extend(call, found)
    bells, *args = call.args
    record = Record.read(call.keys, str(bells), found)
    answer = _DECISIONS[call.script.name](record, *map(_as_bytes, args))
    return answer, record.writes


def removals(call: Call) -> tuple[Command, ...]:
    """Return what sets free what *call* is to free, without a look, since nobody else has this owner.

    Not all that its script does: nobody is woken, nor is it remembered who gave it back.
    """
    if call.script not in {RELEASE, FORCE, LEAVE}:
        return ()
    record, holders, queue, alive = call.keys
    bells, owner, *is_final = map(str, call.args)
    places = [f"{mode}{owner}" for mode in "xs"]
    commands: list[Command] = []
    if call.script is not LEAVE:
        commands += ("ZREM", holders, owner), ("HDEL", record, f"h:{owner}")
    if call.script is LEAVE or "1" in is_final:
        commands += ("ZREM", queue, *places), ("ZREM", alive, *places), ("DEL", f"{bells}{owner}")
    return tuple(commands)


class _Wish(NamedTuple):
    """What ACQUIRE is told."""

    owner: bytes
    mode: bytes
    ttl: int
    min_hold: int
    lock_delay: int
    name: bytes
    holder: bytes
    is_queued: bytes
    is_fair: bytes


def _acquire(record: Record, *args: Any) -> list[Any]:
    wish = _Wish(*args)
    record.expire()
    if wish.owner in record.holders:
        record.hold(wish.owner, max(record.holders[wish.owner], record.now + wish.ttl))
        return [1, record.described(wish.owner).token]
    if record.is_noted(b"revoked", wish.owner):
        return record.busy()
    if _is_free(record, wish.mode) and not _is_behind(record, wish):
        return _grant(record, wish)
    if wish.is_queued:
        record.stand_in_line(wish.mode + wish.owner)
    return record.busy()


def _is_free(record: Record, mode: bytes) -> bool:
    if record.number(b"available") > record.now:
        return False
    return not record.holders or (mode == b"s" and record.is_shared)


def _is_behind(record: Record, wish: _Wish) -> bool:
    if wish.mode == b"x" and not wish.is_fair:
        return False
    for other, who in record.waiters():
        if who == wish.owner:
            return False
        if b"x" in {wish.mode, other}:
            return True
    return False


def _grant(record: Record, wish: _Wish) -> list[Any]:
    now, token = record.now, _next_token(record)
    holding = Holding(token, now, wish.min_hold, wish.lock_delay, wish.holder)
    record.put(
        (b"token", token),
        (b"mode", wish.mode),
        (b"available", now + wish.min_hold if wish.mode == b"x" else 0),
        (b"name", wish.name),
        (b"h:" + wish.owner, holding.text),
    )
    record.hold(wish.owner, now + wish.ttl)
    record.keep(now + wish.ttl + wish.lock_delay)
    if record.queue:
        record.leave(wish.owner)
    return [1, token]


def _release(record: Record, owner: bytes, is_final: bytes) -> int:
    if is_final:
        record.leave(owner)
    if record.holders.get(owner, 0) > record.now:
        return _give_back(record, owner, is_final)
    record.expire()
    answer = 2 if record.holders else 0
    if record.is_noted(b"ended", owner):
        answer = 1
    if is_final and not record.is_noted(b"revoked", owner):
        record.note(b"revoked", owner)
        record.keep(record.now)
    if is_final or answer == 0:
        record.wake()
    return answer


def _give_back(record: Record, owner: bytes, is_final: bytes) -> int:
    holding = record.described(owner)
    record.forget(owner)
    record.hold_back(holding.acquired + holding.min_hold)
    record.note(b"ended", owner)
    if is_final:
        record.note(b"revoked", owner)
    record.wake()
    return 1


def _take_over(record: Record, owner: bytes, former: bytes, ttl: int, holder: bytes) -> int:
    record.expire()
    if owner in record.holders:
        return 1
    if former not in record.holders:
        return 0
    ends, holding = record.holders[former], record.described(former)
    record.forget(former)
    record.put((b"h:" + owner, holding._replace(holder=holder).text))
    record.hold(owner, max(ends, record.now + ttl))
    record.keep(record.now + ttl)
    return 1


def _look(record: Record) -> list[Any]:
    name, mode = record.fields.get(b"name", b""), record.fields.get(b"mode", b"x")
    waiters = sum(patience > record.now for patience in record.alive.values())
    available = record.number(b"available") - record.now
    answer = [name, record.number(b"token"), available, waiters, mode]
    for owner, ends in record.holders.items():
        if ends > record.now:
            answer += owner, ends - record.now, record.described(owner).holder
    return answer


def _force(record: Record, owner: bytes) -> int:
    if owner not in record.holders:
        return 0
    record.forget(owner)
    record.put((b"token", _next_token(record)))
    if not record.holders:
        record.put((b"available", 0))
    record.keep(record.now)
    record.wake()
    return 1


def _leave(record: Record, owner: bytes) -> int:
    left = record.leave(owner)
    record.expire()
    record.wake()
    return left


def _keep(record: Record, *waiters: bytes) -> int:
    for waiter in waiters:
        if waiter in record.queue:
            record.stay(waiter)
        else:
            record.ring(waiter[1:])
    record.expire()
    if record.number(b"available") <= record.now:
        record.wake()
    return 1


def _extend(call: Call, found: Sequence[Any]) -> tuple[list[int], list[Command]]:
    now, leases = instant(found[0]), _leases(call)
    told = list(zip(leases, found[1::3], found[2::3], found[3::3], strict=True))
    ends = {
        (holders, owner): int(float(score or 0)) for (_, holders, owner, _), score, _, _ in told
    }
    left = {key: ms for (*keys, _, _), _, *some in told for key, ms in zip(keys, some, strict=True)}
    kept: list[int] = []
    writes: list[Command] = []
    for record, holders, owner, ttl in leases:
        kept.append(int(ends[holders, owner] > now))
        # The same lock may be among them twice.
        if now < ends[holders, owner] < now + ttl:
            ends[holders, owner] = now + ttl
            writes += ("ZADD", holders, now + ttl, owner), *keeping(left, (record, holders), ttl)
    return kept, writes


def _leases(call: Call) -> list[tuple[str, str, str, int]]:
    parts = call.keys[::2], call.keys[1::2], map(str, call.args[::2]), map(int, call.args[1::2])
    return list(zip(*parts, strict=True))


def _next_token(record: Record) -> int:
    return max(record.number(b"token") + 1, record.now)


def _as_bytes(arg: str | int | bytes) -> bytes | int:
    return arg.encode() if isinstance(arg, str) else arg


_DECISIONS: dict[str, Callable[..., Any]] = {
    ACQUIRE.name: _acquire,
    RELEASE.name: _release,
    TAKE_OVER.name: _take_over,
    LOOK.name: _look,
    FORCE.name: _force,
    LEAVE.name: _leave,
    KEEP.name: _keep,
}
