"""What is held, as each server has it, and what a majority of them has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_distlock.engine.holder import Holder
from django_distlock.engine.values import Held, digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from django_distlock.backends.redis.connections import Conversation
    from django_distlock.backends.redis.scripts import Call


@dataclass(frozen=True, slots=True)
class Seen:
    """A lock as one server has it. *left* is seconds; *token* is 0 if the server knows none."""

    key: str
    owner_digest: str
    left: float
    holder: str
    name: str
    token: int


def looks(calls: Mapping[str, Call]) -> Conversation[list[Seen]]:
    """Ask one server for the locks that *calls* look at, by their keys."""
    answers = yield tuple(call.by_text for call in calls.values())
    return [_seen(key, each) for key, each in zip(calls, answers, strict=True) if _is_held(each)]


def merged(found: Iterable[list[Seen]], most: int) -> list[Held]:
    """Return what at least *most* servers have, in the order of keys."""
    holdings: dict[tuple[str, str], list[Seen]] = {}
    for seen in (seen for each in found for seen in each):
        holdings.setdefault((seen.key, seen.owner_digest), []).append(seen)
    return [_held(holdings[each]) for each in sorted(holdings) if len(holdings[each]) >= most]


def _is_held(answer: object) -> bool:
    return isinstance(answer, list) and bool(answer)


def _seen(key: str, answer: list[bytes]) -> Seen:
    raw_owner, left, raw_holder, raw_name, token = answer
    owner, holder, name = (
        part.decode(errors="backslashreplace") for part in (raw_owner, raw_holder, raw_name)
    )
    return Seen(key, digest(owner), int(left) / 1e6, holder, name, int(token))


def _held(votes: list[Seen]) -> Held:
    last = max(votes, key=lambda seen: seen.left)
    return Held(
        name=last.name,
        key=last.key,
        holder=Holder.from_json(last.holder),
        remaining=last.left,
        token=max(seen.token for seen in votes) or None,
        owner_digest=last.owner_digest,
    )
