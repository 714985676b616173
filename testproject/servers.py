"""Several processes that charge one account at the same time: the demo's servers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django.conf import settings

if TYPE_CHECKING:
    from types import TracebackType

    Process = subprocess.Popen[str]


def start(*command: str) -> Process:
    """Start one of this project's commands in a process that ends when its stdin is closed."""
    return subprocess.Popen(
        [sys.executable, "-m", "testproject", *command],
        cwd=settings.FOLDER.parent,
        env={**os.environ, "DISTLOCK_SQLITE_PATH": settings.DATABASES["default"]["NAME"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for us: we end them.
        start_new_session=True,
    )


def read_line(process: Process) -> str:
    """Return the next line that *process* writes; empty if it ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def begin(process: Process) -> None:
    """Start the work of the process; one that has died already shows that by its exit status."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("go\n")
        process.stdin.flush()


def let_go(process: Process) -> None:
    """Close the process's stdin: what it waits for."""
    assert process.stdin is not None
    process.stdin.close()


@dataclass(frozen=True, slots=True)
class Size:
    """How many servers charge how many fees each, and the seconds of work in each."""

    servers: int
    charges: int
    work: float

    @property
    def total(self) -> int:
        """How many fees they charge together."""
        return self.servers * self.charges


@dataclass(slots=True)
class Servers:
    """Runs while in ``with``: all of them begin together, and none outlives it."""

    size: Size
    account_id: int
    is_locked: bool
    _processes: list[Process] = field(default_factory=list)

    def __enter__(self) -> Servers:
        lock = ["--locked"] if self.is_locked else []
        command = [
            "charge",
            str(self.account_id),
            str(self.size.charges),
            f"--work={self.size.work}",
            *lock,
        ]
        self._processes = [start(*command) for _ in range(self.size.servers)]
        for process in self._processes:
            read_line(process)
        for process in self._processes:
            begin(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def are_working(self) -> bool:
        """Whether one of them is still charging."""
        return any(process.poll() is None for process in self._processes)

    @property
    def failed(self) -> int:
        """How many of them ended with an error."""
        return sum(bool(process.poll()) for process in self._processes)
