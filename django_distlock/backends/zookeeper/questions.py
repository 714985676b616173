"""What can be asked about locks without changing anything, and how to come by a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NoNodeError

from django_distlock.engine.values import Busy
from django_distlock.exceptions import LockBackendError

from .line import Label, Line, quoted
from .steps import Silence, Steps, value

if TYPE_CHECKING:
    from .options import ZooKeeperOptions
    from .session import Session


class Questions:
    """Steps over one session: see steps.Steps."""

    def __init__(self, alias: str, options: ZooKeeperOptions, session: Session) -> None:
        self._alias = alias
        self._options = options
        self._session = session

    def folder(self, key: str) -> str:
        """Return the node under which those who want *key* stand in line."""
        return f"{self._options.root}/{quoted(key)}"

    def look(self, key: str) -> Steps[Busy | None]:
        """Tell who holds *key*."""
        client = yield from self.connected()
        folder = self.folder(key)
        nodes = Line((yield from self.names(client, folder))).nodes
        if not nodes:
            return None
        [outcome] = yield [client.get_async(f"{folder}/{nodes[0].name}")]
        return busy(outcome)

    def connected(self) -> Steps[Any]:
        """Return the client once it is connected; LockBackendError if it is not in time."""
        if (client := self._session.client) is None:
            [outcome] = yield [self._session.ready()]
            if isinstance(outcome, Exception):
                self._session.give_up()
                raise LockBackendError(self._alias, self._why(outcome)) from outcome
            client = outcome
        if self._session.problem:
            raise LockBackendError(self._alias, self._session.problem)
        return client

    def _why(self, error: Exception) -> str:
        servers = self._options.servers
        if isinstance(error, Silence):
            return f"no server of {servers} has answered in time"
        return f"there is no session with {servers}: {type(error).__name__}"

    def names(self, client: Any, folder: str, *, newest: bool = False) -> Steps[list[str]]:
        """Return the children of *folder*; *newest*: as the leader knows them, not this server."""
        if newest:
            client.sync_async(folder)
        [outcome] = yield [client.get_children_async(folder)]
        if not isinstance(outcome, NoNodeError):
            names: list[str] = value(outcome)
            return names
        if client.chroot:
            [chroot] = yield [client.exists_async("/")]
            if value(chroot) is None:
                raise self.no_chroot(client) from outcome
        return []

    def no_chroot(self, client: Any) -> LockBackendError:
        """Return the error that says so."""
        problem = f"the chroot {client.chroot!r} of OPTIONS 'hosts' does not exist: create it"
        return LockBackendError(self._alias, problem)


def busy(outcome: Any) -> Busy:
    """Return what the node of a holder says; of one that is gone nothing is known."""
    if isinstance(outcome, NoNodeError):
        return Busy()
    data, _ = value(outcome)
    return Busy(Label.read(data).holder)
