"""`locks`: makes one backend for each alias of the settings and each process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from . import conf
from .backends.base import BaseLockBackend, memory
from .conf import BackendSettings, read_alias, read_settings
from .engine import handover
from .engine.background import background
from .engine.registry import registry
from .engine.values import State
from .exceptions import DOCS, InvalidLockBackend
from .ground import clock
from .ground.caller import forks
from .ground.mutexes import new_mutex
from .ground.naming import warn

_MUTEX = type(threading.Lock())
#: The backends of this package, with the names that people write in settings by mistake.
BACKENDS = {
    "database.DatabaseBackend": {"postgresql", "postgres", "mysql", "mariadb", "sqlite3", "sqlite"},
    "rowlock.RowLockBackend": {"row"},
    "advisory.AdvisoryBackend": {"advisorylock"},
    "redis.RedisBackend": {"rediscache", "valkey"},
    "redlock.RedlockBackend": set[str](),
    "zookeeper.ZooKeeperBackend": {"kazoo"},
    "etcd.EtcdBackend": {"etcd3"},
    "cache.CacheBackend": {"memcached", "memcachedbackend", "pymemcachecache"},
    "locmem.LocMemBackend": {"memory"},
    "dummy.DummyBackend": set[str](),
}
#: By module of a driver: the extra of this package that installs it.
EXTRAS = {
    "psycopg": "postgres",
    "psycopg2": "postgres",
    "MySQLdb": "mysqlclient",
    "redis": "redis",
    "hiredis": "redis",
    "pymemcache": "memcached",
    "kazoo": "zookeeper",
}
#: Most seconds that the exit of a process waits for the release of held locks.
EXIT_BUDGET = 2.0


class Declared(Protocol):
    """A decorated function or task, with the alias that it uses."""

    title: str
    using: str

    def check_against(self, backend: BaseLockBackend) -> None:
        """Raise NotSupported if *backend* cannot keep this lock."""


#: All decorated functions and tasks that still exist, for `manage.py check`.
declared: WeakSet[Declared] = WeakSet()


class LockHandler:
    """The backends by alias: ``locks["default"]``. Each backend is made at its first use."""

    def __init__(self) -> None:
        self._mutex = new_mutex()
        self._settings: dict[str, Any] | None = None
        self.made: dict[str, BaseLockBackend] = {}
        #: The identity of the running test; None unless Django's tests run.
        self._test: object = None

    def __getitem__(self, alias: str) -> BaseLockBackend:
        """Return the backend of *alias*; InvalidLockBackend if its settings are missing or wrong."""
        forks.notice()
        if "django.test.utils" in sys.modules:
            self._notice_test()
        backend = self.made.get(alias)
        return backend if backend is not None else self._make(alias)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the aliases of the settings."""
        return iter(self._read())

    def close(self) -> None:
        """Close all connections and end all threads; the next use opens and starts them again."""
        for backend in list(self.made.values()):
            backend.close()

    def replace(self, alias: str, backend: BaseLockBackend) -> BaseLockBackend | None:
        """Use *backend* for *alias* from now on; return the one used before, or None if none was made."""
        with self._mutex:
            before = self.made.get(alias)
            self.made[alias] = backend
            return before

    def reset(self) -> None:
        """Close all backends, drop the locks in memory, and read the settings again at the next use."""
        with self._mutex:
            backends, self.made, self._settings = self.made, {}, None
            memory.clear()
        for backend in backends.values():
            backend.leftovers.stop()
            backend.close()

    def end_process(self) -> None:
        """Release all locks, also those just being acquired, and end the sessions, within EXIT_BUDGET seconds."""
        ends = clock.wait_time() + EXIT_BUDGET
        registry.end(EXIT_BUDGET)
        background.drain(ends - clock.wait_time())
        for backend in list(self.made.values()):
            with contextlib.suppress(Exception):
                backend.close_at_exit(max(0.0, ends - clock.wait_time()))

    def forget_parent(self) -> None:
        """Drop all backends in a forked child: connections that the parent opened belong to the parent."""
        backends = list(self.made.values())
        self._mutex, self.made = new_mutex(), {}
        memory.clear()
        for backend in backends:
            backend.abandon_after_fork()

    def _notice_test(self) -> None:
        """At the first lock of each test, drop the locks of the last test and make the backends for tests."""
        test = _running_test() if conf.tests_run() else None
        with self._mutex:
            before, self._test = self._test, test
            # A TestCase that runs again is equal to the one before.
            if test is before or (isinstance(test, str) and test == before):
                return
            for lease in registry.leases() if before is not None else ():
                if lease.held:
                    lease.end(State.LOST, "the test that took it is over")
                    lease.backend.revoke_all([lease.request])
            self.reset()

    def _read(self) -> dict[str, Any]:
        with self._mutex:
            if self._settings is None:
                self._settings = read_settings()
            return self._settings

    def _make(self, alias: str) -> BaseLockBackend:
        with self._mutex:
            if alias not in self.made:
                check_threads()
                if not self.made:
                    _watch_exit_of_child()
                found = self._read()
                if alias not in found:
                    known = ", ".join(map(repr, found)) or "none"
                    raise InvalidLockBackend(f"DISTLOCK has no alias {alias!r}; it has {known}.")
                written = read_alias(alias, found[alias])
                self.made[alias] = make_backend(
                    written if self._test is None else written.in_tests()
                )
            return self.made[alias]


def make_backend(found: BackendSettings) -> BaseLockBackend:
    """Return a new backend for *found*; InvalidLockBackend names the alias and the problem."""
    where = f"DISTLOCK[{found.alias!r}]"
    named = f"{where}: BACKEND {found.backend!r}"
    if "://" in found.backend:  # not shown: it may have a password
        msg = f"{where}: BACKEND is the dotted path of a class; write the URL in place of the dict."
        raise InvalidLockBackend(msg)
    try:
        backend = import_string(found.backend)
    except ImportError as error:
        advice = _missing_driver(error) or _meant(found.backend)
        raise InvalidLockBackend(f"{named} cannot be imported: {error}.{advice}") from error
    if not (isinstance(backend, type) and issubclass(backend, BaseLockBackend)):
        raise InvalidLockBackend(f"{named} is not a lock backend.{_meant(found.backend)}")
    try:
        return backend.for_settings(found)
    except InvalidLockBackend:
        raise
    except (TypeError, ValueError, ImproperlyConfigured) as error:
        text = f"{where}: OPTIONS: {error}{_missing_driver(error)}"
        raise InvalidLockBackend(text) from error


def _missing_driver(error: BaseException | None) -> str:
    """Return a hint on what to install if *error* was caused by a missing driver; else ""."""
    while error is not None:
        driver = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        if driver in EXTRAS:
            return f" Its driver is missing: pip install 'django-distlock[{EXTRAS[driver]}]'."
        error = error.__cause__ or error.__context__
    return ""


def _meant(path: str) -> str:
    """Return a hint with the dotted path of the backend that *path* probably means; "" if there is none."""
    if "." in path and not path.startswith("django"):
        return ""
    words = set(path.lower().split(".")[-2:])
    for known, others in BACKENDS.items():
        if words & {*known.lower().split("."), *others}:
            return f" Use 'django_distlock.backends.{known}'."
    return ""


locks = LockHandler()


def preload() -> None:
    """Import the backends and drivers of all aliases now instead of in the first request; open no connection.

    Call it where a server process begins, such as in wsgi.py or asgi.py; InvalidLockBackend for wrong settings.
    """
    for alias in locks:
        locks[alias]


def _running_test() -> object:
    """Return the identity of the running test: its name in pytest, or its TestCase."""
    # A test of pytest may have started this process, which runs other tests.
    if "_pytest" in sys.modules and (named := os.environ.get("PYTEST_CURRENT_TEST")):
        return named.rpartition(" ")[0]
    return _watch_tests()[0]


@functools.cache
def _watch_tests() -> list[object]:
    """Return a list whose one item is the running TestCase; "first" in the test of the first call, and between tests."""
    running: list[object] = ["first"]
    case = sys.modules["unittest"].TestCase
    run = case.run

    @functools.wraps(run)
    def watched(test: object, *args: Any, **kwargs: Any) -> object:
        outer, running[0] = running[0], test
        try:
            return run(test, *args, **kwargs)
        finally:
            running[0] = outer

    case.run = watched
    return running


def _watch_exit_of_child() -> None:
    """Call end_process() at the exit of a process that does not run atexit.

    Such are a forked child of multiprocessing, and a prefork child of Celery, which skips multiprocessing's hooks too.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        # A priority below 0 runs after the child's own finalizers, and after its own children have ended.
        Finalize(None, locks.end_process, exitpriority=-100)
    if (celery := sys.modules.get("celery.signals")) is not None:
        celery.worker_process_shutdown.connect(
            lambda **_: locks.end_process(), weak=False, dispatch_uid="django_distlock"
        )


def _forget_old_settings(*, setting: str, **_: Any) -> None:
    if setting in {"DISTLOCK", "DATABASES", "CACHES"}:
        aliases = {lease.using for lease in registry.leases() if lease.held}
        in_use = {alias: memory[alias] for alias in aliases & memory.keys()}
        locks.reset()
        memory.update(in_use)


handover.backend_of = locks.__getitem__
setting_changed.connect(_forget_old_settings, dispatch_uid="django_distlock.locks")
forks.in_child(locks.forget_parent)
atexit.register(locks.end_process)


def check_threads() -> None:
    """Raise InvalidLockBackend if locks would hang, and warn once if leases would be extended late."""
    if type(threading.Lock()) is not _MUTEX:
        raise InvalidLockBackend(
            "gevent took the place of threads after django_distlock was imported, and locks would "
            "hang. Patch first of all: gunicorn without --preload, uWSGI with --gevent-early-monkey-patch. "
            f"See {DOCS}howto/with-your-stack.html#stack-gunicorn"
        )
    _warn_of_no_threads(os.getpid())


@functools.cache
def _warn_of_no_threads(pid: int) -> None:
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is not None and not getattr(uwsgi, "has_threads", True):
        warn(
            "uWSGI runs process %s without threads: between two requests no lease is extended or given back. "
            "Start it with --enable-threads.",
            pid,
        )
