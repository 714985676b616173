"""The errors of locks: one tree, and every error can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from .ground.clock import in_words, time_of_day
from .ground.holder import Holder
from .ground.naming import printable

#: The documentation on the web.
DOCS = "https://django-distlock.readthedocs.io/en/latest/"


class LockError(Exception):
    """Base class of all errors about locks."""

    def __repr__(self) -> str:
        # Celery logs the repr of an error.
        return f"{type(self).__name__}({str(self)!r})"


class LockNotAcquired(LockError, TimeoutError, CommandError):
    """The lock was busy until the caller's timeout was over.

    *waited* and *remaining* (the rest of the holder's lease, if known) are seconds. With *reserved_until*
    nobody holds the lock, but min_hold refuses it to others until that time. With a *limit* all places were
    held or reserved, and the other facts are of the place known to end first. *limit* may be the lower limit of
    an earlier caller of this process, behind which this one waited although a place was free.
    The error ends a management command with one line, as any CommandError does.
    """

    returncode = 1

    def __init__(  # noqa: PLR0917 - pickle and Celery make it again from its arguments
        self,
        name: str,
        waited: float = 0.0,
        holder: Holder | str | None = None,
        remaining: float | None = None,
        reserved_until: datetime | str | None = None,
        limit: int | None = None,
    ) -> None:
        self.name = name
        self.waited = waited
        self.holder = Holder.from_json(holder) if isinstance(holder, str) else holder
        self.remaining = remaining
        if isinstance(reserved_until, str):
            reserved_until = datetime.fromisoformat(reserved_until)
        self.reserved_until = reserved_until
        self.limit = limit
        # Only texts and numbers, because Celery writes the arguments as JSON.
        text = self.holder and self.holder.to_json()
        until = reserved_until and reserved_until.isoformat()
        # OSError would take these arguments for (errno, strerror, filename) and drop the rest.
        Exception.__init__(self, name, waited, text, remaining, until, limit)

    def __str__(self) -> str:
        left = ""
        if self.reserved_until is not None:
            state = f"reserved until {time_of_day(self.reserved_until)} (min_hold)"
        else:
            state = f"held by {self.holder}" if self.holder else "held"
            if self.remaining is not None:
                left = f"; its lease has {in_words(self.remaining)} left"
        waited = in_words(self.waited)
        if self.limit is not None:
            is_known = self.remaining is not None or self.reserved_until is not None
            which = "the first to end" if is_known else "one of them"
            state = f"taken at all of its {self.limit} places, {which} {state}"
        return f"Lock {printable(self.name)!r} is {state}: gave up after {waited}{left}."


class LockNotHeld(LockError, RuntimeError):
    """The operation needs a lock that this caller does not hold."""

    def __init__(
        self, name: str, reason: str = "it was not acquired, or is already released"
    ) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"Lock {printable(self.name)!r} is not held: {printable(self.reason)}."


class LockLost(LockNotHeld):
    """The lock may no longer be ours: stop changing what it protects."""

    def __str__(self) -> str:
        return f"Lock {printable(self.name)!r} was lost: {printable(self.reason)}."


class LockNotOwned(LockLost):
    """The lock was lost, and somebody else holds it by now. The call that raised this error changed nothing."""

    def __init__(self, name: str, reason: str = "somebody else holds it now") -> None:
        super().__init__(name, reason)


class LockBackendError(LockError):
    """The server of a lock failed. This error does not say whether the lock is held.

    *causes* are the answers by server, for backends with several servers.
    """

    def __init__(self, alias: str, problem: str, causes: Mapping[str, str] | None = None) -> None:
        # The text of a server or driver may contain anything.
        said = {printable(server): printable(cause) for server, cause in (causes or {}).items()}
        super().__init__(alias, printable(problem), said)
        self.alias = alias
        self.problem = printable(problem)
        self.causes = said

    def copy(self) -> LockBackendError:
        """Return a LockBackendError with the same text and cause for another caller, whose own request was not sent."""
        made = LockBackendError(self.alias, self.problem, self.causes)
        made.__cause__ = self.__cause__
        return made

    def __str__(self) -> str:
        causes = "".join(f" {server}: {cause}." for server, cause in self.causes.items())
        return f"DISTLOCK[{self.alias!r}]: {self.problem}.{causes}"


class LockOutcomeUnknown(LockBackendError):
    """The reply to a request was lost, and so was the reply to its repetition, if there was time for one.

    The lock is released in the background; at the latest it comes free after its ttl.
    *was_idle*: the connection was used before and may have died unnoticed, so that no server got the request.
    """

    def __init__(
        self,
        alias: str,
        problem: str,
        causes: Mapping[str, str] | None = None,
        *,
        was_idle: bool = False,
    ) -> None:
        super().__init__(alias, problem, causes)
        self.was_idle = was_idle


class Contended(LockBackendError):
    """The server refused a request because other clients work on the same rows; a repetition may succeed."""


class NotSent(LockBackendError):
    """The request was not sent: other callers of this process kept all connections or threads busy."""


class LockDeadlock(LockError):
    """Waiting for this lock would never end: this caller holds it, or its holder waits for this caller."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"Waiting for lock {printable(self.name)!r} would never end: {printable(self.reason)}."
        )


class StaleFencingToken(LockError):
    """Protected data refused a write, because its fence is not the fencing token of this lease."""

    def __init__(self, name: str, token: int, what: str, fence: int | None = None) -> None:
        super().__init__(name, token, what, fence)
        self.name = name
        self.token = token
        self.what = what
        self.fence = fence

    def __str__(self) -> str:
        found = "" if self.fence is None else f" (its fence is {self.fence}{self._question})"
        return f"Lock {printable(self.name)!r}, fencing token {self.token}: {printable(self.what)}{found}."

    @property
    def _question(self) -> str:
        """A hint if the fence is higher than the token; both are in microseconds, or began so."""
        ahead = (self.fence or 0) - self.token
        if ahead <= 0:
            return ""
        changed = "was the backend, its server or the data changed?"
        page = f"{DOCS}howto/change-the-backend.html"
        return f", ahead of ours by {in_words(ahead / 1_000_000)}: {changed} See {page}"


class NotSupported(LockError):
    """The backend has no such feature; its page in the documentation lists what it supports."""

    def __init__(self, alias: str, what: str, instead: str = "") -> None:
        super().__init__(alias, what, instead)
        self.alias = alias
        self.what = what
        self.instead = instead

    def __str__(self) -> str:
        instead = f" {printable(self.instead)}" if self.instead else ""
        return f"DISTLOCK[{self.alias!r}] does not support {printable(self.what)}.{instead}"


class _InTransaction(LockError, RuntimeWarning):
    """A warning, or an error with STRICT in DISTLOCK.

    *name* is empty in a warning, which is shown once for each call site, for all names together.
    """

    def __init__(self, name: str, database: str) -> None:
        super().__init__(name, database)
        self.name = name
        self.database = database

    @property
    def _lock(self) -> str:
        return f"Lock {printable(self.name)!r}" if self.name else "A lock"


class ReleasedBeforeCommit(_InTransaction):
    """The lock was released before the transaction around it was committed: the next holder reads old data.

    This is a warning; with STRICT in DISTLOCK an error, so that the transaction rolls back.
    """

    def __str__(self) -> str:
        return (
            f"{self._lock} was released before the transaction around it on {self.database!r} was "
            "committed: the next holder reads old data. Release or detach() it after the commit: leave out "
            'release="at_exit", or use release="on_commit".'
        )


class SnapshotBeforeLock(_InTransaction):
    """The transaction had read data before the lock was acquired, and goes on reading that old data.

    This is a warning; with STRICT in DISTLOCK an error, raised before the lock is acquired.
    """

    def __str__(self) -> str:
        return (
            f"{self._lock} was to be acquired in a transaction on {self.database!r} that has read before: at its "
            "isolation level it reads old data while it holds the lock. Acquire the lock before "
            "anything is read, or outside atomic(), or use the isolation level READ COMMITTED."
        )


class InvalidLockBackend(ImproperlyConfigured):
    """The DISTLOCK setting is wrong; the text names the alias and the key."""

    #: The id and the hint of the system check that reports this error.
    check, hint = "distlock.E001", "Correct the setting."


class UnsupportedDatabase(InvalidLockBackend):
    """The database of an alias is of a kind that cannot keep locks."""

    check = "distlock.E003"
    hint = "Let OPTIONS 'using' name another database, choose another backend, or write one."


class KeyFunctionFailed(InvalidLockBackend):
    """The project's function for the keys of an alias raised an error, as outside of a tenant, or returned no text."""

    check, hint = "distlock.E011", "Until then, its server is not checked."


def root_cause(error: Exception) -> Exception:
    """Return the driver's error behind *error*, to be the only cause of an error of ours.

    Remove its traceback, because variables in the frames show owners, and its context, which repeats the text.
    """
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    error.__traceback__ = error.__context__ = None
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of the text of *error*, for use in another text."""
    text = str(error).strip()
    return printable(text.splitlines()[0].rstrip(".")) if text else type(error).__name__
