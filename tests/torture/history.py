"""What a run writes down: one event a line, one file for each process, appended and never changed."""

from __future__ import annotations

import gzip
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django_distlock.ground import clock

#: The number of the format that tests/torture/README.md describes.
FORMAT = 1
#: What a file of a history ends with.
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a process saw at *at*, in seconds on ``clock.lease_time()``: one clock for all processes of a machine."""

    at: float
    kind: str
    worker: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return one of the details; None if the event does not have it."""
        return self.details.get(name)


class Writer:
    """Appends the events of one *worker*; whatever kills the process, what was written is there."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.worker = worker
        path = folder / f"{worker}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._mutex = threading.Lock()

    def write(self, kind: str, at: float | None = None, **details: Any) -> None:
        """Append an event of now, or of *at*."""
        event = {"at": clock.lease_time() if at is None else at, "kind": kind, **details}
        with self._mutex:
            os.write(self._file, json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(folder: Path) -> list[Event]:
    """Return all events of all workers, in the order of time."""
    events = [event for path in folder.glob(f"*{SUFFIX}") for event in _events(path)]
    return sorted(events, key=lambda event: event.at)


def pack(folder: Path, file: Path) -> None:
    """Write the events of all workers to one *file*, in the order of time; compressed if its name ends with ".gz"."""
    lines = (
        json.dumps({"at": event.at, "kind": event.kind, "worker": event.worker, **event.details})
        for event in read(folder)
    )
    text = "".join(f"{line}\n" for line in lines).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Without the time of now, the same history is the same file.
    file.write_bytes(gzip.compress(text, mtime=0) if file.suffix == ".gz" else text)


def _events(path: Path) -> list[Event]:
    # A process that is killed while it writes leaves half a line, the last.
    lines = path.read_text().split("\n")[:-1]
    events = []
    for line in lines:
        details = json.loads(line)
        at, kind = details.pop("at"), details.pop("kind")
        events.append(Event(at, kind, path.name.removesuffix(SUFFIX), details))
    return events
