"""One question to all servers, from one thread: sent to each at once, then heard as the answers come."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from django_distlock.engine import clock
from django_distlock.exceptions import first_line

from .nodes import BROKEN, NOTHING, Line
from .votes import Count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .nodes import Node
    from .votes import Poll, Question

_T = TypeVar("_T")
Arrival = Line | Exception


class Nodes:
    """All the servers, for threads."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes

    def hold(self, poll: Poll[_T]) -> _T:
        """Ask what *poll* asks, and return its result."""
        try:
            question = next(poll)
            while True:
                question = poll.send(_Round(self._nodes, question).run())
        except StopIteration as end:
            result: _T = end.value
            return result

    def close(self) -> None:
        """Let idle connections and threads go."""
        for node in self._nodes:
            node.close()


class _Round:
    """One question. Over as soon as it is decided: whose answer is still missing may give it to nobody.

    He who has no connection yet is asked all the same, if he gets one in time: the more votes, the better.
    """

    def __init__(self, nodes: Sequence[Node], question: Question) -> None:
        self._nodes = nodes
        self._question = question
        self._count = Count(frozenset(question.calls))
        self._selector = _selector()
        self._lines: dict[int, tuple[int, Line]] = {}
        self._deadlines: dict[int, float] = {}
        self._arrivals = _Arrivals()

    def run(self) -> Count:
        """Return what was answered until it was decided, or everybody's time was over."""
        try:
            for server in self._question.calls:
                self._begin(server)
            while self._deadlines and not self._question.is_decided(self._count):
                self._wait()
        except BaseException:
            # Nobody knows what they have sent or read of it.
            self._selector.close()
            for _, line in self._lines.values():
                line.close()
            self._lines.clear()
            raise
        finally:
            self._end()
        return self._count

    def _begin(self, server: int) -> None:
        node = self._nodes[server]
        line = node.take()
        if line is not None:
            self._ask(server, line)
            return
        try:
            self._arrivals.open(self._selector)
        except OSError as error:
            self._miss(server, "it cannot be reached", error, was_asked=False)
            return
        until = clock.wait_time() + self._question.connecting
        self._deadlines[server] = until
        node.connect_later(partial(self._arrive, server, until), until)

    def _arrive(self, server: int, until: float, arrival: Arrival) -> None:
        """In another thread: bring in a connection."""
        if not self._arrivals.add(server, arrival) and isinstance(arrival, Line):
            self._ask_in_passing(server, arrival, until)

    def _ask_in_passing(self, server: int, line: Line, until: float) -> None:
        try:
            if clock.wait_time() <= until:
                line.ask(self._question.calls[server])
                line.forgo()
        except BROKEN:
            line.close()
        else:
            self._nodes[server].give_back(line)

    def _ask(self, server: int, line: Line) -> None:
        try:
            line.ask(self._question.calls[server])
        except BROKEN as error:
            line.close()
            self._miss(server, "it did not take the question", error, was_asked=True)
            return
        number = line.fileno()
        self._lines[number] = server, line
        self._deadlines[server] = clock.wait_time() + self._question.within
        self._selector.register(number, selectors.EVENT_READ)

    def _wait(self) -> None:
        now = clock.wait_time()
        left = min(self._deadlines.values()) - now
        for key, _ in self._selector.select(max(0.0, left)):
            if key.fd in self._lines:
                self._hear(key.fd)
            else:
                self._let_in()
        # Late by then: what has arrived since was heard, however long this thread was held up.
        self._give_up_late_ones(now)

    def _hear(self, number: int) -> None:
        server, line = self._lines[number]
        try:
            answer = line.hear()
        except BROKEN as error:
            self._leave(number).close()
            self._miss(server, "it did not answer", error, was_asked=True)
            return
        if answer is not NOTHING:
            self._nodes[server].give_back(self._leave(number))
            del self._deadlines[server]
            self._count.take(server, answer)

    def _let_in(self) -> None:
        for server, arrival in self._arrivals.take():
            if server not in self._deadlines:
                if isinstance(arrival, Line):
                    self._nodes[server].give_back(arrival)
            elif isinstance(arrival, Line):
                self._ask(server, arrival)
            else:
                self._miss(server, "it cannot be reached", arrival, was_asked=False)

    def _give_up_late_ones(self, now: float) -> None:
        for server in [each for each, deadline in self._deadlines.items() if deadline <= now]:
            number = next((n for n, (each, _) in self._lines.items() if each == server), None)
            if number is None:
                limit = self._question.connecting
                self._miss(server, f"no connection to it within {limit:.3g} s", was_asked=False)
            else:
                self._forgo(number)
                limit = self._question.within
                self._miss(server, f"it did not answer within {limit:.3g} s", was_asked=True)

    def _miss(
        self, server: int, what: str, error: Exception | None = None, *, was_asked: bool
    ) -> None:
        self._deadlines.pop(server, None)
        cause = f"{what}: {first_line(error)}" if error else what
        self._count.miss(server, cause, error, was_asked=was_asked)

    def _forgo(self, number: int) -> None:
        server, _ = self._lines[number]
        line = self._leave(number)
        line.forgo()
        self._nodes[server].give_back(line)

    def _leave(self, number: int) -> Line:
        self._selector.unregister(number)
        return self._lines.pop(number)[1]

    def _end(self) -> None:
        for number in list(self._lines):
            self._forgo(number)
        self._selector.close()
        for server, arrival in self._arrivals.end():
            if isinstance(arrival, Line):
                self._ask_in_passing(server, arrival, self._deadlines.get(server, 0.0))


def _selector() -> selectors.BaseSelector:
    """Return a selector; with those of eventlet and gevent, which take poll() away, other greenlets run meanwhile."""
    if selectors.DefaultSelector is getattr(selectors, "EpollSelector", None):
        # Not that one: it opens a file, and a process that may open no more could not release its locks.
        return selectors.PollSelector()
    return selectors.DefaultSelector()


class _Arrivals:
    """New connections, as other threads bring them in, or the reasons why there is none."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_over = False
        self._waiting: deque[tuple[int, Arrival]] = deque()
        self._bell: tuple[socket.socket, socket.socket] | None = None

    def open(self, selector: selectors.BaseSelector) -> None:
        """Have *selector* woken by arrivals."""
        if self._bell is None:
            self._bell = socket.socketpair()
            selector.register(self._bell[0], selectors.EVENT_READ)

    def add(self, server: int, arrival: Arrival) -> bool:
        """Bring one in; False if it is too late."""
        with self._mutex:
            if self._is_over or self._bell is None:
                return False
            self._waiting.append((server, arrival))
            self._bell[1].send(b".")
            return True

    def take(self) -> list[tuple[int, Arrival]]:
        """Return those that wait."""
        with self._mutex:
            if self._bell is not None:
                self._bell[0].recv(4096)
            waiting = list(self._waiting)
            self._waiting.clear()
            return waiting

    def end(self) -> list[tuple[int, Arrival]]:
        """Let no more in; return those that were left waiting."""
        with self._mutex:
            self._is_over = True
            for end in self._bell or ():
                end.close()
            return list(self._waiting)
