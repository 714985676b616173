"""The verbs of the recipe on etcd: keys of a session's lease, in the order of their create revisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from typing import Any

from django_distlock.backends.queue.labels import Label, label, unquoted
from django_distlock.backends.queue.nodes import First, Node, Sleeper, Standing
from django_distlock.backends.queue.recipe import Server
from django_distlock.engine.steps import Steps
from django_distlock.engine.values import Busy, Held, Request, batches, digest
from django_distlock.exceptions import LockBackendError, LockOutcomeUnknown
from django_distlock.ground import clock

from .gateway import (
    OPERATIONS,
    Gateway,
    LeaseGone,
    Reply,
    below,
    compare,
    decoded,
    delete,
    encoded,
    find,
    kvs,
    put,
)
from .options import EtcdOptions
from .session import Session
from .watcher import KeyWatcher

#: The folder of the keys that refuse late requests of an owner; no lock's folder has this name.
REVOKED = "%revoked"
#: How many keys are listed at once.
PAGE = 1000

_Json = dict[str, Any]


@dataclass(eq=False, slots=True, kw_only=True)
class Key(Node):
    """The key of one holder or waiter; *number* is its create revision, its position in the queue.

    Keys are used again: etcd keeps deleted keys until its next compaction, and would pass over all of them
    to find the first key of a lock. So a key is named after its session, and its *slot* there.
    """

    slot: int = 0
    #: The etcd lease and the path, once the session is known.
    lease_id: str = ""
    path: str = ""
    #: Whether a late request may yet make the key, also after it was deleted.
    is_late: bool = False
    #: When the key was first requested (``clock.lease_time()``).
    asked_at: float = field(default_factory=clock.lease_time)

    @property
    def may_exist(self) -> bool:
        return bool(self.number or self.is_late)

    def leave(self, lease_id: str) -> None:
        """Note that the key is gone: the next put() makes it at the end of the queue, with this etcd lease."""
        kind = "r" if self.request.shared else "w"
        self.path = f"{self.folder}/{kind}-{int(lease_id):x}-{self.slot}"
        self.number = 0
        self.is_granted = self.is_ending = False
        # Last, as an exception may come between two lines: etcd refuses to delete a key without a path.
        self.lease_id = lease_id


class EtcdServer(Server[Key]):
    """The requests of Server to etcd."""

    def __init__(
        self, alias: str, options: EtcdOptions, gateway: Gateway, session: Session
    ) -> None:
        super().__init__(options.namespace)
        self._alias = alias
        self._options = options
        self._session = session
        self.watcher = KeyWatcher(gateway, options.namespace, self._ring)
        #: The keys by folder and slot.
        self.slots: dict[tuple[str, int], Key] = {}
        self._ask = gateway.transaction

    def node(self, request: Request, folder: str) -> Key:
        key = Key(request, folder=folder)
        # setdefault() is a single step: a signal handler may take a lock between two steps.
        key.slot = next(
            slot for slot in count() if self.slots.setdefault((folder, slot), key) is key
        )
        return key

    def forget(self, node: Key) -> None:
        """Free the slot of *node*, unless a late request might make the key again."""
        slot = node.folder, node.slot
        # If forget() was called before, another key may have the slot now.
        if not node.is_late and self.slots.get(slot) is node:
            del self.slots[slot]

    def is_over(self, node: Key) -> bool:
        return self._session.is_over(node.lease_id)

    # Making a key.

    def put(self, node: Key, *, waits: bool) -> Steps[Any, Standing | None]:
        began = clock.lease_time()
        lease_id = yield self._session.ready
        if not lease_id:
            return None
        if node.lease_id != lease_id:
            self.unwatch(node)
            node.leave(lease_id)
        is_made, was_late = bool(node.number), node.is_late
        try:
            reply = yield from (self._look(node) if is_made else self._make(node, waits=waits))
        except LeaseGone:
            self._session.forget(lease_id)
            return None
        standing = self._standing(node, reply, waits=waits)
        # Only now, when the number is known: an asynchronous exception may come between two lines.
        node.is_late = was_late or not (is_made or reply.is_sure)
        if standing is None or standing.ahead:
            return standing
        # The lock ends with the session, which may have been prolonged some time ago.
        latest = self._session.ends - node.request.ttl
        return Standing(start=latest if latest < began else None)

    def _standing(self, node: Key, reply: Reply, *, waits: bool) -> Standing | None:
        """Return the standing of *node* by *reply*; None: look again."""
        if len(reply.body["responses"]) == 1:
            node.number = reply.revision  # no other key refused it
            return Standing()
        own, first, last = (kvs(each) for each in reply.body["responses"][-3:])
        refusal = _first(first) or First("")
        if not own:
            was_there, node.number = node.number, 0
            if was_there:
                return None  # somebody has deleted it
            if last and not waits:
                return Standing(refusal.path, refusal)
            raise LockBackendError(self._alias, "this request was given up before")
        node.number = int(own[0]["create_revision"])
        node.offset = Label.read(decoded(own[0]["value"])).offset or 0
        others = [kv for kv in last if kv["key"] != own[0]["key"]]
        ahead = [kv for kv in others if int(kv["create_revision"]) < node.number]
        if len(ahead) < len(others):
            return None  # an earlier request has made the key, and others came after it
        return Standing(decoded(ahead[0]["key"]) if ahead else "", refusal, reply.revision)

    def _look(self, node: Key) -> Steps[Any, Reply]:
        reply: Reply = yield partial(self._ask, *_own_and_others(node))
        return reply

    def _make(self, node: Key, *, waits: bool) -> Steps[Any, Reply]:
        """In one transaction, make the key if no other refuses it, or if it *waits*; in that case read the others.

        The common case reads nothing: that would cost all members time.
        """
        is_free = {**compare("", "EQUAL", 0), **_in_the_way(node)}
        while True:
            node.offset = offset = self._session.offset
            said = label(node.request, owner=digest(node.request.owner), offset=offset)
            act = put(node.path, said.decode(), lease=node.lease_id)
            is_wanted = [
                compare(self._tombstone(node), "EQUAL", 0),
                compare(node.path, "EQUAL", 0),
                self._session.has_offset(offset),
            ]
            joining = [{"request_txn": {"compare": is_wanted, "success": [act]}}] if waits else []
            ask = partial(
                self._ask,
                act,
                compare=[*is_wanted, is_free],
                failure=[self._session.find_offset, *joining, *_own_and_others(node)],
            )
            reply = yield from self._ask_to_make(node, ask)
            is_done = reply.body.get("succeeded")
            if is_done or not self._session.learn(kvs(reply.body["responses"][0]), offset):
                return reply

    def _ask_to_make(self, node: Key, ask: Callable[[], Reply]) -> Steps[Any, Reply]:
        was_late, node.is_late = node.is_late, True
        try:
            reply: Reply = yield ask
        except LockBackendError as error:
            node.is_late = was_late or isinstance(error, LockOutcomeUnknown)
            raise
        return reply

    # Watching and listing.

    def watch(self, node: Key, standing: Standing) -> Steps[Any, Busy | None]:
        # Watch the waiter's own key, too: it ends with the session, or an operator deletes it.
        self.watcher.add(node, [standing.ahead, node.path], standing.revision)
        return standing.first.busy
        yield

    def unwatch(self, waiter: Sleeper) -> None:
        self.watcher.remove(waiter)

    def _ring(self, waiters: Sequence[Sleeper]) -> None:
        self.ring(waiters)

    def firsts(
        self, folders: Sequence[str], waiter: Sleeper | None = None
    ) -> Steps[Any, list[First | None]]:
        found: list[First | None] = []
        revision = 0
        for some in batches(folders, OPERATIONS):
            looks = [find(below(folder), limit=1, **_FIRST) for folder in some]
            reply = yield partial(self._ask, *looks)
            revision = revision or reply.revision
            found += [_first(kvs(each)) for each in reply.body["responses"]]
        if waiter is not None:
            self.watcher.add(waiter, [first.path for first in found if first], revision)
        return found

    # Deleting, and the session.

    def delete(self, node: Key) -> Steps[Any, bool]:
        if not node.path:
            return False
        # The tombstone refuses late requests that would make the key again.
        is_refused = node.is_late and not self.is_over(node)
        refusal = [put(self._tombstone(node), "", lease=node.lease_id)] if is_refused else []
        # Compare the revision: when this request arrives late, another node may have the key.
        is_ours = compare(node.path, "EQUAL" if node.number else "GREATER", node.number)
        ask = partial(self._ask, delete(node.path), *refusal, compare=[is_ours], failure=refusal)
        try:
            reply: Reply = yield ask
        except LeaseGone:
            self._session.forget(node.lease_id)
            return (yield from self.delete(node))
        return bool(reply.body.get("succeeded")) or not reply.is_sure

    def _tombstone(self, node: Key) -> str:
        """Return the key that marks the key of *node* as given up."""
        name = node.path.removeprefix(f"{self._options.namespace}/")
        return f"{self._options.namespace}/{REVOKED}/{name}"

    def kept(self, nodes: Sequence[Key]) -> Steps[Any, set[Key]]:
        kept: set[Key] = set()
        is_prolonged = yield self._session.prolong
        for some in batches(nodes, OPERATIONS) if is_prolonged else ():
            looks = [find({"key": encoded(node.path)}, keys_only=True) for node in some]
            reply = yield partial(self._ask, *looks)
            for node, found in zip(some, map(kvs, reply.body["responses"]), strict=True):
                if found and int(found[0]["create_revision"]) == node.number:
                    kept.add(node)
        return kept

    # For operators.

    def held(self, key: str | None) -> Iterator[Held]:
        """Return the holders of the lock *key*, or of all locks."""
        namespace = f"{self._options.namespace}/"
        folder = namespace.rstrip("/") if key is None else self.folder(key)
        for quoted_key, some in groupby(self._pages(folder), lambda kv: _folder_of(kv, namespace)):
            if (name := unquoted(quoted_key)) is not None:
                yield from self._shown(name, [*some])

    def _pages(self, folder: str) -> Iterator[_Json]:
        area = below(folder)
        while True:
            found = kvs(self._ask(find(area, limit=PAGE)).body["responses"][0])
            yield from found
            if len(found) < PAGE:
                return
            area = {**area, "key": encoded(decoded(found[-1]["key"]) + "\0")}

    def _shown(self, key: str, queue: list[_Json]) -> Iterator[Held]:
        holders = _holders(queue)
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
                waiters=len(queue) - len(holders),
            )

    def end_holding(self, key: str, owner_digest: str) -> bool:
        for kv in _holders([*self._pages(self.folder(key))]):
            if _owner_digest(kv) == owner_digest:
                path = decoded(kv["key"])
                is_same = compare(path, "EQUAL", int(kv["create_revision"]))
                reply = self._ask(delete(path), compare=[is_same])
                return bool(reply.body.get("succeeded")) or not reply.is_sure
        return False


# The reads.

_FIRST = {"sort_order": "ASCEND", "sort_target": "CREATE"}
_LAST = {"sort_order": "DESCEND", "sort_target": "CREATE"}


def _own_and_others(node: Key) -> list[_Json]:
    """Return the reads of the key itself, of the first key of its lock, and of the last keys that refuse it."""
    until = {"max_create_revision": str(node.number)} if node.number else {}
    return [
        find({"key": encoded(node.path)}),
        find(below(node.folder), limit=1, **_FIRST),
        # Two, because one may be the key itself.
        find(_in_the_way(node), limit=2, keys_only=True, **_LAST, **until),
    ]


def _in_the_way(node: Key) -> dict[str, str]:
    """Return the range of the keys that refuse *node*: only writers refuse a reader."""
    if not node.request.shared:
        return below(node.folder)
    return {"key": encoded(f"{node.folder}/w-"), "range_end": encoded(f"{node.folder}/w.")}


# Answers.


def _first(found: list[_Json]) -> First | None:
    if not found:
        return None
    holder = Label.read(decoded(found[0].get("value", ""))).holder
    return First(decoded(found[0]["key"]), Busy(holder))


def _folder_of(kv: _Json, namespace: str) -> str:
    """Return the name of the lock of *kv*; for a foreign key, a name that no lock has."""
    key = decoded(kv["key"])
    is_child = key.startswith(namespace) and _child_of(kv)[:2] in {"r-", "w-"}
    return key[len(namespace) :].rpartition("/")[0] if is_child else "%"


def _child_of(kv: _Json) -> str:
    return decoded(kv["key"]).rpartition("/")[2]


def _owner_digest(kv: _Json) -> str:
    try:
        return str(json.loads(decoded(kv["value"]))["owner"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""  # another program has written the value


def _holders(queue: list[_Json]) -> list[_Json]:
    """Return the holders among the keys of a lock: the first key, or all readers before the first writer."""
    queue = sorted(queue, key=lambda kv: int(kv["create_revision"]))
    writers = (index for index, kv in enumerate(queue) if _child_of(kv).startswith("w-"))
    first_writer = next(writers, len(queue))
    return queue[: first_writer or 1]
