"""What can go wrong with a lock: one tree, every branch of it pickles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from .engine.naming import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .engine.holder import Holder


class LockError(Exception):
    """Root of everything this package raises about locks."""


class LockNotAcquired(LockError, TimeoutError):
    """Somebody else held the lock for as long as the caller would wait.

    *waited* and *remaining* (of the holder's lease, where known) are seconds.
    """

    def __init__(
        self,
        name: str,
        waited: float = 0.0,
        holder: Holder | None = None,
        remaining: float | None = None,
    ) -> None:
        # OSError would read (errno, strerror, filename) into these arguments and drop the rest.
        Exception.__init__(self, name, waited, holder, remaining)
        self.name = name
        self.waited = waited
        self.holder = holder
        self.remaining = remaining

    def __str__(self) -> str:
        holder = f" by {self.holder}" if self.holder else ""
        left = "" if self.remaining is None else f"; its lease has {self.remaining:.3g} s left"
        return f"Lock {printable(self.name)!r} is held{holder}: gave up after {self.waited:.3g} s{left}."


class LockNotHeld(LockError, RuntimeError):
    """The operation needs a lock that this caller does not hold."""

    def __init__(self, name: str, reason: str = "it was not acquired, or is released") -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"Lock {printable(self.name)!r} is not held: {printable(self.reason)}."


class LockLost(LockNotHeld):
    """The lease is no longer surely ours: stop touching what the lock protects."""

    def __str__(self) -> str:
        return f"Lock {printable(self.name)!r} was lost: {printable(self.reason)}."


class LockNotOwned(LockNotHeld):
    """The lock is held by somebody else: ours ended before this call, which changed nothing."""

    def __init__(self, name: str, reason: str = "somebody else holds it now") -> None:
        super().__init__(name, reason)


class LockBackendError(LockError):
    """The server behind a lock failed; whether the lock is held is not what this tells.

    *causes* maps each server asked to what it answered, where there are several.
    """

    def __init__(self, alias: str, problem: str, causes: Mapping[str, str] | None = None) -> None:
        # What servers and their drivers say may be anything.
        said = {printable(server): printable(cause) for server, cause in (causes or {}).items()}
        super().__init__(alias, printable(problem), said)
        self.alias = alias
        self.problem = printable(problem)
        self.causes = said

    def __str__(self) -> str:
        causes = "".join(f" {server}: {cause}." for server, cause in self.causes.items())
        return f"DISTLOCK[{self.alias!r}]: {self.problem}.{causes}"


class LockOutcomeUnknown(LockBackendError):
    """A request was sent, its reply was lost, and asking again did not settle it.

    The lock is given back in the background; at the latest it comes free with its ttl.
    """


class Contended(LockBackendError):
    """The server gave a request up because of others at work on the same rows: asked again, it may answer."""


class LockDeadlock(LockError):
    """Waiting for this lock would never end: somebody waits for one that we hold, or we do."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"Waiting for lock {printable(self.name)!r} would never end: {printable(self.reason)}."
        )


class StaleFencingToken(LockError):
    """The protected data refused a write: its fence is not the fencing token of this lease."""

    def __init__(self, name: str, token: int, what: str, fence: int | None = None) -> None:
        super().__init__(name, token, what, fence)
        self.name = name
        self.token = token
        self.what = what
        self.fence = fence

    def __str__(self) -> str:
        found = "" if self.fence is None else f" (its fence is {self.fence})"
        return f"Lock {printable(self.name)!r}, fencing token {self.token}: {printable(self.what)}{found}."


class NotSupported(LockError):
    """The backend cannot do this; its page in the documentation says what it can."""

    def __init__(self, alias: str, what: str, instead: str = "") -> None:
        super().__init__(alias, what, instead)
        self.alias = alias
        self.what = what
        self.instead = instead

    def __str__(self) -> str:
        instead = f" {printable(self.instead)}" if self.instead else ""
        return f"DISTLOCK[{self.alias!r}] does not support {printable(self.what)}.{instead}"


class ReleasedBeforeCommit(LockError, RuntimeWarning):
    """The lock was given back while a transaction begun before it is open: others read old data.

    A warning; raised as an error where DISTLOCK says STRICT, so that the transaction rolls back.
    """

    def __init__(self, name: str, database: str) -> None:
        super().__init__(name, database)
        self.name = name
        self.database = database

    def __str__(self) -> str:
        return (
            f"Lock {printable(self.name)!r} was released before the transaction on {self.database!r}, begun earlier, "
            "is committed: the next holder reads old data. Take the lock outside atomic(), or use "
            'release="on_commit", or transaction_lock().'
        )


class InvalidLockBackend(ImproperlyConfigured):
    """The DISTLOCK setting is wrong; the text names the alias and the key."""


def first_line(error: BaseException) -> str:
    """Return what *error* says, on one line: for the text of another."""
    text = str(error).strip()
    return printable(text.splitlines()[0].rstrip(".")) if text else type(error).__name__
