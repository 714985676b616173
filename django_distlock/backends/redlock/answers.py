"""What one server of a majority answered. See scripts.py for the answers."""

from __future__ import annotations

from typing import Any


def is_grant(answer: Any) -> bool:
    """Whether the server gave its vote."""
    return isinstance(answer, list) and answer[0] == 1


def is_agreed_grant(answer: Any) -> bool:
    """Whether it had given its vote before, and knows the token that was agreed on."""
    return is_grant(answer) and answer[2] == 1


def is_busy(answer: Any) -> bool:
    """Whether somebody else has its vote."""
    return isinstance(answer, list) and answer[0] == 0


def is_guarded(answer: Any) -> bool:
    """Whether it started lately, and gives no votes yet."""
    return isinstance(answer, list) and answer[:1] == [2]


def is_yes(answer: Any) -> bool:
    """Whether it did what it was asked."""
    return isinstance(answer, int) and answer == 1


def is_no(answer: Any) -> bool:
    """Whether it did not."""
    return isinstance(answer, int) and answer != 1


def described(answer: Any) -> str:
    """Say it for people."""
    if is_guarded(answer):
        return f"it started lately, and grants nothing for {answer[1]} s more"
    if is_grant(answer):
        return "it granted the lock, and had it back"
    return "it refused: somebody has the lock" if is_busy(answer) else "it answered"
