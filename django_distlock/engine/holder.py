"""Who holds a lock, told to people: never used to decide who owns it."""

from __future__ import annotations

import json
import os
import socket
import sys
from asyncio import _get_running_loop
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .caller import current_task, forks, here, thread_name
from .naming import printable

#: Characters of each part: with all of them it fits the columns of a database.
_LONGEST = 110
#: Purposes that a thread remembers.
_KNOWN = 64
_HOST = socket.gethostname()[:_LONGEST]


class _Written:
    """What is no part of a holder's value: its text, once it was asked for."""

    __slots__ = ("_json",)
    _json: str


@dataclass(frozen=True, slots=True)
class Holder(_Written):
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
            raise TypeError(f"A pid is a number, not {type(self.pid).__name__}.")

    @classmethod
    def current(cls, purpose: str = "") -> Holder:
        """Return the holder that the calling code would be; a thread without a task makes it once for each purpose."""
        may_be_task = _get_running_loop() is not None or "celery" in sys.modules
        if may_be_task and (task := _task_name()):
            return cls(_HOST, os.getpid(), thread_name(), task, purpose)
        known = here.holders.get(purpose)
        if known is None:
            if len(here.holders) >= _KNOWN:
                here.holders.clear()
            known = here.holders[purpose] = cls(_HOST, os.getpid(), thread_name(), "", purpose)
        return known

    @classmethod
    @lru_cache(maxsize=256)  # many locks have one holder
    def from_json(cls, text: str | bytes | None) -> Holder | None:
        """Return the holder written in *text*, or None where there is none to be read."""
        try:
            known: dict[str, Any] = json.loads(text or "")
            return cls(**known)
        except (ValueError, TypeError, RecursionError):
            return None

    def to_json(self) -> str:
        try:
            return self._json
        except AttributeError:
            known = {"host": self.host, "pid": self.pid, "thread": self.thread}
            more = {"task": self.task, "purpose": self.purpose}
            text = json.dumps({**known, **more}, separators=(",", ":"))
            object.__setattr__(self, "_json", text)
            return text

    def __str__(self) -> str:
        where = f"{self.host} pid {self.pid} {self.task or self.thread}"
        return f"{where} ({self.purpose})" if self.purpose else where


def _task_name() -> str:
    # Nobody runs a task of a library that is not imported: never import it for this.
    celery = getattr(sys.modules.get("celery"), "current_task", None)
    if celery:
        return task_text(celery.name, celery.request.id)
    task = current_task()
    return task.get_name() if task else ""


def task_text(name: str, task_id: str | None) -> str:
    """Return what a holder tells of a Celery task; one that was called like a function has no id."""
    ending = _short(f"[{task_id}]") if task_id else ""
    # A long name must not push an id out.
    return _short(name)[: _LONGEST - len(ending)] + ending


def _forget_parent() -> None:
    here.holders.clear()  # they have the pid of the parent


def _short(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"What is told of a holder is text, not {type(text).__name__}.")
    # What is not ASCII is text that not every server takes.
    return printable(text[:_LONGEST].encode("ascii", "backslashreplace").decode(), _LONGEST)


forks.in_child(_forget_parent)
