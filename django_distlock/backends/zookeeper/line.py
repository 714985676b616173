"""The line for one lock, as its children in ZooKeeper tell it: names and order, no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import LONGEST_LISTED, printable
from django_distlock.engine.values import Request, digest

#: The owner's digest, the attempt, reader or writer, and the number that ZooKeeper appends.
_NODE = re.compile(r"([0-9a-f]{16})-[0-9a-f]{8}-([rw])-(-?\d{10})", re.ASCII)
#: What server_key() lets through and ZooKeeper takes as it is.
_SAFE = "._:@=|#-"
#: Numbers are those of a counter of 32 bits, which begins anew below zero.
_ROUND, _HALF = 2**32, 2**31


def quoted(key: str) -> str:
    """Return the name of the node that stands for the lock *key*: one for each key."""
    name = quote(key, safe=_SAFE)
    return name.replace(".", "%2E") if name in {".", ".."} else name


def unquoted(name: str) -> str | None:
    """Return the key whose node has this *name*; None for a node that is none of ours."""
    key = unquote(name)
    return key if quoted(key) == name else None


def prefix(request: Request, attempt: str) -> str:
    return f"{digest(request.owner)}-{attempt}-{'r' if request.shared else 'w'}-"


class Node(NamedTuple):
    """One in the line."""

    name: str
    owner_digest: str
    shared: bool
    number: int


class Line:
    """All who hold a lock or wait for it, in the order of their arrival; nodes that are none of ours are not in it."""

    def __init__(self, names: Iterable[str]) -> None:
        nodes = [
            Node(name, found[1], found[2] == "r", int(found[3]))
            for name in names
            if (found := _NODE.fullmatch(name))
        ]
        pivot = nodes[0].number if nodes else 0
        self.nodes = sorted(nodes, key=lambda node: (node.number - pivot + _HALF) % _ROUND)

    @property
    def holders(self) -> list[Node]:
        """Those who have it: the first, or all readers before the first writer."""
        if self.nodes and not self.nodes[0].shared:
            return self.nodes[:1]
        writers = (place for place, node in enumerate(self.nodes) if not node.shared)
        return self.nodes[: next(writers, len(self.nodes))]

    def before(self, name: str) -> Node | None:
        """Return whom *name* waits for: the one before it, or for a reader the last writer before it."""
        names = [node.name for node in self.nodes]
        place = names.index(name)
        ahead = reversed(self.nodes[:place])
        return next(
            (node for node in ahead if not (self.nodes[place].shared and node.shared)), None
        )


@dataclass(frozen=True, slots=True)
class Label:
    """What a node says to people."""

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
