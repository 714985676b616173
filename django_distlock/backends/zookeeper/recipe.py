"""The recipe: which requests take, keep and give back a lock. No waiting: see steps.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NodeExistsError, NoNodeError, SessionExpiredError

from django_distlock.engine import clock
from django_distlock.engine.values import Busy, Grant, Release, Request
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .line import Line, label
from .places import UNSURE, Place, Places
from .questions import Questions, busy
from .request import wished_ttl
from .steps import Silence, Steps, value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .options import ZooKeeperOptions
    from .session import Session

#: The connection or the session went; the next one may do better.
BROKEN = (*UNSURE, SessionExpiredError)
#: How often a line that changes while it is read is read again before the next try.
ROUNDS = 5
#: Seconds after which a waiter looks for itself, though nobody has rung.
LOOK_AGAIN = 5.0


class Recipe(Questions):
    """Steps that take, keep and give back. *ends* is when to give up, in wait time."""

    def __init__(
        self, alias: str, options: ZooKeeperOptions, session: Session, places: Places
    ) -> None:
        super().__init__(alias, options, session)
        self._places = places

    # Taking.

    def take(self, request: Request, ends: float, *, keeps: bool) -> Steps[Grant | Busy]:
        """Stand in line, and tell whether we are served; if not, stay there only if *keeps*."""
        while True:
            place = self._places.open(request, self.folder(request.key))
            # Before it is granted: what has no end yet would be taken for over.
            place.ends = max(place.ends, clock.lease_time() + wished_ttl(request))
            try:
                client = yield from self.connected()
                answer = yield from self._stand_in_line(client, place, keeps=keeps)
            except BROKEN:
                if clock.wait_time() >= ends:
                    raise
            except LockBackendError as error:
                if place.is_unsure or place.creating:
                    raise LockOutcomeUnknown(*error.args) from error.__cause__
                raise
            else:
                return answer

    def _stand_in_line(self, client: Any, place: Place, *, keeps: bool) -> Steps[Grant | Busy]:
        for _ in range(ROUNDS):
            line = yield from self._line(client, place)
            ahead = line.before(place.node)
            if ahead is None:
                self._places.unwatch(place)
                place.is_granted = True
                return Grant(place.token)
            if not keeps:
                return (yield from self._leave(client, place, line))
            if (yield from self._watch(client, place, f"{place.folder}/{ahead.name}", line)):
                return place.busy
        return Busy()

    def _line(self, client: Any, place: Place) -> Steps[Line]:
        """Return the line with our own node in it, which is made if there is none."""
        if place.creating is not None:
            self._places.note_created(place, (yield from self._finished(place.creating)))
        if self._places.is_dead(place):
            place.leave()
        if place.is_unsure:
            yield from self._find(client, place)
        if place.node:
            names = yield from self.names(client, place.folder)
            if place.node in names:
                return Line(names)
            place.leave()  # somebody has deleted it
        return (yield from self._join(client, place))

    def _join(self, client: Any, place: Place) -> Steps[Line]:
        data = label(place.request)
        for _ in range(ROUNDS):
            creating = self._places.create(client, place, data)
            created, names = yield [creating, client.get_children_async(place.folder)]
            if not isinstance(created, Silence):
                self._places.note_created(place, creating)
            if not isinstance(created, NoNodeError):
                value(created)
                # Whoever was deleted in this very moment is none of those who are listed.
                if place.node in value(names):
                    return Line(names)
                place.leave()
            else:
                yield from self._make_folder(client, place.folder)
        raise LockBackendError(self._alias, f"{place.folder} is deleted as often as it is made")

    def _make_folder(self, client: Any, folder: str) -> Steps[None]:
        """Make the node of the lock, and those above it."""
        parts = folder.split("/")
        paths = ["/".join(parts[:length]) for length in range(2, len(parts) + 1)]
        for outcome in (yield [client.create_async(path) for path in paths]):
            if isinstance(outcome, NoNodeError):
                raise self.no_chroot(client) from outcome
            if not isinstance(outcome, NodeExistsError):
                value(outcome)

    def _find(self, client: Any, place: Place) -> Steps[None]:
        """Find out whether a create whose reply was lost has made our node, in our session."""
        names = yield from self.names(client, place.folder, newest=True)
        own = next((name for name in names if name.startswith(place.prefix)), None)
        if own is not None:
            [outcome] = yield [client.exists_async(f"{place.folder}/{own}")]
            stat = value(outcome)
            if stat is not None and stat.ephemeralOwner == self._session.id:
                place.node, place.session, place.token = own, stat.ephemeralOwner, stat.czxid
                place.is_unsure = False
                return
        place.leave()

    def _watch(self, client: Any, place: Place, path: str, line: Line) -> Steps[bool]:
        """Be rung when *path* is gone; False if it is gone by now."""
        asked = [client.get_async(path, self._places.watch(place, path))]
        first = f"{place.folder}/{line.nodes[0].name}"
        if first != path:
            asked.append(client.get_async(first))
        outcomes = yield asked
        if isinstance(outcomes[0], NoNodeError):
            self._places.unwatch(place)
            return False
        value(outcomes[0])
        place.busy, place.looked_at = busy(outcomes[-1]), clock.wait_time()
        return True

    def _leave(self, client: Any, place: Place, line: Line) -> Steps[Busy]:
        self._places.drop(place)
        [outcome] = yield [client.get_async(f"{place.folder}/{line.nodes[0].name}")]
        return busy(outcome)

    # Giving back.

    def give_back(self, request: Request, ends: float) -> Steps[Release]:
        """Delete our node, and tell what was found."""
        place = self._places.get(request.owner)
        while True:
            try:
                return (yield from self._give_back(request, place))
            except BROKEN:
                if clock.wait_time() >= ends:
                    raise

    def _give_back(self, request: Request, place: Place | None) -> Steps[Release]:
        if place is None and self._places.has_released(request.owner):
            return Release.RELEASED
        client = yield from self.connected()
        if place is not None and (yield from self._delete(client, place)):
            return Release.RELEASED
        names = yield from self.names(client, self.folder(request.key))
        return Release.TAKEN if Line(names).nodes else Release.GONE

    def _delete(self, client: Any, place: Place) -> Steps[bool]:
        """Delete the node of *place*; tell whether it held until now."""
        if place.creating is not None:
            self._places.note_created(place, (yield from self._finished(place.creating)))
        if place.is_unsure:
            yield from self._find(client, place)
        if not place.node or self._places.is_dead(place):
            self._places.forget(place)
            return False
        was_held, place.is_ending = place.is_granted, True
        [outcome] = yield [client.delete_async(place.path)]
        if isinstance(outcome, NoNodeError):
            was_held &= place.is_leaving
        else:
            place.is_leaving = isinstance(outcome, (*UNSURE, Silence))
            value(outcome)
        if was_held:
            # First, for whoever asks is_session_over() before the lease knows that it is released.
            self._places.note_released(place.request.owner)
        self._places.forget(place)
        return was_held

    # Keeping.

    def keep(self, requests: Sequence[Request]) -> Steps[list[bool]]:
        """Look whether the node of each is still there, and of this session."""
        began = clock.lease_time()
        client = yield from self.connected()
        places = [self._held(request) for request in requests]
        asked = [place for place in places if place is not None]
        outcomes = yield [client.exists_async(place.path) for place in asked]
        stats = dict(zip(asked, map(value, outcomes), strict=True))
        return [
            place is not None and self._is_kept(place, stats[place], began + wished_ttl(request))
            for place, request in zip(places, requests, strict=True)
        ]

    def _held(self, request: Request) -> Place | None:
        place = self._places.get(request.owner)
        if place is None or not place.is_granted or self._places.is_dead(place):
            return None
        return place

    def _is_kept(self, place: Place, stat: Any, ends: float) -> bool:
        if stat is None and place.is_ending:
            return True  # gone by our own will: the release tells how it went
        if stat is None or stat.ephemeralOwner != self._session.id:
            self._places.forget(place)
            return False
        # An extension never shortens.
        place.ends = max(place.ends, ends)
        return True

    def _finished(self, result: Any) -> Steps[Any]:
        [outcome] = yield [result]
        if isinstance(outcome, Silence):
            raise outcome
        return result
