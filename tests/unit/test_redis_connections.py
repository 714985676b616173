"""What is said to a Redis, and what it answers: bytes, no I/O."""

from __future__ import annotations

import pytest
from redis.exceptions import NoScriptError, ResponseError

from django_distlock.backends.redis.connections import packed, parsed
from django_distlock.backends.redis.scripts import Call, Script


def error(text: str) -> Exception:
    return NoScriptError(text) if text.startswith("NOSCRIPT") else ResponseError(text)


ANSWERS = {
    b"+OK\r\n": b"OK",
    b":-17\r\n": -17,
    b"$5\r\na\r\n\xffb\r\n": b"a\r\n\xffb",
    b"$0\r\n\r\n": b"",
    b"$-1\r\n": None,
    b"*-1\r\n": None,
    b"*0\r\n": [],
    b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n+OK\r\n": [1, [b"a", None], b"OK"],
}


@pytest.mark.parametrize("data", ANSWERS)
def test_an_answer_is_read_once_all_of_it_is_there(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises(IndexError):
            parsed(data[:size], 0, error)

    assert parsed(b"xx" + data + b":2\r\n", 2, error) == (ANSWERS[data], 2 + len(data))


def test_an_error_is_an_answer_wherever_it_stands() -> None:
    (found, end) = parsed(b"*2\r\n-NOSCRIPT none\r\n-ERR \xff\r\n", 0, error)

    assert end == 28
    assert [type(each) for each in found] == [NoScriptError, ResponseError]
    assert str(found[1]) == "ERR \N{REPLACEMENT CHARACTER}"


def test_words_are_sent_by_their_bytes_and_scripts_by_their_names() -> None:
    script = Script("some", "return 1")
    call = Call(script, ("k",), ("é", 7, b"\xff"))

    sent = packed([call, ("PING",)])

    words = b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n$1\r\nk\r\n" % script.sha.encode()
    args = b"$2\r\n\xc3\xa9\r\n$1\r\n7\r\n$1\r\n\xff\r\n"
    assert sent == b"*7\r\n" + words + args + b"*1\r\n$4\r\nPING\r\n"
    assert packed([call.by_sha]) == packed([call])
