"""One thread that talks to all servers, for all threads and asyncio tasks of the process."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import call
from typing import Any

from hiredis import Reader, pack_command
from redis.connection import ConnectionPool, DefaultParser
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
    InvalidResponse,
    RedisError,
    ResponseError,
)

from django_distlock.backends.redis.connections import (
    Command,
    Conversation,
    ThreadConnection,
    new_selector,
    words_of,
)
from django_distlock.backends.redis.sources import Source
from django_distlock.engine.background import NoThreadError, start_daemon
from django_distlock.engine.bells import Bell, TaskBell, ThreadBell
from django_distlock.engine.steps import Steps, arun, run
from django_distlock.engine.values import SecretBytes
from django_distlock.exceptions import (
    LockBackendError,
    LockOutcomeUnknown,
    first_line,
    root_cause,
)
from django_distlock.ground import clock
from django_distlock.ground.mutexes import this_thread
from django_distlock.ground.naming import log_fields

from .votes import LONGEST_CONNECTING, Count, Question

logger = logging.getLogger("django_distlock")

#: The errors of a broken connection.
BROKEN = (RedisError, OSError)
#: The errors that a socket raises instead of blocking.
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
#: Bytes that are read at once.
CHUNK = 65536
#: A connection is closed after so many seconds without an answer, or with more than so many answers missing.
DEBT_SECONDS, DEBT = 1.0, 64
#: Seconds of one BLPOP on the doorbells; the next BLPOP has the doorbells of new waiters, too.
LISTEN = 0.1
#: Seconds beyond LISTEN after which a BLPOP counts as unanswered.
DEAF = 1.0
#: Seconds that the thread may be late with an answer, beyond the time limits of the servers.
LATE = 10.0
#: A thread that looks for answers so many seconds too late was held up: it had no processor, or much to do.
HELD_UP = 0.01
#: Seconds between two looks for work, where the thread cannot be woken.
UNWOKEN = 0.005
#: Texts of errors.
IN_THE_THREAD = (
    "a finalizer uses a lock in the thread that talks to the servers, which would wait for itself: "
    "let another thread do it"
)
TOO_LATE = "the thread that talks to the servers is held up: it has not told their answers"


class Query:
    """The conversation with one server for a question. It continues when the question is over."""

    __slots__ = (
        "_answers",
        "_conversation",
        "deadline",
        "missing",
        "question",
        "sent_at",
        "server",
    )

    def __init__(self, question: Question, server: int, deadline: float) -> None:
        self.question = question
        self.server = server
        self._conversation = question.conversations[server]
        self._answers: Any = None
        #: How many answers to the last commands are missing.
        self.missing = 0
        #: When the connection must be there; once the query is sent, when the answer must be there.
        self.deadline = deadline
        self.sent_at = 0.0

    @property
    def is_open(self) -> bool:
        count = self.question.count
        is_known = self.server in count.answers or self.server in count.failures
        return not (self.question.is_over or is_known)

    def next_step(self) -> bytes:
        """Return the bytes to send next; b"" at the end of the conversation."""
        answers, self._answers = self._answers, []
        try:
            commands = self._conversation.send(answers)
        except StopIteration as end:
            self._end(end.value)
        except Exception as error:  # noqa: BLE001 - an answer that makes no sense may lead to any error
            self._refuse(root_cause(error))
        else:
            self.missing = len(commands)
            return SecretBytes(b"".join(map(_packed, commands)))
        return b""

    def take(self, answer: Any) -> None:
        self._answers.append(answer)
        self.missing -= 1
        self.question.answered += 1

    def fail(self, what: str, error: Exception | None = None) -> None:
        """Note that no answer will come."""
        cause = f"{what}: {first_line(error)}" if error else what
        self._miss(cause, error, was_asked=self.sent_at > 0)

    def _refuse(self, error: Exception) -> None:
        self._miss(f"it refused: {first_line(error)}", error, was_asked=False)

    def _end(self, result: Any) -> None:
        if self.is_open:
            self.question.count.answers[self.server] = result
            self.question.end_if_decided()

    def _miss(self, cause: str, error: Exception | None, *, was_asked: bool) -> None:
        if self.is_open:
            self.question.count.miss(self.server, cause, error, was_asked=was_asked)
            self.question.end_if_decided()


def _packed(command: Command) -> bytes:
    sent: bytes = pack_command(words_of(command))  # type: ignore[arg-type] # declared for commands of one word
    return sent


class ServerLink:
    """A connection to one server. All queries are sent at once, and answered in that order.

    So the server carries out a query after all earlier queries, even if nobody waits for their answers.
    *greet* makes a conversation for each new connection; its result is how many seconds the server has been up.
    """

    def __init__(
        self, servers: Servers, source: Source, greet: Callable[[], Conversation[float]]
    ) -> None:
        self._servers = servers
        self._greet = greet
        self._where = source.where
        self._pool = ConnectionPool(**source.connection)
        self._driver: Any = None  # redis-py's connection
        self._socket: Any = None
        self.is_connecting = False
        self._waiting: list[Query] = []
        self._sent: deque[Query] = deque()
        self._unsent = b""
        self._reader: Any = None
        self._heard_at = 0.0
        #: The time (wait time) since when the server has certainly been up.
        self._up_since = 0.0

    def ask(self, query: Query) -> None:
        """Send *query* now, or once there is a connection."""
        if self._is_silent():
            self.close()
        if self._socket is not None:
            self._send(query)
            return
        self._waiting.append(query)
        self._servers.watch(self, query)
        if not self.is_connecting:
            self.is_connecting = True
            try:
                start_daemon(self._connect, f"distlock-connect-{self._where}")
            except NoThreadError:
                self._connect()

    def end_overdue(self, query: Query, now: float) -> None:
        """Fail *query*; but wait up to a second if the server is answering other queries or this thread was held up."""
        within = query.question.within
        if not query.sent_at:
            limit = query.question.connecting
            query.fail(f"no connection to it within {clock.in_words(limit)}")
        elif (
            max(self._heard_at, self._servers.held_up_at) > query.deadline - within
            and now < query.sent_at + DEBT_SECONDS
        ):
            query.deadline = now + within
            self._servers.watch(self, query)
        else:
            query.fail(f"it did not answer within {clock.in_words(within)}")

    def close(self, error: Exception | None = None) -> None:
        """Close the connection; the next query opens another one."""
        if self._socket is None:
            return
        self._servers.selector.unregister(self._socket)
        self._driver.disconnect()
        self._driver = self._socket = None
        self._unsent = b""
        sent, self._sent = self._sent, deque()
        error = error or RedisConnectionError("the connection was lost")
        for query in sent:
            query.fail("it did not answer", error)

    def _is_silent(self) -> bool:
        """Return True if answers are missing for too long, or too many, and nobody waits for any of them."""
        if not self._sent:
            return False
        oldest = self._sent[0]
        silent = clock.wait_time() - max(self._heard_at, oldest.sent_at)
        is_full = len(self._sent) > DEBT and silent > oldest.question.within
        return (is_full or silent > DEBT_SECONDS) and not any(each.is_open for each in self._sent)

    def _connect(self) -> None:
        """Connect and log in, in a separate thread, because that takes long."""
        # Not by the pool's methods: the pool keeps all connections that it ever makes.
        driver: Any = self._pool.connection_class(**self._pool.connection_kwargs)
        failed: Exception | None = None
        up = 0.0
        try:
            driver.connect()
            up = run(self._greet(), ThreadConnection(driver, 0).exchange)
        except Exception as error:  # noqa: BLE001 - settings may have a project's code, for passwords
            driver.disconnect()
            failed = error
        self._servers.submit(partial(self._use, driver, failed, clock.wait_time() - up))

    def _use(self, driver: Any, failed: Exception | None, up_since: float) -> None:
        self.is_connecting = False
        waiting, self._waiting = self._waiting, []
        if failed is not None:
            what = "it refused" if isinstance(failed, ResponseError) else "it cannot be reached"
            for query in waiting:
                query.fail(what, failed)
            return
        self._up_since = up_since
        self._driver, self._socket = driver, driver._sock  # noqa: SLF001 - redis-py waits for one connection only
        self._socket.setblocking(False)
        self._reader = Reader(InvalidResponse, DefaultParser.parse_error)
        self._events = selectors.EVENT_READ
        self._servers.selector.register(self._socket, self._events, self._be_ready)
        now = clock.wait_time()
        for query in waiting:
            # Send it even if the question is over: the more servers have the lock, the better.
            if query.deadline > now and self._socket is not None:
                self._send(query)

    def _send(self, query: Query) -> None:
        """Begin the conversation, unless the server has not been up for long enough."""
        left = self._up_since + query.question.least_uptime - clock.wait_time()
        if query.question.least_uptime and left > 0:
            query.fail(f"it started lately, and grants nothing for {math.ceil(left)} s more")
        else:
            self._send_step(query)

    def _send_step(self, query: Query) -> None:
        """Send the next step of the conversation, if there is one."""
        if not (step := query.next_step()):
            return
        self._sent.append(query)
        now = clock.wait_time()
        query.sent_at, query.deadline = now, now + query.question.within
        self._servers.watch(self, query)
        self._unsent += step
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
            with suppress(*NOT_YET):
                self._receive()
        except BROKEN as error:
            self.close(error)

    def _receive(self) -> None:
        # A selector does not see bytes that TLS has read and not returned yet.
        is_more = True
        while is_more:
            data = self._socket.recv(CHUNK)
            if not data:
                raise RedisConnectionError("Connection closed by server.")
            self._heard_at = clock.wait_time()
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not False:
                self._take(answer)
            is_more = len(data) == CHUNK or getattr(self._socket, "pending", int)() > 0

    def _take(self, answer: Any) -> None:
        if not self._sent:
            return
        query = self._sent[0]
        query.take(answer)
        if not query.missing:
            self._sent.popleft()
            self._send_step(query)


class Servers:
    """All servers. The thread starts with the first question and ends with close(); only this thread uses connections."""

    def __init__(
        self, alias: str, sources: Sequence[Source], greet: Callable[[], Conversation[float]]
    ) -> None:
        self._alias = alias
        #: The names of the servers in errors.
        self.names = [source.where for source in sources]
        self._total = len(sources)
        self._connections = [ServerLink(self, source, greet) for source in sources]
        #: The connections for BLPOP on the waiters' doorbells, and by server the question with the present BLPOP.
        self._listening = [ServerLink(self, source, no_greeting) for source in sources]
        self._waits: dict[int, Question] = {}
        #: By server and key of the doorbell: the bell of a waiter, and until when it is rung.
        self._bells: list[dict[str, tuple[Bell, float]]] = [{} for _ in sources]
        #: Held by the thread that talks to the servers.
        self._thread = threading.Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        #: When the thread last looked for answers, and when it last was too late.
        self._looked_at = self.held_up_at = 0.0
        self._watched: list[tuple[float, int, ServerLink, Query]] = []
        self._numbers = itertools.count()
        self._is_asleep = self._is_closing = False
        self._waker: socket.socket | None = None

    def ask(self, question: Question) -> Count:
        """Return the answers as soon as they decide the question, or when all servers have answered or failed.

        LockBackendError in the thread itself: a finalizer there cannot wait for what the thread does after it.
        """
        return run(self._asked(question, ThreadBell()), call)

    async def aask(self, question: Question) -> Count:
        return await arun(self._asked(question, TaskBell()), call)

    def _asked(
        self, question: Question, bell: ThreadBell | TaskBell
    ) -> Steps[Callable[[], Any], Count]:
        if this_thread.serves_locks:
            raise LockBackendError(self._alias, IN_THE_THREAD)
        self._is_closing = False  # a thread that is about to end then continues
        self.submit(partial(self._begin, question, bell, self._connections))
        seen = -1
        while not question.is_over:
            if question.answered == seen:
                raise LockOutcomeUnknown(self._alias, TOO_LATE)
            seen = question.answered
            yield partial(bell.wait, question.connecting + question.within + LATE)
        return question.count

    def listen(self, doorbells: Sequence[str], bell: Bell, seconds: float) -> None:
        """Ring *bell* when one of *doorbells*, one on each server, rings within *seconds* or a bit longer."""
        until = clock.wait_time() + seconds + LISTEN
        self.submit(partial(self._listen, doorbells, (bell, until)))

    def close(self) -> None:
        """Close connections and end the thread once nobody waits for an answer; the next question starts it again."""
        self._is_closing = True
        self._wake_thread()

    def submit(self, job: Callable[[], object]) -> None:
        """Run *job* in the thread, or in the caller's if no thread can start, as at the exit of the interpreter."""
        self._jobs.append(job)
        if self._thread.locked():
            if self._is_asleep:
                self._wake_thread()
            return
        self._is_closing = False
        try:
            start_daemon(self._run, "distlock-redlock")
        except NoThreadError:
            self._is_closing = True
            self._run()

    # For connections, in the thread.

    def watch(self, connection: ServerLink, query: Query) -> None:
        heapq.heappush(self._watched, (query.deadline, next(self._numbers), connection, query))

    def _begin(self, question: Question, bell: Bell, connections: Sequence[ServerLink]) -> None:
        question.bell = bell
        question.count = Count(self._total, frozenset(question.conversations))
        until = clock.wait_time() + question.connecting
        for server in question.conversations:
            connections[server].ask(Query(question, server, until))
        question.end_if_decided()  # some questions need no answer, such as a release on servers that hang

    def _listen(self, doorbells: Sequence[str], bell: tuple[Bell, float]) -> None:
        for server, doorbell in enumerate(doorbells):
            bells = self._rung_now(server)  # without the waiters whose time is over
            bells[doorbell] = bell
            if server not in self._waits or self._waits[server].is_over:
                conversations = {server: self._wait(server)}
                question = Question(
                    conversations, lambda _: False, LISTEN + DEAF, LONGEST_CONNECTING
                )
                self._waits[server] = question
                self._begin(question, ThreadBell(), self._listening)

    def _wait(self, server: int) -> Conversation[None]:
        """Wait on *server* for the doorbells of all waiters, while there are waiters."""
        while bells := self._rung_now(server):
            (answer,) = yield (("BLPOP", *bells, f"{LISTEN:g}"),)
            if isinstance(answer, ResponseError):
                raise answer
            if answer:
                bells[answer[0].decode()][0].ring()

    def _rung_now(self, server: int) -> dict[str, tuple[Bell, float]]:
        now, bells = clock.wait_time(), self._bells[server]
        self._bells[server] = {key: bells[key] for key in bells if bells[key][1] > now}
        return self._bells[server]

    # The thread.

    def _run(self) -> None:
        # Two threads may have been started: one works. "while" catches a job that comes while the thread ends.
        while self._jobs and self._thread.acquire(blocking=False):
            try:
                this_thread.serves_locks = True
                self._work()
            finally:
                this_thread.serves_locks = False
                self._thread.release()

    def _work(self) -> None:
        self.selector = new_selector()
        ends: tuple[socket.socket, ...] = ()
        with suppress(OSError):  # too many open files
            ends = read_end, self._waker = socket.socketpair()
            self._waker.setblocking(False)
            self.selector.register(read_end, selectors.EVENT_READ, lambda _: read_end.recv(CHUNK))
        connections = [*self._connections, *self._listening]
        while (
            not self._is_closing
            or self._jobs
            or any(each.is_connecting for each in connections)
            or any(query.is_open for *_, query in self._watched)
        ):
            try:
                self._work_once()
            except Exception as error:
                logger.exception(
                    "Redlock: connections are closed after an unexpected error", extra=log_fields()
                )
                for connection in connections:
                    connection.close(error)
        for connection in connections:
            connection.close()
        self.selector.close()
        self._waker = None
        for end in ends:
            end.close()

    def _work_once(self) -> None:
        while self._watched and not self._watched[0][-1].is_open:
            heapq.heappop(self._watched)
        now = clock.wait_time()
        left = self._watched[0][0] - now if self._watched else None
        if self._waker is None:
            left = UNWOKEN if left is None else min(left, UNWOKEN)
        self._is_asleep = True
        events = self.selector.select(0.0 if self._jobs else left)
        self._is_asleep = False
        last, self._looked_at = self._looked_at, clock.wait_time()
        overslept = 0.0 if left is None else self._looked_at - now - left
        if max(now - last, overslept) > HELD_UP:
            self.held_up_at = self._looked_at
        for key, mask in events:
            key.data(mask)
        while self._jobs:
            self._jobs.popleft()()
        # *now* is from before the select(): so answers in time are read before a query fails, even after a hold-up.
        while self._watched and self._watched[0][0] <= now:
            *_, connection, query = heapq.heappop(self._watched)
            if query.is_open and query.deadline <= now:
                connection.end_overdue(query, now)

    def _wake_thread(self) -> None:
        if (waker := self._waker) is not None:
            with suppress(OSError):
                waker.send(b".")


def no_greeting() -> Conversation[float]:
    yield from ()
    return 0.0
