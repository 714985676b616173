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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Exit codes of shells for a command that does not exist, and for one that cannot be run.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
#: Signals that a terminal itself sends.
FROM_TERMINAL = [each for each in signal.Signals if each.name in {"SIGINT", "SIGQUIT"}]
#: Signals with a meaning of the command's own, which do not end it.
USER_DEFINED = [each for each in signal.Signals if each.name in {"SIGUSR1", "SIGUSR2"}]
#: Signals that are passed on to the command.
PASSED_ON = [
    *FROM_TERMINAL,
    *(each for each in signal.Signals if each.name in {"SIGTERM", "SIGHUP"}),
    *USER_DEFINED,
]
#: Signals by which a terminal stops its processes.
STOPPED_BY = [each for each in signal.Signals if each.name in {"SIGTSTP", "SIGTTIN", "SIGTTOU"}]
#: run_locked writes these instead of a signal's number: END the command; the lock was EXTENDED.
END, EXTENDED = 0, 255
#: The supervisor writes this when it ends the command because of --max-hold.
TOO_LONG = 1
#: prctl(2).
PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Runs one command until it ends; a command that must be ended, until its child processes have ended too.

    *control* is a socket to run_locked: each byte from it is the number of a signal, END or EXTENDED. An end of file
    means that run_locked was killed, and no EXTENDED for *ttl* seconds means that it was stopped. After END, in these
    two cases, and at *due* (``time.monotonic()``), the command gets SIGTERM, and *grace* seconds later the remaining
    processes get SIGKILL. At *due*, the supervisor also writes TOO_LONG.
    """

    def __init__(self, control: int, grace: float, ttl: float, due: float | None) -> None:
        self._control = control
        self._grace = grace
        self._ttl = ttl
        self._held_until = time.monotonic() + ttl
        #: When to end the command because of --max-hold, and after SIGTERM: when to kill it.
        self._due = due
        self._is_ending = self._is_killing = False
        #: False on a terminal: the command is in the group of run_locked, perhaps with other commands.
        self._has_group = os.getpgrp() == os.getpid()
        self._can_list = _lists_processes()
        self._pid = 0
        #: What stderr had no room for yet.
        self._untold = ""
        self._code: int | None = None

    def start(self, command: list[str], blocked: set[int]) -> None:
        """Start *command* with the signals *blocked*; OSError if it cannot be run."""
        if sys.platform == "linux":
            # Processes that lose their parent become children of this process.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_inheritable(self._control, False)
        # A terminal must not stop this process together with the command.
        ignored = signal.SIG_IGN
        stopped_by = [each for each in STOPPED_BY if signal.signal(each, ignored) is not ignored]
        # Python ignores the first two of these, and the command would inherit that.
        heeded = [signal.SIGPIPE, signal.SIGXFSZ, *stopped_by]
        self._pid = os.posix_spawnp(
            command[0], command, os.environ, setsigdef=heeded, setsigmask=blocked
        )

    def wait(self, woken: int) -> int:
        """Return the exit code of the command, as a shell does; *woken*: the wakeup pipe of signals."""
        watched = [self._control, woken]
        while self._runs():
            due = self._next_step
            left = None if due is None else max(0.0, due - time.monotonic())
            ready, _, _ = select.select(watched, [], [], left)
            if woken in ready:
                os.read(woken, 512)
            if self._control in ready:
                numbers = received(self._control)
                if not numbers:
                    watched.remove(self._control)
                for number in numbers or [END]:
                    self._obey(number)
            if not ready and self._is_ending:
                self._take_next_step()
            elif not ready:
                is_too_long = due == self._due
                self._take_next_step()
                self._tell_why(is_too_long=is_too_long)
        return self._code or 0

    def tell_rest(self) -> None:
        """Write what stderr had no room for, if it has by now."""
        if self._untold:
            _write(self._untold, patience=1.0)

    @property
    def _next_step(self) -> float | None:
        if self._is_ending:
            return self._due
        return self._held_until if self._due is None else min(self._due, self._held_until)

    def _runs(self) -> bool:
        """Reap processes that have ended; return True while the command runs or is being ended."""
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

    def _tell_why(self, *, is_too_long: bool) -> None:
        if is_too_long:
            with suppress(BrokenPipeError):
                os.write(self._control, bytes([TOO_LONG]))
        why = "--max-hold is over" if is_too_long else "its lock is not extended any more"
        line = f"run_locked: the command is ended, as {why}"
        self._untold = "" if _write(line) else line

    def _take_next_step(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._due = time.monotonic() + self._grace
            self._send(signal.SIGTERM)
        else:
            self._is_killing, self._due = True, None

    def _send(self, number: int) -> None:
        """Send a signal to the command and its descendants, except processes that have left its group."""
        if self._has_group:
            # This process is in the group, too, so killpg() never fails as a whole.
            _send(os.killpg, 0, number)
            others = []
        else:
            others = [pid for pid in self._descendants() if _group(pid) == os.getpgrp()]
        signals = dict.fromkeys(others, number)
        if self._code is None:
            # The command may have left the group, as timeout(1) does.
            has_got_it = self._has_group and _group(self._pid) == os.getpgrp()
            signals[self._pid] = 0 if has_got_it else number
        for pid, each in signals.items():
            try:
                _send(os.kill, pid, each)
            except ProcessLookupError:
                pass
            except PermissionError as error:
                name = signal.Signals(number).name
                _write(
                    f"run_locked: the command was not sent {name}, and goes on: {error.strerror}"
                )

    def _kill(self) -> None:
        """Kill the children of this process, which then inherits their children: call it again until none is left."""
        if self._can_list:
            for pid in _children(os.getpid()):
                with suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
        elif self._has_group:
            os.killpg(0, signal.SIGKILL)
        elif self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def _descendants(self) -> list[int]:
        found = _children(os.getpid()) if self._can_list else []
        for pid in found:
            found += _children(pid)
        return found


def received(control: int) -> bytes:
    """Return the bytes that the other end of the socket *control* has sent; b"" if it is closed."""
    with suppress(ConnectionResetError):  # the other end closed the socket with unread data
        return os.read(control, 512)
    return b""


def _send(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    kill(pid, number)
    if number == signal.SIGTERM:
        # A stopped process handles SIGTERM only after SIGCONT.
        kill(pid, signal.SIGCONT)


def _lists_processes() -> bool:
    """Return True if /proc lists the children of this process.

    Kernels without CONFIG_PROC_CHILDREN have no such list, and after unshare(1) it may belong to another process.
    """
    own = os.getpid()
    with suppress(OSError):
        lists = Path(f"/proc/self/task/{own}/children").exists()
        return lists and Path("/proc/self").readlink().name == str(own)
    return False


def _children(pid: int) -> list[int]:
    """Return the child processes of *pid*; none if *pid* has ended or /proc hides it."""
    with suppress(OSError):
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        texts = [(thread / "children").read_text() for thread in threads]
        return [int(child) for text in texts for child in text.split()]
    return []


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


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


def _write(line: str, patience: float = 0.0) -> bool:
    """Write *line* to stderr if that can be written; return False if it has no room for *patience* seconds."""
    with suppress(OSError):
        if sys.stderr is not None:
            _, ready, _ = select.select([], [sys.stderr], [], patience)
            for file in ready:
                os.write(file.fileno(), os.fsencode(f"{line}\n"))
            return bool(ready)
    return True


def main(control: str, grace: str, ttl: str, due: str, *command: str) -> int:
    """Run *command*; *due* may be empty."""
    supervisor = Supervisor(int(control), float(grace), float(ttl), float(due) if due else None)
    woken = _woken_by_signals()
    # The parent process may have blocked SIGCHLD.
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    try:
        supervisor.start(list(command), blocked)
    except OSError as error:
        _write(f"{command[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    code = supervisor.wait(woken)
    supervisor.tell_rest()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
