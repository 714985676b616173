"""What is the same for every way to a Redis: answers and errors, and how a waiter listens."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError as RedisConnectionError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)

from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .conversation import Command

#: Seconds for which a waiter listens without a look: less than half its patience.
LISTEN = 0.2
#: What drivers raise when no answer came: it may have been carried out.
_UNANSWERED = (RedisConnectionError, RedisTimeoutError, OSError)


def read(connection: Any) -> Any:
    """Return the next answer; an error answered is an answer."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


async def aread(connection: Any) -> Any:
    """See read()."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


@contextmanager
def unreachable(alias: str, where: str) -> Iterator[None]:
    """Nothing has been asked yet: LockBackendError for what goes wrong."""
    try:
        yield
    except (RedisError, OSError, RedisClusterException) as error:
        problem = f"{where} cannot be reached: {first_line(error)}"
        raise LockBackendError(alias, problem) from error


@contextmanager
def unanswered(alias: str, where: str) -> Iterator[None]:
    """Something has been asked: LockOutcomeUnknown where no answer came."""
    try:
        yield
    except BusyLoadingError as error:
        raise LockBackendError(alias, f"{where} is not ready: {first_line(error)}") from error
    except AuthenticationError as error:
        raise LockBackendError(alias, f"{where} refused: {first_line(error)}") from error
    except _UNANSWERED as error:
        raise LockOutcomeUnknown(alias, f"{where} did not answer: {first_line(error)}") from error
    except (RedisError, RedisClusterException) as error:
        raise LockBackendError(alias, f"{where} refused: {first_line(error)}") from error


def listening(bells: Sequence[str], seconds: float) -> Command:
    """Return the command that waits on the server for up to *seconds* until one of the lists *bells* has something."""
    return ("BLPOP", *bells, f"{max(seconds, 0.001):.3f}")


def patience(seconds: float) -> float:
    """Return how long to listen: the server, which looks ten times a second, may be a bit late.

    It may be, unless what is waited for is a deadline; the connection is then given up.
    """
    return seconds + 0.3 if seconds >= LISTEN else seconds


def heard(alias: str, where: str, answer: Any) -> str | None:
    """Return which list had something, or None.

    LockBackendError if it may not be listened to; not if the server has just become a replica.
    """
    if isinstance(answer, ResponseError) and not str(answer).startswith("UNBLOCKED"):
        raise LockBackendError(alias, f"{where} refused BLPOP: {answer}") from answer
    return answer[0].decode() if isinstance(answer, (list, tuple)) else None
