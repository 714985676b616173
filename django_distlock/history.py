"""The last hour of this process: how long locks were waited for and held, drawn for the admin's page of locks.

It is kept from start() on, which the setting ``DISTLOCK_HISTORY = True`` calls.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from django.template.loader import render_to_string
from django.utils.translation import ngettext

from .engine import clock
from .engine.caller import forks
from .engine.naming import printable
from .signals import lock_acquired, lock_busy, lock_detached, lock_lost, lock_released

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.dispatch import Signal
    from django.utils.safestring import SafeString

#: Minutes that are kept, templates that are kept of each, and templates that are drawn.
MINUTES, MOST_TEMPLATES, MOST_DRAWN = 60, 50, 8
#: The template of all locks of a minute beyond MOST_TEMPLATES.
OTHERS = "..."
#: Parts of a name that tell one lock from others like it: UUIDs, numbers, and identifiers of eight hexadecimal digits and more.
_ONE_OF_MANY = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{8,}|\d+")
#: How high the bars above the line are, and those below it; each is a minute wide.
_HEIGHT = 24
#: Seconds that a bar of full height stands for at least: shorter waits are no trouble.
LEAST = 1.0


def template_of(name: str, template: str = "") -> str:
    """Return what locks called like *name* have in common: *template*, or the name with ``*`` for numbers and ids."""
    return printable(template or _ONE_OF_MANY.sub("*", name), 100)


class History:
    """The longest wait and the longest hold of each minute, by template."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self._mutex = threading.Lock()
        # The minutes in which there was something to note; by template the longest wait and the longest hold, in seconds.
        self._minutes = deque[tuple[int, dict[str, list[float]]]](maxlen=MINUTES)

    def add(self, template: str, what: int, seconds: float) -> None:
        """Note a wait (*what* is 0) or a hold (1)."""
        with self._mutex:
            now = _minute()
            if not self._minutes or self._minutes[-1][0] != now:
                self._minutes.append((now, {}))
            noted = self._minutes[-1][1]
            if template not in noted and len(noted) >= MOST_TEMPLATES:
                template = OTHERS
            longest = noted.setdefault(template, [0.0, 0.0])
            longest[what] = max(longest[what], seconds)

    def rows(self) -> list[tuple[str, list[list[float]]]]:
        """Return by template the longest wait and hold of each of the last minutes, those with the longest waits first."""
        rows = defaultdict[str, list[list[float]]](lambda: [[0.0, 0.0]] * MINUTES)
        with self._mutex:
            now = _minute()
            for minute, noted in self._minutes:
                if minute > now - MINUTES:
                    for template, longest in noted.items():
                        rows[template][minute - now - 1] = longest
        return sorted(rows.items(), key=lambda row: max(row[1]), reverse=True)


_history = History()
forks.in_child(_history.reset)


def chart() -> SafeString | str:
    """Return the picture as inline SVG, without script and style; "" where there is nothing to draw."""
    found = _history.rows()[:MOST_DRAWN]
    if not found:
        return ""
    rows = []
    for template, minutes in found:
        wait, hold = (max(each) for each in zip(*minutes, strict=True))
        scale = _HEIGHT / max(wait, hold, LEAST)
        heights = [(x, wait * scale, hold * scale) for x, (wait, hold) in enumerate(minutes)]
        # Waits stand above the line, holds below it.
        bars = [("wait", x, _HEIGHT - height, height) for x, height, _ in heights if height]
        bars += [("hold", x, _HEIGHT, height) for x, _, height in heights if height]
        texts = {"wait": clock.in_words(wait, ngettext), "hold": clock.in_words(hold, ngettext)}
        rows.append({"template": template, "bars": bars, **texts})
    size = {"minutes": MINUTES, "height": _HEIGHT}
    return render_to_string("admin/django_distlock/chart.html", {"rows": rows, **size})


def _waited(name: str, template: str, waited: float, **_facts: Any) -> None:
    _history.add(template_of(name, template), 0, waited)


def _held(name: str, template: str, held: float, **_facts: Any) -> None:
    _history.add(template_of(name, template), 1, held)


_RECEIVERS: dict[Signal, Callable[..., None]] = {
    lock_acquired: _waited,
    lock_busy: _waited,
    lock_released: _held,
    lock_lost: _held,
    lock_detached: _held,
}


def start() -> None:
    """Keep what the locks of this process do from now on."""
    for signal, receiver in _RECEIVERS.items():
        signal.connect(receiver)


def stop() -> None:
    """Keep no more, and forget what was kept."""
    for signal, receiver in _RECEIVERS.items():
        signal.disconnect(receiver)
    _history.reset()


def _minute() -> int:
    return int(clock.lease_time() // 60)
