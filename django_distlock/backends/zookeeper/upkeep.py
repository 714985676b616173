"""What operators ask for: who holds what, ending a holding, deleting nodes that nobody needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kazoo.exceptions import NoNodeError, NotEmptyError

from django_distlock.engine.values import Held, Purged

from .line import Label, Line, Node, unquoted
from .steps import Steps, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .conversation import Conversation
    from .questions import Questions

_T = TypeVar("_T")


#: How many locks are asked about at once.
BATCH = 500


@dataclass(frozen=True, slots=True)
class Terms:
    """What to purge: what is older than so many seconds, so many locks at a time."""

    older_than: float
    batch_size: int
    dry_run: bool

    def __post_init__(self) -> None:
        if not self.older_than >= 0:
            msg = f"older_than must be 0 seconds or more, not {self.older_than!r}."
            raise ValueError(msg)
        if not self.batch_size >= 1:
            msg = f"batch_size must be 1 or more, not {self.batch_size!r}."
            raise ValueError(msg)


class Shown(NamedTuple):
    """A holder in the line for a lock, and how many wait behind the holders."""

    key: str
    path: str
    node: Node
    waiters: int


class Upkeep:
    """What is asked about all locks of one alias. *is_mine* tells its keys."""

    def __init__(
        self, questions: Questions, talk: Conversation, root: str, is_mine: Callable[[str], bool]
    ) -> None:
        self._questions = questions
        self._talk = talk
        self._root = root
        self._is_mine = is_mine

    def keys(self) -> list[str]:
        """Return the keys that have a node, in order."""
        names = self._ask(self._names())
        return sorted(key for key in map(unquoted, names) if key is not None and self._is_mine(key))

    def held(self, key: str | None = None) -> list[Held]:
        """Tell all who hold a lock, or this one."""
        batches = _batches(self.keys() if key is None else [key], BATCH)
        return [held for batch in batches for held in self._ask(self._holders(batch))]

    def end_holding(self, key: str, owner_digest: str) -> bool:
        """Delete the node of the holder with this digest; tell whether it was there."""
        return self._talk.have(self._end_holding(key, owner_digest), changes=True)

    def purge(self, terms: Terms) -> Iterator[Purged]:
        """Delete nodes of locks, batch by batch; what is in use meanwhile stays."""
        now = self._ask(self._now())
        keys = self.keys()
        looked_at = 0
        for batch in _batches(keys, terms.batch_size):
            empty = self._ask(self._empty(batch, now - terms.older_than))
            deleted = len(empty) if terms.dry_run else self._ask(self._delete(empty))
            looked_at += len(batch)
            yield Purged(len(batch), deleted, looked_at / len(keys))

    def _ask(self, steps: Steps[_T]) -> _T:
        return self._talk.have(steps, changes=False)

    # Steps: see steps.Steps.

    def _names(self) -> Steps[list[str]]:
        client = yield from self._questions.connected()
        return (yield from self._questions.names(client, self._root))

    def _holders(self, keys: Sequence[str]) -> Steps[list[Held]]:
        client = yield from self._questions.connected()
        folders = [self._questions.folder(key) for key in keys]
        outcomes = yield [client.get_children_async(folder) for folder in folders]
        shown = [
            each
            for key, folder, outcome in zip(keys, folders, outcomes, strict=True)
            if not isinstance(outcome, NoNodeError)
            for each in _shown(key, folder, Line(value(outcome)))
        ]
        outcomes = yield [client.get_async(each.path) for each in shown]
        both = zip(shown, outcomes, strict=True)
        # One that has released meanwhile is not held.
        return [
            _as_held(each, *value(outcome))
            for each, outcome in both
            if not isinstance(outcome, NoNodeError)
        ]

    def _end_holding(self, key: str, owner_digest: str) -> Steps[bool]:
        client = yield from self._questions.connected()
        folder = self._questions.folder(key)
        line = Line((yield from self._questions.names(client, folder, newest=True)))
        shown = [node for node in line.holders if node.owner_digest == owner_digest]
        outcomes = yield [client.delete_async(f"{folder}/{node.name}") for node in shown]
        return any(map(_is_deleted, outcomes))

    def _now(self) -> Steps[float]:
        """Return the time by the clock of the ensemble, which a write tells; 0 before the first lock."""
        client = yield from self._questions.connected()
        [outcome] = yield [client.set_async(self._root, b"")]
        return 0.0 if isinstance(outcome, NoNodeError) else value(outcome).mtime / 1000

    def _empty(self, keys: Sequence[str], before: float) -> Steps[list[str]]:
        """Return those of *keys* whose node is from before then, and that nobody holds or waits for."""
        client = yield from self._questions.connected()
        outcomes = yield [client.exists_async(self._questions.folder(key)) for key in keys]
        return [
            key
            for key, stat in zip(keys, map(value, outcomes), strict=True)
            if stat is not None and not stat.numChildren and stat.ctime / 1000 < before
        ]

    def _delete(self, keys: Sequence[str]) -> Steps[int]:
        client = yield from self._questions.connected()
        outcomes = yield [client.delete_async(self._questions.folder(key)) for key in keys]
        return sum(map(_is_deleted, outcomes))


def _shown(key: str, folder: str, line: Line) -> list[Shown]:
    holders = line.holders
    waiters = len(line.nodes) - len(holders)
    return [Shown(key, f"{folder}/{node.name}", node, waiters) for node in holders]


def _as_held(shown: Shown, data: bytes, stat: Any) -> Held:
    said, node = Label.read(data), shown.node
    return Held(
        name=said.name or shown.key,
        key=shown.key,
        holder=said.holder,
        remaining=None,
        token=stat.czxid,
        owner_digest=node.owner_digest,
        shared=node.shared,
        waiters=shown.waiters,
    )


def _is_deleted(outcome: Any) -> bool:
    if isinstance(outcome, (NoNodeError, NotEmptyError)):
        return False
    value(outcome)
    return True


def _batches(keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]
