"""What operators do, in code, commands and the admin: list who holds what, and end a holding."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from django.db import connections
from django.utils import timezone
from django.utils.translation import gettext as _, ngettext

from .backends.database.records import State
from .conf import DEFAULT_ALIAS
from .engine import clock
from .engine.naming import checked_name
from .engine.steps import settled
from .engine.waiting import Place
from .engine.waits import LockId, waits
from .exceptions import first_line
from .handler import locks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .backends.base import BaseLockBackend
    from .engine.values import Held

    _Answer = Future[list[Held]]

#: Seconds that the servers have to answer, all of them together.
PATIENCE = 3.0

#: Aliases that have not answered in time, and whose thread still waits: no second one is started for them.
_hanging: dict[str, _Answer] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """A lock in a list for people; *aliases* are those of DISTLOCK that have it, at least one."""

    held: Held
    aliases: tuple[str, ...]

    @property
    def value(self) -> str:
        """The text that identifies this holding in forms and links; read_value() reads it."""
        return f"{quote(self.aliases[0], safe='')}:{self.held.owner_digest}:{self.held.key}"

    @property
    def host(self) -> str:
        """The host of the holder, for people."""
        return self.held.holder.host if self.held.holder else ""

    @property
    def state(self) -> str:
        """The state in the language of the page."""
        text = str(State(self.held.state).label)
        return _("%s, shared") % text if self.held.shared else text

    @property
    def since(self) -> datetime | None:
        """When it was acquired, by the clock of this machine; None if that is not known."""
        age = self.held.age
        return None if age is None else timezone.now() - timedelta(seconds=age)

    @property
    def ago(self) -> str:
        """How long ago it was acquired."""
        return _("%s ago") % clock.in_words(self.held.age or 0.0, ngettext)

    @property
    def remaining(self) -> str:
        """The remaining time, until when it is reserved, or how long ago a stale lease ended."""
        left = self.held.remaining
        if left is None:
            return "-"
        if self.held.reserved:
            # Aware, whatever USE_TZ says.
            until = datetime.now(UTC) + timedelta(seconds=left)
            return _("until %s") % clock.time_of_day(until)
        span = clock.in_words(abs(left), ngettext)
        return span if left > 0 else _("ended %s ago") % span


def read_value(value: str) -> tuple[str, str, str]:
    """Return alias, digest of the owner, and key of the holding that *value* names."""
    alias, _colon, rest = value.partition(":")
    owner_digest, _colon, key = rest.partition(":")
    return unquote(alias), owner_digest, key


def holdings(using: str, name: str | None = None) -> list[Held]:
    """Return who holds the locks of alias *using*: all of them, or the lock *name*.

    *waiters* includes callers of this process that the server does not know.
    NotSupported if the alias cannot list its locks, LockBackendError if its server does not answer.
    """
    backend = locks[using]
    key = None if name is None else backend.key_of(checked_name(name))
    # Read to its end: an open query blocks writers.
    found = settled(lambda: [*backend.held(key)])
    return [
        held if waiters == held.waiters else replace(held, waiters=waiters)
        for held in found
        for waiters in [_waiters(backend, held)]
    ]


def force_release(name: str, using: str = DEFAULT_ALIAS) -> int:
    """End what anybody holds of the lock *name*, also what min_hold reserves; return how many holdings it ended.

    The holder is not stopped: it learns at its next renewal that it has lost the lock, at once if it is
    in this process. NotSupported if the alias cannot list its locks.
    """
    backend = locks[using]
    return sum(backend.force_release(held.key, held.owner_digest) for held in holdings(using, name))


def survey(aliases: Iterable[str]) -> tuple[list[Row], dict[str, str]]:
    """Return the locks of *aliases*, and the problem of each alias that failed; aliases of one place share rows."""
    asked = {alias: _ask(alias) for alias in aliases}
    wait(asked.values(), timeout=PATIENCE)
    rows: dict[object, Row] = {}
    problems: dict[str, str] = {}
    for alias, answer in asked.items():
        if not answer.done():
            _hanging[alias] = answer
            problems[alias] = _("It did not answer within %g s.") % PATIENCE
            continue
        if error := answer.exception():
            problems[alias] = first_line(error).removeprefix(f"DISTLOCK[{alias!r}]: ")
            continue
        for held in answer.result():
            known = locks[alias].location, held.owner_digest, held.key
            before = rows[known].aliases if known in rows else ()
            rows[known] = Row(held, (*before, alias))
    return [*rows.values()], problems


def _ask(alias: str) -> _Answer:
    answer = _hanging.pop(alias, None)
    if answer and not answer.done():
        return answer
    answer = Future()
    Thread(target=_answer, args=[alias, answer], name="distlock-admin", daemon=True).start()
    return answer


def _answer(alias: str, answer: _Answer) -> None:
    try:
        answer.set_result(holdings(alias))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other aliases are shown
        answer.set_exception(error)
    finally:
        connections.close_all()


def _waiters(backend: BaseLockBackend, held: Held) -> int | None:
    if held.waiters is None:
        return waits.count(LockId(backend.location, held.key)) or None
    if (others := backend.queue.callers(held.key) - 1) == 0 == held.behind:
        return held.waiters
    # A waiter on the server counts those of its process, too; behind a holder there is none on the server.
    if (behind := backend.queue.behind(held.key)) is None:
        behind = others if backend.waiting.place is Place.NONE else held.behind
    return held.waiters + behind
