"""Runs one plan, and checks what the package promises."""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from django_distlock import Lease, lock, lock_all
from django_distlock.conf import BackendSettings
from django_distlock.engine.background import background
from django_distlock.engine.deadlocks import wait_graph
from django_distlock.engine.registry import registry
from django_distlock.engine.values import State
from django_distlock.exceptions import (
    LockBackendError,
    LockDeadlock,
    LockNotAcquired,
    LockNotHeld,
)
from django_distlock.signals import lock_acquired, lock_lost, lock_released

from . import world
from .plan import Actor, Fault, Plan, Round
from .primitives import EventLoop
from .processes import ALIAS, Process, Watch, simulated
from .wire import Network, Server
from .world import Strand, Violation, World

#: Seconds by which a wait may be longer than its timeout: where nothing is wrong, and else.
LATE, LATE_IN_TROUBLE = 0.4, 4.0
#: Seconds for which a lock may be free though somebody waits for it.
IDLE = {"redis": 1.5, "redlock": 5.0}
#: Seconds between two looks for such a lock, and the last one.
LOOK, LAST_LOOK = 0.25, 60.0


class Interruption(BaseException):
    """An asynchronous exception."""


@dataclass
class Store:
    """The data that a lock protects: one number that needs the lock, and one that is fenced."""

    value: int = 0
    writes: int = 0
    fence: int = 0
    fenced_value: int = 0
    fenced_writes: int = 0


class Schedule(Watch):
    """One run of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        here = World(plan.seed)
        super().__init__(here)
        here.switching, here.stalling, here.longest_stall = plan.switching, plan.stalling, 0.05
        self.network = Network(here)
        self.stores: dict[str, Store] = {}
        #: All leases that were granted, by key: each with its process.
        self.leases: dict[str, list[tuple[weakref.ref[Lease], Process]]] = {}
        self.tokens: dict[str, int] = {}
        #: Since when each actor waits for a lock, and of which name.
        self.waiting: dict[int, tuple[float, Round]] = {}
        self.free_since: dict[str, float] = {}
        self.left = len(plan.actors)
        self.strands: dict[int, Strand] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.ended: dict[int, list[str]] = {}

    def run(self) -> Violation | None:
        """Run it; return the first promise that was broken."""
        here = self.world
        with self._told(), simulated(here, self):
            self._begin()
            here.run()
            if here.violation is None:
                self._end()
            here.end()
            for lease in [known() for leases in self.leases.values() for known, _ in leases]:
                if lease is not None:
                    # Its finalizer is not to run in another schedule.
                    lease.disown()
        return here.violation

    # The begin.

    def _begin(self) -> None:
        plan, here = self.plan, self.world
        self.servers = [
            Server(here, number, plan.rates[-1 - number]) for number in range(plan.servers)
        ]
        count = max(actor.process for actor in plan.actors) + 1
        self.processes = [
            Process(
                here, number, self.network, self.servers, rate=plan.rates[number], grain=plan.grain
            )
            for number in range(count)
        ]
        for process in self.processes:
            process.enter()
            process.open(self._settings())
            tasks = [
                (n, a)
                for n, a in enumerate(plan.actors)
                if a.process == process.number and a.is_task
            ]
            if tasks:
                process.start(partial(self._run_loop, process, tasks), "loop")
        for number, actor in enumerate(plan.actors):
            if not actor.is_task:
                process = self.processes[actor.process]
                process.enter()
                self.strands[number] = process.start(
                    partial(self._run_thread, number, actor), f"actor-{number}"
                )
        for fault in plan.faults:
            here.after(fault.at, partial(self._strike, fault))
        here.after(LOOK, self._look)

    def _settings(self) -> BackendSettings:
        urls = [f"redis://127.0.0.1:{7000 + number}/0" for number in range(self.plan.servers)]
        if self.plan.servers > 1:
            options: dict[str, Any] = {"servers": urls, "fencing": self.plan.has_fencing}
            path = "django_distlock.backends.redlock.RedlockBackend"
        else:
            options = {"location": urls[0], "fair": self.plan.backend.endswith("fair")}
            path = "django_distlock.backends.redis.RedisBackend"
        return BackendSettings(alias=ALIAS, backend=path, options=options)

    # What goes wrong.

    def _strike(self, fault: Fault) -> None:
        here, server = self.world, self.servers[fault.server]
        process = self.processes[self.plan.actors[fault.who].process]
        here.note("fault", fault)
        getattr(self, f"_{fault.kind}")(fault, server, process)

    def _interrupt(self, fault: Fault, server: Server, process: Process) -> None:
        strand = self.strands.get(fault.who)
        if strand is not None and not strand.is_over:
            strand.interrupt(Interruption(), fault.places)

    def _cancel(self, fault: Fault, server: Server, process: Process) -> None:
        task = self.tasks.get(fault.who)
        if task is not None and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _kill(self, fault: Fault, server: Server, process: Process) -> None:
        process.is_dead = True
        for each in self.servers:
            for connection in [
                each_one for each_one in each.connections if each_one.process is process
            ]:
                connection.close()
        for number, actor in enumerate(self.plan.actors):
            if actor.process == process.number:
                self.waiting.pop(number, None)

    def _freeze(self, fault: Fault, server: Server, process: Process) -> None:
        process.is_frozen = True

        def go_on() -> None:
            process.is_frozen = False

        self.world.after(fault.length, go_on)

    def _cut(self, fault: Fault, server: Server, process: Process) -> None:
        self.network.cut[process.name, server.number] = self.world.now + fault.length

    def _reset(self, fault: Fault, server: Server, process: Process) -> None:
        for connection in [*server.connections]:
            connection.reset()

    def _lossy(self, fault: Fault, server: Server, process: Process) -> None:
        self.network.breaking = 0.15
        self.world.after(fault.length, lambda: setattr(self.network, "breaking", 0.0))

    def _drop(self, fault: Fault, server: Server, process: Process) -> None:
        self.network.lost_in = 1 + fault.places % 7

    def _slow(self, fault: Fault, server: Server, process: Process) -> None:
        self.network.lateness, self.network.longest_late = 0.3, 1.3
        self.world.after(fault.length, lambda: setattr(self.network, "lateness", 0.0))

    def _hang(self, fault: Fault, server: Server, process: Process) -> None:
        server.hangs_until = self.world.now + fault.length

    def _restart(
        self, fault: Fault, server: Server, process: Process, *, keeps_data: bool = True
    ) -> None:
        server.stop()
        self.world.after(fault.length / 4, lambda: server.start_again(keeps_data=keeps_data))

    def _wipe(self, fault: Fault, server: Server, process: Process) -> None:
        self._restart(fault, server, process, keeps_data=False)

    def _unseen_wipe(self, fault: Fault, server: Server, process: Process) -> None:
        server.start_again(keeps_data=False)

    def _back(self, fault: Fault, server: Server, process: Process) -> None:
        server.skew -= fault.length

    def _forward(self, fault: Fault, server: Server, process: Process) -> None:
        server.skew += fault.length * 10

    # The callers.

    def _run_thread(self, number: int, actor: Actor) -> None:
        strand = self.world.running
        assert strand is not None
        was_interrupted = False
        for one in actor.rounds:
            try:
                strand.wait(one.pause)
                self._use(number, one, strand)
            except Interruption:
                was_interrupted = True
                self.world.note("actor", number, "was interrupted")
            except LockDeadlock:
                # Right at the call of release(), an exception leaves the lock held while its thread lives.
                if not was_interrupted:
                    raise
            finally:
                self.waiting.pop(number, None)
        strand.take_pending()
        self.left -= 1

    def _use(self, number: int, one: Round, strand: Strand) -> None:
        """Use the lock once, in a thread."""
        process = strand.process
        came = process.time()
        self.waiting[number] = self.world.now, one

        def work(lease: Lease) -> None:
            self._note_granted(number, one, process, came)
            for seconds in self._work(lease, one):
                strand.wait(seconds)

        try:
            _use_lock(one, work)
        except LockNotAcquired:
            self._note_refused(number, one, process, came)
        except (LockBackendError, LockNotHeld) as error:
            self._note_error(number, one, process, came, error)

    def _run_loop(self, process: Process, actors: list[tuple[int, Actor]]) -> None:
        loop = EventLoop(process.time)

        async def main() -> None:
            for number, actor in actors:
                self.tasks[number] = loop.create_task(self._run_task(number, actor, process))
            await asyncio.gather(
                *(self.tasks[number] for number, _ in actors), return_exceptions=True
            )
            # As asyncio.run(): what goes on in the background is cancelled.
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for each in rest:
                each.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await loop.shutdown_asyncgens()

        loop.run_until_complete(main())
        loop.close()
        for number, _ in actors:
            task = self.tasks[number]
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _run_task(self, number: int, actor: Actor, process: Process) -> None:
        try:
            for one in actor.rounds:
                try:
                    await asyncio.sleep(one.pause)
                    await self._use_async(number, one, process)
                except asyncio.CancelledError:
                    self.world.note("actor", number, "was cancelled")
                finally:
                    self.waiting.pop(number, None)
        finally:
            self.left -= 1

    async def _use_async(self, number: int, one: Round, process: Process) -> None:
        came = process.time()
        self.waiting[number] = self.world.now, one

        async def work(lease: Lease) -> None:
            self._note_granted(number, one, process, came)
            for seconds in self._work(lease, one):
                await asyncio.sleep(seconds)

        try:
            await _use_lock_async(one, work)
        except LockNotAcquired:
            self._note_refused(number, one, process, came)
        except (LockBackendError, LockNotHeld) as error:
            self._note_error(number, one, process, came, error)

    def _work(self, lease: Lease, one: Round) -> Iterator[float]:
        """Change what the lock protects; yield the pauses."""
        is_exclusive = not one.shared and one.limit is None
        store = self.stores.setdefault(lease.name, Store())
        value = store.value
        token = lease.fencing_token if is_exclusive else None
        is_claimed = token is not None and token >= store.fence
        if is_claimed:
            assert token is not None
            store.fence = token
        fenced_value = store.fenced_value
        yield one.hold / 2
        yield one.hold / 2
        if is_claimed and token == store.fence:
            # Even if it was lost meanwhile: that is what the fence is for.
            store.fenced_value = fenced_value + 1
            store.fenced_writes += 1
        lease.check()
        if is_exclusive:
            store.value = value + 1
            store.writes += 1
        if store.fenced_value != store.fenced_writes:
            self.world.fail("fence", f"{store}: a write was lost behind the fence")
        if store.value != store.writes and self.plan.promises_exclusion:
            self.world.fail("lost-update", f"{store}: a write was lost under the lock")

    # What is checked.

    def granted(self, lease: Lease) -> None:
        here, process, key = self.world, self.world.entered, lease.request.key
        here.note("granted", process.name, key, lease.fencing_token, lease.request.owner[:6])
        if self.plan.promises_exclusion:
            for other, of in self.leases.get(key, ()):
                if _excludes(other(), lease, of):
                    text = f"{process.name} was granted {key}, which {of.name} holds: {other()!r}, {lease!r}"
                    here.fail("two-holders", text)
        self.leases.setdefault(key, []).append((lease.ref, process))
        limit = lease.holder.limit
        if limit is not None and lease.place not in range(limit):
            here.fail("place", f"{lease!r} has place {lease.place}")
        if not self._may_be_held_up and process.time() > lease.deadline + LATE:
            here.fail("late-grant", f"{lease!r} was granted after its deadline")
        self._check_token(lease, key)

    def _check_token(self, lease: Lease, key: str) -> None:
        token, last = lease.fencing_token, self.tokens.get(key, 0)
        if (token is None) == self.plan.has_fencing:
            self.world.fail("token", f"the token of {lease!r} is {token}")
        elif token is not None and not lease.shared:
            if token <= last and self.plan.promises_exclusion:
                self.world.fail("token", f"the token of {lease!r} is not above {last}")
            self.tokens[key] = max(token, last)

    def losing(self, lease: Lease, reason: str) -> None:
        self.world.note("losing", lease.request.owner[:6], reason)
        is_early = self.world.entered.time() < lease.deadline
        is_news = lease._state is State.HELD and reason.startswith("the server says")
        if is_news and is_early and self.plan.keeps_leases:
            self.world.fail("untrue-loss", f"{lease!r} was lost before its deadline: {reason}")

        is_over = lease._state is State.HELD and reason.startswith("its deadline")
        if is_over and self.plan.is_calm and not self._may_be_held_up:
            self.world.fail("not-renewed", f"{lease!r} was lost though nothing is wrong")

    @property
    def _may_be_held_up(self) -> bool:
        return self.plan.stalling > 0 or any(fault.kind == "freeze" for fault in self.plan.faults)

    def _note_granted(self, number: int, one: Round, process: Process, came: float) -> None:
        self.waiting.pop(number, None)
        self._check_lateness(number, one, process, came)

    def _note_refused(self, number: int, one: Round, process: Process, came: float) -> None:
        self.waiting.pop(number, None)
        self.world.note("actor", number, "was refused")
        waited = process.time() - came
        if one.timeout is None or waited < one.timeout - 0.001:
            self.world.fail("early", f"actor {number} was refused after {waited} s: {one}")
        self._check_lateness(number, one, process, came)

    def _note_error(
        self, number: int, one: Round, process: Process, came: float, error: Exception
    ) -> None:
        self.world.note("actor", number, "got", type(error).__name__)
        # Whatever a caller did, its server answered.
        if isinstance(error, LockBackendError) and self.plan.is_calm:
            self.world.fail(
                "error", f"actor {number} got {error!r} though the servers are well", error
            )
        if number in self.waiting:
            self.waiting.pop(number)
            self._check_lateness(number, one, process, came)

    def _check_lateness(self, number: int, one: Round, process: Process, came: float) -> None:
        frozen = sum(fault.length for fault in self.plan.faults if fault.kind == "freeze")
        late = frozen + (LATE if self.plan.is_calm else LATE_IN_TROUBLE)
        if self.plan.stalling:
            late += 1.0
        waited = process.time() - came
        if one.timeout is not None and waited > one.timeout + late:
            self.world.fail("late", f"actor {number} waited {waited} s: {one}")

    def _look(self) -> None:
        """See that no lock is free for long while somebody waits for it."""
        here = self.world
        if self.left and here.now < 1000 + LAST_LOOK:
            here.after(LOOK, self._look)
        longest = IDLE["redis" if self.plan.servers == 1 else "redlock"]
        if not self.plan.is_calm or self.plan.stalling:
            return
        for name in ("a", "b"):
            waiting = [
                since
                for since, one in self.waiting.values()
                if one.name == name and one.how != "all"
            ]
            if not waiting or self._is_held(name):
                self.free_since.pop(name, None)
                continue
            since = max(self.free_since.setdefault(name, here.now), min(waiting))
            if here.now - since > longest:
                here.fail(
                    "idle",
                    f"{name!r} has been free for {here.now - since} s, and somebody waits for it",
                )

    def _is_held(self, name: str) -> bool:
        """Whether some owner has the lock, or a place of it, on most servers."""
        return any(name in key.rpartition("|")[2] for key in self._held())

    def _held(self) -> list[str]:
        """Return the keys of what is held on most servers."""
        votes: dict[tuple[str, bytes], int] = {}
        for server in self.servers:
            now = server.clock()
            for key, value in server.redis.data.items():
                owners: list[bytes] = []
                if key.endswith(b":h"):
                    owners = [owner for owner, ends in value.items() if ends > now]
                elif isinstance(value, dict) and (lease := value.get(b"lease")):
                    since, lasts, owner = lease.split(b" ")
                    if int(since) + int(lasts) > now:
                        owners = [owner]
                for owner in owners:
                    votes[key.decode(), owner] = votes.get((key.decode(), owner), 0) + 1
        return [key for (key, _), count in votes.items() if count > self.plan.servers // 2]

    # The end.

    def _end(self) -> None:
        here = self.world
        alive = [process for process in self.processes if not process.is_dead]
        hung = [
            each.name
            for each in here.strands
            if not each.is_over and each.process in alive and "/actor" in each.name
        ]
        if hung:
            here.fail("hung", f"{hung} never ended")
            return
        is_killed = len(alive) < len(self.processes)
        if not is_killed and (held := self._held()):
            here.fail("left-on-server", f"still held: {held}")
        for process in alive:
            process.enter()
            self._check_nothing_left(process)
        for process in alive:
            process.start(process.backend.close, "close")
        here.run()
        left = [each.name for each in here.strands if not each.is_over and each.process in alive]
        if left:
            here.fail("thread-left", f"these threads did not end: {left}")

    def _check_nothing_left(self, process: Process) -> None:
        left = {
            "leases": list(registry._known.values()),
            "in flight": registry._in_flight,
            "lines": process.backend.queue.lines,
            "waiting": wait_graph._waiting,
            "jobs": any(background._lanes.values()),
        }
        if found := {what: each for what, each in left.items() if each}:
            self.world.fail("left-in-process", f"{process.name} has {found}")
        for lease, ends in self.ended.items():
            if len(ends) > 1:
                self.world.fail("signals", f"a lease ended {len(ends)} times: {ends} ({lease})")

    # Signals and logs.

    def _note_unraisable(self, what: Any) -> None:
        if not isinstance(what.exc_value, (world.Over, Interruption)):
            self.world.fail("unraisable", f"{what.object!r}: {what.exc_value!r}", what.exc_value)

    @contextmanager
    def _told(self) -> Iterator[None]:
        def ended(*, signal: Any, lease: Lease, **_: Any) -> None:
            what = "lost" if signal is lock_lost else "released"
            self.world.note("signal", what, lease.request.owner[:6])
            self.ended.setdefault(hash(lease.request.owner), []).append(what)

        def acquired(**_: Any) -> None:
            self.world.note("signal", "acquired")

        handler = _Errors(self.world.fail)
        logger = logging.getLogger("django_distlock")
        level, was_propagated, handlers = logger.level, logger.propagate, logger.handlers
        with ExitStack() as stack:
            if self.plan.has_receivers:
                for signal, receiver in (
                    (lock_acquired, acquired),
                    (lock_lost, ended),
                    (lock_released, ended),
                ):
                    signal.connect(receiver)
                    stack.callback(signal.disconnect, receiver)
            stack.enter_context(patch.object(sys, "unraisablehook", self._note_unraisable))
            logger.setLevel(logging.WARNING)
            logger.propagate, logger.handlers = False, [handler]
            try:
                yield
            finally:
                logger.setLevel(level)
                logger.propagate, logger.handlers = was_propagated, handlers


def _terms(one: Round) -> Any:
    wishes: dict[str, Any] = {"using": ALIAS, "timeout": one.timeout, "ttl": one.ttl}
    if one.shared:
        wishes["shared"] = True
    if one.limit is not None:
        wishes["limit"] = one.limit
    return wishes


def _check_same(lease: Lease, again: Lease) -> None:
    if again is not lease:
        raise Violation("re-entry", f"{again!r} is not {lease!r}")


def _use_lock(one: Round, work: Callable[[Lease], object]) -> None:
    """Acquire the lock as *one* says, *work*, and release it; LockNotAcquired also for None."""
    wanted = lock(one.name, **_terms(one))
    if one.how == "all":
        with lock_all("a", "b", **_terms(one)) as leases:
            work(leases[one.name == "b"])
    elif one.how == "acquire":
        if (lease := wanted.acquire()) is None:
            raise LockNotAcquired(one.name)
        try:
            work(lease)
        finally:
            lease.release()
    else:
        with wanted as lease:
            work(lease)
            if one.how == "nested":
                with wanted as again:
                    _check_same(lease, again)
            elif one.how == "extend":
                lease.extend()


async def _use_lock_async(one: Round, work: Callable[[Lease], Awaitable[object]]) -> None:
    wanted = lock(one.name, **_terms(one))
    if one.how == "all":
        async with lock_all("a", "b", **_terms(one)) as leases:
            await work(leases[one.name == "b"])
    elif one.how == "acquire":
        if (lease := await wanted.aacquire()) is None:
            raise LockNotAcquired(one.name)
        try:
            await work(lease)
        finally:
            await lease.arelease()
    else:
        async with wanted as lease:
            await work(lease)
            if one.how == "nested":
                async with wanted as again:
                    _check_same(lease, again)
            elif one.how == "extend":
                await lease.aextend()


def _excludes(other: Lease | None, lease: Lease, process: Process) -> bool:
    """Return whether *other*, a lease of *process*, is sure to be held, so that *lease* must not be."""
    if other is None or other._state is not State.HELD or not other.entries:
        return False
    return process.time() < other.deadline and not (other.shared and lease.shared)


class _Errors(logging.Handler):
    """Takes an unexpected error that the package has logged for a violation."""

    def __init__(self, fail: Callable[[str, str, BaseException | None], object]) -> None:
        super().__init__()
        self._fail = fail

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            error = record.exc_info[1]
            if not isinstance(error, (world.Over, Interruption)):
                self._fail("logged", f"{record.getMessage()}: {error!r}", error)


def outcome(plan: Plan, log: list[str] | None = None) -> tuple[Violation | None, str]:
    """Run *plan*; return the promise that was broken, if any, and what tells this run from others."""
    schedule = Schedule(plan)
    schedule.world.log = log
    violation = schedule.run()
    return violation, schedule.world.digest
