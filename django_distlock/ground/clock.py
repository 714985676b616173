"""The clocks of this process: one for leases, one for waiting, never compared; and times written for people.

All clocks are read by clock_gettime(), of which freezegun and time-machine change only the wall clock: a test
that freezes the time does not freeze its locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path

from django.utils import timezone

_BOOT = ""
with suppress(OSError):
    # The id of this boot of this machine: CLOCK_BOOTTIME can be compared only within one boot.
    _BOOT = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


if hasattr(time, "clock_gettime"):
    #: Return seconds on the clock for leases; it goes on while the machine sleeps.
    lease_time: Callable[[], float] = partial(
        time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    )
    #: Return seconds on the clock for waits.
    wait_time: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    _wall_time: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_REALTIME)
else:  # On Windows the monotonic clock goes on while the machine sleeps.
    lease_time, wait_time, _wall_time = time.monotonic, time.monotonic, time.time


@lru_cache(maxsize=64)  # a project has few ttls
def drift(ttl: float) -> float:
    """Return the safety margin in seconds: our clock ends a lease of *ttl* seconds that much before the server.

    1 % for clocks of different rates and 2 ms for their steps, as in Redlock
    (S. Sanfilippo, "Distributed Locks with Redis").
    """
    return ttl * 0.01 + 0.002


def postmark() -> tuple[float, str, float]:
    """Return the current time on this machine, to be sent with a message and passed to travelled()."""
    return _wall_time(), _BOOT, lease_time()


def travelled(wall: float, boot: str, lease: float) -> float:
    """Return how many seconds ago that postmark was made, rather too many than too few.

    On the same machine the lease clock counts, which nobody can set. Between two machines only the wall
    clocks can be compared, so a difference between them goes into the result.
    """
    by_wall = _wall_time() - wall
    return max(0.0, by_wall, lease_time() - lease if boot and boot == _BOOT else 0.0)


# Spelt as in Django, to use its translations.
_UNITS = (
    (86_400, "%(num)d day", "%(num)d days"),
    (3_600, "%(num)d hour", "%(num)d hours"),
    (60, "%(num)d minute", "%(num)d minutes"),
)


def in_words(
    seconds: float, ngettext: Callable[[str, str, int], str] = lambda one, many, number: many
) -> str:
    """Return a duration for people: "0.3 s", "44 minutes", "5 hours". *ngettext* translates it."""
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
