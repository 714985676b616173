"""The verbs of the recipe on ZooKeeper: ephemeral sequential nodes; EnsembleSession.ask() sends the requests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kazoo.exceptions import (
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RequestTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)

from django_distlock.backends.queue.labels import Label, label, unquoted
from django_distlock.backends.queue.nodes import First, Node, Sleeper, Standing
from django_distlock.backends.queue.recipe import Server
from django_distlock.engine.values import Busy, Held, Recent, Request
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .children import Child, Children, prefix
from .ensemble import Ask, EnsembleSession, Silence, Steps, value
from .options import ZooKeeperOptions
from .tokens import Tokens

#: Errors after which a request may have been carried out.
UNSURE = (ConnectionLoss, OperationTimeoutError, RequestTimeoutError, SessionMovedError)
#: Errors of a lost connection or session; the request may succeed on the next one.
BROKEN = (*UNSURE, SessionExpiredError)


@dataclass(eq=False, slots=True, kw_only=True)
class ZooKeeperNode(Node):
    """The ephemeral node of one holder or waiter; *number* is the czxid, the number of the transaction that made it."""

    #: The id of this attempt: nodes of earlier attempts of the same owner may still exist.
    attempt: str = field(default_factory=partial(secrets.token_hex, 4))
    #: The node's name, and the session with which it ends, once they are known.
    name: str = ""
    session_id: int | None = None
    #: Tokens.changes when the offset was read; and whether that offset was still valid when the node was made.
    offset_changes: int = 0
    has_token: bool = False
    #: The request that makes the node, until its reply; whether the reply was lost.
    creating: Any = None
    is_unsure: bool = False

    @property
    def prefix(self) -> str:
        return prefix(self.request, self.attempt)

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def may_exist(self) -> bool:
        return bool(self.name or self.creating or self.is_unsure)

    def leave(self) -> None:
        self.name, self.session_id = "", None
        self.is_unsure = self.is_granted = self.is_ending = self.has_token = False
        self.attempt = secrets.token_hex(4)


class ZooKeeperServer(Server[ZooKeeperNode]):
    """The requests of Server to ZooKeeper."""

    def __init__(self, alias: str, options: ZooKeeperOptions, session: EnsembleSession) -> None:
        super().__init__(options.root)
        self._alias = alias
        self._options = options
        self._session = session
        self.tokens = Tokens(options.root, session, self._make_folder)
        #: All waiters that watch nodes.
        self._waiters: dict[Sleeper, None] = {}
        #: The folders in which the last try that did not wait was refused.
        self._crowded = Recent()

    def node(self, request: Request, folder: str) -> ZooKeeperNode:
        return ZooKeeperNode(request, folder=folder)

    def is_over(self, node: ZooKeeperNode) -> bool:
        return bool(node.name) and node.session_id != self._session.id

    def connected(self) -> Steps[Any]:
        """Return the client when it is connected; LockBackendError if that takes too long."""
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

    # Making a node.

    def put(self, node: ZooKeeperNode, *, waits: bool) -> Steps[Standing | None]:
        client = yield from self._connected_for(node)
        if node.may_exist:
            yield from self._know(client, node)
        elif not waits and (first := (yield from self._first_in_the_way(node))):
            return Standing(first.path, first)
        children = yield from self._stand(client, node)
        if children is None:
            return None
        ahead = children.before(node.name)
        if ahead is None:
            self._crowded.pop(node.folder, None)
            return Standing()
        first = First(f"{node.folder}/{children.all[0].name}")
        if not waits:
            first = yield from self._withdraw(client, node, first)
        return Standing(f"{node.folder}/{ahead.name}", first)

    def _connected_for(self, node: ZooKeeperNode) -> Steps[Any]:
        """Return the client; LockOutcomeUnknown if it is not connected and *node* may exist."""
        try:
            return (yield from self.connected())
        except LockBackendError as error:
            if node.may_exist:
                raise LockOutcomeUnknown(*error.args) from error.__cause__
            raise

    def _stand(self, client: Any, node: ZooKeeperNode) -> Steps[Children | None]:
        """Make *node* unless it exists; return the nodes of the lock, None if another client has deleted *node*."""
        if node.name:
            [listed] = yield [partial(client.get_children_async, node.folder)]
        else:
            listed = yield from self._create(client, node)
        children = Children(() if isinstance(listed, NoNodeError) else value(listed))
        if not any(child.name == node.name for child in children.all):
            node.leave()  # another client has deleted it
            return None
        return children if (yield from self._has_token(client, node)) else None

    def _withdraw(self, client: Any, node: ZooKeeperNode, first: First) -> Steps[First]:
        """Delete *node*, which was refused and does not wait; return *first* with the holder's name."""
        self._crowded.add(node.folder)
        deleted, found = yield [
            partial(client.delete_async, node.path),
            partial(client.get_async, first.path),
        ]
        _is_deleted(deleted)
        node.leave()
        return First(first.path, _busy(found))

    def _first_in_the_way(self, node: ZooKeeperNode) -> Steps[First | None]:
        """Return the first node of the lock, if the last single try was refused there; else None.

        Without this look, the short-lived nodes of many single tries would refuse one another a free lock.
        """
        if node.folder not in self._crowded or node.request.shared:
            return None
        [first] = yield from self.firsts([node.folder])
        return first

    def _create(self, client: Any, node: ZooKeeperNode) -> Steps[Any]:
        """Make the node, and list its folder; return the outcome of the list, NoNodeError if there was no folder."""
        _, node.offset_changes, node.offset = yield from self.tokens.present(client)
        created, listed = yield [
            partial(self._begin_to_create, client, node),
            partial(client.get_children_async, node.folder),
        ]
        if isinstance(created, NoNodeError):
            yield from self._make_folder(client, node.folder)
            return created
        value(created)
        return listed

    def _begin_to_create(self, client: Any, node: ZooKeeperNode) -> Any:
        node.creating = creating = client.create_async(
            f"{node.folder}/{node.prefix}",
            label(node.request, offset=node.offset),
            ephemeral=True,
            sequence=True,
            include_data=True,
        )
        creating.rawlink(partial(self.note_created, node))
        return creating

    def note_created(self, node: ZooKeeperNode, result: Any) -> None:
        """Note the outcome of a request that makes *node*; further calls do nothing."""
        if node.creating is not result:
            return
        if result.successful():
            path, stat = result.value
            node.name = path.rpartition("/")[2]
            node.session_id, node.number = stat.ephemeralOwner, stat.czxid
            # The watch reports each change of the offset before the replies to later requests.
            node.has_token = node.offset_changes == self.tokens.changes
        else:
            node.is_unsure = isinstance(result.exception, UNSURE)
        # Last, because readers use the other fields as soon as this is None.
        node.creating = None

    def _know(self, client: Any, node: ZooKeeperNode) -> Steps[None]:
        """Find out the outcome of a create whose reply is late or lost; a node of another session does not count."""
        if (creating := node.creating) is not None:
            [outcome] = yield [lambda: creating]
            if isinstance(outcome, Silence):
                raise outcome
        if self.is_over(node):
            node.leave()
        if not node.is_unsure:
            return
        names = yield from self._names(client, node.folder)
        own = next((name for name in names if name.startswith(node.prefix)), None)
        if own is not None:
            [outcome] = yield [partial(client.exists_async, f"{node.folder}/{own}")]
            stat = value(outcome)
            if stat is not None and stat.ephemeralOwner == self._session.id:
                node.name, node.session_id, node.number = own, stat.ephemeralOwner, stat.czxid
                node.is_unsure = False
                return
        node.leave()

    def _has_token(self, client: Any, node: ZooKeeperNode) -> Steps[bool]:
        """Return True if the token of *node* is known; otherwise delete the node, as its token might be too low."""
        if not node.has_token:
            node.has_token = yield from self.tokens.confirms(client, node.offset, node.number)
        if not node.has_token:
            _is_deleted(*(yield [partial(client.delete_async, node.path)]))
            node.leave()
        return bool(node.name)

    def _make_folder(self, client: Any, folder: str) -> Steps[None]:
        parts = folder.split("/")
        paths = ["/".join(parts[:length]) for length in range(2, len(parts) + 1)]
        *above, made = yield [partial(client.create_async, path) for path in paths]
        if isinstance(made, NoNodeError):
            # Only now, because NoAuthError is also the answer for a node that exists below one that is closed to us.
            for outcome in above:
                if not isinstance(outcome, (NodeExistsError, NoNodeError)):
                    value(outcome)
            raise self._no_chroot(client) from made
        if not isinstance(made, NodeExistsError):
            value(made)

    def _no_chroot(self, client: Any) -> LockBackendError:
        problem = f"the chroot {client.chroot!r} of OPTIONS 'hosts' does not exist: create it"
        return LockBackendError(self._alias, problem)

    # Watching and listing.

    def watch(self, node: ZooKeeperNode, standing: Standing) -> Steps[Busy | None]:
        client = yield from self.connected()
        asks = self._watching(client, node, [standing.ahead])
        if standing.first.path != standing.ahead:
            asks.append(partial(client.get_async, standing.first.path))
        outcomes = yield asks
        if isinstance(outcomes[0], NoNodeError):
            self.unwatch(node)
            return None
        value(outcomes[0])
        return _busy(outcomes[-1])

    def _watching(self, client: Any, waiter: Sleeper, paths: Sequence[str]) -> list[Ask]:
        # Noted before the requests, because a watch may fire at once.
        waiter.watched = tuple(paths)
        self._waiters[waiter] = None
        return [partial(client.get_async, path, self.changed) for path in paths]

    def unwatch(self, waiter: Sleeper) -> None:
        waiter.watched = ()
        self._waiters.pop(waiter, None)

    def changed(self, event: Any) -> None:
        """Ring the waiters of the node in *event*. Kazoo calls this once for each node, for all its watchers."""
        # The path is None after a lost connection, when kazoo has dropped all watches.
        self.ring_all(event.path)

    def ring_all(self, path: str | None = None) -> None:
        """Ring the waiters of the node *path*; None: all."""
        rung = [each for each in list(self._waiters) if path is None or path in each.watched]
        for waiter in rung:
            self.unwatch(waiter)
        self.ring(rung)

    def firsts(
        self, folders: Sequence[str], waiter: Sleeper | None = None
    ) -> Steps[list[First | None]]:
        client = yield from self.connected()
        # sync: this server must catch up with the leader first.
        _, *listings = yield [
            partial(client.sync_async, self._options.root),
            *(partial(client.get_children_async, folder) for folder in folders),
        ]
        paths: dict[str, str] = {}
        for folder, listed in zip(folders, listings, strict=True):
            names = yield from self._listed(client, listed)
            if children := Children(names).all:
                paths[folder] = f"{folder}/{children[0].name}"
        if len(paths) < len(folders) > 1:
            # A place is free, so the holders of the other places need not be read.
            return [First(paths[each]) if each in paths else None for each in folders]
        if waiter is None:
            asks: list[Ask] = [partial(client.get_async, path) for path in paths.values()]
        else:
            asks = self._watching(client, waiter, [*paths.values()])
        outcomes = dict(zip(paths, (yield asks), strict=True)) if asks else {}
        return [
            First(paths[each], _busy(outcomes[each]))
            if each in outcomes and not isinstance(outcomes[each], NoNodeError)
            else None
            for each in folders
        ]

    def _names(self, client: Any, folder: str) -> Steps[list[str]]:
        """Return the children of *folder*, after this server has caught up with the leader."""
        asks = [partial(client.sync_async, folder), partial(client.get_children_async, folder)]
        _, outcome = yield asks
        return (yield from self._listed(client, outcome))

    def _listed(self, client: Any, outcome: Any) -> Steps[list[str]]:
        """Return the names in *outcome*; none if the folder does not exist."""
        if isinstance(outcome, NoNodeError):
            if client.chroot and value(*(yield [partial(client.exists_async, "/")])) is None:
                raise self._no_chroot(client) from outcome
            return []
        names: list[str] = value(outcome)
        return names

    # Deleting, and the session.

    def delete(self, node: ZooKeeperNode) -> Steps[bool]:
        client = yield from self.connected()
        yield from self._know(client, node)
        return bool(node.name) and _is_deleted(*(yield [partial(client.delete_async, node.path)]))

    def kept(self, nodes: Sequence[ZooKeeperNode]) -> Steps[set[ZooKeeperNode]]:
        client = yield from self.connected()
        # A server that has lost the others, also a leader that was paused, answers reads for a while, when the session
        # may be over already. A write needs a majority, and so does its refusal.
        [written] = yield [partial(client.set_async, self._options.root, b"")]
        if isinstance(written, (Silence, *BROKEN)):
            raise written
        outcomes = yield [partial(client.exists_async, node.path) for node in nodes]
        stats = dict(zip(nodes, map(value, outcomes), strict=True))
        mine = self._session.id
        return {node for node, stat in stats.items() if stat and stat.ephemeralOwner == mine}

    # For operators.

    def keys(self) -> Steps[list[str]]:
        client = yield from self.connected()
        names = yield from self._names(client, self._options.root)
        return sorted(key for key in map(unquoted, names) if key is not None)

    def holders(self, keys: Sequence[str]) -> Steps[list[Held]]:
        client = yield from self.connected()
        folders = [self.folder(key) for key in keys]
        outcomes = yield [partial(client.get_children_async, folder) for folder in folders]
        shown: list[tuple[str, str, Child, int]] = []
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
        client = yield from self.connected()
        folder = self.folder(key)
        children = Children((yield from self._names(client, folder)))
        paths = [
            f"{folder}/{child.name}"
            for child in children.holders
            if child.owner_digest == owner_digest
        ]
        return any(map(_is_deleted, (yield [partial(client.delete_async, path) for path in paths])))

    def now(self) -> Steps[float]:
        """Return the time of the ensemble's clock, which a write returns; 0 before the first lock."""
        client = yield from self.connected()
        [outcome] = yield [partial(client.set_async, self._options.root, b"")]
        return 0.0 if isinstance(outcome, NoNodeError) else value(outcome).mtime / 1000

    def purge(self, keys: Sequence[str], before: float, *, dry_run: bool) -> Steps[int]:
        """Delete the nodes of *keys* that are older than *before*, without holders and waiters; return how many."""
        client = yield from self.connected()
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
