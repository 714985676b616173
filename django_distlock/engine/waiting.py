"""How long to pause between two tries: arithmetic, no I/O."""

from __future__ import annotations

import random

from django_distlock.conf import LONGEST

from . import clock

SHORTEST_PAUSE = 0.005
LONGEST_PAUSE = 0.25
LONGEST_WAKEABLE_PAUSE = 1.0


class Wait:
    """One caller's wait: until when it lasts, and how long its next pause is."""

    def __init__(self, timeout: float | None) -> None:
        """*timeout* in seconds; None waits for ever, 0 leaves room for one try."""
        self._began = clock.wait_time()
        # Not every driver and server takes more, and 31 years are as good as 292.
        self._ends = None if timeout is None else self._began + min(timeout, LONGEST)
        self._pause = SHORTEST_PAUSE

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return clock.wait_time() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until it is over, never below 0; None where it never is."""
        return None if self._ends is None else max(0.0, self._ends - clock.wait_time())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._ends is not None and clock.wait_time() >= self._ends

    def next_pause(self, *bounds: float | None, longest: float = LONGEST_PAUSE) -> float:
        """Return the next pause in seconds: jittered, growing, within *bounds* and the time left.

        Decorrelated jitter: each pause is drawn between the shortest and three times the last
        (M. Brooker, "Exponential Backoff And Jitter", 2015).
        """
        self._pause = min(longest, random.uniform(SHORTEST_PAUSE, self._pause * 3))  # noqa: S311
        return self.bounded(min([self._pause, *(bound for bound in bounds if bound is not None)]))

    def bounded(self, seconds: float) -> float:
        """Return *seconds*, or the time left if that is less; never below 0."""
        left = self.left
        return max(0.0, seconds if left is None else min(seconds, left))
