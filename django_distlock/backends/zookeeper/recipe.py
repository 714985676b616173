"""The requests that acquire, extend, release and list locks; EnsembleSession.ask() sends them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from kazoo.exceptions import (
    BadVersionError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    SessionExpiredError,
)

from django_distlock.backends.queue.labels import TOKENS, Label, unquoted, wished_ttl
from django_distlock.backends.queue.places import acquire_any, is_line, turn_owner
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Recent,
    Release,
    Request,
    first_to_end,
)
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, NotSupported
from django_distlock.ground import clock

from .children import Children
from .ensemble import Ask, EnsembleSession, Silence, value
from .nodes import UNSURE, Crowd, Node, Nodes, Steps, Turn
from .options import ZooKeeperOptions

#: Errors of a lost connection or session; the request may succeed on the next one.
BROKEN = (*UNSURE, SessionExpiredError)
#: How many times children that change while they are read are read again.
ROUNDS = 5
#: Seconds after which a waiter that was not rung looks again.
LOOK_AGAIN = 5.0


class Offset(NamedTuple):
    """The difference between a czxid and a token, as a session has read it after so many *changes* of it."""

    session_id: int | None
    changes: int
    value: int


class Recipe:
    """The steps of each verb, over one session."""

    def __init__(
        self, alias: str, options: ZooKeeperOptions, session: EnsembleSession, nodes: Nodes
    ) -> None:
        self._alias = alias
        self._options = options
        self._session = session
        self._nodes = nodes
        #: The folders in which somebody was in the way of the last try that did not wait.
        self._crowded = Recent()
        #: The node with the offset of tokens; and what was read there last.
        self._tokens = f"{options.root}/{TOKENS}"
        self._offset = Offset(None, 0, 0)
        #: The version of that node at the first look of a session.
        self._first_seen: tuple[int | None, int] = None, 0

    def _connected(self) -> Steps[Any]:
        """Return the client when it is connected; LockBackendError if it is not in time."""
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

    # Acquiring.

    def acquire(self, request: Request, *, queued: bool, ends: float = 0.0) -> Steps[Grant | Busy]:
        """Make a node, and return whether the lock is ours, or any place of it; if not, keep the node only if *queued*.

        *ends*: the time (wait time) until which to try again if the connection breaks.
        """
        if request.limit is not None:
            return self._acquire_any(request, queued=queued, ends=ends)
        if not queued:
            return self._try_once(request, ends=ends)
        return self._acquire(request, queued=True, ends=ends)

    def _acquire_any(self, request: Request, *, queued: bool, ends: float) -> Steps[Grant | Busy]:
        turn = self._nodes.get(turn_owner(request))
        if queued and turn and self._is_unchanged(turn):
            return turn.busy
        take, look = partial(self._acquire, ends=ends), self._look_at_places
        return (yield from acquire_any(request, self._nodes, take, look, queued=queued))

    def _try_once(self, request: Request, *, ends: float) -> Steps[Grant | Busy]:
        """Make a node; but first look whether that is of use, if somebody was in the way the last time.

        Otherwise the nodes of many such tries, which are deleted at once, would refuse one another a free lock.
        """
        folder = self._nodes.folder(request.key)
        if folder in self._crowded and not (request.shared or self._nodes.get(request.owner)):
            busy = yield from self.probe(request)
            if busy is not None:
                return busy
        answer = yield from self._acquire(request, queued=False, ends=ends)
        if isinstance(answer, Grant):
            self._crowded.pop(folder, None)
        else:
            self._crowded.add(folder)
        return answer

    def _look_at_places(
        self, request: Request, *, watches: bool = False
    ) -> Steps[list[Busy | None]]:
        """Return who has each place of *request*, None where it is free; *watches*: see acquire_any()."""
        client = yield from self._connected()
        folders = [self._nodes.folder(each.key) for each in request.holdings]
        lines = yield [partial(client.get_children_async, folder) for folder in folders]
        firsts = [
            f"{folder}/{children.all[0].name}"
            for folder, line in zip(folders, lines, strict=True)
            if not isinstance(line, NoNodeError) and (children := Children(value(line))).all
        ]
        if len(firsts) < len(folders):
            taken = {path.rpartition("/")[0] for path in firsts}
            return [Busy() if folder in taken else None for folder in folders]
        node = self._nodes.get(turn_owner(request)) if watches else None
        watch = () if node is None else (self._nodes.changed,)
        if node is not None:
            node.watched = tuple(firsts)  # before the requests, because a watch may fire at once
        outcomes = yield [partial(client.get_async, path, *watch) for path in firsts]
        found = [None if isinstance(each, NoNodeError) else _busy(each) for each in outcomes]
        if node is not None:
            node.looked_at = clock.wait_time()
            if None in found:
                node.watched = ()
        return found

    def _acquire(self, request: Request, *, queued: bool, ends: float) -> Steps[Grant | Busy]:
        node = self._nodes.get(request.owner)
        if queued and node and self._is_unchanged(node):
            return node.busy
        while True:
            node = self._nodes.get(request.owner) or self._open(request)
            # Before it is granted, as a node without an end would count as ended.
            node.ends = max(node.ends, clock.lease_time() + wished_ttl(request))
            try:
                client = yield from self._connected()
                return (yield from self._stand_in_line(client, node, queued=queued))
            except BROKEN:
                if clock.wait_time() >= ends:
                    raise
            except LockBackendError as error:
                if node.is_unsure or node.creating:
                    raise LockOutcomeUnknown(*error.args) from error.__cause__
                raise

    def _open(self, request: Request) -> Node:
        nodes, folder = self._nodes, self._nodes.folder(request.key)
        with nodes.mutex:
            crowd = nodes.crowds.setdefault(folder, Crowd())
            node = nodes.by_owner[request.owner] = Node(request, folder, crowd)
            crowd.size += 1
        return node

    def _is_unchanged(self, node: Node) -> bool:
        """Return True if the last answer is still valid: the watched node has not changed since."""
        is_fresh = clock.wait_time() - node.looked_at < LOOK_AGAIN
        is_watched = bool(node.watched) and self._session.client is not None
        return is_watched and is_fresh and not self._nodes.is_over(node)

    def _stand_in_line(self, client: Any, node: Node, *, queued: bool) -> Steps[Grant | Busy]:
        for _ in range(ROUNDS):
            if queued and node.crowd.size > 1 and not node.request.shared:
                is_served = yield from self._follow(client, node)
                if is_served is not None:
                    return self._grant(node) if is_served else node.busy
            names = yield from self._names(client, node)
            children = Children(names) if len(names) > 1 else None  # alone is the common case
            if children is None or (ahead := children.before(node.name)) is None:
                return self._grant(node)
            first = partial(client.get_async, f"{node.folder}/{children.all[0].name}")
            if not queued:
                self._nodes.drop(node)
                return _busy(*(yield [first]))
            path = f"{node.folder}/{ahead.name}"
            node.watched = (path,)  # before the request, because its watch may fire at once
            watching = partial(client.get_async, path, self._nodes.changed)
            outcomes = yield [watching] if ahead is children.all[0] else [watching, first]
            if not isinstance(outcomes[0], Exception):
                node.busy, node.looked_at = _busy(outcomes[-1]), clock.wait_time()
                node.crowd.busy = node.busy
                return node.busy
            node.watched = ()
            if not isinstance(outcomes[0], NoNodeError):  # else it has gone since the list
                raise outcomes[0]
        return Busy()

    def _grant(self, node: Node) -> Grant:
        node.watched, node.is_granted = (), True
        node.crowd.busy = Busy(node.request.holder)
        if node.turn is not None:
            node.turn.has_held, node.turn.ahead = not node.request.shared, None
        if node.ends < self._nodes.alarm.due:
            self._nodes.alarm.at(node.ends)
        return Grant(node.czxid + node.offset)

    def _follow(self, client: Any, node: Node) -> Steps[bool | None]:
        """Return whether a writer has the lock, judged by the node right before it; None if the children must be read.

        Otherwise many waiters of one process would each read all children, on arrival and again at their turn.
        """
        yield from self._nodes.know(client, node)
        if not node.name:
            [created] = yield from self._create(client, node)
            if isinstance(created, NoNodeError):
                yield from self._make_folder(client, node.folder)
                yield from self._create(client, node)
        if not node.has_token:
            return None
        while node.turn is not None and (ahead := node.turn.ahead) is not None:
            node.watched = (ahead.path,)  # as below
            [outcome] = yield [partial(client.get_async, ahead.path, self._nodes.changed)]
            if not isinstance(outcome, Exception):
                node.busy, node.looked_at = node.crowd.busy, clock.wait_time()
                return False
            node.watched = ()
            if not isinstance(outcome, NoNodeError):
                raise outcome
            if ahead.has_held:
                return (yield from self._is_first(client, node, ahead))
            node.turn.ahead = ahead.ahead  # it has given up
        return None

    def _is_first(self, client: Any, node: Node, last: Turn) -> Steps[bool | None]:
        """Return True if *node* still exists, in the same folder that *last* was in; else None."""
        paths = node.path, node.folder
        own, folder = map(value, (yield [partial(client.exists_async, path) for path in paths]))
        is_there = own and own.ephemeralOwner == self._session.id and folder.czxid < last.czxid
        return True if is_there else None

    # The offset between czxid and token, by which tokens begin at the clock as on other backends.

    def _present_offset(self, client: Any) -> Steps[Offset]:
        """Return the present offset, which each session raises first."""
        if self._offset.session_id != self._session.id:
            yield from self._raise_offset(client)
        session_id, changes = self._session.id, self._nodes.offset_changes
        if self._offset[:2] != (session_id, changes):
            [found] = yield [
                partial(client.get_async, self._tokens, self._nodes.note_offset_changed)
            ]
            if isinstance(found, NoNodeError):  # an operator has deleted it
                yield from self._raise_offset(client)
                return (yield from self._present_offset(client))
            self._offset = Offset(session_id, changes, int(value(found)[0]))
        return self._offset

    def _raise_offset(self, client: Any) -> Steps[None]:
        """Raise the offset to the clock of the ensemble, unless it is higher, or was raised since this session began."""
        root, reading = self._options.root, partial(client.get_async, self._tokens)
        # A write returns the time and its own number.
        ticking = partial(client.set_async, root, b"")
        written, found = yield [ticking, reading]
        if isinstance(written, NoNodeError):
            yield from self._make_folder(client, root)
            written, found = yield [ticking, reading]
        offset = value(written).mtime * 1000 - written.mzxid
        data = str(offset).encode()
        if isinstance(found, NoNodeError):
            [outcome] = yield [partial(client.create_async, self._tokens, data)]
        else:
            known, stat = value(found)
            if self._first_seen[0] != self._session.id:
                self._first_seen = self._session.id, stat.version
            if stat.version != self._first_seen[1] or int(known) >= offset:
                return
            raising = partial(client.set_async, self._tokens, data, version=stat.version)
            [outcome] = yield [raising]
        if not isinstance(outcome, (NodeExistsError, BadVersionError)):
            value(outcome)

    def _create(self, client: Any, node: Node, *asks: Ask) -> Steps[list[Any]]:
        """Make the node, and send *asks*; return the outcomes."""
        _, node.offset_changes, node.offset = yield from self._present_offset(client)
        outcomes: list[Any] = yield [partial(self._nodes.create, client, node), *asks]
        return outcomes

    def _has_token(self, client: Any, node: Node) -> Steps[bool]:
        """Return whether *node* exists and its token is known; otherwise delete it, as tokens might not rise."""
        if not node.name:
            return False
        if not node.has_token:
            [found] = yield [partial(client.get_async, self._tokens)]
            if not isinstance(found, NoNodeError):
                data, stat = value(found)
                node.has_token = int(data) == node.offset and stat.mzxid < node.czxid
        if not node.has_token:
            [outcome] = yield [partial(client.delete_async, node.path)]
            if not isinstance(outcome, NoNodeError):
                value(outcome)
            node.leave()
        return node.has_token

    def _names(self, client: Any, node: Node) -> Steps[list[str]]:
        """Return the names of all children in the folder of *node*, which is made if it does not exist."""
        names: list[str]
        if node.name or node.creating or node.is_unsure:
            yield from self._nodes.know(client, node)
        if (yield from self._has_token(client, node)):
            names = yield from self._nodes.names(client, node.folder)
            if node.name in names:
                return names
            node.leave()  # another client has deleted it
        listing = partial(client.get_children_async, node.folder)
        for _ in range(ROUNDS):
            created, listed = yield from self._create(client, node, listing)
            if isinstance(created, NoNodeError):
                yield from self._make_folder(client, node.folder)
                continue
            value(created)
            if not (yield from self._has_token(client, node)):
                return (yield from self._names(client, node))
            # A node that was deleted right after it was made is not in the list.
            names = value(listed)
            if node.name in names:
                return names
            node.leave()
        raise LockBackendError(self._alias, f"{node.folder} is deleted as often as it is made")

    def _make_folder(self, client: Any, folder: str) -> Steps[None]:
        parts = folder.split("/")
        paths = ["/".join(parts[:length]) for length in range(2, len(parts) + 1)]
        for outcome in (yield [partial(client.create_async, path) for path in paths]):
            if isinstance(outcome, NoNodeError):
                raise self._nodes.no_chroot(client) from outcome
            if not isinstance(outcome, NodeExistsError):
                value(outcome)

    # Releasing.

    def release(self, request: Request) -> Steps[Release]:
        node = self._nodes.get(request.owner)
        if node is None and request.owner in self._nodes.released:
            return Release.RELEASED
        ends = clock.wait_time() + self._options.io_timeout
        while True:
            try:
                client = yield from self._connected()
                if node is not None and (yield from self._nodes.delete(client, node)):
                    return Release.RELEASED
                names = yield from self._nodes.names(client, self._nodes.folder(request.key))
            except BROKEN:
                if clock.wait_time() >= ends:
                    raise
            else:
                return Release.TAKEN if Children(names).all else Release.GONE

    # Extending and probing.

    def extend(self, requests: Sequence[Request]) -> Steps[list[bool]]:
        """Check for each request that its node still exists and belongs to this session."""
        began = clock.lease_time()
        client = yield from self._connected()
        # A server that is cut off from the leader answers for a while, when the session may be over already.
        [synced] = yield [partial(client.sync_async, self._options.root)]
        value(synced)
        nodes = [self._nodes.get(request.owner) for request in requests]
        held = [p for p in nodes if p and p.is_granted and not self._nodes.is_over(p)]
        outcomes = yield [partial(client.exists_async, node.path) for node in held]
        stats = dict(zip(held, map(value, outcomes), strict=True))
        return [
            node in stats and self._is_kept(node, stats[node], began + wished_ttl(request))
            for node, request in zip(nodes, requests, strict=True)
        ]

    def _is_kept(self, node: Node, stat: Any, ends: float) -> bool:
        if stat is None and node.is_ending:
            return True  # deleted by our own release, which returns the result
        if stat is None or stat.ephemeralOwner != self._session.id:
            self._nodes.forget_owner(node)
            return False
        # An extension never shortens a lease.
        node.ends = max(node.ends, ends)
        return True

    def probe(self, request: Request) -> Steps[Busy | None]:
        if request.limit is not None:
            return first_to_end((yield from self._look_at_places(request)))
        client = yield from self._connected()
        folder = self._nodes.folder(request.key)
        children = Children((yield from self._nodes.names(client, folder, newest=True))).all
        if not children:
            return None
        return _busy(*(yield [partial(client.get_async, f"{folder}/{children[0].name}")]))

    def take_over(self, request: Request, former: str) -> Steps[bool]:
        raise NotSupported(self._alias, "Lease.attach()", "The lock is bound to its process.")

    # For operators.

    def keys(self) -> Steps[list[str]]:
        client = yield from self._connected()
        names = yield from self._nodes.names(client, self._options.root)
        return sorted(key for key in map(unquoted, names) if key is not None)

    def holders(self, keys: Sequence[str]) -> Steps[list[Held]]:
        client = yield from self._connected()
        keys = [key for key in keys if not is_line(key)]
        folders = [self._nodes.folder(key) for key in keys]
        outcomes = yield [partial(client.get_children_async, folder) for folder in folders]
        shown = []
        for key, folder, outcome in zip(keys, folders, outcomes, strict=True):
            if not isinstance(outcome, NoNodeError):
                children = Children(value(outcome))
                waiters = len(children.all) - len(children.holders)
                shown += [
                    (key, f"{folder}/{child.name}", child, waiters) for child in children.holders
                ]
        if not shown:
            return []
        # A write returns the time of the ensemble's clock.
        *outcomes, root = yield [
            *(partial(client.get_async, path) for _, path, _, _ in shown),
            partial(client.set_async, self._options.root, b""),
        ]
        now = None if isinstance(root, Exception) else root.mtime
        found: list[Held] = []
        for (key, _, child, waiters), outcome in zip(shown, outcomes, strict=True):
            if isinstance(outcome, NoNodeError):
                continue  # it was released meanwhile
            data, stat = value(outcome)
            said = Label.read(data)
            held = Held(
                name=said.name or key,
                key=key,
                holder=said.holder,
                remaining=None,
                token=said.token(stat.czxid),
                owner_digest=child.owner_digest,
                shared=child.shared,
                waiters=waiters,
                age=now and max(0.0, (now - stat.ctime) / 1000),
            )
            found.append(held)
        return found

    def end_holding(self, key: str, owner_digest: str) -> Steps[bool]:
        client = yield from self._connected()
        folder = self._nodes.folder(key)
        children = Children((yield from self._nodes.names(client, folder, newest=True)))
        paths = [
            f"{folder}/{child.name}"
            for child in children.holders
            if child.owner_digest == owner_digest
        ]
        return any(map(_is_deleted, (yield [partial(client.delete_async, path) for path in paths])))

    def now(self) -> Steps[float]:
        """Return the time of the ensemble's clock, which a write returns; 0 before the first lock."""
        client = yield from self._connected()
        [outcome] = yield [partial(client.set_async, self._options.root, b"")]
        return 0.0 if isinstance(outcome, NoNodeError) else value(outcome).mtime / 1000

    def purge(self, keys: Sequence[str], before: float, *, dry_run: bool) -> Steps[int]:
        """Delete the nodes of *keys* that are older than *before*, without holders and waiters; return how many."""
        client = yield from self._connected()
        folders = [self._nodes.folder(key) for key in keys]
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
    """Return the holder in the data of its node; a Busy without holder if the node is gone."""
    if isinstance(outcome, NoNodeError):
        return Busy()
    data, _ = value(outcome)
    return Busy(Label.read(data).holder)


def _is_deleted(outcome: Any) -> bool:
    if isinstance(outcome, (NoNodeError, NotEmptyError)):
        return False
    value(outcome)
    return True
