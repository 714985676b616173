"""Processes of the tests where there is no /proc, as on macOS: what ps tells is the same."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures import launch, processes
from tests.fixtures.eventually import eventually
from tests.fixtures.processes import Spawn

pytestmark = pytest.mark.skipif(not shutil.which("ps"), reason="ps is not installed")


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[Any]]:
    """A shell with a child that sleeps."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    eventually(lambda: len(launch.family(process.pid)) == 2)
    yield process
    launch.kill_family(process.pid)
    process.wait()


def test_ps_knows_the_family_and_how_it_is(
    parent: subprocess.Popen[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = launch.family(parent.pid)
    launch.send(known[1], signal.SIGSTOP)
    eventually(lambda: launch.state(known[1]) == "T")

    monkeypatch.setattr(launch, "IS_LINUX", False)

    assert launch.family(parent.pid) == known
    assert [launch.state(pid) for pid in known] == ["S", "T"]
    launch.kill_family(parent.pid)
    assert launch.state(known[0]) == "Z"
    assert parent.wait() == -signal.SIGKILL
    assert launch.state(known[0]) == "X"


def test_a_child_needs_nothing_of_linux(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "IS_LINUX", False)
    monkeypatch.setattr(processes, "IS_LINUX", False)

    child = spawn("os:getppid")

    assert isinstance(child.process, subprocess.Popen)
    assert child.result()
