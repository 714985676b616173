"""``manage.py run_locked NAME -- COMMAND``: a cron job that runs on one machine at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from django_distlock import InvalidLockBackend, LockError, lock
from django_distlock.management import launch
from django_distlock.management.base import (
    BUSY,
    LockCommand,
    add_lock,
    command_error,
    duration,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable
    from types import FrameType

    from django_distlock import Lease

#: Signals that a terminal sends itself.
FROM_TERMINAL = signal.SIGINT, signal.SIGQUIT
#: Signals that are passed on to the command.
PASSED_ON = (*FROM_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Command(LockCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "Run a command while holding a lock, so that of many machines one runs it at a time. "
            "Signals are passed on to it; it is ended if the lock is lost. Exit codes: the command's "
            "own (128 + N after signal N, 127 if there is no such command), 75 somebody else has the "
            "lock, 69 no lock server answers, 76 the lock was lost while the command ran, 2 wrong arguments."
        )
        add_lock(parser)
        text = _("what to run, after --")
        parser.add_argument("command", nargs="+", metavar="COMMAND", help=text)
        add_time = partial(parser.add_argument, type=duration, metavar="TIME")
        text = _(
            "how long to wait for the lock: seconds, or a number with s, m, h, d or w "
            "(default: %(default)s, try once)"
        )
        add_time("--timeout", default="0", help=text)
        text = _(
            "how long the lock outlives this process if it is killed (default: TTL of the alias)"
        )
        add_time("--ttl", help=text)
        text = _(
            "keep the lock for at least so long, even if the command ends sooner: "
            "more than the clocks of the machines differ (default: %(default)s)"
        )
        add_time("--min-hold", default="0", help=text)
        text = _(
            "after the lock was lost, kill the command so long after SIGTERM (default: %(default)s)"
        )
        add_time("--grace", default="10", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        words = "using", "timeout", "ttl", "min_hold"
        terms = {word: options[word] for word in words if options[word] is not None}
        program = Path(options["command"][0]).name
        try:
            # Only its name: arguments may be secret.
            with lock(options["name"], **terms, purpose=f"run_locked {program}") as lease:
                code = run(options["command"], lease, options["grace"])
        except (InvalidLockBackend, LockError, ValueError) as error:
            failed = command_error(error)
            if failed.returncode == BUSY and not options["verbosity"]:
                sys.exit(BUSY)
            raise failed from error
        if code:
            sys.exit(code)


def run(command: list[str], lease: Lease, grace: float) -> int:
    """Return the exit code of *command*, as a shell would tell it; it is ended if *lease* is lost."""
    environment = {**os.environ, "DISTLOCK_NAME": lease.name}
    if lease.fencing_token is not None:
        environment["DISTLOCK_FENCING_TOKEN"] = str(lease.fencing_token)
    program = [sys.executable, "-I", launch.__file__, str(os.getpid()), *command]
    # A terminal sends its signals to the group in its foreground: the command must stay in it. Elsewhere
    # it gets a group of its own, so that signals reach its children, too.
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    early: list[int] = []
    send: Callable[[int], object] = early.append

    def pass_on(number: int, _: FrameType | None) -> None:
        if not (has_terminal and number in FROM_TERMINAL):
            send(number)

    # Signals that nohup ignores stay ignored, also by the command.
    ours = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in ours}
    try:
        child = subprocess.Popen(  # noqa: S603 - no shell
            program, env=environment, process_group=None if has_terminal else 0
        )
        send = partial(_signal, os.kill if has_terminal else os.killpg, child.pid)
        for number in early:
            send(number)
        kill = threading.Timer(grace, send, [signal.SIGKILL])

        def end(_: str) -> None:
            send(signal.SIGTERM)
            kill.start()

        lease.on_lost(end)
        # Python handles a signal that comes just before a wait begins once the wait is over: no long one here.
        waiter = threading.Thread(target=child.wait, daemon=True)
        waiter.start()
        while waiter.is_alive():
            waiter.join(0.25)
        code = child.wait()
        kill.cancel()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _signal(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        kill(pid, number)
