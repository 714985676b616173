"""The recipe: which requests take, keep, give back and list locks; Session.ask() sends them and waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError, NotEmptyError, SessionExpiredError

from django_distlock.engine import clock
from django_distlock.engine.values import Busy, Grant, Held, Release, Request
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, NotSupported

from .line import Label, Line, label, quoted, unquoted
from .options import ZooKeeperOptions, wished_ttl
from .places import UNSURE, Place, Places, Steps, value
from .session import Session, Silence

#: The connection or the session went; the next one may do better.
BROKEN = (*UNSURE, SessionExpiredError)
#: How often a line that changes while it is read is read again before the next try.
ROUNDS = 5
#: Seconds after which a waiter looks for itself, though nobody has rung.
LOOK_AGAIN = 5.0


class Recipe:
    """The steps of each verb, over one session."""

    def __init__(
        self, alias: str, options: ZooKeeperOptions, session: Session, places: Places
    ) -> None:
        self._alias = alias
        self._options = options
        self._session = session
        self._places = places

    def folder(self, key: str) -> str:
        return f"{self._options.root}/{quoted(key)}"

    def _connected(self) -> Steps[Any]:
        """Return the client once it is connected; LockBackendError if it is not in time."""
        if (client := self._session.client) is None:
            [client] = yield [self._session.ready]
            if isinstance(client, Exception):
                self._session.give_up()
                servers, error = self._options.servers, client
                problem = f"there is no session with {servers}: {type(error).__name__}"
                if isinstance(error, Silence):
                    problem = f"no server of {servers} has answered in time"
                raise LockBackendError(self._alias, problem) from error
        if self._session.problem:
            raise LockBackendError(self._alias, self._session.problem)
        return client

    # Taking.

    def acquire(self, request: Request, *, queued: int, ends: float = 0.0) -> Steps[Grant | Busy]:
        """Stand in line, and tell whether we are served; if not, stay there only if *queued*.

        *ends*: until when to try again if the connection breaks, in wait time.
        """
        place = self._places.get(request.owner)
        if queued and place and self._is_unchanged(place):
            return place.busy
        while True:
            place = self._places.open(request, self.folder(request.key))
            # Before it is granted: what has no end yet would be taken for over.
            place.ends = max(place.ends, clock.lease_time() + wished_ttl(request))
            try:
                client = yield from self._connected()
                return (yield from self._stand_in_line(client, place, queued=queued))
            except BROKEN:
                if clock.wait_time() >= ends:
                    raise
            except LockBackendError as error:
                if place.is_unsure or place.creating:
                    raise LockOutcomeUnknown(*error.args) from error.__cause__
                raise

    def _is_unchanged(self, place: Place) -> bool:
        """Return whether what was found last still stands: nobody has rung since."""
        is_fresh = clock.wait_time() - place.looked_at < LOOK_AGAIN
        is_watched = bool(place.watched) and self._session.client is not None
        return is_watched and is_fresh and not self._places.is_dead(place)

    def _stand_in_line(self, client: Any, place: Place, *, queued: int) -> Steps[Grant | Busy]:
        for _ in range(ROUNDS):
            line = yield from self._line(client, place)
            ahead = line.before(place.node)
            if ahead is None:
                self._places.grant(place)
                return Grant(place.token)
            first = partial(client.get_async, f"{place.folder}/{line.nodes[0].name}")
            if not queued:
                self._places.drop(place)
                return _busy(*(yield [first]))
            path = f"{place.folder}/{ahead.name}"
            place.watched = path  # before the request, whose watch may end at once
            watching = partial(client.get_async, path, self._places.changed)
            outcomes = yield [watching] if ahead is line.nodes[0] else [watching, first]
            if not isinstance(outcomes[0], Exception):
                place.busy, place.looked_at = _busy(outcomes[-1]), clock.wait_time()
                return place.busy
            place.watched = ""
            if not isinstance(outcomes[0], NoNodeError):  # else it has gone since it was listed
                raise outcomes[0]
        return Busy()

    def _line(self, client: Any, place: Place) -> Steps[Line]:
        yield from self._places.know(client, place)
        if place.node:
            names = yield from self._places.names(client, place.folder)
            if place.node in names:
                return Line(names)
            place.leave()  # somebody has deleted it
        creating = partial(self._places.create, client, place, label(place.request))
        for _ in range(ROUNDS):
            created, names = yield [creating, partial(client.get_children_async, place.folder)]
            if isinstance(created, NoNodeError):
                yield from self._make_folder(client, place.folder)
                continue
            value(created)
            # Whoever was deleted in this very moment is none of those who are listed.
            if place.node in value(names):
                return Line(names)
            place.leave()
        raise LockBackendError(self._alias, f"{place.folder} is deleted as often as it is made")

    def _make_folder(self, client: Any, folder: str) -> Steps[None]:
        parts = folder.split("/")
        paths = ["/".join(parts[:length]) for length in range(2, len(parts) + 1)]
        for outcome in (yield [partial(client.create_async, path) for path in paths]):
            if isinstance(outcome, NoNodeError):
                raise self._places.no_chroot(client) from outcome
            if not isinstance(outcome, NodeExistsError):
                value(outcome)

    # Giving back.

    def release(self, request: Request) -> Steps[Release]:
        place = self._places.get(request.owner)
        if place is None and request.owner in self._places.released:
            return Release.RELEASED
        ends = clock.wait_time() + self._options.io_timeout
        while True:
            try:
                client = yield from self._connected()
                if place is not None and (yield from self._places.delete(client, place)):
                    return Release.RELEASED
                names = yield from self._places.names(client, self.folder(request.key))
            except BROKEN:
                if clock.wait_time() >= ends:
                    raise
            else:
                return Release.TAKEN if Line(names).nodes else Release.GONE

    # Keeping, and looking.

    def extend(self, requests: Sequence[Request]) -> Steps[list[bool]]:
        """Look whether the node of each is still there, and of this session."""
        began = clock.lease_time()
        client = yield from self._connected()
        places = [self._places.get(request.owner) for request in requests]
        held = [p for p in places if p and p.is_granted and not self._places.is_dead(p)]
        outcomes = yield [partial(client.exists_async, place.path) for place in held]
        stats = dict(zip(held, map(value, outcomes), strict=True))
        return [
            place in stats and self._is_kept(place, stats[place], began + wished_ttl(request))
            for place, request in zip(places, requests, strict=True)
        ]

    def _is_kept(self, place: Place, stat: Any, ends: float) -> bool:
        if stat is None and place.is_ending:
            return True  # gone by our own will: the release tells how it went
        if stat is None or stat.ephemeralOwner != self._session.id:
            self._places.forget(place)
            return False
        # An extension never shortens.
        place.ends = max(place.ends, ends)
        return True

    def probe(self, request: Request) -> Steps[Busy | None]:
        client = yield from self._connected()
        folder = self.folder(request.key)
        nodes = Line((yield from self._places.names(client, folder))).nodes
        if not nodes:
            return None
        return _busy(*(yield [partial(client.get_async, f"{folder}/{nodes[0].name}")]))

    def take_over(self, request: Request, former: str) -> Steps[bool]:
        raise NotSupported(self._alias, "Lease.attach()", "The lock is bound to its process.")

    # For operators.

    def keys(self) -> Steps[list[str]]:
        client = yield from self._connected()
        names = yield from self._places.names(client, self._options.root)
        return sorted(key for key in map(unquoted, names) if key is not None)

    def holders(self, keys: Sequence[str]) -> Steps[list[Held]]:
        client = yield from self._connected()
        folders = [self.folder(key) for key in keys]
        outcomes = yield [partial(client.get_children_async, folder) for folder in folders]
        shown = []
        for key, folder, outcome in zip(keys, folders, outcomes, strict=True):
            if not isinstance(outcome, NoNodeError):
                line = Line(value(outcome))
                waiters = len(line.nodes) - len(line.holders)
                shown += [(key, f"{folder}/{node.name}", node, waiters) for node in line.holders]
        if not shown:
            return []
        # A write is what tells the time by the clock of the ensemble.
        *outcomes, root = yield [
            *(partial(client.get_async, path) for _, path, _, _ in shown),
            partial(client.set_async, self._options.root, b""),
        ]
        now = None if isinstance(root, Exception) else root.mtime
        found = []
        for (key, _, node, waiters), outcome in zip(shown, outcomes, strict=True):
            if isinstance(outcome, NoNodeError):
                continue  # one that has released meanwhile is not held
            data, stat = value(outcome)
            said = Label.read(data)
            held = Held(
                name=said.name or key,
                key=key,
                holder=said.holder,
                remaining=None,
                token=stat.czxid,
                owner_digest=node.owner_digest,
                shared=node.shared,
                waiters=waiters,
                age=now and max(0.0, (now - stat.ctime) / 1000),
            )
            found.append(held)
        return found

    def end_holding(self, key: str, owner_digest: str) -> Steps[bool]:
        client = yield from self._connected()
        folder = self.folder(key)
        line = Line((yield from self._places.names(client, folder, newest=True)))
        paths = [f"{folder}/{n.name}" for n in line.holders if n.owner_digest == owner_digest]
        return any(map(_is_deleted, (yield [partial(client.delete_async, path) for path in paths])))

    def now(self) -> Steps[float]:
        """Return the time by the clock of the ensemble, which a write tells; 0 before the first lock."""
        client = yield from self._connected()
        [outcome] = yield [partial(client.set_async, self._options.root, b"")]
        return 0.0 if isinstance(outcome, NoNodeError) else value(outcome).mtime / 1000

    def purge(self, keys: Sequence[str], before: float, *, dry_run: bool) -> Steps[int]:
        """Delete the nodes of *keys* from before then where nobody holds or waits; tell how many."""
        client = yield from self._connected()
        folders = [self.folder(key) for key in keys]
        outcomes = yield [partial(client.exists_async, folder) for folder in folders]
        empty = [
            folder
            for folder, stat in zip(folders, map(value, outcomes), strict=True)
            if stat is not None and not stat.numChildren and stat.ctime / 1000 < before
        ]
        if dry_run:
            return len(empty)
        outcomes = yield [partial(client.delete_async, folder) for folder in empty]
        return sum(map(_is_deleted, outcomes))


def _busy(outcome: Any) -> Busy:
    """Return what the node of a holder says; of one that is gone nothing is known."""
    if isinstance(outcome, NoNodeError):
        return Busy()
    data, _ = value(outcome)
    return Busy(Label.read(data).holder)


def _is_deleted(outcome: Any) -> bool:
    if isinstance(outcome, (NoNodeError, NotEmptyError)):
        return False
    value(outcome)
    return True
