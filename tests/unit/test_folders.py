"""Nothing of a run stays on the disk for ever."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.fixtures.folders import private_folder, remove_orphans


def test_only_what_the_dead_have_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = private_folder("ours")
    orphan = tmp_path / "distlock-999999999-server-x"
    orphan.mkdir()
    (orphan / "data").touch()
    other = tmp_path / "distlock-of-somebody-else"
    other.mkdir()

    remove_orphans()

    assert ours.name.startswith(f"distlock-{os.getpid()}-ours-")
    assert sorted(tmp_path.iterdir()) == sorted([ours, other])
