"""Wall clocks that are wrong: of a server, or of a worker."""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

from tests.fixtures.folders import private_folder
from tests.fixtures.launch import give_to_nobody
from tests.fixtures.memcached import Memcached
from tests.fixtures.postgres import PostgreSQL
from tests.fixtures.redis import Redis
from tests.fixtures.servers import Server
from tests.fixtures.zookeeper import Member

SOURCE = Path(__file__).with_name("clock.c")


class WallClock:
    """The file that says by how much a wall clock is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0.0)
        give_to_nobody(path)

    def set(self, seconds: float) -> None:
        """Have the clock so many *seconds* ahead of that of the machine."""
        value = struct.pack("l", int(seconds * 1e9))
        if not self._path.exists():
            self._path.write_bytes(value)
        with self._path.open("r+b") as file:
            file.write(value)

    @property
    def environment(self) -> dict[str, str]:
        """What a process must have in its environment to go by this clock."""
        return {"LD_PRELOAD": str(_library()), "DISTLOCK_CLOCK": str(self._path)}


@cache
def _library() -> Path:
    folder = private_folder("clock")
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "clock.so"
    compiler = shutil.which("cc")
    assert compiler, "there is no C compiler: install Debian's gcc"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    library.chmod(0o755)
    return library


class HasClock(Server):
    """A server with a wall clock of its own."""

    clock: WallClock

    def prepare(self) -> None:
        """See Server.prepare()."""
        self.clock = WallClock(self.folder / "clock")
        super().prepare()

    def command(self) -> list[str]:
        """See Server.command()."""
        words = [f"{name}={value}" for name, value in self.clock.environment.items()]
        command = super().command()  # type: ignore[safe-super]  # of the server that this is mixed into
        return [self.binary("env"), *words, *command]


class ClockedPostgreSQL(HasClock, PostgreSQL):
    """PostgreSQL with a wall clock of its own."""


class ClockedRedis(HasClock, Redis):
    """Redis with a wall clock of its own."""


class ClockedMemcached(HasClock, Memcached):
    """memcached with a wall clock of its own."""


class ClockedMember(HasClock, Member):
    """A server of ZooKeeper with a wall clock of its own."""


def worker_clock(folder: Path, name: str) -> WallClock:
    """Return a clock for a worker; its file is in *folder*."""
    return WallClock(folder / f"{name}.{os.getpid()}.clock")
