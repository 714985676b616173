"""A panel for django-debug-toolbar: the locks of a request.

Add ``"django_distlock.contrib.debug_toolbar.LocksPanel"`` to ``DEBUG_TOOLBAR_PANELS``.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from debug_toolbar.panels import Panel
from django.core.handlers.asgi import ASGIRequest
from django.utils.translation import gettext as _, gettext_lazy, gettext_noop, ngettext

from django_distlock.engine.announcements import wait_for_receivers
from django_distlock.ground.naming import printable
from django_distlock.signals import (
    backend_failed,
    lock_acquired,
    lock_busy,
    lock_detached,
    lock_lost,
    lock_released,
)

if TYPE_CHECKING:
    from django.dispatch import Signal

    from django_distlock import Lease

    Row = dict[str, Any]

TIMES = "waited", "held", "took"
#: Seconds to wait for the receivers of the signals of an asynchronous view.
PATIENCE = 0.2
#: The panel of the running request.
_current: ContextVar[LocksPanel | None] = ContextVar("distlock_panel", default=None)
#: The panels' rows of leases that still exist: another thread may release or lose these.
_rows: WeakKeyDictionary[Lease, Row] = WeakKeyDictionary()


class LocksPanel(Panel):
    """Shows each lock of the request: the time it was waited for and held, and its outcome."""

    is_async = True
    title = gettext_lazy("Locks")
    nav_icon = "django_distlock/lock.svg"  # type: ignore[assignment]  # its default is None
    template = "django_distlock/toolbar.html"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[Row] = []

    @property
    def nav_subtitle(self) -> str:
        rows = self.get_stats().get("rows", ())  # type: ignore[no-untyped-call]
        text = ngettext(
            "%(count)d lock in %(time).1f ms", "%(count)d locks in %(time).1f ms", len(rows)
        )
        took = sum((row["waited"] or 0) + (row["took"] or 0) for row in rows)
        return text % {"count": len(rows), "time": took * 1000}

    def enable_instrumentation(self) -> None:
        _current.set(self)

    def disable_instrumentation(self) -> None:
        _current.set(None)

    def generate_stats(self, request: object, response: object) -> None:
        if isinstance(request, ASGIRequest):
            wait_for_receivers(PATIENCE)
        shown = [{**row, "times": [_ms(row[word]) for word in TIMES]} for row in self.rows]
        self.record_stats({"rows": shown})  # type: ignore[no-untyped-call]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f} ms"


def _add(state: str, about: object, *, name: str, **facts: Any) -> Row | None:
    """Add a row to the panel of the running request, and return the row; None without a panel."""
    if (panel := _current.get()) is None:
        return None
    row: Row = {word: facts[word] for word in ("using", "waited", "requests")}
    row |= {"name": printable(name), "state": state, "held": None, "took": None}
    row["about"] = "" if about is None else printable(about)
    panel.rows.append(row)
    return row


def _acquired(lease: Lease, waited_for: object, **facts: Any) -> None:
    if row := _add(_("held"), waited_for, **facts):
        _rows[lease] = row


def _busy(holder: object, **facts: Any) -> None:
    _add(_("busy"), holder, **facts)


def _failed(error: object, **facts: Any) -> None:
    _add(_("error"), error, **facts)


def _ended(state: str) -> Any:
    def note(lease: Lease, **known: Any) -> None:
        if (row := _rows.get(lease)) is not None:
            row |= {"state": _(state), "held": known["held"], "took": known.get("took")}
            row["about"] = printable(known.get("reason") or row["about"])

    return note


_receivers: list[tuple[Signal, Any]] = [
    (lock_acquired, _acquired),
    (lock_busy, _busy),
    (backend_failed, _failed),
    (lock_released, _ended(gettext_noop("released"))),
    (lock_lost, _ended(gettext_noop("lost"))),
    (lock_detached, _ended(gettext_noop("handed over"))),
]
for _signal, _receiver in _receivers:
    _signal.connect(_receiver, weak=False)
