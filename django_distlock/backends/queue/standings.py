"""The holders and waiters of this process in the queues on the server, by owner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar

from django_distlock.backends.base import KEYS
from django_distlock.engine.background import Alarm
from django_distlock.engine.bells import Bell
from django_distlock.engine.values import Busy, Recent, Request
from django_distlock.ground import clock

from .labels import quoted


@dataclass(eq=False, slots=True)
class Standing:
    """One holder or waiter, from before the request for its place in line until that is certainly gone."""

    request: Request
    folder: str
    _: KW_ONLY
    is_granted: bool = False
    #: The difference between its fencing token and the server's own number of it; its label says it, too.
    offset: int = 0
    #: Whether a request to give up its place may have been carried out.
    is_ending: bool = False
    #: The end of its hold (``clock.lease_time()``), unless it is extended.
    ends: float = 0.0
    bell: Bell | None = None
    #: The holder that was seen last.
    busy: Busy = field(default_factory=Busy)
    #: The path of the one before it that has gone last, if that is known.
    gone: str = ""


_S = TypeVar("_S", bound=Standing)


class Standings(ABC, Generic[_S]):
    """All standings of one backend, and the locks that were released lately."""

    def __init__(self, root: str) -> None:
        #: Returns the path of a lock below *root*; the paths of its holders and waiters are below that.
        self.folder = lru_cache(KEYS)(lambda key: f"{root}/{quoted(key)}")
        self.by_owner: dict[str, _S] = {}
        self.get = self.by_owner.get
        self.released = Recent()
        #: Rings at the end of the first ttl that is not extended. The server, where a lock lasts with its session,
        #: does not know of ttls.
        self.alarm = Alarm(self._drop_ended)

    @abstractmethod
    def is_over(self, standing: _S) -> bool:
        """Return True if its session has ended."""

    @abstractmethod
    def may_sleep(self, standing: _S) -> bool:
        """Return whether its bell will ring; otherwise the waiter should try again now."""

    @abstractmethod
    def drop(self, standing: _S) -> None:
        """Give up its place in the background; try until it works or its session has ended."""

    def drop_owner(self, owner: str, *, if_waiting: bool = False) -> None:
        """Drop the standing of *owner*, if there is one; *if_waiting*: unless it holds the lock."""
        standing = self.get(owner)
        if standing is not None and not (if_waiting and standing.is_granted):
            self.drop(standing)

    def forget_owner(self, standing: _S, *, is_released: bool = False) -> bool:
        """Remove *standing*, after a release of its lock if *is_released*; return False if that was done before."""
        owner = standing.request.owner
        # First, because is_session_over() may be called before the lease knows that it is released.
        if is_released:
            self.released.add(owner)
        elif self.get(owner) is standing:  # it may have released an earlier one
            self.released.pop(owner, None)
        return self.get(owner) is standing and self.by_owner.pop(owner, None) is standing

    def come_free(self, request: Request, turn: _S) -> Request | None:
        """Return the request for the place whose holder has gone last, if *turn*, the first in line, was told of one."""
        gone, turn.gone = turn.gone, ""
        above, _, _ = gone.rpartition("/")
        return next((each for each in request.holdings if self.folder(each.key) == above), None)

    def granted(self) -> list[_S]:
        return [standing for standing in list(self.by_owner.values()) if standing.is_granted]

    def _drop_ended(self) -> None:
        now = clock.lease_time()
        for standing in self.granted():
            if standing.ends <= now:
                self.drop(standing)
        if left := [standing.ends for standing in self.granted()]:
            self.alarm.at(min(left))
