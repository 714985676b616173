"""Disks whose power can be cut: what was not fsynced is gone."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.fixtures.eventually import eventually
from tests.fixtures.folders import private_folder
from tests.fixtures.launch import IS_LINUX, give_to_nobody
from tests.fixtures.postgres import PostgreSQL
from tests.fixtures.redis import Redis
from tests.fixtures.servers import Server

#: ioctl(2) of ext4: stop at once, and write nothing more, not even the journal.
SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = struct.pack("I", 2)
#: unshare(2)
CLONE_NEWNS = 0x20000
#: sync_file_range(2): start to write, and wait until it is written.
WRITE_AND_WAIT = 2 | 4
SIZE = 512 * 1024 * 1024


class LeftOut(Exception):
    """An arena cannot be had here; the text says why."""


def own_mounts() -> None:
    """Keep what is mounted from other processes, which could hold on to it; it goes with this process, however that ends."""
    if IS_LINUX and ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        _run("mount", "--make-rprivate", "/")


class Disk:
    """An ext4 file system in a file, mounted on *folder*."""

    def __init__(self, folder: Path) -> None:
        if not IS_LINUX or os.getuid() != 0:
            raise LeftOut("only root on Linux can mount a disk and cut its power")
        self.folder = folder
        self._home = private_folder("disk")
        self._image = self._home / "image"
        self._image.touch()
        os.truncate(self._image, SIZE)
        _run("mkfs.ext4", "-q", self._image)
        try:
            self._mount()
        except subprocess.CalledProcessError as error:
            shutil.rmtree(self._home)
            raise LeftOut(f"no disk can be mounted here: {error.stderr.decode()}") from None
        give_to_nobody(folder)

    def cut(self, chance: random.Random) -> None:
        """Cut the power. The kernel may have written any file by then: it has written some."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        for path in filter(lambda _: chance.random() < 0.5, self.folder.rglob("*")):
            with suppress(FileNotFoundError):
                _write_back(path)
        fcntl.ioctl(descriptor, SHUTDOWN, NO_LOG_FLUSH)
        os.close(descriptor)

    def mount_again(self) -> None:
        """Mount what is left, once all processes that used the disk are dead."""
        self._unmount()
        self._mount()

    def sync(self) -> None:
        """Write everything."""
        _run("sync", "--file-system", self.folder)

    def close(self) -> None:
        """Remove the disk with all that is on it."""
        self._unmount()
        shutil.rmtree(self._home)

    def _mount(self) -> None:
        # Nothing is written without need: no journal for minutes, no data before a rename.
        _run("mount", "-o", "loop,commit=300,noauto_da_alloc", self._image, self.folder)

    def _unmount(self) -> None:
        def unmounted() -> bool:
            with suppress(subprocess.CalledProcessError):
                _run("umount", self.folder)
            return not self.folder.is_mount()

        eventually(unmounted, what=f"nobody uses {self.folder}")


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _write_back(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            range_ = ctypes.c_int64(0), ctypes.c_int64(0)
            ctypes.CDLL(None).sync_file_range(file.fileno(), *range_, WRITE_AND_WAIT)


class Powered(Server):
    """A server whose folder is on such a disk."""

    disk: Disk | None = None

    def prepare(self) -> None:
        """See Server.prepare()."""
        self.disk = Disk(self.folder)
        super().prepare()

    def after_first_start(self) -> None:
        """See Server.after_first_start()."""
        super().after_first_start()
        assert self.disk is not None
        self.disk.sync()

    def lose_power(self, chance: random.Random) -> None:
        """Cut the power of the disk and of the server, and start again with what is left."""
        assert self.disk is not None
        self.disk.cut(chance)
        self.kill()
        self.disk.mount_again()
        self.start()

    def close(self) -> None:
        """See Server.close()."""
        if self.process is not None:
            self.kill()
        if self.disk is not None:
            self.disk.close()
        super().close()


class PoweredPostgreSQL(Powered, PostgreSQL):
    """PostgreSQL on such a disk."""


class PoweredRedis(Powered, Redis):
    """Redis on such a disk."""
