"""Names and labels of the holders and waiters in a queue on the server, and their requests. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote, unquote

from django_distlock.conf import LONGEST
from django_distlock.engine.values import Request
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_LISTED, printable

#: Characters of server_key() that ZooKeeper accepts unchanged.
_SAFE = "._:@=|#-"
#: The name beside the locks that stores the offset of tokens; no lock has this name.
TOKENS = "%tokens"


def quoted(key: str) -> str:
    """Return the name on the server for the lock *key*; different keys have different names."""
    name = quote(key, safe=_SAFE)
    return name.replace(".", "%2E") if name in {".", ".."} else name


def unquoted(name: str) -> str | None:
    """Return the key that quoted() turned into *name*; None for a foreign name."""
    key = unquote(name)
    return key if quoted(key) == name else None


@dataclass(frozen=True, slots=True)
class SessionRequest(Request):
    """A request whose *ttl* is cut to *longest*, the session timeout: a silent holder keeps the lock no longer.

    *wished* is the ttl before the cut: while the session lasts, the lock is kept for so long without a renewal.
    """

    longest: float = LONGEST
    wished: float = 0.0

    def __post_init__(self) -> None:
        # A copy by replace() has the cut ttl already: it keeps *wished*.
        if self.ttl != self.longest or self.wished < self.ttl:
            object.__setattr__(self, "wished", self.ttl)
        object.__setattr__(self, "ttl", min(self.ttl, self.longest))

    @property
    def kept_for(self) -> float:
        return self.wished


@dataclass(frozen=True, slots=True)
class Label:
    """The text that the server stores of a holder or waiter, for people."""

    name: str
    holder: Holder | None
    #: The holder's fencing token minus the server's own number for the node.
    offset: int | None = None

    @classmethod
    def read(cls, data: bytes | str) -> Label:
        try:
            known = json.loads(data)
            holder, offset = Holder.from_json(json.dumps(known["holder"])), known.get("offset")
            return cls(str(known["name"]), holder, None if offset is None else int(offset))
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("", None)

    def token(self, number: int) -> int | None:
        """Return the fencing token of the node with this *number* on the server; None if it is not known."""
        return None if self.offset is None else number + self.offset


def label(request: Request, **more: str | int) -> bytes:
    name = printable(request.name, LONGEST_LISTED)
    known = json.dumps({"name": name, **more}, separators=(",", ":"))
    return f'{known[:-1]},"holder":{request.holder.to_json()}}}'.encode()
