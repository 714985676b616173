"""Who holds a lock, told to people: never used to decide who owns it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .caller import thread_name
from .naming import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

_purpose: ContextVar[str] = ContextVar("distlock_purpose", default="")
#: Characters of each part: with all of them it fits the columns of a database.
_LONGEST = 110
_HOST = socket.gethostname()[:_LONGEST]


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder for people: where it runs, and what for (view path, task id, command)."""

    host: str
    pid: int
    thread: str
    task: str = ""
    purpose: str = ""

    def __post_init__(self) -> None:
        """Make the texts harmless, wherever they come from; TypeError for what is no holder."""
        for part in ("host", "thread", "task", "purpose"):
            object.__setattr__(self, part, _short(getattr(self, part)))
        if not isinstance(self.pid, int):
            msg = f"A pid is a number, not {type(self.pid).__name__}."
            raise TypeError(msg)

    @classmethod
    def current(cls, purpose: str = "") -> Holder:
        """Return the holder that the calling code would be."""
        return cls(
            host=_HOST,
            pid=os.getpid(),
            thread=thread_name(),
            task=_task_name(),
            purpose=purpose or _purpose.get(),
        )

    @classmethod
    def from_json(cls, text: str | bytes | None) -> Holder | None:
        """Return the holder written in *text*, or None where there is none to be read."""
        try:
            known: dict[str, Any] = json.loads(text or "")
            return cls(**known)
        except (ValueError, TypeError, RecursionError):
            return None

    def to_json(self) -> str:
        """Return this holder as a short JSON object."""
        known = {"host": self.host, "pid": self.pid, "thread": self.thread}
        more = {"task": self.task, "purpose": self.purpose}
        return json.dumps({**known, **more}, separators=(",", ":"))

    def __str__(self) -> str:
        where = f"{self.host} pid {self.pid} {self.task or self.thread}"
        return f"{where} ({self.purpose})" if self.purpose else where


@contextmanager
def acting_for(purpose: str) -> Iterator[None]:
    """Let locks taken inside say that they are held for *purpose*."""
    reset = _purpose.set(purpose)
    try:
        yield
    finally:
        _purpose.reset(reset)


def _task_name() -> str:
    return _celery_task() or _asyncio_task()


def _celery_task() -> str:
    # Nobody runs a task of a library that is not imported: never import it for this.
    celery = sys.modules.get("celery")
    task = getattr(celery, "current_task", None)
    if not task:
        return ""
    # A task that was called like a function has no id; a long name must not push an id out.
    ending = _short(f"[{task.request.id}]") if task.request.id else ""
    return _short(task.name)[: _LONGEST - len(ending)] + ending


def _asyncio_task() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return ""
    return task.get_name() if task else ""


def _short(text: str) -> str:
    if not isinstance(text, str):
        msg = f"What is told of a holder is text, not {type(text).__name__}."
        raise TypeError(msg)
    # What is not ASCII is text that not every server takes.
    return printable(text[:_LONGEST].encode("ascii", "backslashreplace").decode(), _LONGEST)
