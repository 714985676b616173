"""Windows and macOS, for development: a Python that lacks what it lacks there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.contract.profiles import BY_NAME
from tests.fixtures.pages import ROOT

#: Profiles that one process takes locks of.
TOGETHER = ["locmem", "sqlite"], ["postgres", "postgres-rowlock"], ["mariadb"], ["redis"]


def run(*arguments: str) -> str:
    """Return what tests/integration/other_system.py prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.other_system", *arguments],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("system", ["windows", "macos"])
@pytest.mark.parametrize("server", [name for name, *_ in TOGETHER])
def test_locks_work_there_and_the_whole_package_can_be_imported(
    request: pytest.FixtureRequest, server: str, system: str
) -> None:
    [names] = [names for names in TOGETHER if names[0] == server]
    for name in names:
        for fixture in BY_NAME[name].fixtures:
            request.getfixturevalue(fixture)

    assert run(system, "work", *(json.dumps(BY_NAME[name].settings) for name in names)) == ""


def test_run_locked_says_that_it_needs_posix() -> None:
    assert run("windows", "run_locked").startswith("run_locked needs a POSIX system")
