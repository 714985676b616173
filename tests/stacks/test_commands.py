"""The commands, as a shell runs them, in processes that an agent watches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .profiles import ALIASES
from .settings import STACK

ROOT = Path(__file__).parents[2]


def manage(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run manage.py under what the stack puts before its interpreter."""
    command = [*STACK.command, sys.executable, "-m", "django", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_locks_work_on_every_alias(request: pytest.FixtureRequest) -> None:
    for fixture in {ALIASES[alias] for alias in STACK.aliases}:
        request.getfixturevalue(fixture)

    done = manage("check_locks")

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_runs_under_its_lock() -> None:
    done = manage("run_locked", "stack", "--", sys.executable, "-c", "raise SystemExit(3)")

    assert done.returncode == 3, done.stdout + done.stderr


def test_pods_migrate_one_after_the_other() -> None:
    pods = [
        subprocess.Popen(
            [*STACK.command, sys.executable, "-m", "django", "migrate_locked"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]

    for pod in pods:
        said, _ = pod.communicate(timeout=60)
        assert pod.returncode == 0, said
