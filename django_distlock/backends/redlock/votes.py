"""What the servers have said so far, and what follows from it; no I/O."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from .validity import majority

if TYPE_CHECKING:
    from django_distlock.backends.redis.scripts import Call

_T = TypeVar("_T")


class Election(enum.Enum):
    """What comes of asking for a lock."""

    OPEN = "open"
    WON = "won"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


@dataclass(slots=True)
class Count:
    """The answers to one question, by the number of the server.

    *failures* tells why a server gave none; *unsure* are those among them that were asked all the same.
    *errors* are what drivers raised.
    """

    asked: frozenset[int]
    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)

    @property
    def pending(self) -> frozenset[int]:
        """Those who have said nothing yet."""
        return self.asked - self.answers.keys() - self.failures.keys()

    def take(self, server: int, answer: Any) -> None:
        """Take an answer in; an error is the server's refusal to carry it out."""
        if isinstance(answer, Exception):
            self.failures[server] = f"it refused: {answer}"
            self.errors.append(answer)
        else:
            self.answers[server] = answer

    def miss(
        self, server: int, cause: str, error: Exception | None = None, *, was_asked: bool
    ) -> None:
        """Take note that no answer will come; without *error*, as it took too long."""
        self.failures[server] = cause
        self.errors.append(error or TimeoutError(cause))
        if was_asked:
            self.unsure.add(server)

    def closed(self) -> Count:
        """Return it as it is now: answers that come later change it no more."""
        return replace(
            self,
            answers=dict(self.answers),
            failures=dict(self.failures),
            unsure=set(self.unsure),
            errors=list(self.errors),
        )

    def where(self, is_it: Callable[[Any], bool]) -> set[int]:
        """Return the servers whose answer *is_it*."""
        return {server for server, answer in self.answers.items() if is_it(answer)}


@dataclass(frozen=True, slots=True)
class Question:
    """What each server is asked, by its number; it is over when *is_decided*.

    A server has *within* seconds for its answer, and a new connection to it *connecting* seconds before.
    """

    calls: Mapping[int, Call]
    is_decided: Callable[[Count], bool]
    within: float
    connecting: float


#: A generator that does no I/O: it yields questions, is sent their counts, and returns a result.
Poll = Generator[Question, Count, _T]


def election(servers: int, *, granted: int, refused: int, failed: int) -> Election:
    """Return where a vote stands: won or lost as soon as nothing can change it any more.

    Busy: a majority answered, and the rest cannot make up for those who refused.
    """
    needed = majority(servers)
    if granted >= needed:
        return Election.WON
    if servers - refused - failed >= needed:
        return Election.OPEN
    if granted + refused >= needed:
        return Election.BUSY
    return Election.UNREACHABLE if servers - failed < needed else Election.OPEN


def agreed(servers: int, *, yes: int, no: int) -> bool | None:
    """Return what a majority says; None while it has not."""
    if yes >= majority(servers):
        return True
    return False if no >= majority(servers) else None
