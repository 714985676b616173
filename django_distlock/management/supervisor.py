"""Runs the command of run_locked; ends it and its child processes when the lock is lost or run_locked is killed.

It runs as a script of its own, and imports neither Django nor this package.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

#: Exit codes of shells for a command that does not exist, and for one that cannot be run.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
#: Exit code of a command that was ended after --max-hold; the same as for a lost lock.
TOO_LONG = 76
#: Signals that a terminal itself sends.
FROM_TERMINAL = [each for each in signal.Signals if each.name in {"SIGINT", "SIGQUIT"}]
#: Signals that are passed on to the command.
PASSED_ON = [
    *FROM_TERMINAL,
    *(each for each in signal.Signals if each.name in {"SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"}),
]
#: run_locked writes these instead of a signal's number: to end the command, and when its lock was extended.
END, EXTENDED = 0, 255
#: prctl(2).
PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Runs one command until it ends; if it has to be ended, until its child processes have ended too.

    *control* is a pipe from run_locked: each byte is the number of a signal, END or EXTENDED. Its end of file means
    that run_locked was killed, and no EXTENDED for *ttl* seconds that it was stopped. After END, one of these, or
    at *due* (``time.monotonic()``), the command gets SIGTERM, and *grace* seconds later the remaining processes get
    SIGKILL.
    """

    def __init__(self, control: int, grace: float, ttl: float, due: float | None) -> None:
        self._control = control
        self._grace = grace
        self._ttl = ttl
        self._held_until = time.monotonic() + ttl
        #: When the command is to be ended because of --max-hold, then when it is to be killed.
        self._due = due
        self._is_ending = self._is_killing = False
        #: False on a terminal: the command shares the group of run_locked, and signals go to the command alone.
        self._has_group = os.getpgrp() == os.getpid()
        self._pid = 0
        self._code: int | None = None

    def start(self, command: list[str]) -> None:
        """Start *command*; OSError if it cannot be run."""
        if sys.platform == "linux":
            # Processes that lose their own parent become children of this one.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_inheritable(self._control, False)
        # Python ignores these two signals, and the command would inherit that.
        heeded = signal.SIGPIPE, signal.SIGXFSZ
        self._pid = os.posix_spawnp(command[0], command, os.environ, setsigdef=heeded)

    def wait(self, woken: int) -> int:
        """Return the exit code of the command, as a shell does, or TOO_LONG; *woken*: the wakeup pipe of signals."""
        watched = [self._control, woken]
        is_too_long = False
        while self._runs():
            due = self._next_step
            left = None if due is None else max(0.0, due - time.monotonic())
            ready, _, _ = select.select(watched, [], [], left)
            if woken in ready:
                os.read(woken, 512)
            if self._control in ready:
                numbers = os.read(self._control, 512)
                if not numbers:
                    watched.remove(self._control)
                for number in numbers or [END]:
                    self._obey(number)
            if not ready:
                if not self._is_ending:
                    is_too_long = due == self._due
                    why = (
                        "--max-hold is over" if is_too_long else "its lock is not extended any more"
                    )
                    _write(f"the command is ended, as {why}")
                self._take_next_step()
        return TOO_LONG if is_too_long else self._code or 0

    @property
    def _next_step(self) -> float | None:
        if self._is_ending:
            return self._due
        return self._held_until if self._due is None else min(self._due, self._held_until)

    def _runs(self) -> bool:
        """Reap processes that have ended, and return whether to go on."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._code = 128 - code if code < 0 else code
        except ChildProcessError:
            if self._is_ending:
                self._kill()
            return False
        if self._is_killing:
            self._kill()
        return self._is_ending or self._code is None

    def _obey(self, number: int) -> None:
        if number == EXTENDED:
            self._held_until = time.monotonic() + self._ttl
        elif number != END:
            self._send(number)
        elif not self._is_ending:
            self._take_next_step()

    def _take_next_step(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._due = time.monotonic() + self._grace
            self._send(signal.SIGTERM)
        else:
            self._is_killing, self._due = True, None

    def _send(self, number: int) -> None:
        try:
            if self._has_group:
                # This process is in the group, too, so killpg() never fails as a whole.
                os.killpg(0, number)
            if self._code is None:
                # The command may have left the group, as timeout(1) does.
                has_got_it = self._has_group and os.getpgid(self._pid) == os.getpgrp()
                os.kill(self._pid, 0 if has_got_it else number)
        except PermissionError as error:
            name = signal.Signals(number).name
            _write(f"the command was not sent {name}, and goes on: {error.strerror}")

    def _kill(self) -> None:
        """Kill the children of this process; it inherits their children, and the next call kills those."""
        if sys.platform == "linux":
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for pid in map(int, children):
                with suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
        elif self._has_group:
            os.killpg(0, signal.SIGKILL)
        elif self._code is None:
            os.kill(self._pid, signal.SIGKILL)


def _woken_by_signals() -> int:
    """Return a pipe that becomes readable after each signal; none of the signals ends this process."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *PASSED_ON):
        # The command inherits ignored signals, but no handlers. With SIGCHLD ignored, waitpid() gets no exit codes.
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return readable


def _write(text: str) -> None:
    sys.stderr.write(f"run_locked: {text}\n")
    sys.stderr.flush()


def main(control: str, grace: str, ttl: str, due: str, *command: str) -> int:
    """Run *command*; *due* may be empty."""
    supervisor = Supervisor(int(control), float(grace), float(ttl), float(due) if due else None)
    woken = _woken_by_signals()
    try:
        supervisor.start(list(command))
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return supervisor.wait(woken)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
