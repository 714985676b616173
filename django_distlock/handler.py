"""`locks`: from settings to one backend per alias and process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from . import conf
from .backends.base import BaseLockBackend
from .conf import BackendSettings, read_alias, read_settings
from .engine import clock
from .engine.background import background
from .engine.caller import forks
from .engine.naming import warn
from .engine.registry import registry
from .exceptions import InvalidLockBackend

_MUTEX = type(threading.Lock())
#: The backends of this package, and what else they are called in settings by mistake.
BACKENDS = {
    "database.DatabaseBackend": {"postgresql", "postgres", "mysql", "mariadb", "sqlite3", "sqlite"},
    "rowlock.RowLockBackend": {"row"},
    "advisory.AdvisoryBackend": {"advisorylock"},
    "redis.RedisBackend": {"rediscache", "valkey"},
    "redlock.RedlockBackend": set[str](),
    "zookeeper.ZooKeeperBackend": {"kazoo"},
    "cache.CacheBackend": {"memcached", "memcachedbackend", "pymemcachecache"},
    "locmem.LocMemBackend": {"memory"},
    "dummy.DummyBackend": set[str](),
}
#: The extra of this package that installs a driver, by the module that is missing.
EXTRAS = {
    "psycopg": "postgres",
    "psycopg2": "postgres",
    "MySQLdb": "mysqlclient",
    "redis": "redis",
    "pymemcache": "memcached",
    "kazoo": "zookeeper",
}
#: Seconds that the exit of a process may spend on giving back what is still held.
EXIT_BUDGET = 2.0


class LockHandler:
    """The backends by alias: ``locks["default"]``. Each is made when it is first asked for."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._settings: dict[str, Any] | None = None
        self.made: dict[str, BaseLockBackend] = {}
        #: What tells the running test from others; None unless Django's tests run.
        self._test: object = None

    def __getitem__(self, alias: str) -> BaseLockBackend:
        """Return the backend of *alias*; InvalidLockBackend if the settings have none, or are wrong."""
        forks.notice()
        if "django.test.utils" in sys.modules:
            self._notice_test()
        backend = self.made.get(alias)
        return backend if backend is not None else self._make(alias)

    def __iter__(self) -> Iterator[str]:
        """Go over the aliases of the settings."""
        return iter(self._read())

    def close(self) -> None:
        """Let go of all connections and threads; they come back when they are needed."""
        for backend in list(self.made.values()):
            backend.close()

    def replace(self, alias: str, backend: BaseLockBackend) -> BaseLockBackend | None:
        """Put *backend* behind *alias*, for tests; return the one that was there, if one was made."""
        with self._mutex:
            before = self.made.get(alias)
            self.made[alias] = backend
            return before

    def reset(self) -> None:
        """Close all, and read the settings anew at the next use."""
        with self._mutex:
            backends, self.made, self._settings = self.made, {}, None
        for backend in backends.values():
            backend.close()

    def end_process(self) -> None:
        """Give back what is held or waited for, and end the sessions: in two seconds at most."""
        ends = clock.wait_time() + EXIT_BUDGET
        registry.release_all(EXIT_BUDGET)
        background.drain(ends - clock.wait_time())
        for backend in list(self.made.values()):
            with contextlib.suppress(Exception):
                backend.say_goodbye(max(0.0, ends - clock.wait_time()))

    def forget_parent(self) -> None:
        """Begin anew in a forked child: what the parent opened is the parent's."""
        backends = list(self.made.values())
        self._mutex, self.made = threading.RLock(), {}
        for backend in backends:
            backend.abandon_after_fork()

    def _notice_test(self) -> None:
        """Begin each test without locks, and have the backends that stand in while tests run."""
        test = _running_test() if conf.tests_run() else None
        with self._mutex:
            before, self._test = self._test, test
            if test == before:
                return
            for lease in registry.leases() if before is not None else ():
                if lease.held:
                    lease.lose("the test that took it is over")
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
    """Return a new backend for *found*; InvalidLockBackend names the alias and what is wrong."""
    where = f"DISTLOCK[{found.alias!r}]"
    named = f"{where}: BACKEND {found.backend!r}"
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
    """Return what to install, if a driver that could not be imported is the cause of *error*."""
    while error is not None:
        driver = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        if driver in EXTRAS:
            return f" Its driver is missing: pip install 'django-distlock[{EXTRAS[driver]}]'."
        error = error.__cause__ or error.__context__
    return ""


def _meant(path: str) -> str:
    """Return the dotted path that *path*, a short name or one of Django's or ours, probably means."""
    if "." in path and not path.startswith("django"):
        return ""
    words = set(path.lower().split(".")[-2:])
    for known, others in BACKENDS.items():
        if words & {*known.lower().split("."), *others}:
            return f" Use 'django_distlock.backends.{known}'."
    return ""


locks = LockHandler()


def _running_test() -> object:
    """Return what tells the running test from others: pytest's name of it, or the TestCase."""
    if named := os.environ.get("PYTEST_CURRENT_TEST"):
        return named.rpartition(" ")[0]
    run = sys.modules["unittest"].TestCase.run.__code__
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - nothing else tells it
    while frame is not None and frame.f_code is not run:
        frame = frame.f_back
    return "none" if frame is None else frame.f_locals["self"]


def _watch_exit_of_child() -> None:
    """Have the end of this process noticed if it is one that skips atexit.

    That is a forked child of multiprocessing, and a prefork child of Celery, which skips even that.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        # Below 0: after what the child itself has asked for, and after its own children have ended.
        Finalize(None, locks.end_process, exitpriority=-100)
    if (celery := sys.modules.get("celery.signals")) is not None:
        celery.worker_process_shutdown.connect(
            lambda **_: locks.end_process(), weak=False, dispatch_uid="django_distlock"
        )


def _forget_old_settings(*, setting: str, **_: Any) -> None:
    if setting in {"DISTLOCK", "DATABASES", "CACHES"}:
        locks.reset()


setting_changed.connect(_forget_old_settings, dispatch_uid="django_distlock.locks")
forks.in_child(locks.forget_parent)
atexit.register(locks.end_process)


def check_threads() -> None:
    """Raise InvalidLockBackend where locks would hang, and warn once where leases are extended late."""
    if type(threading.Lock()) is not _MUTEX:
        raise InvalidLockBackend(
            "gevent or eventlet took the place of threads after django_distlock was imported, and locks would "
            "hang. Patch first of all: gunicorn without --preload, uWSGI with --gevent-early-monkey-patch."
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
