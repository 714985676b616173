"""The nodes that the holders and waiters of this process make."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from kazoo.exceptions import (
    ConnectionLoss,
    NoNodeError,
    OperationTimeoutError,
    RequestTimeoutError,
    SessionMovedError,
)

from django_distlock.backends.queue.labels import label
from django_distlock.backends.queue.standings import Standing, Standings
from django_distlock.engine import steps
from django_distlock.engine.values import Busy
from django_distlock.exceptions import LockBackendError
from django_distlock.ground.mutexes import section

from .children import Children, prefix
from .ensemble import Ask, EnsembleSession, Silence, value

#: Errors after which a request may have been carried out.
UNSURE = (ConnectionLoss, OperationTimeoutError, RequestTimeoutError, SessionMovedError)

_T = TypeVar("_T")
#: Yields functions that send requests, is sent their outcomes (errors are not raised), and returns a result.
Steps: TypeAlias = "steps.Steps[Sequence[Ask], _T]"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Turn:
    """The turn of one node; kept after the node is gone, for the nodes of this process that come after it."""

    path: str
    czxid: int
    #: The node right before it, if this process made that; None once this node has held the lock.
    ahead: Turn | None
    #: Whether it has held the lock exclusively, so that all nodes made before it are gone.
    has_held: bool = False


@dataclass(eq=False, slots=True, weakref_slot=True)
class Crowd:
    """The holders and waiters of this process for one lock."""

    size: int = 0
    #: Their nodes, by number.
    turns: WeakValueDictionary[int, Turn] = field(default_factory=WeakValueDictionary)
    #: The holder that was seen last.
    busy: Busy = field(default_factory=Busy)


@dataclass(eq=False, slots=True)
class Node(Standing):
    """The node of one holder or waiter."""

    crowd: Crowd
    #: The id of this attempt: nodes of earlier attempts of the same owner may still exist.
    attempt: str = field(default_factory=partial(secrets.token_hex, 4))
    #: Its name, and the session with which it ends, once they are known.
    name: str = ""
    turn: Turn | None = None
    session_id: int | None = None
    #: The number of the transaction that made it.
    czxid: int = 0
    #: How often the offset of tokens had changed when its own was read; and whether it had not when it was made.
    offset_changes: int = 0
    has_token: bool = False
    #: The request that makes it, until its reply; whether its reply was lost.
    creating: Any = None
    is_unsure: bool = False
    #: The nodes that it waits for: until one has gone; and when it looked last (wait time).
    watched: tuple[str, ...] = ()
    looked_at: float = 0.0

    @property
    def prefix(self) -> str:
        return prefix(self.request, self.attempt)

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"

    def leave(self) -> None:
        self.name, self.turn, self.session_id = "", None, None
        self.is_unsure = self.is_granted = self.is_ending = self.has_token = False
        self.attempt = secrets.token_hex(4)


class Nodes(Standings[Node]):
    """The nodes of one backend by owner, and the steps that make, find and delete them."""

    def __init__(self, alias: str, root: str, session: EnsembleSession) -> None:
        super().__init__(root)
        self._alias = alias
        self._session = session
        self.mutex = section()
        self.crowds = WeakValueDictionary[str, Crowd]()
        self._doomed: set[Node] = set()
        #: How often the offset of tokens has changed, or may have while the connection was lost.
        self.offset_changes = 0

    def is_over(self, node: Node) -> bool:
        return bool(node.name) and node.session_id != self._session.id

    def forget_owner(self, node: Node, *, is_released: bool = False) -> bool:
        node.watched = ()
        with self.mutex:
            was_known = super().forget_owner(node, is_released=is_released)
            node.crowd.size -= was_known
        return was_known

    # Waiting for another node to go.

    def may_sleep(self, node: Node) -> bool:
        return bool(node.watched)

    def changed(self, event: Any) -> None:
        """Ring the waiters of the node in *event*. Kazoo calls this once for each node, however many watch it."""
        # The path is None if the connection was lost: kazoo has then dropped all watches.
        watching = [node for node in list(self.by_owner.values()) if node.watched]
        waiting = [node for node in watching if event.path in {None, *node.watched}]
        for node in waiting:
            # Before the bell, because a waiter checks this right before it waits for the bell.
            node.watched, node.gone = (), event.path or ""
        self._ring(waiting)

    def _ring(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.bell is not None and not node.bell.ring():
                self.drop(node)  # its event loop has ended

    def note_offset_changed(self, _: Any) -> None:
        """Note that the offset of tokens must be read again. Kazoo calls this as it does changed()."""
        self.offset_changes += 1

    # Making a node, and the outcome.

    def create(self, client: Any, node: Node) -> Any:
        node.creating = creating = client.create_async(
            f"{node.folder}/{node.prefix}",
            label(node.request, offset=node.offset),
            ephemeral=True,
            sequence=True,
            include_data=True,
        )
        creating.rawlink(partial(self.note_created, node))
        return creating

    def note_created(self, node: Node, result: Any) -> None:
        """Note the outcome of create(); further calls do nothing."""
        if node.creating is not result:
            return
        if result.successful():
            path, stat = result.value
            node.name = path.rpartition("/")[2]
            node.session_id, node.czxid = stat.ephemeralOwner, stat.czxid
            turns, number = node.crowd.turns, Children([node.name]).all[0].number
            # Only the one whose number is one less is right before it; below zero the counter begins again.
            # Its watch is told of each change before a reply to what was asked after it.
            node.has_token = node.offset_changes == self.offset_changes
            node.turn = turns[number] = Turn(node.path, stat.czxid, turns.get(number - 1))
        else:
            node.is_unsure = isinstance(result.exception, UNSURE)
        # Last, because readers use the other fields as soon as this is None.
        node.creating = None

    def know(self, client: Any, node: Node) -> Steps[None]:
        """Find out the outcome of a create whose reply was late or lost; a node of another session does not count."""
        if (creating := node.creating) is not None:
            [outcome] = yield [lambda: creating]
            if isinstance(outcome, Silence):
                raise outcome
        if self.is_over(node):
            node.leave()
        if not node.is_unsure:
            return
        names = yield from self.names(client, node.folder, newest=True)
        own = next((name for name in names if name.startswith(node.prefix)), None)
        if own is not None:
            [outcome] = yield [partial(client.exists_async, f"{node.folder}/{own}")]
            stat = value(outcome)
            if stat is not None and stat.ephemeralOwner == self._session.id:
                node.name, node.session_id, node.czxid = own, stat.ephemeralOwner, stat.czxid
                node.is_unsure = False
                return
        node.leave()

    def names(self, client: Any, folder: str, *, newest: bool = False) -> Steps[list[str]]:
        """Return the children of *folder*; *newest*: after this server has caught up with the leader."""
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

    # Deleting nodes.

    def delete(self, client: Any, node: Node) -> Steps[bool]:
        was_held = node.is_granted
        yield from self.know(client, node)
        if not node.name:
            self.forget_owner(node)
            self._doomed.discard(node)
            return False
        was_ending, node.is_ending = node.is_ending, True
        [outcome] = yield [partial(client.delete_async, node.path)]
        if isinstance(outcome, NoNodeError):
            was_held &= was_ending  # otherwise another client has deleted it
        else:
            value(outcome)
        self.forget_owner(node, is_released=was_held)
        self._doomed.discard(node)
        return was_held

    def drop(self, node: Node) -> None:
        self._doomed.add(node)
        self.forget_owner(node)
        node.is_granted = False
        if (client := self._session.client) is not None:  # otherwise go_on() will be called
            self._session.hand_over(partial(self._session.start, self.delete(client, node)))

    def go_on(self) -> None:
        """Continue after a lost connection: delete nodes again, and ring waiters, as kazoo has dropped all watches."""
        for node in list(self._doomed):
            self.drop(node)
        self._ring([node for node in list(self.by_owner.values()) if not node.is_granted])
