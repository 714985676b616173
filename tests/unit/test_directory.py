"""The example of docs/howto/write-a-backend.md: what the contract over its profile does not ask."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import Holder, InvalidLockBackend, LockBackendError, lock, locks
from django_distlock.backends import Busy, Grant
from testproject import directory

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_django import Settings

    from testproject.directory import DirectoryBackend

PATH = "testproject.directory.DirectoryBackend"


@pytest.fixture
def backend(settings: Settings, tmp_path: Path) -> DirectoryBackend:
    directory = tmp_path / "made" / "by it"
    settings.DISTLOCK = {"files": {"BACKEND": PATH, "OPTIONS": {"directory": directory}}}
    made: DirectoryBackend = locks["files"]  # type: ignore[assignment]  # by these settings
    return made


def _tries(backend: DirectoryBackend, name: str = "report") -> Grant | None:
    request = backend.request(name, ttl=60.0, holder=Holder.current())
    answer = backend.try_acquire(request, queued=False)
    return answer if isinstance(answer, Grant) else None


def test_an_error_of_the_file_system_is_one_of_the_backend(
    backend: DirectoryBackend, tmp_path: Path
) -> None:
    (tmp_path / "made").write_text("a file")

    with pytest.raises(LockBackendError, match="Not a directory") as caught:
        lock("report", using="files").acquire()
    assert isinstance(caught.value.__cause__, NotADirectoryError)
    with pytest.raises(LockBackendError):
        backend.held("report")


@pytest.mark.parametrize("wrong", [{}, {"directory": 7}])
def test_a_wrong_directory_is_refused(settings: Settings, wrong: dict[str, object]) -> None:
    settings.DISTLOCK = {"files": {"BACKEND": PATH, "OPTIONS": wrong}}

    with pytest.raises(InvalidLockBackend, match="'directory' must be a path, not"):
        locks["files"]


def test_an_extension_of_another_ttl_keeps_the_token(backend: DirectoryBackend) -> None:
    with lock("report", using="files", ttl=5) as lease:
        lease.extend(50)
        lease.extend(1)

        [held] = backend.held()
        assert held.token == lease.fencing_token
        assert (held.remaining or 0) > 40


def _killed_at(line: int, verb: Callable[[], object]) -> bool:
    """Run *verb* in another process, which is killed at this line of the example; False if it has fewer."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        is_in_example = frame.f_code.co_filename == directory.__file__
        if is_in_example and event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread
        pid = os.fork()
    if not pid:
        sys.settrace(trace)
        verb()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_process_that_is_killed_at_any_line_leaves_the_lock_as_it_was_or_changed(
    backend: DirectoryBackend,
) -> None:
    holders, last = set[bool](), 0
    for line in itertools.count(1):
        request = backend.request(f"report:{line}", ttl=60.0, holder=Holder.current())
        others = replace(request, owner="another")

        is_killed = _killed_at(line, partial(backend.try_acquire, request, queued=False))

        answer = backend.try_acquire(others, queued=False)
        assert backend.extend([request]) == [isinstance(answer, Busy)]
        assert len([*backend.held(request.key)]) == 1
        holders.add(isinstance(answer, Busy))
        if not is_killed:
            break
        last = line
    assert holders == {True, False}
    assert last > 20


def test_a_process_that_was_stopped_in_the_middle_of_a_change_holds_up_its_lock_alone(
    backend: DirectoryBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _tries(backend)
    [mutex] = tmp_path.rglob("mutex")
    monkeypatch.setattr(time, "sleep", id)

    with mutex.open("a") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)

        with pytest.raises(LockBackendError, match="mutex has been locked for a second"):
            _tries(backend)
        assert _tries(backend, "another")


def test_a_lease_does_not_outlive_a_boot(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _tries(backend)
    assert not _tries(backend)

    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) / 1000)

    assert _tries(backend)


def test_tokens_rise_though_somebody_sets_the_clock_back(
    backend: DirectoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []
    for hour in (3, 2, 1):
        monkeypatch.setattr(time, "time_ns", lambda hour=hour: hour * 3600 * 10**9)
        with lock("report", using="files") as lease:
            tokens.append(lease.checked_token())

    assert tokens == [first := 3 * 3600 * 10**6, first + 1, first + 2]
