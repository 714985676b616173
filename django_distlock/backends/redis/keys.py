"""The names of a lock's keys: those of one lock share a slot of a cluster, by what is in braces."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

#: Makes a key of the cache, with its prefix and version.
MakeKey = Callable[[str], str]
_PLACE = "distlock-place"
#: What the key of the holders ends with.
_HOLDERS = ":h"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one lock. See scripts."""

    record: str

    @property
    def holders(self) -> str:
        """Who holds it."""
        return f"{self.record}{_HOLDERS}"

    @property
    def bells(self) -> str:
        """What the names of doorbells begin with."""
        return f"{self.record}:b:"

    @property
    def all(self) -> tuple[str, str, str, str]:
        """The keys that scripts are given, in their order."""
        return self.record, self.holders, f"{self.record}:q", f"{self.record}:a"

    def bell(self, owner: str) -> str:
        """Return the key of the doorbell of a waiter."""
        return self.bells + owner


class KeySpace:
    """All the locks of one alias."""

    def __init__(self, make_key: MakeKey) -> None:
        """ValueError if *make_key* makes keys that a lock cannot be told by."""
        made = str(make_key(f"distlock:{{{_PLACE}}}"))
        self._before, place, self._after = made.partition(_PLACE)
        if not place or "{}" in made:
            msg = f"the cache's key function makes {made!r} of a key: it must keep the key as it is, and add no {{}}"
            raise ValueError(msg)

    def of(self, key: str) -> Keys:
        """Return the keys of the lock that servers know as *key*: it has no braces in it."""
        return Keys(f"{self._before}{key}{self._after}")

    @property
    def pattern(self) -> str:
        """What SCAN finds all records by, and other keys of locks."""
        before, after = (re.sub(r"([*?\[\]\\])", r"\\\1", part) for part in self._ends)
        return f"{before}*{after}"

    @property
    def holders_pattern(self) -> str:
        """What SCAN finds the holders of all locks by: a lock that is free has none."""
        return self.pattern + _HOLDERS

    def key_of_holders(self, holders: str) -> str | None:
        """Return what servers know a lock by. See key_of()."""
        return self.key_of(holders.removesuffix(_HOLDERS))

    def key_of(self, record: str) -> str | None:
        """Return what servers know a lock by; None if *record* is no record of this alias."""
        before, after = self._ends
        key = record[len(before) : len(record) - len(after)]
        is_record = record == f"{before}{key}{after}" and "{" not in key and "}" not in key
        return key if is_record and key else None

    @property
    def _ends(self) -> tuple[str, str]:
        return self._before, self._after
