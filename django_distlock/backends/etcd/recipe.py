"""The transactions that acquire, extend, release and list locks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, groupby
from operator import call
from typing import Any, TypeVar

from django_distlock.backends.queue.labels import Label, label, unquoted, wished_ttl
from django_distlock.backends.queue.places import acquire_any, is_line, turn_owner
from django_distlock.backends.queue.standings import Standings
from django_distlock.engine.background import Alarm, background
from django_distlock.engine.steps import Steps, run
from django_distlock.engine.values import (
    Busy,
    Grant,
    Held,
    Recent,
    Release,
    Request,
    batches,
    digest,
    first_to_end,
)
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown
from django_distlock.ground import clock

from .entries import Entry
from .gateway import (
    OPERATIONS,
    Gateway,
    LeaseGone,
    Refused,
    Reply,
    below,
    compare,
    decoded,
    delete,
    encoded,
    find,
    kvs,
    nested,
    put,
)
from .options import EtcdOptions
from .session import Session
from .watcher import KeyWatcher

#: The folder of the keys that refuse late requests of an owner; no lock's folder has this name.
REVOKED = "%revoked"
#: How many times a key that is deleted as soon as it is made is made again.
ROUNDS = 5
#: How many keys before its own a waiter knows at most.
AHEAD = 16
#: Seconds until a single try looks again that was refused by a waiter who is leaving a line.
SETTLING = 0.005
#: At how many places the first waiter for any of them stands in line. Each costs all members and clients a little
#: at each hand-over: at 4 places, 16 processes get a quarter fewer holds than with one.
CLAIMS = 4
#: How many keys are deleted in one transaction, each by up to three operations; how many are listed at once.
BATCH, PAGE = 32, 1000
#: Seconds before what could not be deleted is tried again.
RETRY = 1.0

_T = TypeVar("_T")
_Json = dict[str, Any]


class EtcdRecipe(Standings[Entry]):
    """The verbs, and the entries of this process by owner."""

    def __init__(
        self, alias: str, options: EtcdOptions, gateway: Gateway, session: Session
    ) -> None:
        super().__init__(options.namespace)
        self._alias = alias
        self._options = options
        self._session = session
        self.watcher = KeyWatcher(gateway, options.namespace, self._ring)
        #: By folder and number.
        self._slots: dict[tuple[str, int], Entry] = {}
        #: The folders in which somebody was in the way the last time.
        self._crowded = Recent()
        #: What is to be deleted.
        self._doomed: dict[Entry, None] = {}
        self._retry = Alarm(partial(self._bury_soon, size=1))
        self._ask = gateway.transaction

    # Acquiring.

    def known_busy(self, owner: str) -> Busy | None:
        """Return the last answer to a waiter while it is valid: nothing that it waits for has happened."""
        entry = self.get(owner)
        if entry is None or not entry.is_watched or not self.watcher.is_fresh:
            return None
        return entry.busy if self._session.is_fresh(entry.lease_id) else None

    def acquire(self, request: Request, *, queued: bool) -> Grant | Busy:
        """Stand in line, and return whether the lock is ours, or any place of it; if not, keep that only if *queued*."""
        if request.limit is None:
            return self._acquire(request, queued=queued)
        take, look = _steps(self._acquire), _steps(self._look_at_places, settles=not queued)
        return run(acquire_any(request, self, take, look, queued=queued), call)

    def come_free(self, request: Request, turn: Entry) -> Request | None:
        gone = super().come_free(request, turn)
        # One whose line it is the first of is its own.
        return next((claim.request for claim in turn.claims if claim.is_next), gone)

    def _look_at_places(
        self, request: Request, *, watches: bool = False, settles: bool = False
    ) -> list[Busy | None]:
        """Return who has each place of *request*, None where it is free, or ours; *watches*: see acquire_any().

        A waiter that is told stands in the line of the places meanwhile, as in that of a lock: so the one that
        comes free is its own without a request. *settles*: see _settled().
        """
        line = self.folder(request.line)
        # The names of places are digits.
        look = find({"key": encoded(f"{line}0"), "range_end": encoded(f"{line}:")}, **_FIRST)
        turn = self.get(turn_owner(request)) if watches else None
        if turn is not None:
            reply = self._claim(request, turn, look)
        else:
            reply = self._settled(look) if settles else self._ask(look)
        queues = _queues(reply)
        claims = {} if turn is None else {claim.folder: claim for claim in turn.claims}
        found, others = [], []
        for folder in (self.folder(each.key) for each in request.holdings):
            queue = queues.get(folder, [])
            if folder in claims:
                queue = self._before(claims[folder], queue, reply.revision)
            elif queue:
                others.append(decoded(queue[0]["key"]))
            found.append(_busy(queue) if queue else None)
        if turn is not None and None not in found:
            # Its own key too, as there may be no others.
            self.watcher.add(turn, [turn.key, *others], reply.revision, is_all=False)
        return found

    def _settled(self, look: _Json) -> Reply:
        """Return who is in the lines of the places, once nobody is the first in two of them, for a single try.

        A waiter that has a place now leaves the lines of the others in the background, which takes a moment.
        """
        reply = self._ask(look)
        for _ in range(ROUNDS):
            owners = [_owner_digest(queue[0]) for queue in _queues(reply).values()]
            if len({*owners}) == len(owners):
                break
            time.sleep(SETTLING)
            reply = self._ask(look)
        return reply

    def _claim(self, request: Request, turn: Entry, look: _Json) -> Reply:
        """Stand in the line of some places, and *look*."""
        if not turn.claims:
            # Each is known before the next one is made, as an exception may come between two.
            for each in request.from_any[:CLAIMS]:
                turn.claims.append(self._made(each, self.folder(each.key), turn))
        for claim in turn.claims:
            if claim.lease_id != turn.lease_id:
                self._leave(claim, turn.lease_id)
        try:
            return self._join(turn.claims, look)
        except LeaseGone:
            self._session.forget(turn.lease_id)
            raise
        except BaseException as error:
            for claim in turn.claims:
                claim.is_late |= _may_come_late(error)
            raise

    def _before(self, claim: Entry, queue: list[_Json], revision: int) -> list[_Json]:
        """Return who is before *claim* in the line of its place, as of this *revision*; watch them."""
        keys = [decoded(kv["key"]) for kv in queue]
        own = keys.index(claim.key)
        claim.revision, claim.is_next = int(queue[own]["create_revision"]), not own
        if own:
            self.watcher.add(claim, keys[:own], revision, is_all=True)
        return queue[:own]

    def _acquire(self, request: Request, *, queued: bool) -> Grant | Busy:
        entry, began = self._entry(request), clock.lease_time()
        # Before it is granted, as an entry without an end would count as ended.
        entry.ends = max(entry.ends, began + wished_ttl(request))
        try:
            return self._stand_in_line(entry, began, queued=queued)
        except BaseException as error:
            entry.is_late |= _may_come_late(error)
            raise

    def _entry(self, request: Request) -> Entry:
        entry, folder = self.get(request.owner), self.folder(request.key)
        if entry is None or entry.folder != folder:
            claim = self._claim_on(request, folder)
            entry = claim or self._made(request, folder)
            self.by_owner[request.owner] = entry
            # After it is known here, as an exception may come between two lines.
            if claim is not None and claim.turn is not None:
                claim.turn.claims.remove(claim)
                claim.turn = None
        return entry

    def _claim_on(self, request: Request, folder: str) -> Entry | None:
        """Return its key in the line of this place, if it has stood there while it waited for any."""
        turn = None if request.place is None else self.get(turn_owner(request))
        claims = turn.claims if turn is not None else ()
        return next((claim for claim in claims if claim.folder == folder), None)

    def _made(self, request: Request, folder: str, turn: Entry | None = None) -> Entry:
        entry = Entry(request, folder, turn=turn)
        # In one step, as a signal handler may take a lock between two.
        entry.slot = next(
            slot for slot in count() if self._slots.setdefault((folder, slot), entry) is entry
        )
        return entry

    def _free_slot(self, entry: Entry) -> None:
        """Free its key for others, unless a late request might make it again."""
        place = entry.folder, entry.slot
        # Once: by its end and by its release, for one, and another entry may have the slot by then.
        if not entry.is_late and self._slots.get(place) is entry:
            del self._slots[place]

    def _stand_in_line(self, entry: Entry, began: float, *, queued: bool) -> Grant | Busy:
        for _ in range(ROUNDS):
            lease_id = self._session.ready()
            if entry.lease_id != lease_id:
                self._leave(entry, lease_id)
            try:
                answer = self._take(entry, began, queued=queued)
            except LeaseGone:
                self._session.forget(lease_id)
                continue
            if answer is not None and not self._session.is_over(lease_id):
                return answer
        raise LockBackendError(self._alias, f"{entry.key} is deleted as often as it is made")

    def _leave(self, entry: Entry, lease_id: str) -> None:
        # First, as its key will have another name.
        self.watcher.remove(entry)
        for claim in entry.claims:
            self.drop(claim)
        entry.leave(lease_id)

    def _take(self, entry: Entry, began: float, *, queued: bool) -> Grant | Busy | None:
        """Return the answer of etcd; None if it must be asked again."""
        if not entry.revision and not (queued and entry.folder in self._crowded):
            busy = self._take_if_free(entry)
            if busy is None:
                return self._grant(entry, began)
            if not (queued or entry.is_late):
                self._forget(entry)
                return busy
            self._crowded.add(entry.folder)
        line = self._look_at_line(entry, joins=queued and not entry.revision)
        return self._judged(entry, line, began, queued=queued)

    def _judged(
        self, entry: Entry, line: Reply, began: float, *, queued: bool
    ) -> Grant | Busy | None:
        """Return what the *line* means for this entry: as of _take()."""
        own, first, ahead = (kvs(each) for each in line.body["responses"][-3:])
        entry.busy = _busy(first)
        if not own:
            self._leave(entry, entry.lease_id)  # somebody has deleted it, if it was there
            return None if queued else self._refused(entry)
        entry.revision = int(own[0]["create_revision"])
        entry.offset = Label.read(decoded(own[0]["value"])).offset or 0
        others = [kv for kv in ahead if kv["key"] != own[0]["key"]]
        before = [kv for kv in others if int(kv["create_revision"]) < entry.revision]
        if len(before) < len(others):
            return None  # it was made before, and those right before it are not among them
        if not before:
            self._crowded.pop(entry.folder, None)
            return self._grant(entry, began)
        if not queued:
            return self._refused(entry)
        entry.is_in_line = True
        keys, is_all = [decoded(kv["key"]) for kv in before], len(ahead) < AHEAD
        self.watcher.add(entry, keys if is_all else keys[:1], line.revision, is_all=is_all)
        return entry.busy

    def _take_if_free(self, entry: Entry) -> Busy | None:
        """Make its key if nobody is in the way, which is the common case; else return who it is."""
        is_free = {**compare("", "EQUAL", 0), **_in_the_way(entry)}
        # A reader is not in its own way.
        wanted = [self._is_wanted(entry), is_free, compare(entry.key, "EQUAL", 0)]
        first = find(below(entry.folder), limit=1, **_FIRST)
        while True:
            offset = self._session.offset
            reply = self._ask(
                self._put(entry, offset),
                compare=[*wanted, self._session.has_offset(offset)],
                failure=[first, self._session.find_offset],
            )
            entry.is_late |= not reply.is_sure
            if reply.body.get("succeeded"):
                entry.revision, entry.offset = reply.revision, offset
                return None
            line, found = map(kvs, reply.body["responses"])
            if not self._session.learn(found, offset):
                return _busy(line)

    def _look_at_line(self, entry: Entry, *, joins: bool) -> Reply:
        """Read its own key, the first one of the line, and the last ones in its way; before that, perhaps join."""
        terms = {"max_create_revision": str(entry.revision)} if entry.revision else {}
        look = [
            find({"key": encoded(entry.key)}),
            find(below(entry.folder), limit=1, **_FIRST),
            find(_in_the_way(entry), limit=AHEAD, keys_only=True, **_LAST, **terms),
        ]
        return self._join([entry], *look) if joins else self._ask(*look)

    def _join(self, entries: Sequence[Entry], *look: _Json) -> Reply:
        """Make the keys of *entries*, then *look*."""
        wanted = [*map(self._is_wanted, entries)]
        while True:
            offset = self._session.offset
            # What an earlier request has made keeps its offset.
            puts = [
                nested(self._put(entry, offset), compare(entry.key, "EQUAL", 0))
                for entry in entries
            ]
            reply = self._ask(
                *puts,
                *look,
                compare=[*wanted, self._session.has_offset(offset)],
                failure=[self._session.find_offset],
            )
            for entry in entries:
                entry.is_late |= not reply.is_sure
            if reply.body.get("succeeded"):
                return reply
            if not self._session.learn(kvs(reply.body["responses"][0]), offset):
                raise LockBackendError(self._alias, "this request was given up before")

    def _put(self, entry: Entry, offset: int) -> _Json:
        said = label(entry.request, owner=digest(entry.request.owner), offset=offset)
        return put(entry.key, said.decode(), lease=entry.lease_id)

    def _is_wanted(self, entry: Entry) -> _Json:
        """Return the condition that it was not given up: it may arrive late."""
        return compare(self._tombstone(entry), "EQUAL", 0)

    def _refused(self, entry: Entry) -> Busy:
        if entry.revision or entry.is_late:
            self.drop(entry)
        else:
            self._forget(entry)
        return entry.busy

    def _grant(self, entry: Entry, began: float) -> Grant:
        self.watcher.remove(entry)
        entry.is_granted, entry.is_in_line, entry.is_next = True, False, False
        self.released.pop(entry.request.owner, None)
        if entry.ends < self.alarm.due:
            self.alarm.at(entry.ends)
        # The lock ends with the session, which may have been prolonged a while ago.
        latest = self._session.ends - entry.request.ttl
        token = entry.revision + entry.offset
        return Grant(token, start=latest if latest < began else None)

    # Releasing.

    def release(self, request: Request) -> Release:
        entry = self.get(request.owner)
        if entry is not None and self._delete(entry):
            return Release.RELEASED
        if entry is None and request.owner in self.released:
            return Release.RELEASED
        found = self._ask(find(below(self.folder(request.key)), limit=1, keys_only=True))
        return Release.TAKEN if kvs(found.body["responses"][0]) else Release.GONE

    def _delete(self, entry: Entry) -> bool:
        """Delete its key; return whether that has released the lock."""
        self.watcher.remove(entry)
        was_ending, entry.is_ending = entry.is_ending, True
        refusals = self._refusals([entry])
        try:
            reply = self._ask(
                delete(entry.key), *refusals, compare=[_is_ours(entry)], failure=refusals
            )
        except LeaseGone:
            self._session.forget(entry.lease_id)
            entry.is_ending = was_ending
            return self._delete(entry)
        is_deleted = bool(reply.body.get("succeeded")) or was_ending or not reply.is_sure
        was_held = entry.is_granted and is_deleted  # otherwise another client has deleted it
        self._forget(entry, is_released=was_held)
        return was_held

    def _refusals(self, entries: Sequence[Entry]) -> list[_Json]:
        """Return what refuses requests that may still arrive to make the keys of *entries* again."""
        return [
            put(self._tombstone(entry), "", lease=entry.lease_id)
            for entry in entries
            if entry.is_late and not self._session.is_over(entry.lease_id)
        ]

    def _tombstone(self, entry: Entry) -> str:
        folder = entry.folder.removeprefix(f"{self._options.namespace}/")
        return f"{self._options.namespace}/{REVOKED}/{folder}/{entry.place}"

    def _forget(self, entry: Entry, *, is_released: bool = False) -> None:
        """Remove *entry*, whose key is gone."""
        self.forget_owner(entry, is_released=is_released)
        self._free_slot(entry)

    def drop(self, entry: Entry) -> None:
        for each in (*entry.claims, entry):
            self._doomed[each] = None
            self.watcher.remove(each)
        self.forget_owner(entry)
        entry.is_granted = False
        self._bury_soon()

    def _bury_soon(self, size: int = BATCH) -> None:
        background.submit((self._alias, "etcd"), partial(self._bury, size))

    def _bury(self, size: int = BATCH) -> None:
        """Delete the keys of *size* entries at a time; if some cannot be deleted, try again later, each by itself."""
        doomed = [e for e in list(self._doomed) if not self._session.is_over(e.lease_id)]
        is_left = False
        try:
            for some in batches(doomed, size):
                is_left |= not self._bury_some(some)
        except LeaseGone:
            self._session.forget(doomed[0].lease_id)
        except LockBackendError:
            is_left = True
        if is_left:
            self._retry.at(clock.lease_time() + RETRY)
        for entry in list(self._doomed):
            if self._session.is_over(entry.lease_id):
                self._buried(entry)

    def _bury_some(self, entries: Sequence[Entry]) -> bool:
        """Delete the keys of *entries*; return False if etcd refuses that."""
        # Each by its own revision: when this arrives late, others may have these keys.
        deletes = [nested(delete(entry.key), _is_ours(entry)) for entry in entries]
        try:
            self._ask(*deletes, *self._refusals(entries))
        except LockBackendError as error:
            if isinstance(error, LeaseGone) or not isinstance(error.__cause__, Refused):
                raise
            return False
        for entry in entries:
            self._buried(entry)
        return True

    def _buried(self, entry: Entry) -> None:
        if self._doomed.pop(entry, self) is None:
            self._free_slot(entry)

    # Waiting.

    def is_over(self, entry: Entry) -> bool:
        return self._session.is_over(entry.lease_id)

    def may_sleep(self, entry: Entry) -> bool:
        if entry.has_failed:
            entry.has_failed = False
            return True  # else etcd would be asked without a pause
        # The first in the line for any place looks who has them: before that, the watch need not run.
        if entry.is_granted and not entry.claims:
            return False
        return entry.is_watched or not self.watcher.is_fresh

    def _ring(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            waiter = entry.turn or entry
            if waiter.bell is not None and not waiter.bell.ring():
                # Its event loop has ended, perhaps while a thread asked for it, which will make the keys later.
                for each in (*waiter.claims, waiter):
                    each.is_late = True
                self.drop(waiter)

    # Extending and probing.

    def extend(self, requests: Sequence[Request]) -> list[bool]:
        """Prolong the session, and check for each request that its key still exists."""
        began = clock.lease_time()
        entries = [self.get(request.owner) for request in requests]
        held = [e for e in entries if e and e.is_granted and not self._session.is_over(e.lease_id)]
        if not held or not self._session.prolong():
            return [False] * len(requests)
        found: dict[Entry, list[_Json]] = {}
        for some in batches(held, OPERATIONS):
            asks = [find({"key": encoded(entry.key)}, keys_only=True) for entry in some]
            found |= dict(zip(some, map(kvs, self._ask(*asks).body["responses"]), strict=True))
        return [
            entry in found and self._is_kept(entry, found[entry], began + wished_ttl(request))
            for entry, request in zip(entries, requests, strict=True)
        ]

    def _is_kept(self, entry: Entry, found: list[_Json], ends: float) -> bool:
        if not found and entry.is_ending:
            return True  # deleted by our own release, which returns the result
        if not found or int(found[0]["create_revision"]) != entry.revision:
            self._forget(entry)
            return False
        # An extension never shortens a lease.
        entry.ends = max(entry.ends, ends)
        return True

    def probe(self, request: Request) -> Busy | None:
        if request.limit is not None:
            return first_to_end(self._look_at_places(request, settles=True))
        ask = find(below(self.folder(request.key)), limit=1, **_FIRST)
        found = kvs(self._ask(ask).body["responses"][0])
        return _busy(found) if found else None

    # For operators.

    def held(self, key: str | None) -> Iterator[Held]:
        """Return the holders of the lock *key*, or of all locks."""
        namespace = f"{self._options.namespace}/"
        folder = namespace.rstrip("/") if key is None else self.folder(key)
        for quoted_key, some in groupby(self._pages(folder), lambda kv: _folder_of(kv, namespace)):
            name = unquoted(quoted_key)
            if name is not None and not is_line(name):
                yield from self._shown(name, [*some])

    def _pages(self, folder: str) -> Iterator[_Json]:
        area = below(folder)
        while True:
            found = kvs(self._ask(find(area, limit=PAGE)).body["responses"][0])
            yield from found
            if len(found) < PAGE:
                return
            area = {**area, "key": encoded(decoded(found[-1]["key"]) + "\0")}

    def _shown(self, key: str, line: list[_Json]) -> Iterator[Held]:
        holders = _holders(line)
        for kv in holders:
            said = Label.read(decoded(kv["value"]))
            yield Held(
                name=said.name or key,
                key=key,
                holder=said.holder,
                remaining=None,
                token=said.token(int(kv["create_revision"])),
                owner_digest=_owner_digest(kv),
                shared=_child_of(kv).startswith("r-"),
                waiters=len(line) - len(holders),
            )

    def end_holding(self, key: str, owner_digest: str) -> bool:
        for kv in _holders([*self._pages(self.folder(key))]):
            if _owner_digest(kv) == owner_digest:
                path = decoded(kv["key"])
                is_same = compare(path, "EQUAL", int(kv["create_revision"]))
                reply = self._ask(delete(path), compare=[is_same])
                return bool(reply.body.get("succeeded")) or not reply.is_sure
        return False


def _steps(act: Callable[..., _T], **always: bool) -> Callable[..., Steps[Any, _T]]:
    """Return *act* as steps that ask for nothing."""

    def steps(*args: Any, **terms: Any) -> Steps[Any, _T]:
        return act(*args, **terms, **always)
        yield

    return steps


# What it asks for.

_FIRST = {"sort_order": "ASCEND", "sort_target": "CREATE"}
_LAST = {"sort_order": "DESCEND", "sort_target": "CREATE"}


def _is_ours(entry: Entry) -> _Json:
    """Return the condition that its key is there: of this revision, or of any while that is not known."""
    return compare(entry.key, "EQUAL" if entry.revision else "GREATER", entry.revision)


def _in_the_way(entry: Entry) -> dict[str, str]:
    """Return the range of the keys that refuse it: a reader is refused by writers alone."""
    if not entry.request.shared:
        return below(entry.folder)
    return {"key": encoded(f"{entry.folder}/w-"), "range_end": encoded(f"{entry.folder}/w.")}


# Answers.


def _may_come_late(error: BaseException) -> bool:
    """Return whether the request that ended by this *error* may still be carried out."""
    return not isinstance(error, LockBackendError) or isinstance(error, LockOutcomeUnknown)


def _busy(first: list[_Json]) -> Busy:
    return Busy(Label.read(decoded(first[0].get("value", ""))).holder) if first else Busy()


def _queues(reply: Reply) -> dict[str, list[_Json]]:
    """Return what the last look of *reply* has found in each folder, in the order of arrival."""
    found: dict[str, list[_Json]] = {}
    for kv in kvs(reply.body["responses"][-1]):
        found.setdefault(decoded(kv["key"]).rpartition("/")[0], []).append(kv)
    return found


def _folder_of(kv: _Json, namespace: str) -> str:
    """Return the name of its lock; for a key that belongs to none, a name that no lock has."""
    key = decoded(kv["key"])
    is_child = key.startswith(namespace) and _child_of(kv)[:2] in {"r-", "w-"}
    return key[len(namespace) :].rpartition("/")[0] if is_child else "%"


def _child_of(kv: _Json) -> str:
    return decoded(kv["key"]).rpartition("/")[2]


def _owner_digest(kv: _Json) -> str:
    try:
        return str(json.loads(decoded(kv["value"]))["owner"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""  # another program has written it


def _holders(line: list[_Json]) -> list[_Json]:
    """Return the holders in *line*: the first one, or all readers before the first writer."""
    line = sorted(line, key=lambda kv: int(kv["create_revision"]))
    writers = (index for index, kv in enumerate(line) if _child_of(kv).startswith("w-"))
    first_writer = next(writers, len(line))
    return line[: first_writer or 1]
