"""Runs in one arena after the other, and what is told of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from tests.fixtures.warm import WarmParent
from tests.torture.arenas import ARENAS, CONTROLS
from tests.torture.report import page
from tests.torture.run import Result, run, store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.postgres import PostgreSQL
    from tests.torture.arenas import Make

#: Findings of one run that are printed; the histories have all.
MOST_SHOWN = 8
_console = Console(highlight=False, soft_wrap=True)


def torture(
    names: list[str], *, minutes: float, seed: int, folder: Path, report: Path | None
) -> int:
    """Torture the arenas with these *names*, or all, for so many *minutes*; return 1 if a promise was broken."""
    chosen = names or [*ARENAS]
    seconds = minutes * 60 / len(chosen)
    _console.print(f"seed {seed}, {seconds:.0f} s each, histories in {folder}")
    with store() as rows:
        tried = partial(_tried, rows=rows, folder=folder, seed=seed)
        results = [tried(name, ARENAS[name], seconds=seconds) for name in chosen]
        if report is not None:
            controls = [tried(name, make, seconds=10.0) for name, make in CONTROLS.items()]
            report.write_text(page(results, controls, seed))
    return 1 if any(result.verdict.findings for result in results) else 0


def _tried(
    name: str, make: Make, *, rows: PostgreSQL, folder: Path, seconds: float, seed: int
) -> Result:
    there = folder / name
    there.mkdir(parents=True)
    result = run(name, make, rows, there, seconds=seconds, seed=seed)
    WarmParent.close_all()
    _tell(result)
    return result


def _tell(result: Result) -> None:
    verdict = result.verdict
    _console.print(
        f"{result.name}: {verdict.grants} grants, {verdict.faults.total()} faults in {result.seconds:.0f} s, "
        f"{dict(verdict.outcomes)}, errors {dict(verdict.errors)}, faults {dict(verdict.faults)}, "
        f"allowed pairs {verdict.allowed_pairs}, refused writes {verdict.refused_writes}, "
        f"written {dict(verdict.written)}, lost {dict(verdict.lost)}, gap {verdict.longest_gap:.1f} s",
        markup=False,
    )
    for finding in verdict.findings[:MOST_SHOWN]:
        _console.print(f"  {shortened(str(finding))}", markup=False)
    if len(verdict.findings) > MOST_SHOWN:
        _console.print(f"  ... and {len(verdict.findings) - MOST_SHOWN} more", markup=False)


def shortened(text: str) -> str:
    """Return the first and the last line of *text*: of a traceback, whose it is and what it says."""
    first, *rest = text.strip().splitlines()
    return f"{first} ... {rest[-1]}" if rest else first
