"""What the value of a key says."""

from __future__ import annotations

import json
from dataclasses import dataclass

from django_distlock.engine.holder import Holder
from django_distlock.engine.naming import printable

#: Characters of the name that are kept for people who look into the cache.
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Record:
    """A lock that is held. *ends*: when the server may let it expire, on the owner's lease clock."""

    owner: str
    ends: float
    name: str
    holder: Holder | None

    def pack(self) -> bytes:
        """Return it as a value."""
        holder = self.holder.to_json() if self.holder else ""
        known = {"owner": self.owner, "ends": self.ends, "holder": holder}
        return json.dumps({**known, "name": printable(self.name, LONGEST_NAME)}).encode()

    @classmethod
    def unpack(cls, value: bytes) -> Record:
        """Return what *value* says; what is no record of ours is held by nobody known."""
        try:
            known = json.loads(value)
            holder = Holder.from_json(known["holder"])
            return cls(str(known["owner"]), float(known["ends"]), str(known["name"]), holder)
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("", 0.0, "", None)
