"""Runs the stacks that the command line names, or all: two side by side, each with servers of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fixtures.environment import SERVER_PORTS, free_port, sqlite_path

from .profiles import BY_NAME, ELSEWHERE, Stack

FOLDER = Path(__file__).parent


def run(stack: Stack) -> int:
    """Run the acts of *stack*, print what pytest says, and return its exit status."""
    began = time.monotonic()
    acts = [str(ELSEWHERE.get(act, FOLDER / f"test_{act}.py")) for act in stack.acts]
    # Chosen here: an agent may read Django's settings before pytest has loaded its plugins.
    ports = {name: str(free_port()) for name in SERVER_PORTS}
    environment = {
        **os.environ,
        **ports,
        "DISTLOCK_SQLITE_PATH": sqlite_path(),
        **stack.environment,
        "DISTLOCK_STACK": stack.name,
        "DJANGO_SETTINGS_MODULE": "tests.stacks.settings",
    }
    command = [
        *stack.command,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--color=no",
        "--durations=5",
        *acts,
    ]
    done = subprocess.run(
        # Packages warn of each other; and Django's settings are those of the environment.
        [*command, "-o", "filterwarnings=", "-o", "DJANGO_SETTINGS_MODULE=tests.stacks.settings"],
        cwd=FOLDER.parents[1],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    print(f"\n=== stack {stack.name}, {seconds:.0f} s\n{done.stdout}", flush=True)  # noqa: T201
    return done.returncode


def main(names: list[str]) -> int:
    """Run the stacks with these *names*, or all, and return how many failed."""
    stacks = [BY_NAME[name] for name in names or BY_NAME]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        statuses = [*pool.map(run, stacks)]
    failed = [stack.name for stack, status in zip(stacks, statuses, strict=True) if status]
    if failed:
        print(f"Failed stacks: {' '.join(failed)}")  # noqa: T201
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
