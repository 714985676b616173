"""Deadlocks between locks on connections of their own, which no server can see by itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from django_distlock.engine.background import background
from django_distlock.engine.naming import log_fields, printable
from django_distlock.exceptions import LockBackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .sessions import Session

    #: Who waits, and who has what it waits for.
    Edge = tuple[str, str]

logger = logging.getLogger("django_distlock")

#: Seconds until the first look, as servers have it; between looks; before what was seen is believed.
FIRST, AGAIN, CONFIRM = 1.0, 2.0, 0.1


def is_victim(caller: str, waits: Iterable[Edge]) -> bool:
    """Return whether *caller* stands in a circle and is the one to leave it.

    That is the last one of the circle in the order of texts: whoever looks, the answer is one. Who
    waits for itself is none: another thread may release for it.
    """
    ahead: dict[str, set[str]] = {}
    for waiter, holder in waits:
        if waiter != holder and waiter <= caller and holder <= caller:
            ahead.setdefault(waiter, set()).add(holder)
    reached, look = set[str](), list(ahead.get(caller, ()))
    while look:
        found = look.pop()
        if found not in reached:
            reached.add(found)
            look += ahead.get(found, ())
    return caller in reached


class DeadlockWatch:
    """Looks at times, in the background, whether *session* waits in a circle; then ends its wait."""

    def __init__(self, alias: str, session: Session, waits: Callable[[], Iterable[Edge]]) -> None:
        self._alias = alias
        self._session = session
        self._waits = waits
        self._was_seen = False
        background.submit(alias, self._look, FIRST)

    def _look(self) -> None:
        if not self._session.is_waiting:
            return
        is_seen, name = False, self._session.request.name
        fields = log_fields(name, self._alias)
        try:
            is_seen = is_victim(self._session.caller, self._waits())
        except LockBackendError as error:
            logger.warning("Deadlocks cannot be looked for: %s", printable(error), extra=fields)
        if is_seen and self._was_seen:
            logger.warning("Lock %s: deadlock", printable(name), extra=fields)
            self._session.deadlock = (
                "others wait for a lock that this caller holds, and hold this one"
            )
            self._session.interrupt()
            return
        # Holders are written down a moment after they hold: one look may join two moments.
        self._was_seen = is_seen
        background.submit(self._alias, self._look, CONFIRM if is_seen else AGAIN)
