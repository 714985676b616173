"""The Redis in memory answers the scripts of locks as a real one does."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import redis as driver

from django_distlock.backends.redis import scripts
from tests.fixtures.redis import Redis

from .redis_memory import RedisInMemory

TTL = 900_000_000
OWNERS = ("11111111", "22222222", "33333333")
Question = tuple[str, list[str], list[str | int]]


def question_of(random: Random, key: str) -> Question:
    owner, other = random.sample(OWNERS, 2)
    lock = [key, f"{key}:h", f"{key}:q", f"{key}:a"]
    bells, mode, queued, fair = f"{key}:b:", random.choice("xxs"), *random.choices(("", "1"), k=2)
    wish: list[str | int] = [bells, owner, mode, TTL, 0, "name", "{}", queued, fair, owner, ""]
    questions: list[Question] = [
        (scripts.ACQUIRE.text, lock, wish),
        (scripts.ACQUIRE.text, lock, wish),
        (scripts.ACQUIRE.text, [f"{key}0", f"{key}0:h", *lock[2:]], [*wish[:-1], "1"]),
        (scripts.ENQUEUE.text, lock, [bells, owner]),
        (scripts.RELEASE.text, lock, [bells, owner, random.choice(("", "", "1")), 0]),
        (scripts.EXTEND.text, lock[:1], [owner, 2 * TTL, "x"]),
        (scripts.EXTEND.text, lock[:2], [owner, 2 * TTL, "s"]),
        (scripts.TAKE_OVER.text, lock, [bells, owner, other, TTL, "{}"]),
        (scripts.LOOK.text, [key, f"{key}:h", f"{key}:a"], []),
        (scripts.FORCE.text, lock, [bells, owner, "0"]),
        (scripts.LEAVE.text, lock, [bells, owner]),
        (scripts.RAISE.text, lock, [bells, owner, 2_000_000_000_000_000 + random.randrange(100)]),
        (scripts.RELEASE.text, lock, ["", owner, "1", 0]),
    ]
    return random.choice(questions)


@pytest.mark.parametrize("seed", range(10))
def test_scripts_are_answered_alike(seed: int, redis: Redis) -> None:
    random, key = Random(seed), f"{{{uuid.uuid4()}}}"
    memory = RedisInMemory(lambda: int(time.time() * 1e6))
    real: Any = driver.Redis(host=redis.host, port=redis.port)

    with real.client() as client:
        for _ in range(150):
            text, keys, arguments = question_of(random, key)
            words = ["EVAL", text, len(keys), *keys, *arguments]
            theirs = client.execute_command(*words)
            ours = memory.carry_out([str(word).encode() for word in words], print)
            assert [*_without_instants(ours)] == [*_without_instants(theirs)], (text, arguments)
        left = {each.decode() for each in client.keys(f"*{key}*")}
    assert {each.decode() for each in memory.data} == left


def _without_instants(answer: Any) -> Iterator[object]:
    """Give the parts of *answer*, without times and tokens, which depend on the moment."""
    if isinstance(answer, list):
        yield "["
        for each in answer:
            yield from _without_instants(each)
    elif isinstance(answer, bytes):
        yield re.sub(rb"^\d{16}", b"TOKEN", answer)
    else:
        yield type(answer) if isinstance(answer, int) and abs(answer) > 100 else answer
