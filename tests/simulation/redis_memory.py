"""A Redis in memory: the commands that locks use, and their real scripts, carried out by Lua 5.1 as in Redis."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lupa import lua51

Words = Sequence[bytes]
#: Sends an answer, or a message, to a connection.
Send = Callable[[bytes], object]


class Refusal(Exception):
    """What Redis answers with a minus."""


class Status(bytes):
    """What Redis answers with a plus."""


_lua: Any = lua51.LuaRuntime(encoding=None)
_compile: Any = _lua.eval(b"function(text) return assert(loadstring(text)) end")
# redis.call() and redis.pcall() of a script ask the server that runs it.
_run: Any = _lua.eval(
    b"""function(script, keys, arguments, ask)
        KEYS, ARGV = keys, arguments
        redis = {call = function(...) return ask(false, ...) end, pcall = function(...) return ask(true, ...) end}
        return script()
    end"""
)
_table: Any = _lua.table_from
_compiled: dict[bytes, Any] = {}
_sha_of: dict[bytes, bytes] = {}


def to_wire(answer: Any) -> bytes:
    """Return *answer* in RESP 2."""
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, Status):
        return b"+%b\r\n" % answer
    if isinstance(answer, Refusal):
        return b"-%b\r\n" % str(answer).encode()
    if isinstance(answer, bytes):
        return b"$%d\r\n%b\r\n" % (len(answer), answer)
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    return b"*%d\r\n" % len(answer) + b"".join(map(to_wire, answer))


def _score(text: bytes) -> tuple[float, bool]:
    """Return a bound of ZRANGEBYSCORE, and whether it is exclusive."""
    return (float(text[1:]), True) if text.startswith(b"(") else (float(text), False)


def _shown(score: float) -> bytes:
    return b"%d" % score if score == int(score) else b"%r" % score


class RedisInMemory:
    """One server. *clock* returns the microseconds of its wall clock."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.start(keeps_data=False)

    def start(self, *, keeps_data: bool) -> None:
        """Start again, with the data of before or without; scripts and connections are forgotten."""
        if not keeps_data:
            self.data: dict[bytes, Any] = {}
            self.expiry: dict[bytes, int] = {}
        self.scripts: dict[bytes, bytes] = {}
        self.channels: dict[bytes, list[Send]] = {}
        #: Who waits by BLPOP: the keys and what to do with one that has something.
        self.blocked: deque[tuple[Words, Send]] = deque()
        self.started = self.clock()

    # Requests.

    def carry_out(self, words: Words, send: Send) -> Any:
        """Return the answer to a request; BLPOP's None means that it waits."""
        name = words[0].upper().decode()
        try:
            if name == "SUBSCRIBE":
                self.channels.setdefault(words[1], []).append(send)
                return [b"subscribe", words[1], 1]
            if name == "BLPOP":
                return self._pop_first(words[1:-1])
            answer = self._call(words)
        except Refusal as error:
            answer = error
        self._serve_blocked()
        return answer

    def forget(self, send: Send) -> None:
        """Forget a connection that was closed."""
        self.blocked = deque(each for each in self.blocked if each[1] != send)
        for listeners in self.channels.values():
            if send in listeners:
                listeners.remove(send)

    def _serve_blocked(self) -> None:
        for waiting in [*self.blocked]:
            found = self._pop_first(waiting[0])
            if found is not None:
                self.blocked.remove(waiting)
                waiting[1](to_wire(found))

    def _pop_first(self, keys: Words) -> list[bytes] | None:
        for key in keys:
            if known := self._get(key, None):
                popped = known.pop(0)
                self._drop_if_empty(key)
                return [key, popped]
        return None

    def _call(self, words: Words) -> Any:
        name = _COMMANDS.get(words[0])
        if name is None:
            raise Refusal(f"ERR unknown command '{words[0].decode()}'")
        return getattr(self, name)(*words[1:])

    # Scripts.

    def do_eval(self, text: bytes, count: bytes, *rest: bytes) -> Any:
        if text not in _compiled:
            _compiled[text] = _compile(text)
            _sha_of[text] = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
        self.scripts[_sha_of[text]] = text
        keys, arguments = rest[: int(count)], rest[int(count) :]
        return _from_lua(_run(_compiled[text], _table(keys), _table(arguments), self._from_lua))

    def do_evalsha(self, sha: bytes, count: bytes, *rest: bytes) -> Any:
        if sha not in self.scripts:
            raise Refusal("NOSCRIPT No matching script. Please use EVAL.")
        return self.do_eval(self.scripts[sha], count, *rest)

    def _from_lua(self, is_protected: bool, *words: Any) -> Any:
        try:
            answer = self._call([word if type(word) is bytes else _number(word) for word in words])
        except Refusal as error:
            if not is_protected:
                raise
            return _table({b"err": str(error).encode()})
        return answer if type(answer) in {int, bytes} else _to_lua(answer)

    # Keys.

    def _get(self, key: bytes, default: Any) -> Any:
        if key in self.expiry and self.expiry[key] <= self.clock() // 1000:
            self.do_del(key)
        return self.data.get(key, default)

    def _make(self, key: bytes, kind: type[Any]) -> Any:
        found = self._get(key, None)
        if found is None:
            found = self.data[key] = kind()
        return found

    def _drop_if_empty(self, key: bytes) -> None:
        if not self.data[key]:
            self.do_del(key)

    def do_del(self, *keys: bytes) -> int:
        for key in keys:
            self.expiry.pop(key, None)
        return sum(self.data.pop(key, None) is not None for key in keys)

    def do_exists(self, *keys: bytes) -> int:
        return sum(self._get(key, None) is not None for key in keys)

    def do_pttl(self, key: bytes) -> int:
        if self._get(key, None) is None:
            return -2
        return self.expiry[key] - self.clock() // 1000 if key in self.expiry else -1

    def do_pexpire(self, key: bytes, ms: bytes) -> int:
        if self._get(key, None) is None:
            return 0
        self.expiry[key] = self.clock() // 1000 + int(ms)
        return 1

    def do_set(self, key: bytes, value: bytes, *options: bytes) -> Status:
        self.do_del(key)
        self.data[key] = value
        if options:
            self.do_pexpire(key, options[1])
        return Status(b"OK")

    # Hashes.

    def do_hget(self, key: bytes, field: bytes) -> bytes | None:
        known: bytes | None = self._get(key, {}).get(field)
        return known

    def do_hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        known = self._get(key, {})
        return [known.get(field) for field in fields]

    def do_hset(self, key: bytes, *pairs: bytes) -> int:
        known = self._make(key, dict)
        before = len(known)
        known.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(known) - before

    def do_hdel(self, key: bytes, *fields: bytes) -> int:
        if (known := self._get(key, None)) is None:
            return 0
        gone = sum(known.pop(field, None) is not None for field in fields)
        self._drop_if_empty(key)
        return gone

    # Sorted sets.

    def _sorted(self, key: bytes) -> list[tuple[bytes, float]]:
        return sorted(self._get(key, {}).items(), key=lambda item: (item[1], item[0]))

    def _range(
        self, found: list[tuple[bytes, float]], first: bytes, last: bytes, options: Words
    ) -> list[bytes]:
        end = int(last) % len(found) if found and int(last) < 0 else int(last)
        start = int(first) % len(found) if found and int(first) < 0 else int(first)
        some = found[start : end + 1]
        if options:
            return [each for member, score in some for each in (member, _shown(score))]
        return [member for member, _ in some]

    def do_zadd(self, key: bytes, *words: bytes) -> int:
        only_new = words[0].upper() == b"NX"
        pairs = words[1:] if only_new else words
        known = self._make(key, dict)
        before = len(known)
        for score, member in zip(pairs[::2], pairs[1::2], strict=True):
            if not only_new or member not in known:
                known[member] = float(score)
        return len(known) - before

    def do_zrem(self, key: bytes, *members: bytes) -> int:
        return self.do_hdel(key, *members)

    def do_zcard(self, key: bytes) -> int:
        return len(self._get(key, ()))

    def do_zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = self._get(key, {}).get(member)
        return None if score is None else _shown(score)

    def do_zrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
        return self._range(self._sorted(key), first, last, options)

    def do_zrevrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
        return self._range(self._sorted(key)[::-1], first, last, options)

    def do_zrangebyscore(self, key: bytes, least: bytes, most: bytes) -> list[bytes]:
        (low, is_above), (high, is_below) = _score(least), _score(most)
        return [
            member
            for member, score in self._sorted(key)
            if (low < score or (low == score and not is_above))
            and (score < high or (score == high and not is_below))
        ]

    def do_zcount(self, key: bytes, least: bytes, most: bytes) -> int:
        return len(self.do_zrangebyscore(key, least, most))

    def do_zpopmin(self, key: bytes) -> list[bytes]:
        for member, score in self._sorted(key):
            self.do_zrem(key, member)
            return [member, _shown(score)]
        return []

    # Lists and messages.

    def do_rpush(self, key: bytes, *values: bytes) -> int:
        known = self._make(key, list)
        known += values
        return len(known)

    def do_publish(self, channel: bytes, text: bytes) -> int:
        listeners = self.channels.get(channel, [])
        for send in listeners:
            send(to_wire([b"message", channel, text]))
        return len(listeners)

    def do_pubsub(self, what: bytes, *channels: bytes) -> list[bytes | int]:
        return [
            each for channel in channels for each in (channel, len(self.channels.get(channel, ())))
        ]

    # The server.

    def do_time(self) -> list[bytes]:
        return [b"%d" % part for part in divmod(self.clock(), 1_000_000)]

    def do_info(self) -> bytes:
        up = self.clock() // 1_000_000 - self.started // 1_000_000
        return b"uptime_in_seconds:%d\r\naof_enabled:0\r\n" % up


_COMMANDS = {
    name.removeprefix("do_").upper().encode(): name
    for name in dir(RedisInMemory)
    if name.startswith("do_")
}


def _number(value: float) -> bytes:
    return b"%d" % value if value == int(value) else b"%.17g" % value


def _to_lua(answer: Any) -> Any:
    if answer is None:
        return False
    if isinstance(answer, Status):
        return _table({b"ok": bytes(answer)})
    if isinstance(answer, list):
        return _table([_to_lua(each) for each in answer])
    return answer


def _from_lua(answer: Any) -> Any:
    if answer is None or answer is False:
        return None
    if answer is True:
        return 1
    if isinstance(answer, (int, float)):
        return int(answer)
    if isinstance(answer, bytes):
        return answer
    if (refusal := answer[b"err"]) is not None:
        raise Refusal(refusal.decode())
    answers, at = [], 1
    while (each := answer[at]) is not None:
        answers.append(_from_lua(each))
        at += 1
    return answers
