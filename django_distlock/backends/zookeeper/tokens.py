"""The offset between ZooKeeper's numbers and fencing tokens, which begin at the clock, as on other backends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from django_distlock.backends.queue.labels import TOKENS

from .ensemble import EnsembleSession, Steps, value

if TYPE_CHECKING:
    from collections.abc import Callable


class Offset(NamedTuple):
    """A token minus a czxid, as *session_id* has read it after so many *changes*."""

    session_id: int | None
    changes: int
    value: int


class Tokens:
    """The node with the offset, which each session first raises to the clock."""

    def __init__(
        self, root: str, session: EnsembleSession, make_folder: Callable[[Any, str], Steps[None]]
    ) -> None:
        self._root = root
        self._session = session
        self._make_folder = make_folder
        self.path = f"{root}/{TOKENS}"
        self._offset = Offset(None, 0, 0)
        #: The version of the node at the first look of a session.
        self._first_seen: tuple[int | None, int] = None, 0
        #: How often the offset has changed, or may have while the connection was lost.
        self.changes = 0

    def note_change(self, _: Any) -> None:
        """Note that the offset must be read again. Kazoo calls this when the node changes or the connection breaks."""
        self.changes += 1

    def present(self, client: Any) -> Steps[Offset]:
        """Return the present offset."""
        if self._offset.session_id != self._session.id:
            yield from self._raise(client)
        session_id, changes = self._session.id, self.changes
        if self._offset[:2] != (session_id, changes):
            [found] = yield [partial(client.get_async, self.path, self.note_change)]
            if isinstance(found, NoNodeError):  # an operator has deleted it
                yield from self._raise(client)
                return (yield from self.present(client))
            self._offset = Offset(session_id, changes, int(value(found)[0]))
        return self._offset

    def confirms(self, client: Any, offset: int, czxid: int) -> Steps[bool]:
        """Return True if *offset* was valid when the node with this *czxid* was made."""
        [found] = yield [partial(client.get_async, self.path)]
        if isinstance(found, NoNodeError):
            return False
        data, stat = value(found)
        return int(data) == offset and stat.mzxid < czxid

    def _raise(self, client: Any) -> Steps[None]:
        """Raise the offset to the ensemble's clock, unless it is higher, or was raised since this session began."""
        # A write returns the ensemble's time and the number of the transaction.
        asks = [
            partial(client.set_async, self._root, b""),
            partial(client.get_async, self.path),
        ]
        written, found = yield asks
        if isinstance(written, NoNodeError):
            yield from self._make_folder(client, self._root)
            written, found = yield asks
        # Not below what this process knows, as an operator may have deleted the node.
        offset = max(value(written).mtime * 1000 - written.mzxid, self._offset.value)
        data = str(offset).encode()
        if isinstance(found, NoNodeError):
            [outcome] = yield [partial(client.create_async, self.path, data)]
        else:
            known, stat = value(found)
            if self._first_seen[0] != self._session.id:
                self._first_seen = self._session.id, stat.version
            if stat.version != self._first_seen[1] or int(known) >= offset:
                return
            raising = partial(client.set_async, self.path, data, version=stat.version)
            [outcome] = yield [raising]
        if not isinstance(outcome, (NodeExistsError, BadVersionError)):
            value(outcome)
