"""The child nodes of a lock in ZooKeeper: their names and their order. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from django_distlock.engine.values import Request, digest

#: The owner's digest, the attempt, r(eader) or w(riter), and the number that ZooKeeper appends.
_NODE = re.compile(r"([0-9a-f]{16})-[0-9a-f]{8}-([rw])-(-\d{9,10}|\d{10})", re.ASCII)
#: The numbers come from a signed 32-bit counter, which wraps around.
_ROUND, _HALF = 2**32, 2**31


def prefix(request: Request, attempt: str) -> str:
    return f"{digest(request.owner)}-{attempt}-{'r' if request.shared else 'w'}-"


class Child(NamedTuple):
    """The node of one holder or waiter, read from its name."""

    name: str
    owner_digest: str
    shared: bool
    number: int


class Children:
    """The children of a lock's node: its holders and waiters in the order of arrival, without foreign nodes."""

    def __init__(self, names: Iterable[str]) -> None:
        children = [
            Child(name, found[1], found[2] == "r", int(found[3]))
            for name in names
            if (found := _NODE.fullmatch(name))
        ]
        pivot = children[0].number if children else 0
        self.all = sorted(children, key=lambda child: (child.number - pivot + _HALF) % _ROUND)

    @property
    def holders(self) -> list[Child]:
        """The holders: the first child, or all readers before the first writer."""
        if self.all and not self.all[0].shared:
            return self.all[:1]
        writers = (index for index, child in enumerate(self.all) if not child.shared)
        return self.all[: next(writers, len(self.all))]

    def before(self, name: str) -> Child | None:
        """Return the child that *name* waits for: the child before it, or for a reader, the last writer before it."""
        names = [child.name for child in self.all]
        index = names.index(name)
        ahead = reversed(self.all[:index])
        return next(
            (child for child in ahead if not (self.all[index].shared and child.shared)), None
        )
