"""One run in one arena: its servers, workers, nemesis, and what the checker says in the end."""

from __future__ import annotations

import platform
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import django

import django_distlock
from tests.fixtures.postgres import PostgreSQL
from tests.torture.arenas import postgres_database
from tests.torture.checker import Verdict, check
from tests.torture.crew import Crew
from tests.torture.history import FORMAT, Writer, read
from tests.torture.nemesis import Nemesis, longest_clock_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.torture.arenas import Make


@dataclass(frozen=True, slots=True)
class Result:
    """What a run in the arena *name* has shown, and with which servers."""

    name: str
    seconds: float
    seed: int
    day: str
    versions: list[str]
    verdict: Verdict


def result_of(folder: Path) -> Result:
    """Return what the histories in *folder*, which has the name of the arena, tell."""
    events = read(folder)
    began = next(event for event in events if event.kind == "arena")
    seconds = events[-1].at - began.at
    verdict = check(events, unfenced=began["careless"])
    return Result(folder.name, seconds, began["seed"], began["day"], began["versions"], verdict)


@contextmanager
def store() -> Iterator[PostgreSQL]:
    """The server of the rows, which no fault reaches."""
    with PostgreSQL() as server:
        yield server


def run(
    make: Make,
    rows: PostgreSQL,
    folder: Path,
    *,
    seconds: float,
    seed: int,
    beside: Path | None = None,
) -> Result:
    """Torture an arena for so many *seconds*; the histories are written to *folder*, which is empty and has its name.

    *beside*: a folder with another version of the package, which every second worker imports.
    """
    name = folder.name
    with ExitStack() as stack:
        arena = stack.enter_context(make())
        history = Writer(folder, "nemesis")
        stack.callback(history.close)
        history.write(
            "arena",
            format=FORMAT,
            backend=name,
            release=django_distlock.__version__,
            ttl=arena.ttl,
            seed=seed,
            day=datetime.now(UTC).date().isoformat(),
            versions=[*arena.versions, *software()],
            careless=arena.careless,
        )
        crew = Crew(
            arena, name, folder, postgres_database(rows.port), f"{seed} {name}", beside=beside
        )
        stack.callback(crew.close)
        crew.start()
        nemesis = Nemesis(arena, crew, history, f"{seed} {name}")
        nemesis.start()
        try:
            time.sleep(seconds)
        finally:
            nemesis.stop()
        time.sleep(arena.free_within + longest_clock_error(arena))
        history.write("calm")
        time.sleep(arena.calm)
        crew.end()
        for each in crew.tracebacks():
            history.write("broke", id="output", text=each[:3000])
    return result_of(folder)


def software() -> list[str]:
    """Return the versions of what runs on any arena."""
    release = platform.release().partition("-")[0]
    return [
        f"Python {platform.python_version()}",
        f"Django {django.__version__}",
        f"Linux {release}",
    ]
