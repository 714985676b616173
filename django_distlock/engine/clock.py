"""The clocks of this process: one for leases, one for waiting, never compared; and times as people read them.

All are read by clock_gettime(), which freezegun and time-machine leave alone but for the wall clock:
a test that freezes the time does not freeze its locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path

from django.utils import timezone

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_gettime = time.clock_gettime
_BOOT = ""
with suppress(OSError):
    # Tells this run of this machine from all others: they have another CLOCK_BOOTTIME.
    _BOOT = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


#: Returns seconds on the clock leases are counted by; it goes on while the machine sleeps.
lease_time = partial(_gettime, _BOOTTIME)
#: Returns seconds on the clock waits are counted by.
wait_time = partial(_gettime, time.CLOCK_MONOTONIC)


@lru_cache(maxsize=64)  # a project has few of them
def drift(ttl: float) -> float:
    """Return how many seconds before the server our clock must give up a lease of *ttl* seconds.

    1 % for clocks of different rates and 2 ms for their steps, as Redlock reckons
    (S. Sanfilippo, "Distributed Locks with Redis").
    """
    return ttl * 0.01 + 0.002


def postmark() -> tuple[float, str, float]:
    """Return when and where this is: for travelled(), maybe of another machine."""
    return _gettime(time.CLOCK_REALTIME), _BOOT, lease_time()


def travelled(wall: float, boot: str, lease: float) -> float:
    """Return for how many seconds something with that postmark was on its way, rather more than less.

    On one machine its lease clock tells, which nobody sets; of another one the wall clocks are
    compared, and what they differ by is an error.
    """
    by_wall = _gettime(time.CLOCK_REALTIME) - wall
    return max(0.0, by_wall, lease_time() - lease if boot and boot == _BOOT else 0.0)


# As Django spells them: its translations know them.
_UNITS = (
    (86_400, "%(num)d day", "%(num)d days"),
    (3_600, "%(num)d hour", "%(num)d hours"),
    (60, "%(num)d minute", "%(num)d minutes"),
)


def in_words(
    seconds: float, ngettext: Callable[[str, str, int], str] = lambda one, many, number: many
) -> str:
    """Return a length of time for people: "0.3 s", "44 minutes", "5 hours". *ngettext* translates it."""
    for size, one, many in _UNITS:
        if seconds >= 2 * size:
            number = int(seconds / size)
            return ngettext(one, many, number) % {"num": number}
    return f"{int(seconds)} s" if seconds >= 10 else f"{round(seconds, 3):.2g} s"


def time_of_day(instant: datetime) -> str:
    """Return *instant* for people, in Django's current time zone: "14:05"; with the date if that is not today."""
    here, now = timezone.localtime(instant), timezone.localtime(datetime.now(UTC))
    date = "" if here.date() == now.date() else "%Y-%m-%d "
    seconds = ":%S" if abs((here - now).total_seconds()) < 120 else ""
    return here.strftime(f"{date}%H:%M{seconds}")
