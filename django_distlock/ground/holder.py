"""The holder of a lock, described for people; never used to decide who owns the lock."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from asyncio import _get_running_loop
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from .caller import current_task, forks, here, thread_name
from .naming import MOST_PLACES, printable

#: Most characters of each part: a holder with parts of this length still fits the database columns.
_LONGEST = 110
#: How many holders a thread caches, one for each purpose.
_KNOWN = 64
#: A character outside ASCII, as the texts of a holder have it; the last one of a text that was cut may not be whole.
_ESCAPED = re.compile(
    r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(000[0-9a-f]{5})|[xuU]?[0-9a-f]*(?=\.\.\.$))"
)
#: Characters of a task's id that are not percent-encoded, beside letters and digits.
_AS_IT_IS = " !\"#$&'()*+,/:;<=>?@\\^`{|}"
_HOST = socket.gethostname()[:_LONGEST]


class _Written:
    """A slot that caches the JSON of a holder: not a field, so not compared."""

    __slots__ = ("_json",)
    _json: str


@dataclass(frozen=True, slots=True)
class Holder(_Written):
    """The holder of a lock, for people: where it runs, and for what purpose (view path, command).

    *limit*: how many may hold the lock at once, if there is a limit.
    """

    host: str
    pid: int
    thread: str
    task: str = ""
    purpose: str = ""
    limit: int | None = None

    def __post_init__(self) -> None:
        """Escape and cut the texts, which may come from a server; TypeError for values of a wrong type."""
        for part in ("host", "thread", "task", "purpose"):
            object.__setattr__(self, part, _short(getattr(self, part)))
        if not isinstance(self.pid, int):
            raise TypeError(f"A pid is a number, not {type(self.pid).__name__}.")
        if self.limit is not None and self.limit not in range(1, MOST_PLACES + 1):
            raise TypeError(f"No lock has {printable(self.limit)} places.")

    @classmethod
    def current(cls, purpose: str = "") -> Holder:
        """Return the holder for the calling code; outside tasks, it is cached by thread and purpose."""
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
        """Return the holder written in *text*, or None if *text* is not the JSON of a holder."""
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
            more: dict[str, Any] = {"task": self.task, "purpose": self.purpose}
            if self.limit is not None:
                more["limit"] = self.limit
            text = json.dumps({**known, **more}, separators=(",", ":"))
            object.__setattr__(self, "_json", text)
            return text

    def __str__(self) -> str:
        where = f"{self.host} pid {self.pid} {self.task or self.thread}"
        return f"{where} ({self.purpose})" if self.purpose else where


def _task_name() -> str:
    # Without Celery imported, no Celery task runs.
    celery = getattr(sys.modules.get("celery"), "current_task", None)
    if celery:
        return task_text(celery.name, celery.request.id)
    task = current_task()
    return task.get_name() if task else ""


def task_text(name: str, task_id: str | None) -> str:
    """Return the name and id of a task as "name[id]"; a task that was called like a function has no id.

    Brackets and characters outside ASCII are percent-encoded, so that the id can be parsed.
    """
    told = quote(task_id or "", _AS_IT_IS, errors="surrogatepass")
    ending = _short(f"[{told}]") if told else ""
    # A long name must not push an id out.
    return _short(name)[: _LONGEST - len(ending)] + ending


def unescaped(text: str) -> str:
    """Return *text*, a part of a holder, with its characters outside ASCII, unless these are not printable."""

    def character(found: re.Match[str]) -> str:
        return chr(int(found[found.lastindex], 16)) if found.lastindex else ""

    return printable(_ESCAPED.sub(character, text))


def _forget_parent() -> None:
    here.holders.clear()  # the holders have the pid of the parent


def _short(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(
            f"Host, thread, task and purpose of a holder must be text, not {type(text).__name__}."
        )
    # Not every server accepts text outside ASCII.
    return printable(text[:_LONGEST].encode("ascii", "backslashreplace").decode(), _LONGEST)


forks.in_child(_forget_parent)
