"""`make simulate`: run many schedules, show and shrink those that break a promise, or find planted mistakes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from time import monotonic

from rich.console import Console

_console = Console(highlight=False, markup=False, soft_wrap=True)
#: Schedules within which a planted mistake must be found.
MOST = 10_000


def main() -> int:
    """Return 1 if a schedule breaks a promise, or a planted mistake is not found."""
    arguments = _arguments()
    if arguments.mutants is not None:
        return _find_mutants(arguments.mutants, arguments.jobs)
    if arguments.replay is not None:
        return _replay(arguments.replay)
    return _search(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=1_000_000, help="how many schedules (default: a million)"
    )
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes (default: 2)")
    parser.add_argument(
        "--until-found", action="store_true", help="stop at the first one, and do not shrink it"
    )
    parser.add_argument("--replay", type=int, help="show what happens in the schedule of this seed")
    parser.add_argument(
        "--mutants", nargs="*", help="find planted mistakes: all, or those with these words"
    )
    return parser.parse_args()


def _search(arguments: argparse.Namespace) -> int:
    from .search import CHUNK, search

    start, found = monotonic(), list[int]()
    most = 1 if arguments.until_found else CHUNK
    for done, some in search(arguments.first, arguments.seeds, arguments.jobs, most):
        found += some
        for seed in some:
            _console.print(f"seed {seed} breaks a promise")
            if not arguments.until_found:
                _show(seed)
        if found and arguments.until_found:
            _console.print(f"found after {found[0] - arguments.first + 1} schedules")
            return 1
        if done % 1000 == 0 or done == arguments.seeds:
            _console.print(
                f"{done} schedules, {len(found)} broken promises, {monotonic() - start:.0f} s"
            )
    return bool(found)


def _show(seed: int) -> None:
    from .plan import plan_of
    from .schedule import outcome
    from .search import shrunk

    plan = shrunk(plan_of(seed))
    violation, _ = outcome(plan)
    _console.print(f"{violation}\n{plan}\n{plan.to_json()}")


def _replay(seed: int) -> int:
    from .plan import plan_of
    from .schedule import outcome

    log = list[str]()
    violation, digest = outcome(plan_of(seed), log)
    _console.print(f"{plan_of(seed)}\n" + "\n".join(log) + f"\n{digest}")
    if violation is not None:
        _console.print("".join(traceback.format_exception(violation)))
    return violation is not None


def _find_mutants(words: list[str], jobs: int) -> int:
    from .search import mutants

    chosen = [each for each in mutants() if not words or any(word in each.title for word in words)]
    missed = 0
    for mutant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            tree = mutant.tree_without(Path(folder))
            command = [
                *(sys.executable, "-m", "tests.simulation", "--until-found"),
                *("--seeds", str(MOST), "--jobs", str(jobs)),
            ]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            told = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, check=False
            )
        last = (told.stdout.splitlines() or [told.stderr])[-1]
        is_found = last.startswith("found")
        missed += not is_found
        _console.print(
            f"{last if is_found else f'NOT found in {MOST} schedules'}: {mutant.kind}, {mutant.name}"
        )
    return bool(missed)


if __name__ == "__main__":
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    raise SystemExit(main())
