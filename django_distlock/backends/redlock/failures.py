"""Why a majority could not be had, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown

from .answers import described, is_guarded
from .validity import majority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .votes import Count


class Failures:
    """The errors of the backend *alias*, whose servers are at *places*."""

    def __init__(self, alias: str, places: Sequence[str]) -> None:
        self._alias = alias
        self._places = places

    def fail(self, count: Count) -> NoReturn:
        """Raise LockBackendError, or LockOutcomeUnknown where a server may have done what it was asked."""
        said = {server: described(answer) for server, answer in count.answers.items()}
        failures = {
            **count.failures,
            **{server: said[server] for server in count.where(is_guarded)},
        }
        kind = LockOutcomeUnknown if count.unsure else LockBackendError
        error = kind(self._alias, self._missing(failures), self._causes({**said, **failures}))
        raise error from _grouped(count.errors)

    def not_enough(self, failures: dict[int, str]) -> LockBackendError:
        """Return the error that says why fewer than a majority answered."""
        return LockBackendError(self._alias, self._missing(failures), self._causes(failures))

    def _missing(self, failures: dict[int, str]) -> str:
        total = len(self._places)
        good, most = total - len(failures), majority(total)
        return f"{good} of {total} Redis servers can be used, {most} must be"

    def _causes(self, causes: dict[int, str]) -> dict[str, str]:
        nothing = "was not waited for"
        return {place: causes.get(server, nothing) for server, place in enumerate(self._places)}


def _grouped(errors: list[Exception]) -> Exception | None:
    return ExceptionGroup("what the servers' drivers say", errors) if errors else None
