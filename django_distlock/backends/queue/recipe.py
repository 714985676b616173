"""The recipe for locks from ordered nodes that end with their session, over the five verbs of a server.

Each holder and waiter makes a node; the first one holds the lock, and each waiter watches only the node before
its own, so a release wakes one. These are the "simple locks without herd effect" of P. Hunt, M. Konar,
F. P. Junqueira and B. Reed, "ZooKeeper: Wait-free coordination for Internet-scale systems", 2010, which kazoo
and etcd's package `concurrency` follow. The name of a node has an id of its maker, so that the maker finds it again if the
reply was lost: J. Zimmerman, ZOOKEEPER-1262, 2011.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django_distlock.backends.base import KEYS
from django_distlock.engine.background import Alarm, background
from django_distlock.engine.steps import Steps
from django_distlock.engine.values import Busy, Grant, Recent, Release, Request
from django_distlock.exceptions import LockBackendError, NotSupported
from django_distlock.ground import clock

from .labels import quoted
from .nodes import First, Node, Sleeper, Standing

if TYPE_CHECKING:
    from django_distlock.engine.bells import Bell

_N = TypeVar("_N", bound=Node)
#: How many times a node is made again if another client deletes it at once.
ROUNDS = 5
#: Seconds before nodes that could not be deleted are tried again.
RETRY = 1.0


class Server(ABC, Generic[_N]):
    """A server that keeps nodes in the order in which they were made, each until its session ends.

    The verbs are steps that may be carried out twice. They raise LockBackendError, or errors for the backend to translate.
    """

    #: Recipe.ring(), which the recipe sets.
    ring: Callable[[Sequence[Sleeper]], None]

    def __init__(self, root: str) -> None:
        #: Returns the path of a lock under *root*; the paths of its nodes are under that path.
        self.folder = lru_cache(KEYS)(lambda key: f"{root}/{quoted(key)}")

    @abstractmethod
    def node(self, request: Request, folder: str) -> _N:
        """Return a Node for *request*, which does not exist on the server yet."""

    @abstractmethod
    def put(self, node: _N, *, waits: bool) -> Steps[Any, Standing | None]:
        """Make *node* unless it exists, and return its standing; without *waits*, a refused node is not kept.

        None: the node was deleted meanwhile, or its session has ended. put() begins a session if there is none.
        """

    @abstractmethod
    def watch(self, node: _N, standing: Standing) -> Steps[Any, Busy | None]:
        """Ring *node* once the node ahead of it has gone; return the holder; None if that node has gone already."""

    @abstractmethod
    def firsts(
        self, folders: Sequence[str], waiter: Sleeper | None = None
    ) -> Steps[Any, list[First | None]]:
        """Return the first node in each of *folders*, and ring *waiter* once one of these nodes has gone."""

    @abstractmethod
    def delete(self, node: _N) -> Steps[Any, bool]:
        """Delete *node*; return False if it did not exist, or belongs to another session."""

    @abstractmethod
    def kept(self, nodes: Sequence[_N]) -> Steps[Any, set[_N]]:
        """Prolong the session; return the *nodes* that exist in it."""

    @abstractmethod
    def is_over(self, node: _N) -> bool:
        """Return True if the session of *node* has ended."""

    def unwatch(self, waiter: Sleeper) -> None:
        """Stop ringing *waiter*. No I/O."""
        waiter.watched = ()

    def forget(self, node: _N) -> None:
        """Note that *node* is certainly gone. No I/O."""


class Recipe(Generic[_N]):
    """The verbs of a backend, as steps, and the nodes of this process, by owner."""

    def __init__(
        self,
        alias: str,
        server: Server[_N],
        carry_out: Callable[[Steps[Any, Any]], Any],
        after: Callable[[Request, Callable[[], None]], None],
    ) -> None:
        """*carry_out* runs steps to their end; *after* runs a job once no try of the request is under way."""
        self._alias = alias
        self._server = server
        server.ring = self.ring
        self._carry_out = carry_out
        self._after = after
        self.nodes: dict[str, _N] = {}
        #: The waiters for any place of a lock with a limit, by owner.
        self.lookouts: dict[str, Sleeper] = {}
        self.released = Recent()
        self.to_delete: dict[_N, None] = {}
        self._retry = Alarm(self.delete_soon)
        #: Runs _drop_ended() when the first ttl ends: the server does not know the ttls.
        self._alarm = Alarm(self._drop_ended)

    # Acquiring.

    def acquire(self, request: Request, *, queued: bool) -> Steps[Any, Grant | Busy]:
        """Make a node: the lock is ours once no node is ahead of it. Without *queued*, a refused node is not kept."""
        node = self._node_of(request)
        for _ in range(ROUNDS):
            node.is_rung = False
            standing = yield from self._server.put(node, waits=queued)
            if standing is None or self._server.is_over(node):
                continue
            if not standing.ahead:
                return self._grant(node, standing.start)
            if not queued:
                self._refuse(node)
                return standing.first.busy
            if (busy := (yield from self._server.watch(node, standing))) is not None:
                node.busy = busy
                return busy
        raise LockBackendError(
            self._alias, f"{node.folder}: nodes are deleted as soon as they are made"
        )

    def _node_of(self, request: Request) -> _N:
        folder = self._server.folder(request.key)
        node = self.nodes.get(request.owner)
        if node is None or node.folder != folder:
            if node is not None:
                self.drop(node)
            node = self.nodes[request.owner] = self._server.node(request, folder)
        # Set before the grant, because _drop_ended() drops a granted node with ends 0.
        node.ends = max(node.ends, clock.lease_time() + request.kept_for)
        return node

    def _grant(self, node: _N, start: float | None) -> Grant:
        self._server.unwatch(node)
        self.released.pop(node.request.owner, None)
        node.is_granted = True
        if node.ends < self._alarm.due:
            self._alarm.at(node.ends)
        return Grant(node.number + node.offset, start)

    def _refuse(self, node: _N) -> None:
        if node.may_exist:
            self.drop(node)
        else:
            self._forget(node)

    # Waiting.

    def enqueue(self, request: Request, bell: Bell) -> Steps[Any, None]:
        """Ring *bell* once the first node of any place of *request* has gone: the place may be free."""
        self.forget_bell(request)
        self.lookouts[request.owner] = waiter = Sleeper(request, bell=bell)
        folders = [self._server.folder(each.key) for each in request.holdings]
        if None in (yield from self._server.firsts(folders, waiter)):
            waiter.ring()

    def dequeue(self, request: Request) -> Steps[Any, None]:
        self.forget_bell(request)
        node = self.nodes.get(request.owner)
        if node is not None and not node.is_granted:
            yield from self._delete(node)

    def may_sleep(self, request: Request, bell: Bell) -> bool:
        """Arrange that *bell* rings when the waiter should try again; return False if the waiter should try now."""
        waiter = self.lookouts.get(request.owner) or self.nodes.get(request.owner)
        if waiter is None:
            return True
        waiter.bell = bell
        return not waiter.is_rung

    def forget_bell(self, request: Request) -> None:
        if (lookout := self.lookouts.pop(request.owner, None)) is not None:
            self._server.unwatch(lookout)
        if (node := self.nodes.get(request.owner)) is not None:
            node.bell = None

    def ring(self, waiters: Sequence[Sleeper]) -> None:
        """Ring *waiters*; delete the nodes of those whose event loop has ended. Does not block."""
        for waiter in waiters:
            if not waiter.ring():
                self.drop_later(waiter.request)

    # Releasing.

    def release(self, request: Request) -> Steps[Any, Release]:
        node = self.nodes.get(request.owner)
        was_held = node is not None and (yield from self._delete(node))
        if was_held or (node is None and request.owner in self.released):
            return Release.RELEASED
        [first] = yield from self._server.firsts([self._server.folder(request.key)])
        return Release.TAKEN if first else Release.GONE

    def _delete(self, node: _N) -> Steps[Any, bool]:
        """Delete *node*; return whether that has released the lock."""
        was_ending, node.is_ending = node.is_ending, True
        is_deleted = yield from self._server.delete(node)
        # If neither is true, another client has deleted the node.
        was_held = node.is_granted and (is_deleted or was_ending)
        self._forget(node, is_released=was_held)
        return was_held

    def _forget(self, node: _N, *, is_released: bool = False) -> None:
        """Remove *node*, which is certainly gone."""
        self._remove(node, is_released=is_released)
        self.to_delete.pop(node, None)
        self._server.forget(node)

    def _remove(self, node: _N, *, is_released: bool = False) -> None:
        owner = node.request.owner
        self._server.unwatch(node)
        # First, because is_session_over() may be called before the lease knows that it is released.
        if is_released:
            self.released.add(owner)
        elif self.nodes.get(owner) is node:  # the owner may have released an earlier node
            self.released.pop(owner, None)
        if self.nodes.get(owner) is node:
            self.nodes.pop(owner, None)

    # Deleting in the background.

    def drop_later(self, request: Request, *, if_waiting: bool = False) -> None:
        """Delete the node of *request* in the background; with *if_waiting*, only if it does not hold the lock."""

        def drop() -> None:
            self.forget_bell(request)
            node = self.nodes.get(request.owner)
            if node is not None and not (if_waiting and node.is_granted):
                self.drop(node)

        self._after(request, drop)

    def drop(self, node: _N) -> None:
        """Delete *node* in the background: try until it works or the node's session has ended."""
        self.to_delete[node] = None
        self._remove(node)
        node.is_granted = False
        self.delete_soon()

    def delete_soon(self) -> None:
        if self.to_delete:
            background.submit((self._alias, "nodes"), self._delete_now)

    def _delete_now(self) -> None:
        ends = clock.lease_time() + RETRY
        for node in list(self.to_delete):
            if self._server.is_over(node) or not node.may_exist:
                self._forget(node)
                continue
            try:
                self._carry_out(self._delete(node))
            except LockBackendError:
                # Move the node behind the others: the server may refuse to delete just this one.
                self.to_delete.pop(node, None)
                self.to_delete[node] = None
                self._retry.at(clock.lease_time() + RETRY)
                if clock.lease_time() >= ends:
                    return  # the server is silent

    def _drop_ended(self) -> None:
        now = clock.lease_time()
        for node in self.granted():
            if node.ends <= now:
                self.drop(node)
        if left := [node.ends for node in self.granted()]:
            self._alarm.at(min(left))

    # Extending and probing.

    def granted(self) -> list[_N]:
        return [node for node in list(self.nodes.values()) if node.is_granted]

    def extend(self, requests: Sequence[Request]) -> Steps[Any, list[bool]]:
        """Prolong the session, and check for each request that its node still exists in it."""
        began = clock.lease_time()
        nodes = [self.nodes.get(request.owner) for request in requests]
        held = [n for n in nodes if n and n.is_granted and not self._server.is_over(n)]
        kept = (yield from self._server.kept(held)) if held else set()
        for node, request in zip(nodes, requests, strict=True):
            if node in kept:
                # An extension never shortens a lease.
                node.ends = max(node.ends, began + request.kept_for)
            elif node in held and node.is_ending:
                kept.add(node)  # deleted by our own release, which returns the result
            elif node in held:
                self._forget(node)
        return [node in kept for node in nodes]

    def probe(self, request: Request) -> Steps[Any, Busy | None]:
        [busy] = yield from self.probe_all([request])
        return busy

    def probe_all(self, requests: Sequence[Request]) -> Steps[Any, list[Busy | None]]:
        found = yield from self._server.firsts([self._server.folder(each.key) for each in requests])
        return [first and first.busy for first in found]

    def take_over(self, request: Request, former: str) -> Steps[Any, bool]:
        raise NotSupported(self._alias, "Lease.attach()", "The lock is bound to its process.")

    def is_session_over(self, request: Request) -> bool:
        node = self.nodes.get(request.owner)
        if node is None:
            return request.owner not in self.released
        return self._server.is_over(node)
