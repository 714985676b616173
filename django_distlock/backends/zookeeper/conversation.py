"""Having steps run, in the time that there is, and in our own errors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from kazoo.exceptions import KazooException

from django_distlock.engine import clock
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .recipe import BROKEN
from .steps import Silence, Steps, arun, run

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")


class Conversation:
    """Runs the steps of one backend, for threads and for tasks.

    *changes*: what is asked for may have been carried out although there is no reply.
    """

    def __init__(self, alias: str, io_timeout: float) -> None:
        self._alias = alias
        self._io_timeout = io_timeout

    @property
    def ends(self) -> float:
        """When one that begins now is given up, in wait time."""
        return clock.wait_time() + self._io_timeout

    def have(self, steps: Steps[_T], *, changes: bool, ends: float | None = None) -> _T:
        """Run *steps* in this thread."""
        with self._translated(changes=changes):
            return run(steps, self.ends if ends is None else ends)

    async def ahave(self, steps: Steps[_T], *, changes: bool, ends: float | None = None) -> _T:
        """See have()."""
        with self._translated(changes=changes):
            return await arun(steps, self.ends if ends is None else ends)

    @contextmanager
    def _translated(self, *, changes: bool) -> Iterator[None]:
        unanswered = LockOutcomeUnknown if changes else LockBackendError
        try:
            yield
        except Silence as error:
            raise unanswered(self._alias, "no reply in time") from error
        except BROKEN as error:
            problem = f"the connection broke: {type(error).__name__}"
            raise unanswered(self._alias, problem) from error
        except KazooException as error:
            problem = f"the ensemble refused: {type(error).__name__}"
            raise LockBackendError(self._alias, problem) from error
