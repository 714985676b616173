"""What the processes of a run do: threads and tasks that take locks and update rows, and an operator.

They are run as children of the tests: see tests/fixtures/processes.py. A worker is told "end" and
nothing else, for it may be killed or stopped at any moment.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.cache import caches
from django.core.management import CommandError, call_command
from django.db import connections

from django_distlock import (
    Lease,
    Lock,
    LockBackendError,
    LockDeadlock,
    LockError,
    LockNotAcquired,
    StaleFencingToken,
    __version__,
    force_release,
    lock,
    locks,
)
from django_distlock.ground import clock
from tests.fixtures.child import hear, say
from tests.torture import rows
from tests.torture.history import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The alias of DISTLOCK that is tried.
USING = "tried"
#: Timeouts of the attempts, in seconds.
TIMEOUTS = (0.0, 0.3, 2.0, 6.0)
#: Seconds after which unused records are purged: more than the steps of a server's clock, see the guarantees page.
OLD = 5
#: Seconds between two checks of a holder who works for long.
LOOK = 0.03
#: Seconds between two samples of what the process uses.
SAMPLE = 0.5


def configure(config: dict[str, Any]) -> None:
    """Have the aliases of *config* in the settings of this process."""
    settings.DISTLOCK = {USING: config["alias"]}
    for alias, database in connections.configure_settings(
        {"default": {}, **config["databases"]}
    ).items():
        if alias in config["databases"]:
            connections.settings[alias] = database
    for place in (settings.CACHES, caches.settings):
        place.update(config["caches"])


@dataclass(frozen=True, slots=True)
class Wish:
    """One attempt that a worker makes: which lock, and how."""

    lock: str
    timeout: float
    shared: bool = False
    limit: int | None = None

    @property
    def writes(self) -> bool:
        """Whether its holder updates rows."""
        return not self.shared and self.limit is None


class Worker:
    """The callers of one process; *config* says what they do, see Arena.config()."""

    def __init__(self, config: dict[str, Any], history: Writer, seed: int) -> None:
        self.config = config
        self.history = history
        self.over = threading.Event()
        self._random = random.Random(seed)
        self._numbers = count(1)

    def run(self) -> None:
        """Work until told to end."""
        threads = [
            *(threading.Thread(target=self._in_thread) for _ in range(self.config["threads"])),
            threading.Thread(target=lambda: asyncio.run(self._in_tasks())),
            threading.Thread(target=self._sample),
        ]
        self.history.write("began", pid=os.getpid(), version=__version__)
        for thread in threads:
            thread.start()
        hear()
        self.over.set()
        for thread in threads:
            thread.join()

    def _in_thread(self) -> None:
        while not self.over.is_set():
            wish = self._wish()
            with self._asking(wish) as id_:
                lease = self._lock(wish).acquire()
                self._note_answer(id_, lease)
                if lease:
                    self._hold(id_, wish, lease)
                    self._leave(id_, lease.release)
            self.over.wait(self._pause())

    async def _in_tasks(self) -> None:
        await asyncio.gather(*(self._in_task() for _ in range(self.config["tasks"])))

    async def _in_task(self) -> None:
        while not self.over.is_set():
            wish = self._wish()
            with self._asking(wish) as id_:
                lease = await self._acquired_in_task(id_, wish)
                if lease:
                    await asyncio.to_thread(self._hold, id_, wish, lease)
                    await self._aleave(id_, lease)
            await asyncio.sleep(self._pause())

    async def _acquired_in_task(self, id_: str, wish: Wish) -> Lease | None:
        """Return the lease, or None; some attempts are cancelled at a moment of chance."""
        attempt = asyncio.ensure_future(self._lock(wish).aacquire())
        if self._random.random() < 0.1:
            await asyncio.wait([attempt], timeout=self._random.random() * 0.01)
            attempt.cancel()
        try:
            lease = await attempt
        except asyncio.CancelledError:
            self.history.write("cancelled", id=id_)
            return None
        self._note_answer(id_, lease)
        return lease

    def _wish(self) -> Wish:
        names, timeout = self.config["locks"], self._random.choice(TIMEOUTS)
        name = self._random.choice(names)
        reads = name in self.config["shared"] and self._random.random() < 0.6
        return Wish(name, timeout, reads, self.config["limits"].get(name))

    def _lock(self, wish: Wish) -> Lock:
        return lock(
            wish.lock,
            using=USING,
            timeout=wish.timeout,
            ttl=self.config["ttl"],
            shared=wish.shared,
            limit=wish.limit,
            reentrant=False,
        )

    @contextmanager
    def _asking(self, wish: Wish) -> Iterator[str]:
        id_ = f"{self.history.worker}-{next(self._numbers)}"
        self.history.write("asked", id=id_, **asdict(wish))
        try:
            yield id_
        except (LockBackendError, LockDeadlock) as error:
            self.history.write("failed", id=id_, error=type(error).__name__, text=str(error)[:300])
        except LockNotAcquired:
            self.history.write("refused", id=id_)
        except LockError as error:
            # Lost before it could be returned.
            self.history.write("failed", id=id_, error=type(error).__name__, text=str(error)[:300])
        except Exception as error:  # noqa: BLE001 - of a driver, or our own mistake: the checker reports it
            text = "".join(traceback.format_exception(error))
            self.history.write("broke", id=id_, error=type(error).__name__, text=text[-3000:])

    def _note_answer(self, id_: str, lease: Lease | None) -> None:
        if lease is None:
            self.history.write("refused", id=id_)
        else:
            self.history.write("got", id=id_, token=lease.fencing_token, place=lease.place)

    def _hold(self, id_: str, wish: Wish, lease: Lease) -> None:
        """Do the work that the lock is held for, in this thread; a lost lease or a refused write ends it."""
        try:
            self._check(id_, lease)
            seconds = self._seconds_of_work()
            watched = partial(self._work, id_, lease, seconds)
            if not wish.writes:
                watched()
            else:
                sleep = partial(time.sleep, seconds)
                work = sleep if self.config["careless"] else watched
                self._write(id_, "unfenced", partial(rows.raise_unfenced, wish.lock, work))
                if self.config["fencing"]:
                    claimed = partial(rows.raise_claimed, wish.lock, lease, sleep)
                    self._write(id_, "claimed", claimed)
            self._check(id_, lease)
        except StaleFencingToken:
            self.history.write("stale", id=id_)
        except LockError as error:
            self.history.write("lost", id=id_, reason=lease.reason, error=type(error).__name__)

    def _seconds_of_work(self) -> float:
        """Return how long a holder takes between reading and writing: now and then so long that it is renewed, or stopped meanwhile."""
        if self._random.random() < 0.03:
            return float(self.config["ttl"]) * self._random.uniform(0.3, 2.5)
        return float(self.config["work"])

    def _work(self, id_: str, lease: Lease, seconds: float) -> None:
        """Take so many *seconds*, and look all the time whether the lock is still ours."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, LOOK))
            self._check(id_, lease)

    def _write(self, id_: str, row: str, write: Callable[[], int]) -> None:
        before = clock.lease_time()
        value = write()
        self.history.write("wrote", id=id_, row=row, began=before, value=value)

    def _check(self, id_: str, lease: Lease) -> None:
        before = clock.lease_time()
        lease.check()
        self.history.write("checked", at=before, id=id_)

    def _leave(self, id_: str, release: Callable[[], object]) -> None:
        with self._leaving(id_):
            release()

    async def _aleave(self, id_: str, lease: Lease) -> None:
        with self._leaving(id_):
            await lease.arelease()

    @contextmanager
    def _leaving(self, id_: str) -> Iterator[None]:
        how = "released"
        try:
            yield
        except LockError as error:
            how = type(error).__name__
        self.history.write("left", id=id_, how=how)

    def _pause(self) -> float:
        return self._random.random() * float(self.config["pause"])

    def _sample(self) -> None:
        while not self.over.wait(SAMPLE):
            self.history.write("uses", **usage())


def usage() -> dict[str, int]:
    """Return how many descriptors and threads this process has, and its memory in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", maxsplit=1) for line in lines if ":" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - nothing but its length
        "threads": int(status["Threads"]),
        "memory": int(status["VmRSS"].split()[0]),
    }


def work(config: dict[str, Any], folder: str, name: str, seed: int) -> None:
    """Take locks and update rows until told to end."""
    configure(config)
    history = Writer(Path(folder), name)
    Worker(config, history, seed).run()
    locks.close()
    history.write("ended")


def operate(config: dict[str, Any], folder: str) -> None:
    """Do what an operator is asked for: "purge", "force NAME", "probe NAME ...", "rows NAME ...", "end"."""
    configure(config)
    history = Writer(Path(folder), "operator")
    for alias in (rows.STORE, *config["migrated"]):
        # Not all apps: a migration of django-tasks-db updates a table of "default", where there is none.
        for app in ("django_distlock", "testproject"):
            call_command("migrate", app, database=alias, verbosity=0)
    for name in config["names"]:
        rows.make(name)
    connections.close_all()
    say("ready")
    while True:
        word, *names = hear().split()
        if word == "end":
            return
        try:
            said = _DUTIES[word](config, history, names)
        except Exception as error:  # noqa: BLE001 - as above
            said = "".join(traceback.format_exception(error))[-3000:]
            history.write("broke", id=word, text=said)
        say("done", said=said)


def _purge(config: dict[str, Any], history: Writer, names: list[str]) -> str:
    # The server may be away.
    with suppress(CommandError):
        call_command("purge_stale_locks", f"--using={USING}", f"--older-than={OLD}s", verbosity=0)
    return "purged"


def _force(config: dict[str, Any], history: Writer, names: list[str]) -> str:
    try:
        return str(sum(force_release(name, USING) for name in names))
    except LockBackendError as error:
        return str(error)


def _probe(config: dict[str, Any], history: Writer, names: list[str]) -> str:
    """Acquire each lock, now that nobody wants it any more."""
    for name in names:
        limit = config["limits"].get(name)
        free = lock(
            name,
            using=USING,
            timeout=config["free_within"],
            ttl=config["ttl"],
            limit=limit,
            reentrant=False,
        )
        try:
            taken = [free.acquire() for _ in range(limit or 1)]
        except LockError as error:
            history.write("stuck", lock=name, why=f"{type(error).__name__}: {error}")
            continue
        if None in taken:
            history.write("stuck", lock=name, why=f"busy for {config['free_within']:g} s")
        for lease in taken:
            if lease:
                lease.release()
    return "probed"


def _count_rows(config: dict[str, Any], history: Writer, names: list[str]) -> str:
    for name in names:
        for kind, (receipts, counted) in rows.counts(name).items():
            history.write("row", lock=name, row=kind, receipts=receipts, counted=counted)
    return "counted"


_DUTIES: dict[str, Callable[[dict[str, Any], Writer, list[str]], str]] = {
    "purge": _purge,
    "force": _force,
    "probe": _probe,
    "rows": _count_rows,
}
