"""Runs in one arena after the other, and what is told of them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tests.fixtures.warm import WarmParent
from tests.torture.arenas import ARENAS, CONTROLS, NAMED
from tests.torture.history import pack
from tests.torture.power import LeftOut
from tests.torture.report import page
from tests.torture.run import Result, result_of, run, store

if TYPE_CHECKING:
    from tests.fixtures.postgres import PostgreSQL
    from tests.torture.arenas import Make

#: Findings of one run that are printed; the histories have all.
MOST_SHOWN = 8
SECONDS_OF_CONTROL = 10.0
_console = Console(highlight=False, soft_wrap=True)


def torture(
    names: list[str],
    *,
    minutes: float,
    seed: int,
    folder: Path,
    report: Path | None,
    history: Path | None = None,
    beside: Path | None = None,
) -> int:
    """Torture the arenas with these *names*, or all ARENAS, for so many *minutes*; return 1 if a promise was broken.

    *history*: what pack() is to write, with "{backend}" for the name of the arena.
    *beside*: see run().
    """
    chosen = names or [*ARENAS]
    for name in (*chosen, *(CONTROLS if report else ())):
        if (folder / name).exists():
            sys.exit(f"{folder / name} has the histories of another run: give another --folder.")
    seconds = minutes * 60 / len(chosen)
    _console.print(f"seed {seed}, {seconds:.0f} s each, histories in {folder}")
    with store() as rows:
        tried = partial(_tried, rows=rows, seed=seed, beside=beside)
        results = []
        for name in chosen:
            try:
                results.append(tried((ARENAS | NAMED)[name], folder / name, seconds=seconds))
            except LeftOut as why:
                (folder / name).rmdir()
                _console.print(f"{name} was left out: {why}")
                continue
            if history is not None:
                pack(folder / name, Path(str(history).replace("{backend}", name)))
        if report is not None:
            for name, make in CONTROLS.items():
                tried(make, folder / name, seconds=SECONDS_OF_CONTROL)
            write(folder, report)
    return 1 if any(result.verdict.findings for result in results) else 0


def write(folder: Path, report: Path) -> None:
    """Write the page of a run, once more perhaps, from the histories in *folder*."""
    results = [result_of(folder / name) for name in ARENAS if (folder / name).is_dir()]
    controls = [result_of(folder / name) for name in CONTROLS if (folder / name).is_dir()]
    report.write_text(page(results, controls))


def _tried(make: Make, there: Path, *, rows: PostgreSQL, **terms: Any) -> Result:
    there.mkdir(parents=True)
    result = run(make, rows, there, **terms)
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
