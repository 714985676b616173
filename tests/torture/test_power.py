"""The disk whose power is cut: it has what was fsynced, and nothing else."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.torture.power import Disk, LeftOut, own_mounts


def test_what_was_not_fsynced_is_gone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1, initializer=own_mounts) as thread:
        try:
            found = thread.submit(_after_a_cut, tmp_path).result()
        except LeftOut as why:
            pytest.skip(str(why))

    assert found == {"log": b"kept"}


def _after_a_cut(folder: Path) -> dict[str, bytes]:
    with closing(Disk(folder)) as disk:
        with (folder / "log").open("wb", buffering=0) as file:
            file.write(b"kept")
            os.fsync(file.fileno())
            file.write(b" lost")
            (folder / "other").touch()
            disk.cut(random.Random(1))
            with pytest.raises(OSError, match="Input/output error"):
                file.write(b" more")
        disk.mount_again()
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
