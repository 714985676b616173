"""What was asked for and is wanted no more: given back in the background, until that has worked."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from django_distlock.engine import clock
from django_distlock.engine.background import background
from django_distlock.engine.naming import log_fields, printable
from django_distlock.engine.values import Release, Request
from django_distlock.exceptions import LockBackendError

Outcomes = Sequence[Release | Exception]

logger = logging.getLogger("django_distlock")

#: Seconds before a failed giving back is tried again; doubled each time, up to the second one.
RETRY, LONGEST_RETRY = 0.25, 5.0
#: Seconds until a release that did not find the lock in our hands is sent once more.
SECOND_LOOK = 2.0


@dataclass(frozen=True, slots=True)
class _Leftover:
    request: Request
    #: Until when it is tried (lease time): from then on the server has nothing of it any more.
    ends: float
    is_second_look: bool = False


class Leftovers:
    """Those of one alias. What comes in while others are under way is given back together."""

    def __init__(self, alias: str, revoke_all: Callable[[Sequence[Request]], Outcomes]) -> None:
        self._alias = alias
        self._revoke_all = revoke_all
        self._waiting: deque[_Leftover] = deque()

    def add(self, request: Request) -> None:
        """Give back whatever the server has for *request*, or may have yet."""
        self._waiting.append(_Leftover(request, clock.lease_time() + request.ttl))
        background.submit(self._alias, self._revoke_waiting)

    def _revoke_waiting(self) -> None:
        # All at once: the jobs of the others find nothing to do.
        if some := [self._waiting.popleft() for _ in range(len(self._waiting))]:
            self._revoke(some, RETRY)

    def _revoke(self, some: Sequence[_Leftover], pause: float) -> None:
        outcomes: Outcomes
        try:
            outcomes = self._revoke_all([each.request for each in some])
        except Exception as error:  # noqa: BLE001 - whatever it is, they are tried again
            outcomes = [error] * len(some)
        failed, doubtful = list[_Leftover](), list[_Leftover]()
        for each, outcome in zip(some, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failed.append(each)
            # A server that hung may carry out the lost acquire after this release.
            elif outcome is not Release.RELEASED and not each.is_second_look:
                doubtful.append(replace(each, is_second_look=True))
        self._revoke_later(doubtful, SECOND_LOOK, RETRY)
        if failed:
            # A second look is for what most likely is not there.
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
