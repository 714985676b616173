"""What the scripts answer, as values of the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_distlock.engine.holder import Holder
from django_distlock.engine.values import Busy, Grant, Held, Release, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

_RELEASES = {0: Release.GONE, 1: Release.RELEASED, 2: Release.TAKEN}


def microseconds(seconds: float) -> int:
    """Return a time as the scripts take it."""
    return round(seconds * 1_000_000)


def granted(answer: list[Any]) -> Grant | Busy:
    """Read what ACQUIRE answers."""
    if answer[0] == 1:
        return Grant(int(answer[1]))
    return Busy(Holder.from_json(answer[1]), _left(answer[2]))


def released(answer: int) -> Release:
    """Read what RELEASE answers."""
    return _RELEASES[int(answer)]


def occupied(answer: list[Any]) -> Busy | None:
    """Read what LOOK answers: whether somebody has the lock, and who has it longest."""
    holdings = list(_holdings(answer))
    ends = [_left(answer[2]) or 0.0, *(left for _, left, _ in holdings)]
    if max(ends) <= 0:
        return None
    return Busy(holdings[-1][2] if holdings else None, max(ends))


def held(answer: list[Any], key: str) -> Iterator[tuple[Held, str]]:
    """Read what LOOK answers: each holding, for people, and its owner, for nobody."""
    name, token, _, waiters, mode = answer[:5]
    for owner, left, holder in _holdings(answer):
        shown = Held(
            name=name.decode(errors="backslashreplace"),
            key=key,
            holder=holder,
            remaining=left,
            token=int(token),
            owner_digest=digest(owner),
            shared=mode == b"s",
            waiters=int(waiters),
        )
        yield shown, owner


def _holdings(answer: list[Any]) -> Iterator[tuple[str, float, Holder | None]]:
    found = iter(answer[5:])
    for owner, left, holder in zip(found, found, found, strict=True):
        yield owner.decode(errors="backslashreplace"), int(left) / 1e6, Holder.from_json(holder)


def _left(left: Any) -> float | None:
    return int(left) / 1e6 if int(left) >= 0 else None
