"""Who of this process holds or waits for what, and the nodes that stand for them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from kazoo.exceptions import (
    ConnectionLoss,
    NoNodeError,
    OperationTimeoutError,
    RequestTimeoutError,
    SessionMovedError,
)

from django_distlock.engine import clock, steps
from django_distlock.engine.background import Alarm
from django_distlock.engine.bells import Bell
from django_distlock.engine.values import Busy, RecentOwners, Request
from django_distlock.exceptions import LockBackendError

from .line import prefix
from .session import Ask, Session, Silence

#: After these a request may have been carried out.
UNSURE = (ConnectionLoss, OperationTimeoutError, RequestTimeoutError, SessionMovedError)

_T = TypeVar("_T")
#: Yields what sends requests, is sent what each came to, errors as they are, and returns a result.
Steps: TypeAlias = "steps.Steps[Sequence[Ask], _T]"


def value(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@dataclass(eq=False, slots=True)
class Place:
    """One node in the line for a lock, from before it is asked for until it is surely gone."""

    request: Request
    folder: str
    #: Tells this attempt from others of the same owner: their nodes may linger.
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))
    #: The name of the node, and the session that it ends with, once they are known.
    node: str = ""
    session: int | None = None
    token: int = 0
    #: The request that makes the node, while it is under way; whether its reply was lost.
    creating: Any = None
    is_unsure: bool = False
    is_granted: bool = False
    #: Whether it is being released: a request to delete it may have been carried out.
    is_ending: bool = False
    #: Until when it may hold without being extended, on ``clock.lease_time()``.
    ends: float = 0.0
    bell: Bell | None = None
    #: The node that is waited for, if any, and what was found when it was looked at last (wait time).
    watched: str = ""
    busy: Busy = field(default_factory=Busy)
    looked_at: float = 0.0

    @property
    def prefix(self) -> str:
        return prefix(self.request, self.attempt)

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.node}"

    def leave(self) -> None:
        self.node, self.session = "", None
        self.is_unsure = self.is_granted = self.is_ending = False
        self.attempt = secrets.token_hex(4)


class Places:
    """The places of one backend by owner, and the steps that make, find and delete their nodes."""

    def __init__(self, alias: str, session: Session) -> None:
        self._alias = alias
        self._session = session
        self._mutex = threading.Lock()
        self._by_owner: dict[str, Place] = {}
        self._doomed: set[Place] = set()
        self.released = RecentOwners()
        self._ends = Alarm(self._drop_ended)

    def get(self, owner: str) -> Place | None:
        return self._by_owner.get(owner)

    def open(self, request: Request, folder: str) -> Place:
        place = self._by_owner.get(request.owner)
        if place is None:
            self.released.discard(request.owner)
            place = self._by_owner[request.owner] = Place(request, folder)
        return place

    def grant(self, place: Place) -> None:
        """Note that *place* holds. At the end of its ttl it is freed: the ensemble keeps it as long as the session."""
        place.watched = ""
        place.is_granted = True
        self._ends.at(place.ends)

    def granted(self) -> list[Place]:
        return [place for place in list(self._by_owner.values()) if place.is_granted]

    def _drop_ended(self) -> None:
        now = clock.lease_time()
        for place in self.granted():
            if place.ends <= now:
                self.drop(place)
        if left := [place.ends for place in self.granted()]:
            self._ends.at(min(left))

    def is_dead(self, place: Place) -> bool:
        """Return whether its node has gone with the session that made it."""
        return bool(place.node) and place.session != self._session.id

    def forget(self, place: Place, *, is_released: bool = False) -> None:
        """Have no such place any more: its node is gone."""
        if is_released:
            # First, for whoever asks is_session_over() before the lease knows that it is released.
            self.released.add(place.request.owner)
        self._doomed.discard(place)
        self._leave_owner(place)

    def _leave_owner(self, place: Place) -> None:
        place.watched = ""
        with self._mutex:
            if self._by_owner.get(place.request.owner) is place:
                del self._by_owner[place.request.owner]

    # Waiting for another node to go.

    def changed(self, event: Any) -> None:
        """Ring those who wait for the node of *event*. Kazoo keeps one watch a node, however many ask."""
        # A path of None: the connection was lost, and kazoo has forgotten all watches.
        watching = [place for place in list(self._by_owner.values()) if place.watched]
        waiting = [place for place in watching if event.path in {None, place.watched}]
        for place in waiting:
            # Before the bell: whoever is about to wait for it looks here last.
            place.watched = ""
        self._ring(waiting)

    def _ring(self, places: Iterable[Place]) -> None:
        for place in places:
            if place.bell is not None and not place.bell.ring():
                self.drop(place)  # its event loop is gone

    # Making a node, and the outcome.

    def create(self, client: Any, place: Place, data: bytes) -> Any:
        place.creating = creating = client.create_async(
            f"{place.folder}/{place.prefix}", data, ephemeral=True, sequence=True, include_data=True
        )
        creating.rawlink(partial(self.note_created, place))
        return creating

    def note_created(self, place: Place, result: Any) -> None:
        """Take note of what came of create(); once is enough."""
        if place.creating is not result:
            return
        if result.successful():
            path, stat = result.value
            place.node = path.rpartition("/")[2]
            place.session, place.token = stat.ephemeralOwner, stat.czxid
        else:
            place.is_unsure = isinstance(result.exception, UNSURE)
        # Last: whoever finds nothing under way goes by the rest.
        place.creating = None

    def know(self, client: Any, place: Place) -> Steps[None]:
        """Find out what came of a create whose reply was late or lost; a node of another session is none."""
        if (creating := place.creating) is not None:
            [outcome] = yield [lambda: creating]
            if isinstance(outcome, Silence):
                raise outcome
        if self.is_dead(place):
            place.leave()
        if not place.is_unsure:
            return
        names = yield from self.names(client, place.folder, newest=True)
        own = next((name for name in names if name.startswith(place.prefix)), None)
        if own is not None:
            [outcome] = yield [partial(client.exists_async, f"{place.folder}/{own}")]
            stat = value(outcome)
            if stat is not None and stat.ephemeralOwner == self._session.id:
                place.node, place.session, place.token = own, stat.ephemeralOwner, stat.czxid
                place.is_unsure = False
                return
        place.leave()

    def names(self, client: Any, folder: str, *, newest: bool = False) -> Steps[list[str]]:
        """Return the children of *folder*; *newest*: as the leader knows them, not this server."""
        asks = [partial(client.get_children_async, folder)]
        [*_, outcome] = yield [partial(client.sync_async, folder), *asks] if newest else asks
        if not isinstance(outcome, NoNodeError):
            names: list[str] = value(outcome)
            return names
        if client.chroot:
            [chroot] = yield [partial(client.exists_async, "/")]
            if value(chroot) is None:
                raise self.no_chroot(client) from outcome
        return []

    def no_chroot(self, client: Any) -> LockBackendError:
        problem = f"the chroot {client.chroot!r} of OPTIONS 'hosts' does not exist: create it"
        return LockBackendError(self._alias, problem)

    # Getting rid of nodes.

    def delete(self, client: Any, place: Place) -> Steps[bool]:
        was_held = place.is_granted
        yield from self.know(client, place)
        if not place.node:
            self.forget(place)
            return False
        was_ending, place.is_ending = place.is_ending, True
        [outcome] = yield [partial(client.delete_async, place.path)]
        if isinstance(outcome, NoNodeError):
            was_held &= was_ending  # else somebody else has deleted it
        else:
            value(outcome)
        self.forget(place, is_released=was_held)
        return was_held

    def drop(self, place: Place) -> None:
        """Delete its node in the background, until that has worked or its session is over."""
        self._doomed.add(place)
        self._leave_owner(place)
        place.is_granted = False
        if (client := self._session.client) is not None:  # else go_on() will be called
            self._session.hand_over(partial(self._session.start, self.delete(client, place)))

    def go_on(self) -> None:
        """Go on with what a lost connection has stopped: kazoo has forgotten all watches."""
        for place in list(self._doomed):
            self.drop(place)
        self._ring([place for place in list(self._by_owner.values()) if not place.is_granted])
