"""The disk whose power is cut: it has what was fsynced, and nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.power import Disk, LeftOut


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        found = Disk(tmp_path)
    except LeftOut as why:
        pytest.skip(str(why))
    yield found
    found.close()


def test_what_was_not_fsynced_is_gone(disk: Disk) -> None:
    with (disk.folder / "log").open("wb", buffering=0) as file:
        file.write(b"kept")
        os.fsync(file.fileno())
        file.write(b" lost")
        (disk.folder / "other").touch()
        disk.cut(random.Random(1))
        with pytest.raises(OSError, match="Input/output error"):
            file.write(b" more")

    disk.mount_again()

    assert (disk.folder / "log").read_bytes() == b"kept"
    assert not (disk.folder / "other").exists()
