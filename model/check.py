"""`make model`: Spin searches each variation of lease.pml for a state that breaks a promise, and a table says what it found.

Needs spin and gcc, and nothing of this project.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("lease.pml")
#: The search ends early, and so fails, where it needs more memory (MB).
MEMORY = 8000
#: Promises by the macro that has the model assert them.
PROMISES = {
    "EXCLUSION": "one holder is sure at a time",
    "TOKENS": "tokens rise",
    "UPDATES": "no update is lost",
    "NOT_FINISHED": "no caller gets to its last step",
    "NOT_REFUSED": "no late write is refused",
}
ALL = ("EXCLUSION", "TOKENS", "UPDATES")


@dataclass(frozen=True)
class Variation:
    """The model with these macros, and the promises that are asserted: kept, or in a *control* broken."""

    name: str
    macros: str
    promises: tuple[str, ...]
    is_control: bool = False

    @property
    def promised(self) -> str:
        """The promises in words."""
        if self.promises == ALL:
            return "all three"
        return ", ".join(PROMISES[each] for each in self.promises)


def control(name: str, macros: str, promise: str) -> Variation:
    """Return a variation in which Spin must find *promise* broken."""
    return Variation(name, macros, (promise,), is_control=True)


#: Where the clock of one process is slow.
SLOW = "SLOW_CLOCK TTL=3 MISHAPS=0"
F_FAULTS = "forced release, lost data, clock of the server ahead"
#: Those that take long come first.
VARIATIONS = [
    Variation(
        "claim and fenced write, three callers", "CALLERS=3 ROUNDS=1 RENEWED=1 MISHAPS=0", ALL
    ),
    Variation("claim and fenced write", "", ALL),
    Variation("the same, and a slow clock", f"{SLOW} DRIFT=1", ALL),
    Variation("guard", "GUARD", ALL),
    Variation("guard after the read", "GUARD_AFTER_READ", ALL),
    Variation(F_FAULTS, "FAULTS", ("TOKENS", "UPDATES")),
    control(F_FAULTS, "FAULTS", "EXCLUSION"),
    control("a release does not compare the owner", "NO_OWNER_COMPARE", "EXCLUSION"),
    control("a renewal takes the lock again", "RENEWAL_TAKES_AGAIN", "EXCLUSION"),
    control("a refused renewal counts as an extension", "REFUSAL_COUNTS", "EXCLUSION"),
    control("the deadline counts from the reply", "CLOCK_OF_THE_REPLY", "EXCLUSION"),
    control("nothing is taken off for a slow clock", f"{SLOW} DRIFT=0", "EXCLUSION"),
    control("a purge deletes a living row", "PURGE_OF_THE_LIVING", "EXCLUSION"),
    control("the token is a plain counter", "PLAIN_COUNTER", "TOKENS"),
    control("the token is a plain counter", "PLAIN_COUNTER", "UPDATES"),
    control("check() and no fence", "WITHOUT_FENCE", "UPDATES"),
    control("fenced write without claim", "WITHOUT_CLAIM", "UPDATES"),
    control("claim after the read", "CLAIM_AFTER_READ", "UPDATES"),
    control("claim and fenced write", "", "NOT_FINISHED"),
    control("claim and fenced write", "", "NOT_REFUSED"),
]


@dataclass(frozen=True)
class Result:
    """What the search of a variation has found: how many states, and whether one breaks the promise."""

    variation: Variation
    states: int
    is_broken: bool
    is_complete: bool

    @property
    def is_right(self) -> bool:
        """Whether it is as expected; a search that was not completed shows nothing."""
        return (
            self.is_broken if self.variation.is_control else self.is_complete and not self.is_broken
        )

    @property
    def row(self) -> str:
        """A row of the table."""
        found = "broken" if self.is_broken else "holds"
        mark = "" if self.is_right else " **(unexpected)**"
        return f"| {self.variation.name} | {self.variation.promised} | {found}{mark} | {self.states:,} |"


def searched(variation: Variation, folder: Path) -> Result:
    """Compile and search a variation in *folder*, which gets the steps to a broken promise (lease.pml.trail)."""
    folder.mkdir(parents=True)
    promises = (f"{each}=1" for each in variation.promises)
    macros = [f"-D{each}" for each in (*variation.macros.split(), *promises)]
    commands = (
        ["spin", "-a", *macros, str(MODEL)],
        ["gcc", "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY}", "-o", "pan", "pan.c"],
        ["./pan", "-E", "-m100000"],
    )
    said = ""
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        said = done.stdout
        if done.returncode:
            sys.exit(f"{variation.name}: {' '.join(command)}\n{said}{done.stderr}")
    states = re.search(r"(\d+) states, stored", said)
    is_complete = "Search not completed" not in said and "max search depth too small" not in said
    is_broken = "assertion violated" in said
    return Result(variation, int(states[1]) if states else 0, is_broken, is_complete)


def main() -> int:
    """Print the table; return 1 if a search has not found what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="words of the name of a variation")
    parser.add_argument(
        "--folder", type=Path, help="keep the searches here; `spin -t -p -g` shows the steps"
    )
    arguments = parser.parse_args()
    chosen = [each for each in VARIATIONS if arguments.only in each.name]
    if not chosen:
        parser.error(f"no variation has {arguments.only!r} in its name")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = arguments.folder or Path(temporary)
        searches = (
            pool.submit(searched, each, folder / str(number))
            for number, each in enumerate(chosen, 1)
        )
        print("| Variation | Promise | Result | States |\n|---|---|---|---|")
        results = []
        for search in [*searches]:
            results.append(search.result())
            print(results[-1].row, flush=True)
    return 0 if all(each.is_right for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
