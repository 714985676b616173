"""A short run: no promise is broken, and what is no lock, or has no fence, is found by the same checker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.pages import ROOT
from tests.fixtures.postgres import PostgreSQL
from tests.torture.arenas import ARENAS, CONTROLS, Make
from tests.torture.checker import Verdict
from tests.torture.history import pack
from tests.torture.run import run, store
from tests.torture.session import torture

pytestmark = [
    pytest.mark.server,
    pytest.mark.caches,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("warm_parents"),
]
SEED = 1


@pytest.fixture(scope="module")
def rows() -> Iterator[PostgreSQL]:
    with store() as server:
        yield server


def test_no_promise_is_broken_while_processes_lines_and_the_server_fail(
    rows: PostgreSQL, tmp_path: Path
) -> None:
    verdict = _tortured("redis", ARENAS["redis"], rows, tmp_path, 6)

    assert verdict.findings == []
    assert verdict.grants
    assert verdict.faults
    assert verdict.written["claimed"]


def test_a_folder_with_the_histories_of_another_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()

    with pytest.raises(SystemExit, match=r"memory has the histories of another run"):
        torture(["memory"], minutes=1, seed=SEED, folder=tmp_path, report=None)


def _tortured(name: str, make: Make, rows: PostgreSQL, folder: Path, seconds: float) -> Verdict:
    there = folder / name
    there.mkdir()
    verdict = run(make, rows, there, seconds=seconds, seed=SEED).verdict
    assert _second_checker_finds_something(there) == bool(verdict.findings)
    return verdict


def _second_checker_finds_something(folder: Path) -> bool:
    file = folder.with_suffix(".jsonl.gz")
    pack(folder, file)
    command = [sys.executable, str(ROOT / "tools" / "check-history"), str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not checked.stderr
    return bool(checked.returncode)


def test_the_checker_finds_that_there_is_no_lock(rows: PostgreSQL, tmp_path: Path) -> None:
    verdict = _tortured("no-lock", CONTROLS["no-lock"], rows, tmp_path, 1.5)

    assert {finding.rule for finding in verdict.findings} == {"exclusion"}
    assert verdict.lost["unfenced"] > 0


def test_the_checker_finds_updates_lost_by_holders_that_were_stopped_without_a_fence(
    rows: PostgreSQL, tmp_path: Path
) -> None:
    # Chance decides whether a stop meets a holder between its reading and its writing.
    runs = (
        _tortured(f"careless{number}", CONTROLS["careless"], rows, tmp_path, 6)
        for number in range(4)
    )
    verdict = next((each for each in runs if each.lost["unfenced"]), None)

    assert verdict, "no update was lost"
    assert {finding.rule for finding in verdict.findings} == {"lost updates"}
