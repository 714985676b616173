"""Takes away from Python what another system has not, and then locks: ``python -m tests.integration.other_system windows work '{"BACKEND": ...}'``.

Libraries are imported before that, as each has a way of its own on each system: what counts is what
this package looks up.
"""

import importlib.util
import json
import os
import pkgutil
import select
import selectors
import signal
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any

#: What Python lacks on a system: prefixes of names by module.
LACKING = {
    "windows": {
        "os": "EX_ WNOHANG fork forkpty register_at_fork getpgrp setpgrp getpgid setpgid getsid setsid getuid geteuid "
        "getgid getegid getgroups killpg posix_spawn wait4 wait3 uname sched_ nice mkfifo pread pwrite sendfile "
        "O_CLOEXEC O_NONBLOCK",
        "time": "CLOCK_ clock_gettime clock_getres clock_settime pthread_getcpuclockid",
        "select": "poll epoll POLL EPOLL",
        "selectors": "EpollSelector PollSelector",
        "signal": "SIGQUIT SIGHUP SIGUSR SIGKILL SIGCHLD SIGPIPE SIGALRM SIGSTOP SIGCONT SIGTSTP SIGXFSZ SIGTT "
        "pthread_ setitimer getitimer sigwait sigtimedwait alarm pause",
        "socket": "MSG_NOSIGNAL MSG_DONTWAIT SOCK_NONBLOCK SOCK_CLOEXEC TCP_USER_TIMEOUT CMSG_ SCM_",
    },
    "macos": {
        "time": "CLOCK_BOOTTIME",
        "select": "epoll EPOLL POLLRDHUP",
        "selectors": "EpollSelector",
        "socket": "TCP_KEEPIDLE TCP_USER_TIMEOUT SOCK_NONBLOCK SOCK_CLOEXEC MSG_NOSIGNAL",
    },
}
LIBRARIES = (
    "asyncio",
    "multiprocessing.queues",
    "subprocess",
    "urllib.request",
    "django.core.management",
    "django.db.backends.postgresql.base",
    "psycopg",
    "redis.asyncio",
)
#: Modules that are not there on Windows.
MODULES = "fcntl", "grp", "pwd", "resource", "termios", "tty", "pty"


PLATFORMS = {"windows": "win32", "macos": "darwin"}
#: What selectors has instead of epoll.
SELECTORS = {"windows": selectors.SelectSelector, "macos": selectors.PollSelector}


def take_away(system: str) -> None:
    """Make this the Python of *system*, as far as names go; this package comes later."""
    vars(selectors)["DefaultSelector"] = SELECTORS[system]
    for name in LIBRARIES:
        importlib.import_module(name)
    # Python 3.14 chooses the kind of loop by the platform at its first use.
    importlib.import_module("asyncio").new_event_loop().close()
    assert "django_distlock" not in sys.modules
    sys.platform = PLATFORMS[system]
    for module in (os, select, selectors, signal, socket, time):
        strip(module, system)
    if (parser := sys.modules.get("redis._parsers.hiredis")) is not None:
        # It has looked once, as it was imported.
        vars(parser)["_HAS_POLL"] = hasattr(select, "poll")
    find = importlib.util.find_spec

    def find_without(name: str, package: str | None = None) -> Any:
        found = find(name, package)
        if found and found.loader and name in LACKING[system]:
            execute = found.loader.exec_module

            def execute_without(module: ModuleType) -> None:
                execute(module)
                strip(module, system)

            loader = found.loader
            found.loader = type(
                "Loader", (), {"create_module": staticmethod(loader.create_module)}
            )()
            found.loader.exec_module = execute_without  # type: ignore[method-assign]
        return found

    importlib.util.find_spec = find_without
    if system == "windows":
        sys.modules |= dict.fromkeys(MODULES)  # type: ignore[arg-type]  # stands for a missing module


def strip(module: ModuleType, system: str) -> None:
    """Delete from *module* what it has not on *system*."""
    lacking = tuple(LACKING[system].get(module.__name__, "").split())
    for name in [each for each in vars(module) if each.startswith(lacking)]:
        delattr(module, name)


def work(*aliases: str) -> None:
    """Take locks of each alias, and import every module of the package except contrib, which needs libraries of others."""
    import django
    from django.conf import settings

    django.setup()
    settings.DISTLOCK = {str(number): json.loads(alias) for number, alias in enumerate(aliases)}
    for using in settings.DISTLOCK:
        work_with(using)
    import django_distlock

    for found in pkgutil.walk_packages(django_distlock.__path__, "django_distlock."):
        if not found.name.startswith("django_distlock.contrib."):
            importlib.import_module(found.name)


def work_with(using: str) -> None:
    """Take locks of this alias in each way, free and held by another thread or task."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    from django_distlock import Lease, lock as lock_of, lock_all
    from django_distlock.signals import lock_extended

    name, lock = f"other-system:{os.getpid()}", partial(lock_of, using=using)
    lease = lock(name, ttl=2).acquire()
    assert lease
    with ThreadPoolExecutor(8) as pool:
        assert pool.submit(lambda: lock(name, timeout=0).acquire()).result() is None
        waiter = pool.submit(lambda: lock(name, timeout=60).acquire())
        renewed = threading.Event()
        lock_extended.connect(lambda **_: renewed.set(), weak=False)
        assert lease.backend.session_bound or renewed.wait(30)
        lease.release()
        heir = waiter.result(60)
        assert heir
        heir.release()
    with lock_all(f"{name}:1", f"{name}:2", using=using) as leases:
        assert all(each.held for each in leases)
    asyncio.run(work_in_tasks(name, using))
    if lease.backend.supports_detach:
        handed = lock(name).acquire()
        assert handed
        Lease.attach(handed.detach()).release()
    assert not lock(name).locked()


async def work_in_tasks(name: str, using: str) -> None:
    import asyncio

    from django_distlock import lock

    async def take() -> None:
        async with lock(name, using=using, timeout=60) as lease:
            await lease.aextend()

    await asyncio.gather(*[take() for _ in range(5)])


def run_locked() -> None:
    import django
    from django.core.management import CommandError, call_command

    django.setup()
    try:
        call_command("run_locked", "x", "true")
    except CommandError as error:
        sys.stdout.write(f"{error}")


def main(system: str, act: str, *arguments: str) -> None:
    take_away(system)
    globals()[act](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
