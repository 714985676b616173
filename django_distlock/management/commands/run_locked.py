"""``manage.py run_locked NAME -- COMMAND``: a cron job, or a daemon, that runs on one machine at a time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import PARSER
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.utils.translation import gettext as _

from django_distlock import InvalidLockBackend, LockError, LockNotHeld, lock, locks
from django_distlock.engine.waiting import Wait
from django_distlock.leading import LONGEST_PAUSE
from django_distlock.management import supervisor
from django_distlock.management.base import (
    BUSY,
    LOST,
    NO_SERVER,
    WRONG_ARGUMENTS,
    LockCommand,
    add_lock,
    command_error,
    duration,
    patience,
)
from django_distlock.management.supervisor import (
    END,
    EXTENDED,
    FROM_TERMINAL,
    PASSED_ON,
    USER_DEFINED,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    from django_distlock import Lease

    Handlers = dict[signal.Signals, Any]


class Command(LockCommand):
    #: How many words the command line has after the first "--".
    _after_dashes = 0

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.description = _(
            "Run a command while holding a lock, so that of many machines one runs it at a time. "
            "Signals are passed on to it; it is ended if the lock is lost. Exit codes: the command's "
            "own (128 + N after signal N, 127 if there is no such command, 126 if it cannot be run), 75 "
            "somebody else has the lock, 69 no lock server answers, 76 the lock was lost or --max-hold "
            "was over while the command ran, 2 wrong arguments."
        )
        add_lock(parser)
        text = _("what to run, after --")
        # Not "+": Python 3.11 then drops a "--" of the command, as in "kubectl exec pod -- ls".
        parser.add_argument("command", nargs=PARSER, metavar="COMMAND", help=text)
        add_time = partial(parser.add_argument, type=duration, metavar="TIME")
        text = _(
            "how long to wait for the lock: seconds, a number with s, m, h, d or w, or forever "
            "(default: %(default)s, try once)"
        )
        parser.add_argument("--timeout", type=patience, default="0", metavar="TIME", help=text)
        text = _(
            "if the lock is lost, or no lock server answers, begin again instead of ending: "
            "for daemons, with --timeout forever"
        )
        parser.add_argument("--restart", action="store_true", help=text)
        text = _("how many may run it at the same time (default: one)")
        parser.add_argument("--limit", type=int, metavar="NUMBER", help=text)
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
            "end a command that takes so long: the lock is held no longer, and SIGTERM comes --grace earlier"
        )
        add_time("--max-hold", help=text)
        text = _(
            "when the command is to end, kill it, and what it has started, so long after SIGTERM "
            "(default: %(default)s)"
        )
        add_time("--grace", default="10", help=text)

    def run_from_argv(self, argv: list[str]) -> None:
        if "--" in argv:
            self._after_dashes = len(argv) - argv.index("--") - 1
        super().run_from_argv(argv)

    def handle(self, *args: Any, **options: Any) -> None:
        options["command"] = _without_dashes(options["command"])
        # Without a name before "--", argparse takes the first word after it for the name.
        has_name = len(options["command"]) >= self._after_dashes
        if problem := _problem(options, has_name=has_name):
            raise CommandError(problem, returncode=WRONG_ARGUMENTS)
        pauses = Wait(None)
        #: The signals received that mean to end the command.
        ended_by: list[int] = []
        code: int | None = None
        with _signals_heeded():
            while code is None:
                try:
                    code = self._run_once(ended_by, options)
                    if code is None and (ended_by or not options["restart"]):
                        code = LOST
                except CommandError as failed:
                    is_to_restart = options["restart"] and failed.returncode in {LOST, NO_SERVER}
                    if ended_by or not is_to_restart:
                        raise
                    self._warn(str(failed), options)
                if code is None:
                    time.sleep(pauses.next_pause(longest=LONGEST_PAUSE))
        if code:
            sys.exit(code)

    def _run_once(self, ended_by: list[int], options: dict[str, Any]) -> int | None:
        """Run the command under the lock, and return the result of run(); CommandError if the lock is lost or not acquired."""
        words = "using", "ttl", "limit", "min_hold", "max_hold"
        terms = {word: options[word] for word in words if options[word] is not None}
        command, grace, longest = options["command"], options["grace"], options["max_hold"]
        longest = None if longest is None else longest - grace
        # Only the command's name, because arguments may be secret.
        terms |= {"timeout": options["timeout"], "purpose": f"run_locked {Path(command[0]).name}"}
        code: int | None = None
        try:
            locks[options["using"]].check_key()
            with lock(options["name"], **terms) as lease:
                code = run(command, lease, grace, longest, ended_by)
        except (InvalidLockBackend, LockError, ValueError) as error:
            failed = command_error(error)
            if failed.returncode == BUSY and not options["verbosity"]:
                sys.exit(BUSY)
            if code is None or isinstance(error, LockNotHeld):
                raise failed from error
            text = _("The command has ended; its lock was not released: %s") % error
            self._warn(text, options)
        return code

    def _warn(self, text: str, options: dict[str, Any]) -> None:
        if options["verbosity"]:
            with suppress(OSError):  # a daemon goes on without its log
                self.stderr.write(self.style.WARNING(text))


def _signals_heeded() -> AbstractContextManager[None]:
    """Until the command runs, and between its runs, raise SystemExit at signals that end a process, and drop others.

    So a wait for the lock ends without traces on the server, also in a process with the id 1, to which the kernel
    sends only signals that it handles. Ignored signals stay ignored, except SIGCHLD, without which wait() gets no
    exit codes. Python itself raises KeyboardInterrupt at SIGINT.
    """

    def end(number: int, _: FrameType | None) -> None:
        if number not in USER_DEFINED:
            sys.exit(128 + number)

    handlers: Handlers = {each: end for each in _heeded() if each != signal.SIGINT}
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        handlers[signal.SIGCHLD] = signal.SIG_DFL
    return _handled(handlers)


def _heeded() -> list[signal.Signals]:
    """Return the signals to pass on to the command: all that this process does not ignore, as under nohup."""
    return [each for each in PASSED_ON if signal.getsignal(each) is not signal.SIG_IGN]


@contextmanager
def _handled(handlers: Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _without_dashes(words: list[str]) -> list[str]:
    """Return *words* without a leading "--", which Python 3.11 leaves there after an option."""
    return words[1:] if words[0] == "--" else words


def _problem(options: dict[str, Any], *, has_name: bool) -> str:
    """Return the error in *options*, for people; "" if there is none."""
    if not hasattr(os, "posix_spawnp"):
        return _(
            "run_locked needs a POSIX system, such as Linux or macOS: its signals and process groups."
        )
    if not has_name:
        return _("The name of the lock is missing: write run_locked NAME -- COMMAND.")
    if not options["command"][0]:
        return _("The command is empty: write what to run after --.")
    if options["max_hold"] is not None and options["max_hold"] <= options["grace"]:
        return _("--max-hold must be more than --grace, which is part of it.")
    return ""


def run(
    command: list[str], lease: Lease, grace: float, limit: float | None, ended_by: list[int]
) -> int | None:
    """Run *command* and return its exit code, as a shell does; end it if *lease* is lost.

    Also end the command *limit* seconds after *lease* began, and return None. Signals to this process that mean to
    end the command are appended to *ended_by*.
    """
    # A point in time, not a duration, because the supervisor begins later than the lease.
    spent = lease.ttl - lease.remaining
    due = None if limit is None else time.monotonic() + limit - spent
    told = {"NAME": lease.name, "FENCING_TOKEN": lease.fencing_token, "PLACE": lease.place}
    known = {f"DISTLOCK_{word}": str(value) for word, value in told.items() if value is not None}
    # An end of file on this socket tells the supervisor that this process was killed.
    control, heard = socket.socketpair()

    def send(number: int) -> None:
        # Either side may have closed the socket, if the command has ended.
        with suppress(OSError):
            control.send(bytes([number]))

    def pass_on(number: int, _: FrameType | None) -> None:
        if number not in USER_DEFINED and number != signal.SIGHUP:  # a daemon reloads at SIGHUP
            ended_by.append(number)
        if not (number in FROM_TERMINAL and _is_in_front(terminal)):
            send(number)

    terms = str(heard.fileno()), str(grace), str(lease.ttl), "" if due is None else str(due)
    with control, _terminal() as terminal, _handled(dict.fromkeys(_heeded(), pass_on)):
        with heard:
            # A terminal serves only its foreground group, and stops other processes that read from it. So the command
            # stays in the group of this process, which a shell can bring to the foreground. Without a terminal,
            # the command gets its own group, so that signals reach its children, too.
            child = subprocess.Popen(  # noqa: S603 - no shell
                [sys.executable, "-I", supervisor.__file__, *terms, *command],
                env={**os.environ, **known},
                pass_fds=[heard.fileno()],
                process_group=None if terminal else 0,
            )
        lease.on_lost(lambda _: send(END))
        _wait(child, lease, send)
        code = child.wait()
        if code < 0 and not terminal:
            # The supervisor itself was killed.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if supervisor.received(control.fileno()):
            return None
    return 128 - code if code < 0 else code


def _terminal() -> AbstractContextManager[FileIO | None]:
    """Open the terminal that controls this process: in a pipeline, stdin and stdout are not the terminal."""
    try:
        return FileIO("/dev/tty")
    except OSError:
        return nullcontext()


def _is_in_front(terminal: FileIO | None) -> bool:
    """Return True if *terminal* itself sends its signals to this process and its group."""
    with suppress(OSError):
        return terminal is not None and os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _wait(child: subprocess.Popen[bytes], lease: Lease, send: Callable[[int], None]) -> None:
    """Wait for the end of *child*, and send EXTENDED after each extension of *lease*."""
    deadline = lease.deadline
    # Python handles a signal that comes just before a wait only after the wait, so each wait here is short.
    waiter = threading.Thread(target=child.wait, daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(0.25)
        if lease.deadline != deadline:
            deadline = lease.deadline
            send(EXTENDED)
