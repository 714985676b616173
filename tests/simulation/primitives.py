"""What stands in the place of `threading`, of thread pools, of selectors and of asyncio's event loop."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from . import world
from .world import Strand


def _me() -> Strand | None:
    return world.current().running


class Mutex:
    """As threading.Lock()."""

    def __init__(self) -> None:
        self._is_locked = False
        self._waiters: list[Strand] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        here = world.current()
        here.step()
        me = _me()
        ends = None if timeout < 0 or me is None else here.now + timeout / me.process.rate
        while self._is_locked:
            left = None if ends is None or me is None else (ends - here.now) * me.process.rate
            if not blocking or me is None or (left is not None and left <= 0):
                return False
            self._waiters.append(me)
            try:
                me.wait(left)
            finally:
                self._waiters.remove(me)
        self._is_locked = True
        here.end_call()
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        for each in self._waiters:
            each.wake()
        world.current().step()
        world.current().end_call()

    def locked(self) -> bool:
        return self._is_locked


class ReentrantMutex:
    """As threading.RLock()."""

    def __init__(self) -> None:
        self.owner: Strand | None = None
        self._count = 0
        self._waiters: list[Strand] = []

    def acquire(self) -> bool:
        me = _me()
        if me is None:  # between two threads nobody is inside
            return True
        if self.owner is not me:
            world.current().step()
            while self.owner is not None:
                self._waiters.append(me)
                try:
                    me.wait(None)
                finally:
                    self._waiters.remove(me)
            self.owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if _me() is None or world.current().is_over:
            return
        if self.owner is not _me():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self.owner = None
            for each in self._waiters:
                each.wake()
            # No step: a switch before a thread goes on is one before its next step.

    def _is_owned(self) -> bool:
        return self.owner is not None and self.owner is _me()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
        world.current().end_call()


class Condition:
    """As threading.Condition()."""

    def __init__(self, mutex: ReentrantMutex) -> None:
        self._mutex = mutex
        self._waiters: deque[Strand] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        me = _me()
        assert me is not None
        self._waiters.append(me)
        self._mutex.release()
        try:
            return me.wait(timeout)
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
            if not world.current().is_over:
                self._mutex.acquire()

    def notify(self) -> None:
        if self._waiters:
            self._waiters.popleft().wake()


class Thread:
    """As threading.Thread."""

    def __init__(self, target: Callable[[], object], name: str = "", daemon: bool = False) -> None:
        here = world.current()
        process = here.running.process if here.running else here.entered
        self._strand = Strand(here, process, target, f"{process.name}/{name}")

    def start(self) -> None:
        self._strand.start()


class Timer(Thread):
    """As threading.Timer."""

    def __init__(
        self, interval: float, function: Callable[..., object], args: Sequence[object]
    ) -> None:
        super().__init__(self._run, "timer")
        self._seconds, self._job, self._is_cancelled = interval, partial(function, *args), False

    def _run(self) -> None:
        if not self._is_cancelled:
            self._strand.wait(self._seconds)
        if not self._is_cancelled:
            self._job()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._strand.wake()


class Threading:
    """The module."""

    Lock, RLock, Condition, Thread, Timer = Mutex, ReentrantMutex, Condition, Thread, Timer
    TIMEOUT_MAX = 1e6
    local = threading.local

    @staticmethod
    def get_ident() -> int:
        me = _me()
        return 0 if me is None else me.ident

    get_native_id = get_ident

    @staticmethod
    def enumerate() -> list[Strand]:
        return [each for each in world.current().strands if not each.is_over]


class Pool:
    """As ThreadPoolExecutor: its threads end as soon as they have nothing to do."""

    def __init__(self, size: int, thread_name_prefix: str = "") -> None:
        self._size, self._name = size, thread_name_prefix
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0

    def submit(self, verb: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, partial(verb, *arguments)))
        if self._threads < self._size:
            self._threads += 1
            Thread(self._work, self._name).start()
        return future

    def _work(self) -> None:
        while self._jobs:
            future, verb = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = verb()
                except BaseException as error:  # noqa: BLE001 - as the real one
                    future.set_exception(error)
                else:
                    future.set_result(result)
        self._threads -= 1

    def shutdown(self, *, wait: bool) -> None:
        pass


class Selector:
    """As selectors.PollSelector, of sockets of the simulation."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def __enter__(self) -> Selector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(self, socket: Any, events: int, data: object = None) -> None:
        self._keys[socket] = selectors.SelectorKey(socket, id(socket), events, data)

    modify = register

    def unregister(self, socket: Any) -> None:
        del self._keys[socket]

    def close(self) -> None:
        self._keys.clear()

    def select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        world.current().step()
        if (found := self._ready()) or (timeout is not None and timeout <= 0):
            return found
        me = _me()
        assert me is not None
        for socket in self._keys:
            socket.readers.append(me)
        try:
            me.wait(timeout)
        finally:
            for socket in self._keys:
                socket.readers.remove(me)
        return self._ready()

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = []
        for socket, key in self._keys.items():
            readable = selectors.EVENT_READ if socket.has_news() else 0
            if mask := readable | (key.events & selectors.EVENT_WRITE):
                ready.append((key, mask))
        return ready


class EventLoop(asyncio.BaseEventLoop):
    """An event loop in a simulated thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._is_rung = False
        self._sleeper: Strand | None = None
        self._world = world.current()
        self._world.loops.append(self)
        super().__init__()
        self._selector: Any = self
        self._clock_resolution = 1e-6

    def run_forever(self) -> None:
        me = _me()
        assert me is not None
        try:
            super().run_forever()
        finally:
            me.note_loop(None)

    def time(self) -> float:
        return self._now()

    def select(self, timeout: float | None) -> list[Any]:
        if (me := _me()) is not None:
            me.note_loop(self)
        world.current().step()
        if not self._is_rung and (timeout is None or timeout > 0):
            self._sleeper = _me()
            assert self._sleeper is not None
            try:
                self._sleeper.wait(timeout)
            finally:
                self._sleeper = None
        self._is_rung = False
        return []

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # What is destroyed after the end, or with a killed process, is no error.
        self._world.fail("loop", context["message"], context.get("exception"))

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._is_rung = True
        if self._sleeper is not None:
            self._sleeper.wake()
