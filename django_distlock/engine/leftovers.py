"""Locks that were requested and are no longer wanted: released in the background, repeated until it works."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from django_distlock.engine.background import background
from django_distlock.engine.values import Release, Request
from django_distlock.exceptions import LockBackendError
from django_distlock.ground import clock
from django_distlock.ground.naming import log_fields, printable

Outcomes = Sequence[Release | Exception]

logger = logging.getLogger("django_distlock")

#: Seconds before a failed release is tried again: the first pause, doubled each time, and the longest.
RETRY, LONGEST_RETRY = 0.25, 5.0
#: Seconds before a release that did not find our lock is sent once more.
SECOND_LOOK = 2.0


@dataclass(frozen=True, slots=True)
class _Leftover:
    request: Request
    #: The time (lease time) at which the server has dropped the lock, and the attempts end.
    ends: float
    is_second_look: bool = False


class Leftovers:
    """The leftovers of one alias. Leftovers that come during a release are released together after it."""

    def __init__(self, alias: str, revoke_all: Callable[[Sequence[Request]], Outcomes]) -> None:
        self._alias = alias
        self._revoke_all = revoke_all
        self._waiting: deque[_Leftover] = deque()
        self._may_repeat = True

    def add(self, request: Request) -> None:
        """Release in the background what the server has granted for *request*, or may yet grant."""
        self._waiting.append(_Leftover(request, clock.lease_time() + request.ttl))
        background.submit(self._alias, self._revoke_waiting)

    def stop(self) -> None:
        """Repeat no failed release from now on, because the settings have changed, as by override_settings() in a test."""
        self._may_repeat = False

    def _revoke_waiting(self) -> None:
        # The first job takes all leftovers; the other jobs find nothing to do.
        if some := [self._waiting.popleft() for _ in range(len(self._waiting))]:
            self._revoke(some, RETRY)

    def _revoke(self, some: Sequence[_Leftover], pause: float) -> None:
        outcomes: Outcomes
        try:
            outcomes = self._revoke_all([each.request for each in some])
        except Exception as error:  # noqa: BLE001 - after any error they are tried again
            outcomes = [error] * len(some)
        failed, doubtful = list[_Leftover](), list[_Leftover]()
        for each, outcome in zip(some, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failed.append(each)
            # A server that hung may carry out the lost try after this release.
            elif outcome is not Release.RELEASED and not each.is_second_look:
                doubtful.append(replace(each, is_second_look=True))
        self._revoke_later(doubtful, SECOND_LOOK, RETRY)
        if failed and self._may_repeat:
            # A second look most likely finds nothing, so its failure is no warning.
            level = logging.DEBUG if failed[0].is_second_look else logging.WARNING
            problem = next(each for each in outcomes if isinstance(each, Exception))
            name = failed[0].request.name if len(failed) == 1 else None
            logger.log(
                level,
                "Giving back %d lock(s) failed for now: %s",
                len(failed),
                printable(problem),
                extra=log_fields(name, self._alias),
            )
            now = clock.lease_time()
            again = [each for each in failed if now < each.ends]
            self._revoke_later(again, pause, min(pause * 2, LONGEST_RETRY))

    def _revoke_later(self, some: Sequence[_Leftover], delay: float, pause: float) -> None:
        if some:
            background.submit(self._alias, partial(self._revoke, some, pause), delay)


def until_done(alias: str, job: Callable[[], object], ends: float, pause: float = 0.0) -> None:
    """Run *job* in the background until the server has answered, or *ends* (lease time) has come."""

    def attempt() -> None:
        try:
            job()
        except LockBackendError:
            if clock.lease_time() < ends:
                until_done(alias, job, ends, min(pause * 2 or RETRY, LONGEST_RETRY))

    background.submit(alias, attempt, pause)
