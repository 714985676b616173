"""The child nodes of a lock in ZooKeeper: their names, their data and their order. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from django_distlock.engine.values import Request, digest
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_LISTED, printable

#: The owner's digest, the attempt, r(eader) or w(riter), and the number that ZooKeeper appends.
_NODE = re.compile(r"([0-9a-f]{16})-[0-9a-f]{8}-([rw])-(-\d{9,10}|\d{10})", re.ASCII)
#: Characters of server_key() that ZooKeeper accepts unchanged.
_SAFE = "._:@=|#-"
#: The node beside the locks that stores the offset of tokens; no lock's node has this name.
TOKENS = "%tokens"
#: The numbers come from a signed 32-bit counter, which wraps around.
_ROUND, _HALF = 2**32, 2**31


def quoted(key: str) -> str:
    """Return the name of the node for the lock *key*; different keys have different names."""
    name = quote(key, safe=_SAFE)
    return name.replace(".", "%2E") if name in {".", ".."} else name


def unquoted(name: str) -> str | None:
    """Return the key whose node has this *name*; None if it is not one of our nodes."""
    key = unquote(name)
    return key if quoted(key) == name else None


def prefix(request: Request, attempt: str) -> str:
    return f"{digest(request.owner)}-{attempt}-{'r' if request.shared else 'w'}-"


class Child(NamedTuple):
    """The node of one holder or waiter, as its name tells."""

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
        """Return the child that *name* waits for: the one before it, or for a reader the last writer before it."""
        names = [child.name for child in self.all]
        index = names.index(name)
        ahead = reversed(self.all[:index])
        return next(
            (child for child in ahead if not (self.all[index].shared and child.shared)), None
        )


@dataclass(frozen=True, slots=True)
class Label:
    """The data of a node, for people."""

    name: str
    holder: Holder | None

    @classmethod
    def read(cls, data: bytes) -> Label:
        try:
            known = json.loads(data)
            return cls(str(known["name"]), Holder.from_json(json.dumps(known["holder"])))
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("", None)


def label(request: Request) -> bytes:
    name = json.dumps(printable(request.name, LONGEST_LISTED))
    return f'{{"name":{name},"holder":{request.holder.to_json()}}}'.encode()
