"""DirectoryBackend: an example of a lock backend, which keeps locks in files for all processes of one machine."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from django_distlock.backends import (
    BaseLockBackend,
    Busy,
    Grant,
    Held,
    Holder,
    LockBackendError,
    Release,
    digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from io import TextIOWrapper

    from django_distlock.backends import BackendSettings, Request

RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """OPTIONS of DirectoryBackend. directory: the path of a directory for its files alone."""

    directory: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if not self.directory or not isinstance(self.directory, str | os.PathLike):
            raise ValueError(f"'directory' must be a path, not {self.directory!r}.")


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """The last holding of a lock. Times are seconds of the machine's clock."""

    key: str
    name: str = ""
    owner: str = ""
    holder: str = ""
    token: int = 0
    acquired: float = 0.0
    began: float = 0.0
    ttl: float = 0.0
    #: The last owner that has released the lock.
    released: str = ""

    @property
    def remaining(self) -> float:
        """Seconds until its lease ends; 0 or less if it has ended, or was made before the last boot."""
        passed = _now() - self.began
        return self.ttl - passed if passed >= 0 else 0.0

    @property
    def is_held(self) -> bool:
        return self.remaining > 0

    def is_held_by(self, owner: str) -> bool:
        return self.owner == owner and self.is_held

    def taken_by(self, request: Request) -> Record:
        """Return it with the owner and holder of *request*, for its ttl from now."""
        owner, holder = request.owner, request.holder.to_json()
        return replace(self, owner=owner, holder=holder, began=_now(), ttl=request.ttl)

    def busy(self) -> Busy:
        return Busy(Holder.from_json(self.holder), self.remaining)

    def listed(self) -> Held:
        mark, age = digest(self.owner), _now() - self.acquired
        holder = Holder.from_json(self.holder)
        return Held(self.name, self.key, holder, self.remaining, self.token, mark, age=age)


class DirectoryBackend(BaseLockBackend):
    """Each lock has a folder: its Record, and a file that is locked by who changes the record."""

    options_class = DirectoryOptions
    supports_fencing = True
    supports_listing = True
    supports_detach = True

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._directory = Path(self.options.directory).absolute()
        self.location = "directory", str(self._directory)

    # The four verbs that every backend has.

    def try_acquire(
        self, request: Request, *, queued: bool, left: float | None = 0.0
    ) -> Grant | Busy:
        with self._alone(request.key):
            record = self._read(request.key)
            if record.is_held and record.owner != request.owner:
                return record.busy()
            if not record.is_held:
                token = max(record.token + 1, time.time_ns() // 1000)
                record = replace(record, name=request.name, token=token, acquired=_now())
            self._write(record.taken_by(request))
            return Grant(record.token)

    def release(self, request: Request) -> Release:
        with self._alone(request.key):
            record = self._read(request.key)
            if record.is_held_by(request.owner):
                self._write(replace(record, ttl=0.0, released=request.owner))
                return Release.RELEASED
            if record.released == request.owner:
                return Release.RELEASED
            return Release.TAKEN if record.is_held else Release.GONE

    def extend(self, requests: Sequence[Request]) -> Sequence[bool]:
        return [self._extend(request) for request in requests]

    def _extend(self, request: Request) -> bool:
        with self._alone(request.key):
            record = self._read(request.key)
            is_ours = record.is_held_by(request.owner)
            if is_ours and record.remaining < request.ttl:
                self._write(replace(record, began=_now(), ttl=request.ttl))
            return is_ours

    def probe(self, request: Request) -> Busy | None:
        with self._errors():
            record = self._read(request.key)
        return record.busy() if record.is_held else None

    # supports_detach: another owner takes the lease over.

    def take_over(self, request: Request, former: str) -> bool:
        with self._alone(request.key):
            record = self._read(request.key)
            if record.is_held_by(former):
                record = record.taken_by(request)
                self._write(record)
            return record.is_held_by(request.owner)

    # supports_listing: for operators.

    def held(self, key: str | None = None) -> Iterable[Held]:
        paths = [self._path(key)] if key else self._directory.glob(f"*/{RECORD}")
        with self._errors():
            records = [record for path in paths for record in _load(path)]
        return [each.listed() for each in records if each.is_held and self.keeps(each.key)]

    def end_holding(self, key: str, owner_digest: str) -> bool:
        with self._alone(key):
            record = self._read(key)
            is_shown = record.is_held and digest(record.owner) == owner_digest
            if is_shown:
                self._write(replace(record, ttl=0.0))
            return is_shown

    # The files.

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Keep all other threads and processes from changing the record of *key* during the block."""
        folder = self._path(key).parent
        with self._errors():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with folder.joinpath("mutex").open("a") as mutex:
                _lock(mutex)
                try:
                    yield
                finally:
                    # Closing does not unlock it: a child that was forked meanwhile has it open.
                    fcntl.flock(mutex, fcntl.LOCK_UN)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise an error of the file system as one of django_distlock: after it, nothing has changed."""
        try:
            yield
        except OSError as error:
            raise LockBackendError(self.alias, str(error)) from error

    def _path(self, key: str) -> Path:
        return self._directory / sha256(key.encode()).hexdigest() / RECORD

    def _read(self, key: str) -> Record:
        return next(_load(self._path(key)), Record(key))

    def _write(self, record: Record) -> None:
        """Replace the record in one step: whenever this process is killed, it is the old or the new one."""
        path = self._path(record.key)
        new = path.with_name("new.json")
        new.write_text(json.dumps(asdict(record)))
        new.replace(path)


def _load(path: Path) -> Iterator[Record]:
    with suppress(FileNotFoundError):
        yield Record(**json.loads(path.read_text()))


def _lock(mutex: TextIOWrapper) -> None:
    """Lock the file, within a second: who has locked it has been stopped, or is interrupted by this call."""
    for _ in range(1000):
        with suppress(BlockingIOError):
            return fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.001)
    raise TimeoutError(f"{mutex.name} has been locked for a second")


def _now() -> float:
    # One clock for all processes of the machine, which nobody can set.
    return time.clock_gettime(time.CLOCK_MONOTONIC)
