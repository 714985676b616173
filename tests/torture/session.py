"""Runs in one arena after the other, and what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from tests.fixtures.warm import WarmParent
from tests.torture.arenas import ARENAS
from tests.torture.report import page
from tests.torture.run import Result, run, store

if TYPE_CHECKING:
    from pathlib import Path

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
    results = []
    with store() as rows:
        for name in chosen:
            there = folder / name
            there.mkdir(parents=True)
            results.append(run(name, ARENAS[name], rows, there, seconds=seconds, seed=seed))
            WarmParent.close_all()
            _tell(results[-1])
    if report is not None:
        report.write_text(page(results, seed))
    return 1 if any(result.verdict.findings for result in results) else 0


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
