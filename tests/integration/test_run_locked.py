"""``manage.py run_locked``: what the command gets, what the caller gets, and who is ended when."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_distlock import lock
from django_distlock.backends.database import records
from django_distlock.management import supervisor
from django_distlock.management.base import BUSY, LOST, WRONG_ARGUMENTS
from django_distlock.management.commands.run_locked import Command
from django_distlock.models import MethodLock
from tests.fixtures.eventually import eventually, never
from tests.fixtures.launch import IS_LINUX, launch, state
from tests.fixtures.processes import Child, Spawn
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import Redis

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="reads /proc, and calls setsid")
Start = Callable[..., Child]
#: Says that it runs, and who it is; then waits.
TICK = "echo runs $$; while :; do sleep 0.05; done"
#: An argument of sh -c: the same, but it does not listen to SIGTERM.
STUBBORN = "\"trap '' TERM; {}\"".format(TICK.replace("$", "\\$"))
#: Commands that do not, or have started what does not.
NOBODY_LISTENS = pytest.mark.parametrize(
    "script",
    [f"trap '' TERM; {TICK}", f"sh -c {STUBBORN} & wait", f"setsid sh -c {STUBBORN} & wait"],
    ids=["command", "child", "session"],
)


@pytest.fixture
def start(spawn: Spawn, name: str) -> Start:
    """Run a shell's script in another process, as cron would."""

    def begin(script: str, **options: object) -> Child:
        command = ["sh", "-c", script]
        return spawn(f"{__name__}:run", name=name, command=command, options=options)

    return begin


def run(
    name: str, command: list[str], options: dict[str, object], *, hangs_up: bool = True
) -> None:
    # Tests may themselves run under nohup, or in the background of a script.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL if hangs_up else signal.SIG_IGN)
    given = [
        f"--{option.replace('_', '-')}" + ("" if value is True else f"={value}")
        for option, value in options.items()
    ]
    Command().run_from_argv(["manage.py", "run_locked", *given, name, "--", *command])


def pid_of_command(child: Child) -> int:
    return eventually(lambda: pids(child))[0]


def pids(child: Child) -> list[int]:
    return [int(pid) for pid in re.findall(r"^runs (\d+)$", child.stderr, re.MULTILINE)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def heeds(number: signal.Signals, pid: int) -> bool:
    [caught] = re.findall(
        r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return bool(int(caught, 16) >> number - 1 & 1)


def has_ended(pid: int) -> bool:
    return state(pid) in "XZ"


def test_the_command_knows_the_lock_and_its_exit_code_is_passed_on(start: Start, name: str) -> None:
    child = start("echo $DISTLOCK_NAME $DISTLOCK_FENCING_TOKEN; exit 3")

    assert child.wait() == 3

    token = MethodLock.objects.get(description=name).fencing_token
    assert child.stderr == f"{name} {token}\n"
    assert not lock(name).locked()


@pytest.mark.parametrize("option", ["", "--grace=5"])
def test_the_command_has_its_arguments_unchanged(name: str, tmp_path: Path, option: str) -> None:
    script = f'printf "%s|" "$@" > {tmp_path}/told'
    before = f"manage.py run_locked {name} {option} -- sh -c".split()

    with suppress(SystemExit):
        Command().run_from_argv([*before, script, "sh", "a", "--", "-b"])

    assert (tmp_path / "told").read_text() == "a|--|-b|"


def test_while_it_runs_others_are_refused_with_a_line_and_a_code_of_its_own(
    start: Start, name: str
) -> None:
    first = start(TICK)
    pid_of_command(first)

    with pytest.raises(CommandError, match="run_locked sh") as refused:
        call_command("run_locked", name, "true")
    with pytest.raises(SystemExit) as silent:
        call_command("run_locked", name, "true", verbosity=0)

    assert refused.value.returncode == silent.value.code == BUSY
    first.terminate()
    assert first.wait() == 128 + signal.SIGTERM


def test_it_waits_as_long_as_it_is_told(start: Start, name: str) -> None:
    with lock(name):
        waiter = start("echo done", timeout=30)
        # It came later, and has tried already.
        assert start("echo done").wait() == BUSY

    assert waiter.wait() == 0


def test_a_daemon_waits_for_ever_and_runs_again_after_a_loss(start: Start, name: str) -> None:
    daemon = start(TICK, timeout="forever", restart=True, ttl=1)
    first = pid_of_command(daemon)

    free(name)

    eventually(lambda: len(pids(daemon)) == 2, 30)
    assert has_ended(first)
    assert "was lost" in daemon.stderr
    daemon.terminate()
    assert daemon.wait() == 128 + signal.SIGTERM
    assert not lock(name).locked()
    assert len(pids(daemon)) == 2


def test_of_two_daemons_one_runs_until_it_is_killed(start: Start, name: str) -> None:
    first = start(TICK, timeout="forever", restart=True, ttl=1)
    pid_of_command(first)
    second = start(TICK, timeout="forever", restart=True, ttl=1)
    never(lambda: pids(second), 1)

    os.kill(first.pid, signal.SIGKILL)

    pid_of_command(second)
    assert has_ended(pids(first)[0])
    second.terminate()
    assert second.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_daemon_that_waits_ends_at_once_and_leaves_nothing(
    start: Start, name: str, number: signal.Signals
) -> None:
    with lock(name):
        daemon = start(TICK, timeout="forever", restart=True)
        eventually(lambda: heeds(number, daemon.pid))

        os.kill(daemon.pid, number)

        assert daemon.wait() == 128 + number
        assert not pids(daemon)
    assert not lock(name).locked()


@pytest.mark.parametrize("options", [{}, {"max_hold": "1h"}])
@pytest.mark.parametrize("code", [3, LOST])
def test_a_daemon_that_ends_by_itself_is_not_run_again(
    start: Start, code: int, options: dict[str, object]
) -> None:
    daemon = start(f"echo done; exit {code}", timeout="forever", restart=True, **options)

    assert daemon.wait() == code
    assert daemon.stderr == "done\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command_and_it_decides(start: Start, number: signal.Signals) -> None:
    child = start(f"trap 'echo told; exit 5' {number.name[3:]}; {TICK}")
    pid_of_command(child)

    os.kill(child.pid, number)

    assert child.wait() == 5
    assert child.stderr.endswith("told\n")


def test_what_was_ignored_by_the_caller_is_ignored_by_the_command(spawn: Spawn, name: str) -> None:
    child = spawn(f"{__name__}:run_under_nohup", name=name)
    pid_of_command(child)

    os.kill(child.pid, signal.SIGHUP)
    child.tell("go on")

    assert child.wait() == 7


def run_under_nohup(name: str) -> None:
    script = "kill -HUP $$; echo runs $$; read word; exit 7"
    run(name, ["sh", "-c", script], {}, hangs_up=False)


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_a_caller_that_does_not_heed_its_children_has_the_exit_code(
    spawn: Spawn, name: str, how: str
) -> None:
    assert spawn(f"{__name__}:run_under_a_careless_caller", name=name, how=how).wait() == 3


def run_under_a_careless_caller(name: str, how: str) -> None:
    if how == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    # Each renewal wakes the supervisor.
    run(name, ["sh", "-c", "sleep 0.5; exit 3"], {"ttl": "10m"})


def test_a_command_that_is_stopped_can_be_ended(start: Start) -> None:
    child = start(TICK)
    pid = pid_of_command(child)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state(pid) == "T")

    child.terminate()

    assert child.wait() == 128 + signal.SIGTERM


def test_a_caller_that_stands_still_for_too_long_takes_the_command_along(
    start: Start, name: str
) -> None:
    child = start(TICK, ttl=1)
    pid = pid_of_command(child)

    os.kill(child.pid, signal.SIGSTOP)
    eventually(lambda: has_ended(pid))
    os.kill(child.pid, signal.SIGCONT)

    assert child.wait() == LOST
    assert "its lock is not extended any more" in child.stderr


def test_on_a_kernel_that_lists_no_children_it_is_killed_too(
    spawn: Spawn, name: str, tmp_path: Path
) -> None:
    child = spawn(f"{__name__}:run_without_lists", name=name, folder=str(tmp_path))
    pid = pid_of_command(child)

    free(name)

    assert child.wait() == LOST
    assert has_ended(pid)


def run_without_lists(name: str, folder: str) -> None:
    # The files in /proc, of which a kernel that was built without CONFIG_PROC_CHILDREN has none.
    text = Path(supervisor.__file__).read_text()
    supervisor.__file__ = f"{folder}/supervisor.py"
    Path(supervisor.__file__).write_text(text.replace('children")', 'no-such-file")'))
    run(name, ["sh", "-c", f"trap '' TERM; {TICK}"], {"ttl": 1, "grace": 0.2})


@NOBODY_LISTENS
def test_what_does_not_listen_is_killed_when_the_lock_is_lost(
    start: Start, name: str, script: str
) -> None:
    child = start(script, ttl=1, grace=0.2)
    stubborn = pid_of_command(child)

    free(name)

    assert child.wait() == LOST
    assert has_ended(stubborn)


@NOBODY_LISTENS
def test_a_killed_caller_takes_all_of_it_along(start: Start, name: str, script: str) -> None:
    child = start(script, ttl=1, grace=0.2)
    stubborn = pid_of_command(child)

    os.kill(child.pid, signal.SIGKILL)

    eventually(lambda: has_ended(stubborn))
    with lock(name, timeout=10):
        pass


def test_a_killed_supervisor_takes_the_command_along(start: Start) -> None:
    child = start(TICK)
    pid = pid_of_command(child)

    os.kill(parent(pid), signal.SIGKILL)

    assert child.wait() == 128 + signal.SIGKILL
    eventually(lambda: has_ended(pid))


@contextmanager
def nobody_reads() -> Iterator[int]:
    readable, writable = os.pipe()
    os.close(readable)
    yield writable
    os.close(writable)


def full_pipe() -> tuple[int, int]:
    """Return the two ends of a pipe that has no room, as that of a pager."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writable, bytes(4096))
    os.set_blocking(writable, True)
    return readable, writable


@contextmanager
def nobody_reads_yet() -> Iterator[int]:
    readable, writable = full_pipe()
    yield writable
    os.close(readable)
    os.close(writable)


@contextmanager
def no_space() -> Iterator[int]:
    with Path("/dev/full").open("wb", buffering=0) as full:
        yield full.fileno()


@contextmanager
def closed() -> Iterator[None]:
    yield None


@pytest.mark.parametrize("stderr", [nobody_reads, nobody_reads_yet, no_space, closed])
@pytest.mark.parametrize("why", ["--max-hold is over", "its lock is not extended"])
def test_a_command_is_ended_also_where_nobody_can_be_told(
    stderr: Callable[[], AbstractContextManager[int | None]], why: str
) -> None:
    is_too_long = why == "--max-hold is over"
    ttl, due = ("60", str(time.monotonic() + 1)) if is_too_long else ("1", "")
    control, heard = socket.socketpair()
    with control, stderr() as told:
        close = None if told is not None else partial(os.close, 2)
        terms = str(heard.fileno()), "20", ttl, due
        supervised = subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, *terms, "sleep", "60"],
            pass_fds=[heard.fileno()],
            stderr=told,
            preexec_fn=close,  # noqa: PLW1509 - one system call
            process_group=0,
        )
        heard.close()
        try:
            assert supervised.wait(20) == 128 + signal.SIGTERM
        finally:
            with suppress(ProcessLookupError):
                os.killpg(supervised.pid, signal.SIGKILL)


def test_a_line_that_a_slow_reader_has_no_room_for_is_written_at_the_end(tmp_path: Path) -> None:
    may_end = tmp_path / "may end"
    script = f"trap : TERM; while ! [ -e '{may_end}' ]; do sleep 0.05; done"
    control, heard = socket.socketpair()
    readable, writable = full_pipe()
    terms = str(heard.fileno()), "60", "60", str(time.monotonic() + 3)
    with control, heard, os.fdopen(readable, "rb") as told:
        supervised = subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, *terms, "sh", "-c", script],
            pass_fds=[heard.fileno()],
            stderr=writable,
            process_group=0,
        )
        assert control.recv(1) == bytes([supervisor.TOO_LONG])
        os.close(writable)
        may_end.touch()

        said = told.read()
        supervised.wait(20)
    assert b"run_locked: the command is ended, as --max-hold is over\n" in said


def test_a_command_that_hangs_is_ended_while_its_lock_is_held(start: Start, name: str) -> None:
    child = start(f"trap 'echo told; exit 0' TERM; {TICK}", grace=20, **{"max-hold": 22})
    pid = pid_of_command(child)

    assert child.wait() == LOST

    assert has_ended(pid)
    assert "told" in child.stderr
    assert "--max-hold is over" in child.stderr
    assert not lock(name).locked()


def test_a_server_that_hangs_at_the_release_leaves_the_commands_own_code(
    redis: Redis, settings: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    script = f"touch {begun}; while [ -e {begun} ]; do sleep 0.05; done; exit 5"

    with Proxy(redis.port) as proxy, ThreadPoolExecutor() as pool:
        backend = "django_distlock.backends.redis.RedisBackend"
        options = {"location": f"redis://127.0.0.1:{proxy.port}"}
        settings.DISTLOCK = {"default": {"BACKEND": backend, "OPTIONS": options}}

        def hang() -> None:
            eventually(begun.exists)
            proxy.black_hole()
            begun.unlink()

        hanging = pool.submit(hang)
        with pytest.raises(SystemExit) as ended:
            call_command("run_locked", name, "--", "sh", "-c", script)
        hanging.result()
        proxy.pass_through()

    assert ended.value.code == 5
    assert "its lock was not released" in capsys.readouterr().err


def free(name: str) -> None:
    """As an operator does."""
    row = records.rows("default").get(description=name)
    with connection.cursor() as cursor:
        assert records.free(cursor, row)


class Terminal:
    """A terminal of its own that a script runs on under run_locked, by this function of this module."""

    def __init__(self, name: str, script: str, runs: str = "run") -> None:
        self._ours, theirs = pty.openpty()
        code = f"import django; django.setup(); from {__name__} import {runs}; {runs}({name!r}, ['sh', '-c', {script!r}], {{}})"
        # A session of its own, whose terminal it is.
        become = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
        self.process = launch(
            [sys.executable, "-c", f"{become}; {code}"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings"},
        )
        os.close(theirs)
        self.shown = b""

    def shows(self, text: bytes) -> bool:
        if select.select([self._ours], [], [], 0)[0]:
            self.shown += os.read(self._ours, 1000)
        return text in self.shown

    def write(self, text: bytes) -> None:
        os.write(self._ours, text)

    def ends(self) -> None:
        """Read what is left to read; fail if anybody still has the terminal open."""
        self.process.wait(30)
        with pytest.raises(OSError, match="Input/output"):
            eventually(lambda: self.shows(b"the end"))
        os.close(self._ours)


def test_on_a_terminal_an_interrupt_reaches_the_command_once(name: str) -> None:
    # No trap: a shell that runs something takes two signals for one.
    code = "import signal, time; signal.signal(2, lambda *_: print('told')); print('runs'); time.sleep(30)"
    terminal = Terminal(name, f'exec {sys.executable} -uc "{code}"')

    def told() -> int:
        return terminal.shown.count(b"told") if terminal.shows(b"told") else 0

    def press(times: int) -> None:
        terminal.write(b"\x03")
        eventually(lambda: told() >= times)
        never(lambda: told() > times, 0.2)

    eventually(lambda: terminal.shows(b"runs"), 30)
    for times in range(1, 6):  # a second signal that comes before the first is handled is lost
        press(times)
    terminal.process.terminate()
    terminal.ends()

    assert terminal.shown.count(b"told") == 5


def run_in_a_pipeline(name: str, command: list[str], options: dict[str, object]) -> None:
    """As in ``echo data | run_locked ...``."""
    readable, writable = os.pipe()
    os.write(writable, b"data\n")
    os.close(writable)
    os.dup2(readable, 0)
    run(name, command, options)


def test_in_a_pipeline_on_a_terminal_the_command_can_ask(name: str) -> None:
    """As psql, ssh and sudo ask for a password."""
    script = "read line; echo asks; read answer </dev/tty; echo got $line $answer; exit 6"
    terminal = Terminal(name, script, "run_in_a_pipeline")
    eventually(lambda: terminal.shows(b"asks"), 30)

    terminal.write(b"secret\n")

    eventually(lambda: terminal.shows(b"got data secret"))
    terminal.ends()
    assert terminal.process.returncode == 6
    assert not lock(name).locked()


def run_as_a_job(name: str, command: list[str], options: dict[str, object]) -> None:
    """As a shell runs ``run_locked ... &``."""
    if (job := os.fork()) == 0:
        os.setpgid(0, 0)
        run(name, command, options | {"ttl": 1, "grace": 1})
        os._exit(0)
    _, status = os.waitpid(job, os.WUNTRACED)
    sys.stdout.write(f"stopped by {signal.Signals(os.WSTOPSIG(status)).name}\n")
    sys.stdout.flush()
    input()
    os.killpg(job, signal.SIGCONT)
    _, status = os.waitpid(job, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def test_in_the_background_of_a_terminal_a_command_that_asks_keeps_its_lock_for_the_ttl(
    name: str,
) -> None:
    terminal = Terminal(name, "echo asks; read answer </dev/tty", "run_as_a_job")

    eventually(lambda: terminal.shows(b"stopped by SIGTTIN"), 30)
    eventually(lambda: terminal.shows(b"its lock is not extended any more"))
    with lock(name, timeout=10):
        pass
    terminal.write(b"\n")
    terminal.ends()

    assert terminal.process.returncode == LOST


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_run_is_told_from_one_that_failed(
    name: str, command: str, code: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        call_command("run_locked", name, command)

    assert ended.value.code == code
    assert not lock(name).locked()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--using=nowhere", "x", "true"], "DISTLOCK has no alias 'nowhere'"),
        (["", "true"], "name"),
        (["--ttl=0", "x", "true"], "ttl"),
        (["--timeout=soon", "x", "true"], "'soon' is not a time"),
        (["--timeout=99999999999999", "x", "true"], "'99999999999999' is too long"),
        (["--grace=99999999999999", "x", "true"], "'99999999999999' is too long"),
        (["--max-hold=10", "x", "true"], "more than --grace"),
        (["x", ""], "The command is empty"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said) as refused:
        call_command("run_locked", *arguments)

    assert refused.value.returncode in {1, WRONG_ARGUMENTS}


@pytest.mark.parametrize("options", [[], ["--timeout=5"]])
def test_a_name_that_was_forgotten_is_not_taken_from_the_command(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        Command().run_from_argv(["manage.py", "run_locked", *options, "--", "sh", "-c", "exit 3"])

    assert refused.value.code == WRONG_ARGUMENTS
    assert "The name of the lock is missing" in capsys.readouterr().err


def test_min_hold_keeps_other_machines_from_running_it_again(start: Start, name: str) -> None:
    assert start("exit 0", **{"min-hold": "1h"}).wait() == 0

    assert start("exit 0").wait() == BUSY
