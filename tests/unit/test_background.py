"""Jobs run at their time, in the order of their lane, and no lane waits for another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from django_distlock import locks
from django_distlock.engine import background as module
from django_distlock.engine.background import WORKERS, Background, VerbThreads
from django_distlock.exceptions import NotSent
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from tests.fixtures.eventually import eventually, never


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    """A background of its own, whose threads end soon."""
    monkeypatch.setattr(module, "LINGER", 0.2)
    OWN[:] = [made := Background()]
    yield made
    eventually(lambda: not _threads(), 15, "its threads have ended")


#: The one under test: that of the process may begin threads at any time.
OWN: list[Background] = []


def _threads() -> list[threading.Thread]:
    owners = [part for own in OWN for part in (own, own._clock)]
    return [t for t in threading.enumerate() if getattr(_target(t), "__self__", None) in owners]


def _target(thread: threading.Thread) -> object:
    return getattr(thread, "_target", None)


def test_jobs_of_one_lane_run_one_after_the_other(background: Background) -> None:
    over, done = threading.Event(), list[int]()
    background.submit("a", lambda: over.wait(10))
    for number in range(20):
        background.submit("a", lambda number=number: done.append(number))  # type: ignore[misc]  # mypy and defaults of lambdas

    never(lambda: done, 0.1)
    over.set()
    eventually(lambda: len(done) == 20)

    assert done == list(range(20))


def test_a_lane_that_hangs_holds_up_no_other(background: Background) -> None:
    over, done = threading.Event(), threading.Event()

    background.submit("hung", lambda: over.wait(10))
    background.submit("hung", lambda: None)
    background.submit("other", done.set)

    assert done.wait(8)
    over.set()


def test_many_lanes_share_the_workers_and_are_all_served_when_these_are_free_again(
    background: Background,
) -> None:
    over, done = threading.Event(), list[int]()
    for number in range(3 * WORKERS):
        background.submit(f"lane {number}", lambda: over.wait(10))
        background.submit(f"lane {number}", lambda number=number: done.append(number))  # type: ignore[misc]  # as above

    eventually(lambda: len(_threads()) == WORKERS)
    never(lambda: len(_threads()) > WORKERS, 0.1)
    over.set()

    eventually(lambda: sorted(done) == list(range(3 * WORKERS)))


def test_a_delayed_job_runs_in_its_time_and_never_before(background: Background) -> None:
    began, ran = clock.lease_time(), list[float]()

    background.submit("a", lambda: ran.append(clock.lease_time()), delay=0.1)

    eventually(lambda: ran)
    assert began + 0.1 <= ran[0]


def test_timed_jobs_run_in_the_order_of_their_times(background: Background) -> None:
    now, ran = clock.lease_time(), list[str]()
    with background._clock._mutex:  # none is run before all are there
        background.at(now + 0.15, lambda: ran.append("late"))
        background.at(now + 0.05, lambda: ran.append("early"))
        background.at(now + 0.1, lambda: ran.append("between"))

    eventually(lambda: len(ran) == 3)

    assert ran == ["early", "between", "late"]


def test_drain_runs_what_is_left_here_and_now(background: Background) -> None:
    over, done = threading.Event(), list[str]()
    for number in range(WORKERS):
        background.submit(f"hung {number}", lambda: over.wait(10))
    eventually(lambda: not background._free())
    for number in range(5):
        background.submit(f"lane {number}", lambda: done.append(threading.current_thread().name))
    background.submit("last", over.set)

    background.drain(8)

    assert done == [threading.current_thread().name] * 5
    over.set()


def test_a_finalizer_may_add_a_job_wherever_it_runs(background: Background) -> None:
    done = threading.Event()

    def be_finalized() -> None:
        # As if it ran while this very thread adds a job: it must not wait for itself.
        with background._clock._mutex, background._mutex:
            background.at(clock.lease_time(), done.set)

    threading.Thread(target=be_finalized, daemon=True).start()

    assert done.wait(8)


@pytest.mark.parametrize(
    "stopped_by", [RuntimeError("can't start new thread"), RuntimeError("x"), KeyboardInterrupt()]
)
def test_what_stops_the_start_of_a_thread_does_not_stop_the_clock(
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
    stopped_by: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise stopped_by

    done = [threading.Event() for _ in range(3)]
    has_no_thread = "new thread" in str(stopped_by)
    expected = nullcontext() if has_no_thread else pytest.raises(type(stopped_by))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with expected:
            background.at(clock.lease_time(), done[0].set)
        with expected:
            background.submit("a", done[1].set)

    background.at(clock.lease_time(), partial(background.submit, "a", done[2].set))

    assert all(each.wait(8) for each in done)
    assert ("can't start new thread" in caplog.text) == has_no_thread


def test_the_exit_of_the_interpreter_waits_for_what_is_under_way() -> None:
    program = """
import time
from django_distlock.engine.background import background
background.submit("a", lambda: (time.sleep(0.3), print("done")))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert ended.stdout.split() == [b"done"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(1), KeyboardInterrupt()])
def test_nothing_that_a_job_raises_ends_a_thread_and_it_is_logged(
    background: Background, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    done = [threading.Event(), threading.Event()]
    background.at(clock.lease_time(), fail)
    for _ in range(2 * WORKERS):
        background.submit("a", fail)

    background.at(clock.lease_time() + 0.05, done[0].set)
    background.submit("a", done[1].set)

    assert all(each.wait(8) for each in done)
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert logged.count(error) == 1 + 2 * WORKERS


def test_drain_waits_for_what_is_under_way_but_not_for_long(background: Background) -> None:
    over = threading.Event()
    background.submit("slow", lambda: over.wait(10))
    eventually(lambda: not background._free())
    began = clock.lease_time()
    threading.Timer(0.1, over.set).start()

    background.drain(9)

    assert 0.05 < clock.lease_time() - began < 7
    assert not background._lanes


async def test_what_no_thread_can_be_started_for_is_not_carried_out_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, done = VerbThreads("default"), list[str]()
    held, request = threading.Event(), locks["default"].request("a", ttl=1, holder=Holder.current())
    busy = asyncio.ensure_future(threads.run_try(request, held.wait))
    await asyncio.sleep(0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NotSent, match="can't start new thread"):
            await threads.run_try(replace(request, owner="b"), lambda: done.append("b"))
    held.set()

    assert await busy
    await threads.run_try(replace(request, owner="c"), lambda: done.append("c"))
    assert done == ["c"]
    threads.close()
