"""One thread that talks to all servers, for the threads and the tasks of a process alike."""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
import ssl
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from redis.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError, RedisError

from django_distlock.backends.redis.connections import packed, parsed
from django_distlock.engine import clock
from django_distlock.engine.background import NoThreadError, start_daemon
from django_distlock.engine.bells import TaskBell, ThreadBell
from django_distlock.exceptions import first_line

from .votes import LONGEST, LONGEST_CONNECTING, Count, Question, majority

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_distlock.backends.redis.sources import Source
    from django_distlock.engine.bells import Bell

logger = logging.getLogger("django_distlock")

#: What drivers raise when there is no connection, or not any more.
BROKEN = (RedisError, OSError)
#: What sockets raise instead of waiting.
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
#: Seconds after which a connection that still owes answers is given up, and how many it may owe.
DEBT_SECONDS, DEBT = 1.0, 64
#: Seconds between two checks that the servers can still wake the waiters of this process.
CHECK = 1.0
#: Bytes that are read at once.
CHUNK = 65536
#: Seconds between two looks of a thread that cannot be woken.
UNWOKEN = 0.005


class Round:
    """One question to the servers; *bell* is rung when it is over: from then on the count is not changed any more."""

    __slots__ = ("bell", "count", "is_over", "question")

    def __init__(self, question: Question, bell: Bell, total: int) -> None:
        self.question = question
        self.bell = bell
        self.count = Count(total, frozenset(question.calls))
        self.is_over = False

    def look(self) -> None:
        """Be over if it is decided, or nobody is left to answer."""
        try:
            self.is_over = self.question.is_decided(self.count) or not self.count.pending
        except Exception:  # noqa: BLE001 - an answer makes no sense: whoever asks meets it as well
            self.is_over = True
        if self.is_over:
            self.bell.ring()


class Asked:
    """What one server is asked in a round."""

    __slots__ = ("deadline", "round", "sent_at", "server")

    def __init__(self, its_round: Round, server: int, deadline: float) -> None:
        self.round = its_round
        self.server = server
        #: Until when to wait for the connection, and from when it is *sent_at*, for the answer.
        self.deadline = deadline
        self.sent_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for the answer."""
        count = self.round.count
        is_heard = self.server in count.answers or self.server in count.failures
        return not (self.round.is_over or is_heard)

    def answer(self, answer: Any) -> None:
        """Take the answer in."""
        if self.is_open:
            self.round.count.take(self.server, answer)
            self.round.look()

    def miss(self, what: str, error: Exception | None = None) -> None:
        """Take note that there will be no answer."""
        if self.is_open:
            cause = f"{what}: {first_line(error)}" if error else what
            self.round.count.miss(self.server, cause, error, was_asked=self.sent_at > 0)
            self.round.look()


class Connection:
    """A connection to one server, used by one thread: questions are sent as they come, and answered in that order.

    So what is sent after a question that timed out is carried out after it, whenever that is.
    """

    def __init__(self, servers: Servers, source: Source) -> None:
        self._servers = servers
        self._source = source
        self._driver: Any = None  # redis-py's connection, which knows how to connect
        self._socket: Any = None
        self.is_connecting = False
        self._waiting: list[Asked] = []
        self._sent: deque[Asked] = deque()
        self._unsent, self._unread = b"", b""
        self._events = selectors.EVENT_READ
        self._heard_at = 0.0
        #: Whether waiters can be woken by it.
        self.is_subscribed = False

    def ask(self, asked: Asked) -> None:
        """Send a question, once there is a connection."""
        if self._is_silent():
            self.close()
        if self._socket is not None:
            self._send(asked)
            return
        self._waiting.append(asked)
        self._servers.watch(self, asked)
        if not self.is_connecting:
            self.is_connecting = True
            try:
                start_daemon(self._connect, f"distlock-connect-{self._source.where}")
            except NoThreadError:
                self._connect()

    def give_up(self, asked: Asked, now: float) -> None:
        """Wait no longer for the answer; but a server that answers others meanwhile is at work: it has a second."""
        within = asked.round.question.within
        if not asked.sent_at:
            limit = asked.round.question.connecting
            asked.miss(f"no connection to it within {limit:.3g} s")
        elif self._heard_at > asked.deadline - within and now < asked.sent_at + DEBT_SECONDS:
            asked.deadline = now + within
            self._servers.watch(self, asked)
        else:
            asked.miss(f"it did not answer within {within:.3g} s")

    def close(self, error: Exception | None = None) -> None:
        """Close it; the next question opens another one."""
        if self._socket is None:
            return
        self._servers.selector.unregister(self._socket)
        self._driver.disconnect()
        self._driver = self._socket = None
        self._unsent, self._unread, self.is_subscribed = b"", b"", False
        sent, self._sent = self._sent, deque()
        error = error or RedisConnectionError("the connection was lost")
        for asked in sent:
            asked.miss("it did not answer", error)

    def _connect(self) -> None:
        """In another thread: get a connection, greetings and all."""
        # Not the pool's: that keeps all it has ever made.
        pool = ConnectionPool(**self._source.connection)
        driver: Any = pool.connection_class(**pool.connection_kwargs)
        failed: Exception | None = None
        try:
            driver.connect()
        except Exception as error:  # noqa: BLE001 - also what gives passwords may fail
            driver.disconnect()
            failed = error
        self._servers.do(partial(self._connected, driver, failed))

    def _connected(self, driver: Any, failed: Exception | None) -> None:
        self.is_connecting = False
        waiting, self._waiting = self._waiting, []
        if failed is not None:
            for asked in waiting:
                asked.miss("it cannot be reached", failed)
            return
        self._driver, self._socket = driver, driver._sock  # noqa: SLF001 - redis-py waits for one connection only
        self._socket.setblocking(False)
        self._events = selectors.EVENT_READ
        self._servers.selector.register(self._socket, self._events, self._be_ready)
        now = clock.wait_time()
        for asked in waiting:
            # Also what is decided by now: the more votes, the better.
            if asked.deadline > now and self._socket is not None:
                self._send(asked)

    def _send(self, asked: Asked) -> None:
        now = clock.wait_time()
        asked.sent_at, asked.deadline = now, now + asked.round.question.within
        self._sent.append(asked)
        self._servers.watch(self, asked)
        self._unsent += asked.round.question.calls[asked.server]
        self._go_on_sending()

    def _be_ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE and self._socket is not None:
            self._go_on_sending()
        if events & selectors.EVENT_READ and self._socket is not None:
            self._read()

    def _go_on_sending(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except NOT_YET:
            pass
        except OSError as error:
            self.close(error)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._servers.selector.modify(self._socket, events, self._be_ready)

    def _read(self) -> None:
        try:
            self._receive()
            while self._unread:
                parse_error = self._driver._parser.parse_error  # noqa: SLF001 - only it knows all its errors
                answer, end = parsed(self._unread, 0, parse_error)
                self._unread = self._unread[end:]
                self._take(answer)
        except IndexError:
            pass  # more of it comes later
        except (*BROKEN, ValueError) as error:
            self.close(error)

    def _receive(self) -> None:
        with suppress(*NOT_YET):
            while data := self._socket.recv(CHUNK):
                self._unread += data
                self._heard_at = clock.wait_time()
                # What TLS has decrypted already is no news to a selector.
                if len(data) < CHUNK and not getattr(self._socket, "pending", int)():
                    return
            raise RedisConnectionError("it closed the connection")

    def _take(self, answer: Any) -> None:
        kind = answer[0] if isinstance(answer, list) and answer else None
        if kind == b"message":
            self._servers.wake(answer[2].decode())
        elif self._sent:
            self._sent.popleft().answer(answer)
            if kind == b"subscribe" and not self.is_subscribed:
                self.is_subscribed = True
                self._servers.note_subscription()

    def _is_silent(self) -> bool:
        """Return whether it owes answers for too long, or too many; nobody may be waiting for any of them."""
        if not self._sent:
            return False
        oldest = self._sent[0]
        silent = clock.wait_time() - max(self._heard_at, oldest.sent_at)
        is_full = len(self._sent) > DEBT and silent > oldest.round.question.within
        return (is_full or silent > DEBT_SECONDS) and not any(each.is_open for each in self._sent)


class Servers:
    """All the servers. Its thread starts with the first question and ends with close(); it alone uses connections."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._total = len(sources)
        self._connections = [Connection(self, source) for source in sources]
        #: Messages come by connections of their own: a server must not wait for answers to send one.
        self._listening = [Connection(self, source) for source in sources]
        #: Servers know the waiters of this process by it.
        self.channel = f"distlock-bells:{token_hex(8)}"
        self._bells: WeakValueDictionary[str, Bell] = WeakValueDictionary()
        self._checked_at = -CHECK
        #: Who has it is the one thread that serves.
        self._post = threading.Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        self._due: list[tuple[float, int, Connection, Asked]] = []
        self._numbers = itertools.count()
        self._is_asleep = self._is_closing = False
        self._waker: tuple[socket.socket, socket.socket] | None = None

    def ask(self, question: Question) -> Count:
        """Return what was answered until it was decided, or everybody's time was over."""
        bell = ThreadBell()
        asked = Round(question, bell, self._total)
        self.do(partial(self._begin, asked, self._connections))
        bell.wait(None)
        return asked.count

    async def aask(self, question: Question) -> Count:
        """See ask()."""
        bell = TaskBell()
        asked = Round(question, bell, self._total)
        self.do(partial(self._begin, asked, self._connections))
        await bell.wait(None)
        return asked.count

    def listen(self, owner: str, bell: Bell) -> None:
        """Have *bell* rung when a server says that it is worth to ask again for *owner*."""
        self._bells[owner] = bell

    def channel_of_waiters(self) -> str:
        """Return what servers know the waiters of this process by, and see to it that they can be woken."""
        self.do(self._subscribe)
        return self.channel

    def close(self) -> None:
        """End the thread and close all connections, once nobody waits for an answer. They come back if need be."""
        self._is_closing = True
        self._wake()

    def do(self, job: Callable[[], object]) -> None:
        """Run *job* in the thread; here, if there can be no thread, as at the exit of the interpreter."""
        self._jobs.append(job)
        if self._post.locked():
            if self._is_asleep:
                self._wake()
            return
        self._is_closing = False
        try:
            start_daemon(self._run, "distlock-redlock")
        except NoThreadError:
            self._is_closing = True
            self._run()

    def watch(self, connection: Connection, asked: Asked) -> None:
        """Have *asked* given up at its deadline."""
        heapq.heappush(self._due, (asked.deadline, next(self._numbers), connection, asked))

    def wake(self, owner: str) -> None:
        """Wake one waiter, if it is there."""
        if (bell := self._bells.get(owner)) is not None:
            bell.ring()

    def note_subscription(self) -> None:
        """Wake all waiters once most servers can: what they said before was not heard."""
        if sum(each.is_subscribed for each in self._listening) == majority(self._total):
            for bell in self._bells.valuerefs():
                if (its := bell()) is not None:
                    its.ring()

    def _begin(self, its_round: Round, connections: Sequence[Connection]) -> None:
        until = clock.wait_time() + its_round.question.connecting
        for server in its_round.question.calls:
            connections[server].ask(Asked(its_round, server, until))

    def _subscribe(self) -> None:
        """Have servers send messages to this process; look now and then whether they still can."""
        now = clock.wait_time()
        if now < self._checked_at + CHECK:
            return
        self._checked_at = now
        calls = dict.fromkeys(range(self._total), packed([("SUBSCRIBE", self.channel)]))
        question = Question(calls, lambda _: False, LONGEST, LONGEST_CONNECTING)
        self._begin(Round(question, ThreadBell(), self._total), self._listening)

    def _run(self) -> None:
        # Whoever comes while another thread serves has nothing to do: that one does all jobs before it ends.
        while self._jobs and self._post.acquire(blocking=False):
            try:
                self._serve()
            finally:
                self._post.release()

    def _serve(self) -> None:
        self.selector = _selector()
        with suppress(OSError):  # there may be no more files: then it looks often
            self._waker = socket.socketpair()
            self._waker[1].setblocking(False)
            self.selector.register(self._waker[0], selectors.EVENT_READ, self._wake_up)
        connections = [*self._connections, *self._listening]
        while not self._is_closing or self._jobs or self._is_waited_for(connections):
            try:
                self._turn()
            except Exception as error:
                logger.exception("Redlock: what a server said was not understood")
                for connection in connections:
                    connection.close(error)
        for connection in connections:
            connection.close()
        self.selector.close()
        waker, self._waker = self._waker, None
        for end in waker or ():
            end.close()

    def _is_waited_for(self, connections: Sequence[Connection]) -> bool:
        is_connecting = any(each.is_connecting for each in connections)
        return is_connecting or any(asked.is_open for *_, asked in self._due)

    def _turn(self) -> None:
        while self._due and not self._due[0][-1].is_open:
            heapq.heappop(self._due)
        now = clock.wait_time()
        left = self._due[0][0] - now if self._due else None
        if self._waker is None:
            left = UNWOKEN if left is None else min(left, UNWOKEN)
        self._is_asleep = True
        if self._jobs:
            left = 0.0
        events = self.selector.select(left)
        self._is_asleep = False
        for key, mask in events:
            key.data(mask)
        while self._jobs:
            self._jobs.popleft()()
        # Late by then: what has arrived since was heard, however long this thread was held up.
        while self._due and self._due[0][0] <= now:
            *_, connection, asked = heapq.heappop(self._due)
            if asked.is_open and asked.deadline <= now:
                connection.give_up(asked, now)

    def _wake(self) -> None:
        if (waker := self._waker) is not None:
            with suppress(OSError):
                waker[1].send(b".")

    def _wake_up(self, _: int) -> None:
        if self._waker is not None:
            self._waker[0].recv(CHUNK)


def _selector() -> selectors.BaseSelector:
    """Return a selector; with those of eventlet and gevent, which take poll() away, other greenlets run meanwhile."""
    if selectors.DefaultSelector is getattr(selectors, "EpollSelector", None):
        # Not that one: a forked child would share it, and it opens one more file.
        return selectors.PollSelector()
    return selectors.DefaultSelector()
