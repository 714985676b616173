"""The owners that ended lately: what they send again, or late, is told from what others send."""

from __future__ import annotations

from collections import OrderedDict

#: How many owners are remembered.
REMEMBERED = 1000


class RecentOwners:
    """The owners of one backend that ended last, by a release or otherwise."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, None] = OrderedDict()

    def add(self, owner: str) -> None:
        self._owners[owner] = None
        if len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    def discard(self, owner: str) -> bool:
        return self._owners.pop(owner, self) is None

    def __contains__(self, owner: str) -> bool:
        return owner in self._owners
