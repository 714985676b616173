"""What sessions do: the verbs of the backend, and what users write around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import DatabaseError, connections, transaction

from django_distlock import Lease, LockError, LockNotAcquired, StaleFencingToken
from django_distlock.backends.database.backend import DatabaseBackend
from django_distlock.backends.rowlock import transaction_lock
from django_distlock.conf import BackendSettings
from django_distlock.engine.values import Grant
from django_distlock.exceptions import LockOutcomeUnknown
from django_distlock.ground.holder import Holder
from testproject.models import Account

from .promises import TTL, Hold
from .servers import CLAIMED, NAME, PAID
from .sessions import ASLEEP, Session, step_through

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_distlock.engine.values import Busy, Request

    from .promises import Promises
    from .servers import Database

_T = TypeVar("_T")
LOCK_NAME = "x"
_LOSES = {"~": "reply", "^": "request"}


class Refused(Exception):
    """Ends a round: somebody else has the lock, or was later."""


class Ears:
    """In the place of the thread that listens: the stage hears for all sessions."""

    channel = NAME

    def __init__(self) -> None:
        self.ticket = 0

    def expect(self, owner: str, called: Any, bell: Any) -> None: ...
    def forget_bell(self, owner: str) -> None: ...
    def close(self) -> None: ...

    def ring_for(self, owner: str, ticket: int) -> None:
        self.ticket = ticket


class Player(Session):
    """A session and its backend. *alias*: of the connection on which it has transactions of its own."""

    promises: Promises

    def __init__(self, number: int, server: Database, alias: str) -> None:
        super().__init__(number)
        self._server, self._alias = server, alias
        #: Whether it would look by itself now, as the lease that it waits for has ended.
        self.is_timed_out = False
        #: Whether it is getting its place in the queue, and the step at which it had that.
        self.is_enqueuing = False
        self.place_since = 0
        options = {"using": server.alias, "listen": server.calls, "io_timeout": 60.0}
        self.backend: Any = DatabaseBackend(BackendSettings(server.alias, options=options))
        self.ears = Ears()
        if server.calls:
            vars(self.backend).update(_notified=self.ears, _listeners=[self.ears])
        self.call(self._open)

    def _open(self) -> None:
        connection = connections[self._alias]
        connection.ensure_connection()
        step_through(connection)
        assert (
            self.backend.schema is not None
        )  # asked once, which would be a statement of the first schedule alone

    def close(self) -> None:
        self.backend.close()
        super().close()

    def play(self, script: str) -> None:
        """Play the rounds of *script*."""
        for words in script.split(";"):
            self._request: Request | None = None
            self._hold: Hold | None = None
            is_refused = False
            for word in words.split():
                if is_refused and (word != "release" or self._hold is None):
                    continue
                try:
                    self._play(word)
                except Refused:
                    is_refused = True

    def _play(self, word: str) -> None:
        name = word.rstrip("~^")
        self.loses = _LOSES.get(word[len(name) :], "")
        self._is_lossy = bool(self.loses)
        getattr(self, f"_{name}")()

    def _ask(self, verb: Callable[..., _T], *args: Any) -> _T:
        """Return the answer; ask once more if it was lost."""
        try:
            return verb(*args)
        except LockOutcomeUnknown:
            if not self._is_lossy:
                raise
            return verb(*args)

    def _try(self, *, queued: bool) -> Grant | Busy:
        assert self._request is not None
        request = self._request

        def ask() -> Grant | Busy:
            answer: Grant | Busy = self.backend.try_acquire(request, queued=queued)
            return answer

        answer = self._ask(ask)
        self.promises.answered(self, request, answer)
        if isinstance(answer, Grant):
            self._hold = Hold(request.owner, answer.token or 0)
        return answer

    def _acquire(self) -> None:
        holder = Holder.current(f"session {self.number}")
        self._request = self.backend.request(LOCK_NAME, ttl=TTL, holder=holder)
        if not isinstance(self._try(queued=False), Grant):
            raise Refused

    def _wait(self) -> None:
        """Enqueue where the server calls waiters, and then look, sleep, and look again."""
        try:
            self._acquire()
        except Refused:
            if self._server.calls:
                self.is_enqueuing = True
                self._ask(self.backend.enqueue, self._request, None)
                self.is_enqueuing = False
            while not isinstance(self._try(queued=self._server.calls), Grant):
                self.is_timed_out = False
                self.stop("sleep", ASLEEP)

    def _renew(self) -> None:
        (is_kept,) = self._ask(self.backend.extend, [self._request])
        self.promises.renewed(self, is_kept)

    def _release(self) -> None:
        held: list[Hold | None] = []
        self.when_let_go = lambda: held.append(self.promises.releases(self))
        outcome = self._ask(self.backend.release, self._request)
        self.promises.released(self, outcome, held[0], self._is_lossy)

    def _expire(self) -> None:
        self.stop("expire")  # the stage does it

    def _purge(self) -> None:
        for _ in self.backend.purge(3600.0):
            pass

    # What users write.

    def _lease(self) -> Any:
        """Return what Lease.claim() needs: its check() has passed, but that was before the first stop."""
        assert self._hold is not None
        token = self._hold.token
        return SimpleNamespace(name=LOCK_NAME, check=bool, checked_token=lambda: token)

    def _do(self, act: Callable[[], _T]) -> _T:
        """Return what *act* returns; Refused if another transaction or a later holder was in its way."""
        try:
            return act()
        except StaleFencingToken as error:
            assert self._hold is not None
            self.promises.refused(self, self._hold)
            raise Refused from error
        except LockNotAcquired as error:
            raise Refused from error
        except DatabaseError as error:
            if self.backend.dialect.is_contention(error):
                raise Refused from error
            raise

    def _claim(self) -> None:
        account = Account(pk=CLAIMED)
        account._state.db, account._state.adding = self._alias, False
        self._account = self._do(lambda: Lease.claim(self._lease(), account))
        assert self._hold is not None
        self.promises.claimed(self, self._hold)

    def _save(self) -> None:
        self._account.balance += 1
        self._do(self._account.save)
        assert self._hold is not None
        self.promises.saved(self, self._hold)

    def _guard(self) -> None:
        self._do(self._in_guard)

    def _in_guard(self) -> None:
        hold, request = self._hold, self._request
        assert hold is not None
        with transaction.atomic(using=self._alias):
            try:
                self.backend.guard(request, hold.token, self._alias)
            except StaleFencingToken:
                raise
            except LockError as error:  # its snapshot is older
                raise Refused from error
            self.promises.guarded(self, hold)
            self.stop("go on under the guard")
            self.when_let_go = lambda: self.promises.guards.pop(self)

    def _fee(self, *, looks_first: bool = False) -> None:
        try:
            self._do(lambda: self._pay(looks_first))
        finally:
            self.promises.inside.discard(self)

    def _latefee(self) -> None:
        """Read before the lock is there, which must be refused where the transaction would not see newer data."""
        self._fee(looks_first=True)

    def _pay(self, looks_first: bool) -> None:
        rows = Account.objects.using(self._alias).filter(pk=PAID)
        with transaction.atomic(using=self._alias):
            if looks_first:
                rows.get()
            try:
                transaction_lock(LOCK_NAME, using=self._alias, timeout=None)
            except LockNotAcquired:
                raise
            except LockError as error:
                if "isolation level" in str(error):
                    raise Refused from error
                raise
            self.promises.entered(self)
            balance = rows.get().balance
            rows.update(balance=balance + 1)
            self.when_let_go = lambda: self.promises.inside.discard(self)
        self.promises.paid()
