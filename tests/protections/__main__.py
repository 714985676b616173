"""`make see-red`: take each protection out of a copy of the code, and see its tests fail."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic

from rich.console import Console

from tests.protections.listed import Protection, protections

#: Seconds. pytest cuts a test at 120; code without its protection may hang where nothing is cut.
LONGEST_RUN = 600.0


def main() -> int:
    """Print what each protection's tests do without it; return 1 if one of them stays green."""
    arguments = _arguments()
    chosen = [one for one in protections() if _is_meant(one, arguments.words)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        guarded = list(pool.map(_is_guarded, chosen))
    _console.print(f"{sum(guarded)} of {len(guarded)} protections are missed by all their tests")
    return 0 if chosen and all(guarded) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.protections", description=__doc__)
    parser.add_argument("words", nargs="*", help="only protections with one of these in their name")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    return parser.parse_args()


def _is_meant(protection: Protection, words: list[str]) -> bool:
    return not words or any(word in protection.title for word in words)


def _is_guarded(protection: Protection) -> bool:
    start = monotonic()
    green = _green_without(protection)
    count = len(protection.red)
    seen = f"{count - len(green)} of {count} red in {monotonic() - start:.0f} s"
    lines = [f"{seen}: {protection.title}", *(f"  green: {one}" for one in green)]
    _console.print("\n".join(lines), markup=False, soft_wrap=True)
    return not green


def _green_without(protection: Protection) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        tree = protection.tree_without(Path(folder))
        lines = _closing_lines(protection.red, tree)
    return [test for test in protection.red if not any(_tells_red(test, line) for line in lines)]


def _closing_lines(tests: list[str], tree: Path) -> list[str]:
    output = tree / "output"
    with output.open("w") as stream, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--color=no", "-rfE", "--tb=line", *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=stream,
            stderr=stream,
            timeout=LONGEST_RUN,
            check=False,
        )
    return output.read_text().splitlines()


def _tells_red(test: str, line: str) -> bool:
    return any(f"{line} - ".startswith(f"{word} {test} - ") for word in ("FAILED", "ERROR"))


_console = Console(highlight=False)

if __name__ == "__main__":
    raise SystemExit(main())
