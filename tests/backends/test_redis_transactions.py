"""Exclusive locks in Redis without scripts: they do what the scripts do, on the same keys."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import redis as driver
from hypothesis import (
    HealthCheck,
    Phase,
    given,
    settings as hypothesis_settings,
    strategies as some,
)
from redis.exceptions import (
    ExecAbortError,
    NoPermissionError,
    OutOfMemoryError,
    ResponseError,
)

from django_distlock import LockBackendError, NotSupported
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redis.connections import PoolLink
from django_distlock.backends.redis.scripts import (
    ACQUIRE,
    EXTEND,
    LOOK,
    RELEASE,
    SCRIPTS,
    Call,
    Script,
)
from django_distlock.backends.redis.sources import Source
from django_distlock.backends.redis.unscripted import ROUNDS, transact
from django_distlock.backends.redis.verbs import Keys, keys_of
from django_distlock.conf import BackendSettings
from django_distlock.engine.values import Grant, Release
from django_distlock.ground.holder import Holder
from django_distlock.handler import make_backend
from django_distlock.lock import Terms
from tests.fixtures.redis import Redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_distlock.backends.redis.connections import Command, Conversation

# Some start servers of their own.
pytestmark = [pytest.mark.server, pytest.mark.caches]

BACKEND = "django_distlock.backends.redis.RedisBackend"
SECOND = 1_000_000
HOUR = 3600 * SECOND
OWNERS = [letter * 32 for letter in "abcdefghij"]
NOW = 1_800_000_000 * SECOND


# What the tests are made of.


@contextmanager
def way_to(server: Redis, user: str = "") -> Iterator[PoolLink]:
    url = f"redis://{user}{server.host}:{server.port}/3"
    link = PoolLink("test", Source(url, connect_timeout=5, io_timeout=5))
    try:
        yield link
    finally:
        link.close()


@pytest.fixture
def link(redis: Redis) -> Iterator[PoolLink]:
    with way_to(redis) as link:
        yield link


@pytest.fixture
def keys() -> Keys:
    return keys_of(uuid.uuid4().hex)


@pytest.fixture
def make(redis: Redis) -> Iterator[Callable[..., RedisBackend]]:
    """Make backends, each as another process would have it."""
    made: list[RedisBackend] = []

    def make(user: str = "", server: Redis = redis, **options: Any) -> RedisBackend:
        location = f"redis://{user}{server.host}:{server.port}/3"
        found = BackendSettings("test", BACKEND, options={"location": location, **options})
        backend = make_backend(found)
        assert isinstance(backend, RedisBackend)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


@contextmanager
def user_without(server: Redis, *refused: str) -> Iterator[str]:
    """Make a user who may do all but these; yield what stands for it in a URL."""
    name = f"limited-{uuid.uuid4().hex[:8]}"
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", name, "on", ">secret", "~*", "+@all", *refused)
        yield f"{name}:secret@"
        client.execute_command("ACL", "DELUSER", name)


def acquire(keys: Keys, owner: str, mode: str = "x", ttl: int = 60 * SECOND) -> Call:
    args = keys.bells, owner, mode, ttl, 0, "a name", "{}", "", ""
    return Call(ACQUIRE, keys.all, args)


def call(script: Script, keys: Keys, *args: str | int) -> Call:
    return Call(script, keys.all, (keys.bells, *args))


def look(*locks: Keys) -> Call:
    names = [(record, readers, alive) for record, readers, _, alive in (k.all for k in locks)]
    return Call(LOOK, tuple(chain(*names)), ())


def ask(*commands: Command) -> Conversation[list[Any]]:
    return (yield commands)


def script(call: Call) -> Conversation[list[Any]]:
    return (yield (call.by_text,))


def interrupted(
    conversation: Conversation[list[Any]], meddle: Callable[[], object], exchanges: list[Any]
) -> Conversation[list[Any]]:
    """Have somebody *meddle* after each reading; note the exchanges."""
    answers: list[Any] | None = None
    while True:
        try:
            commands = next(conversation) if answers is None else conversation.send(answers)
        except StopIteration as end:
            return list(end.value)
        exchanges.append(commands)
        answers = yield commands
        first, last = commands[0], commands[-1]
        assert isinstance(first, tuple)
        assert isinstance(last, tuple)
        if first[0] == "WATCH" and last[0] == "MULTI":
            meddle()


# One by one, at an instant that the test says, they do the same.


def script_at(now: int, call: Call) -> Conversation[list[Any]]:
    """Carry *call* out by its script, whose clock says *now*."""
    text = call.script.text.replace("redis.call('TIME')", "{ARGV[#ARGV - 1], ARGV[#ARGV]}")
    args = (*call.args, now // SECOND, now % SECOND)
    return (yield (("EVAL", text, len(call.keys), *call.keys, *args),))


def transaction_at(now: int, call: Call) -> Conversation[list[Any]]:
    """Carry *call* out without a script, by a clock that says *now*."""
    conversation = transact(call)
    commands = next(conversation)
    try:
        while True:
            answers = yield commands
            if ("TIME",) in commands:
                answers[commands.index(("TIME",))] = [
                    b"%d" % (now // SECOND),
                    b"%d" % (now % SECOND),
                ]
            commands = conversation.send(answers)
    except StopIteration as end:
        return list(end.value)


def contents(client: driver.Redis, keys: Keys) -> tuple[Any, ...]:
    """Return the record, with when its lease ends in place of what tells it, and the readers."""
    record, readers, *_ = keys.all
    fields: Any = client.hgetall(record)
    since, lasts, owner = (fields.pop("lease", "") or "0 0 ").split(" ")
    return fields, int(since) + int(lasts), owner, client.zrange(readers, 0, -1, withscores=True)


# What is likely is named more often: otherwise nearly all would be revoked.
owners = some.sampled_from([*OWNERS[:4] * 3, *OWNERS])
rarely = some.sampled_from(["", "", "", "", "1"])
times = some.sampled_from([SECOND, 5 * SECOND, 300 * SECOND, 700 * SECOND, 2 * HOUR])
holders = some.sampled_from(["{}", '{"a\n": 1}'])
fixed = some.just
exclusive = some.tuples(
    *(fixed("acquire"), owners, fixed("x"), times, fixed(0), fixed("é"), holders),
    *(fixed(""), fixed("")),
)
calls = some.one_of(
    *[exclusive] * 4,
    *[some.tuples(fixed("release"), owners, rarely, fixed(0))] * 2,
    some.tuples(fixed("extend"), owners, times, fixed("x")),
    some.tuples(fixed("look")),
)
#: Microseconds until the next call; the server's clock may be set back too.
pauses = some.sampled_from(
    [*[0, 1, 100_000] * 4, 600_000, SECOND, 4 * SECOND, 11 * SECOND, HOUR, -SECOND]
)


def call_of(step: tuple[Any, ...], keys: Keys) -> Call:
    name, *args = step
    (script,) = (script for script in SCRIPTS if script.name == name)
    if script is LOOK:
        return look(keys)
    if script is not EXTEND:
        return call(script, keys, *args)
    return Call(EXTEND, keys.all[:1], tuple(args))


def compare(redis: Redis, link: PoolLink, steps: list[Any]) -> None:
    """Take the same steps with scripts and without: answers and keys must be equal after each."""
    now, name = NOW, uuid.uuid4().hex
    by_script, by_transaction = keys_of(f"{name}:1"), keys_of(f"{name}:2")
    with redis.client(db=3) as client:
        for step, pause in steps:
            wanted = link.converse(script_at(now, call_of(step, by_script)))
            answer = link.converse(transaction_at(now, call_of(step, by_transaction)))
            if step[0] == "look" and wanted[0][0]:
                wanted[0][0][3] = None  # the waiters, of which only scripts know
            assert answer == wanted
            assert contents(client, by_transaction) == contents(client, by_script)
            # Scripts spare a write if the key lives nearly long enough, and have it live longer for that.
            spared = client.pttl(by_script.record) - 1_260_000
            assert client.pttl(by_transaction.record) > spared
            now += pause


def take(owner: str, ttl: int = 5 * SECOND) -> tuple[Any, ...]:
    return "acquire", owner, "x", ttl, 0, "a name", "{}", "", ""


def at_once(*calls: tuple[Any, ...]) -> list[Any]:
    return [(call, 1) for call in calls]


A, B, *_ = OWNERS
#: What chance brings about too seldom.
SCENES = {
    "eight are remembered": at_once(
        *(step for owner in OWNERS for step in (take(owner), ("release", owner, "", 0))),
        *(("release", owner, "", 0) for owner in OWNERS),
        *(("release", owner, "1", 0) for owner in OWNERS),
        *(take(owner) for owner in OWNERS),
    ),
    "a release comes too late": [
        (take(A, ttl=SECOND), 600_000),
        (take(B), 450_000),
        (("release", A, "", 0), 0),
    ],
    "an extension is for less": at_once(
        take(A, ttl=SECOND),
        ("extend", A, 300 * SECOND, "x"),
        ("extend", A, SECOND, "x"),
        ("extend", B, SECOND, "x"),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_answers_and_the_keys_are_those_of_the_scripts_when(
    redis: Redis, link: PoolLink, scene: str
) -> None:
    compare(redis, link, SCENES[scene])


random_steps = hypothesis_settings(
    max_examples=30,
    deadline=None,
    database=None,
    # To look for the fewest steps that fail takes longer than a test may take.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@random_steps
@given(steps=some.lists(some.tuples(calls, pauses), min_size=25, max_size=60))
def test_whatever_is_asked_the_answers_and_the_keys_are_those_of_the_scripts(
    redis: Redis, link: PoolLink, steps: list[Any]
) -> None:
    compare(redis, link, steps)


def test_what_scripts_share_or_reserve_is_refused_until_it_has_ended(
    link: PoolLink, keys: Keys
) -> None:
    reader, other, late, writer = OWNERS[:4]
    for owner, seconds in (reader, 5), (other, 9):
        link.converse(script_at(NOW, acquire(keys, owner, "s", seconds * SECOND)))

    asked = acquire(keys, writer)
    assert link.converse(transaction_at(NOW, asked)) == [[b"{}", 9 * SECOND]]
    [[shown]] = link.converse(transaction_at(NOW, look(keys)))
    assert shown[4:] == [
        *(b"s", reader.encode(), 5 * SECOND, 0, b"{}"),
        *(other.encode(), 9 * SECOND, 0, b"{}"),
    ]
    (token,) = link.converse(transaction_at(NOW + 9 * SECOND, asked))
    assert token.isdigit()

    link.converse(transaction_at(NOW + 9 * SECOND, call(RELEASE, keys, writer, "", 0)))
    reserving = keys.bells, late, "x", SECOND, 20 * SECOND, "a name", "{}", "", ""
    link.converse(script_at(NOW + 10 * SECOND, Call(ACQUIRE, keys.all, reserving)))
    later = acquire(keys, other)
    assert link.converse(transaction_at(NOW + 12 * SECOND, later)) == [[b"", 18 * SECOND]]
    (token,) = link.converse(transaction_at(NOW + 30 * SECOND, later))
    assert token.isdigit()


def test_a_look_at_many_locks_tells_who_holds_each(link: PoolLink) -> None:
    locks = [keys_of(uuid.uuid4().hex) for _ in OWNERS]
    for keys, owner in zip(locks, OWNERS, strict=True):
        link.converse(transact(acquire(keys, owner)))

    for how in (script, transact):
        (found,) = link.converse(how(look(*locks)))
        assert [answer[5] for answer in found] == [owner.encode() for owner in OWNERS]


# Nobody gets between.


def test_it_takes_two_round_trips(link: PoolLink, keys: Keys) -> None:
    def trips(call: Call) -> int:
        exchanges: list[Any] = []
        link.converse(interrupted(transact(call), lambda: None, exchanges))
        return len(exchanges)

    assert trips(acquire(keys, OWNERS[0])) == 2
    assert trips(acquire(keys, OWNERS[1])) == 2
    assert trips(look(keys)) == 2
    assert trips(call(RELEASE, keys, OWNERS[0], "", 0)) == 2


def test_what_others_write_between_reading_and_writing_is_read_again(
    link: PoolLink, keys: Keys
) -> None:
    others = iter([script, transact])

    def meddle() -> None:
        if how := next(others, None):
            owner = OWNERS[1] if how is script else OWNERS[2]
            told.append(link.converse(how(acquire(keys, owner)))[0])

    told: list[Any] = []
    exchanges: list[Any] = []
    asked = interrupted(transact(acquire(keys, OWNERS[0])), meddle, exchanges)
    answer = link.converse(asked)

    granted, refused = told
    assert granted.isdigit()
    assert refused[0] == answer[0][0] == b"{}"
    assert link.converse(transact(look(keys)))[0][0][5::5] == [OWNERS[1].encode()]


def test_who_is_always_interrupted_is_told_so_and_leaves_nothing_behind(
    redis: Redis, link: PoolLink, keys: Keys
) -> None:
    with redis.client(db=3) as client:
        exchanges: list[Any] = []
        wear = lambda: client.hincrby(keys.record, "worn", 1)  # noqa: E731
        asked = interrupted(transact(acquire(keys, OWNERS[0]), ("PING",)), wear, exchanges)
        (answer,) = link.converse(asked)

        assert isinstance(answer, ResponseError)
        assert len(exchanges) == 2 * ROUNDS
        assert client.hgetall(keys.record) == {"worn": str(ROUNDS)}
        assert is_clean(link, client, keys)


def test_what_comes_after_is_answered_behind_it(link: PoolLink, keys: Keys) -> None:
    answers = link.converse(transact(acquire(keys, OWNERS[0]), ("ECHO", "a"), ("WAIT", 0, 1)))

    assert [answers[0].isdigit(), *answers[1:]] == [True, b"a", 0]
    assert link.converse(transact(look(keys), ("ECHO", "b")))[1:] == [b"b"]


def test_what_only_scripts_do_is_refused_in_words(make: Callable[..., RedisBackend]) -> None:
    backend = make(scripting=False)
    request = backend.request(uuid.uuid4().hex, ttl=30, holder=Holder.current())

    for act in (
        lambda: Terms.of({"shared": True}).check_against(backend),
        lambda: Terms.of({"min_hold": 1}).check_against(backend),
        lambda: backend.take_over(request, OWNERS[0]),
        lambda: list(backend.held()),
        lambda: backend.force_release(request.key, "digest"),
    ):
        with pytest.raises(NotSupported, match="leave out OPTIONS 'scripting'"):
            act()


# What Redis refuses.


def test_user_who_may_not_run_scripts_is_told_what_to_do_and_does_without(
    redis: Redis, make: Callable[..., RedisBackend]
) -> None:
    with user_without(redis, "-@scripting") as user:
        refused, obeying = make(user), make(user, scripting=False)
        request = refused.request(uuid.uuid4().hex, ttl=30, holder=Holder.current())

        with pytest.raises(LockBackendError, match="set OPTIONS 'scripting': False") as caught:
            refused.try_acquire(request, queued=False)
        assert isinstance(caught.value.__cause__, NoPermissionError)

        assert isinstance(obeying.try_acquire(request, queued=False), Grant)
        assert obeying.extend([request]) == [True]
        assert obeying.probe(request)
        assert obeying.release(request) is Release.RELEASED


@pytest.mark.parametrize("command", ["watch", "multi", "exec", "time", "hgetall", "zrange", "hset"])
def test_refused_command_is_told_and_nothing_is_written_and_the_connection_is_clean(
    redis: Redis, keys: Keys, command: str
) -> None:
    with user_without(redis, f"-{command}") as user, way_to(redis, user) as limited:
        (answer,) = limited.converse(transact(acquire(keys, OWNERS[0])))

        assert isinstance(answer, (NoPermissionError, ExecAbortError))
        with redis.client(db=3) as client:
            assert client.exists(*keys.all) == 0
            assert command in {"multi", "exec"} or is_clean(limited, client, keys)
            assert "multi=-1 " in limited.converse(ask(("CLIENT", "INFO")))[0].decode()


def is_clean(link: PoolLink, client: driver.Redis, keys: Keys) -> bool:
    """Tell whether its connection is in no transaction and watches nothing."""
    client.hincrby(keys.record, "worn", 1)
    return link.converse(ask(("MULTI",), ("PING",), ("EXEC",)))[0::2] == [b"OK", [b"PONG"]]


def test_when_the_memory_is_full_nothing_new_is_locked_and_scripts_extend_and_free_what_is_held(
    make: Callable[..., RedisBackend],
) -> None:
    with Redis() as server, server.client() as client:
        backend = make(server=server)
        name = uuid.uuid4().hex
        requests = [
            backend.request(f"{name}{i}", ttl=30, holder=Holder.current()) for i in range(4)
        ]
        held_back = backend.request(f"{name}h", ttl=30, holder=Holder.current())
        for request in [*requests[:3], held_back]:
            backend.try_acquire(request, queued=False)
        reserved = backend.request(f"{name}r", ttl=30, holder=Holder.current(), min_hold=600)
        backend.try_acquire(reserved, queued=False)
        backend.release(reserved)
        client.config_set("maxmemory", "1")

        with pytest.raises(LockBackendError, match="memory is full") as caught:
            backend.try_acquire(requests[3], queued=False)
        assert isinstance(caught.value.__cause__, OutOfMemoryError)
        assert [backend.probe(request) is None for request in requests] == [False] * 3 + [True]
        assert backend.extend(requests[:3]) == [True] * 3
        assert backend.release(requests[0]) is Release.RELEASED
        assert backend.revoke_all(requests[1:2]) == [Release.RELEASED]
        (held,) = [held for held in backend.held() if held.key == requests[2].key]
        assert backend.end_holding(held.key, held.owner_digest)
        assert [backend.probe(request) for request in requests] == [None] * 4
        # Reserved by its release, as with free_on_error.
        assert backend.release(replace(held_back, min_hold=600)) is Release.RELEASED
        found = backend.probe(held_back)
        assert found is not None
        assert found.reserved
        (shown,) = backend.held(reserved.key)
        assert shown.reserved
        assert backend.end_holding(shown.key, shown.owner_digest)
        assert backend.probe(reserved) is None


def test_when_the_memory_is_full_a_transaction_frees_nothing(
    make: Callable[..., RedisBackend],
) -> None:
    with Redis() as server, server.client() as client:
        backend = make(server=server, scripting=False)
        request = backend.request(uuid.uuid4().hex, ttl=30, holder=Holder.current())
        backend.try_acquire(request, queued=False)
        client.config_set("maxmemory", "1")

        with pytest.raises(LockBackendError, match="memory is full"):
            backend.release(request)
        assert backend.probe(request) is not None
        client.config_set("maxmemory", "0")
        assert backend.release(request) is Release.RELEASED


def test_a_release_that_is_refused_leaves_the_lock_held(redis: Redis, keys: Keys) -> None:
    with way_to(redis) as free, user_without(redis, "-hset") as user:
        free.converse(transact(acquire(keys, OWNERS[0])))
        with way_to(redis, user) as limited:
            (answer,) = limited.converse(transact(call(RELEASE, keys, OWNERS[0], "1", 0)))

        assert isinstance(answer, NoPermissionError)
        assert free.converse(transact(look(keys)))[0][0][5] == OWNERS[0].encode()
