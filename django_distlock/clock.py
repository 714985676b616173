"""The two clocks of this process: one for leases, one for waiting. They are never compared."""

from __future__ import annotations

import time

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_time() -> float:
    """Return seconds on the clock leases are counted by; it goes on while the machine sleeps."""
    return time.clock_gettime(_BOOTTIME)


def wait_time() -> float:
    """Return seconds on the clock waits are counted by."""
    return time.monotonic()
