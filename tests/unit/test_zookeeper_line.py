"""The line for one lock, as arithmetic: order, who waits for whom, names of nodes, OPTIONS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kazoo.security import CREATOR_ALL_ACL

from django_distlock import InvalidLockBackend
from django_distlock.backends.queue.labels import Label, SessionRequest, label, quoted, unquoted
from django_distlock.backends.zookeeper.children import Children, prefix
from django_distlock.backends.zookeeper.options import ZooKeeperOptions
from django_distlock.conf import BackendSettings
from django_distlock.engine.values import digest
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import LONGEST_LISTED, server_key
from django_distlock.handler import make_backend

BACKEND = "django_distlock.backends.zookeeper.ZooKeeperBackend"


def node(number: int, kind: str = "w") -> str:
    # Whoever came later has an owner that is earlier in the order of names.
    return f"{-number % 2**64:016x}-00000000-{kind}-{number:010d}"


def waits_for(line: Children, name: str) -> int | None:
    before = line.before(name)
    return None if before is None else before.number


def test_children_of_somebody_else_are_not_in_line() -> None:
    assert not Children(
        ["x", "lock-0000000001", "", "a" * 16, f"{'g' * 16}-00000000-w-0000000001"]
    ).all


def test_a_writer_waits_for_the_one_before_it() -> None:
    line = Children([node(1, "r"), node(2, "r"), node(3), node(4)])

    assert [waits_for(line, node(number)) for number in (3, 4)] == [2, 3]
    assert waits_for(Children([node(5)]), node(5)) is None


def test_a_reader_waits_for_the_last_writer_before_it_alone() -> None:
    line = Children([node(1), node(2, "r"), node(3), node(4, "r"), node(5, "r")])

    assert [waits_for(line, node(number, "r")) for number in (2, 4, 5)] == [1, 3, 3]
    assert waits_for(Children([node(1, "r"), node(2, "r")]), node(2, "r")) is None


def test_holders_are_the_first_writer_or_all_readers_before_it() -> None:
    def holders(*names: str) -> list[int]:
        return [each.number for each in Children(names).holders]

    assert holders() == []
    assert holders(node(1), node(2), node(3, "r")) == [1]
    assert holders(node(1, "r"), node(2, "r"), node(3), node(4, "r")) == [1, 2]
    assert holders(node(1, "r"), node(2, "r")) == [1, 2]


@pytest.mark.parametrize(
    "name", [".", "..", "/", "a/b", "/../a", "%2F", "%", "zookeeper", "#|a", "\ud800", "a\0b", "~"]
)
def test_any_name_is_one_node(name: str) -> None:
    key = server_key(name)
    made = quoted(key)

    assert "/" not in made
    assert made not in {".", ".."}
    assert made.isascii()
    assert made.isprintable()
    assert unquoted(made) == key


def test_names_of_nodes_that_are_none_of_ours_are_no_keys() -> None:
    assert [unquoted(name) for name in ("a b", "%41", "%2f", "\u00fc")] == [None, None, None, None]


def request(**terms: Any) -> SessionRequest:
    known = {"name": "n", "key": "k", "ttl": 30.0, "holder": Holder.current(), "longest": 10.0}
    return SessionRequest(**{**known, **terms})


def test_a_node_says_who_holds_what() -> None:
    wanted = request(name="r\u00e9port \ud800")

    assert Label.read(label(wanted)) == Label("r\u00e9port \\ud800", wanted.holder)
    assert wanted.owner.encode() not in label(wanted)
    assert len(Label.read(label(request(name="x" * 10**7))).name) == LONGEST_LISTED


def test_a_ttl_is_cut_to_the_session_timeout_and_remembered() -> None:
    long, short = request(), request(ttl=5.0)

    assert (long.ttl, long.kept_for) == (10.0, 30.0)
    assert (short.ttl, short.kept_for) == (5.0, 5.0)
    # What an extension and max_hold make of it.
    assert (replace(long, ttl=60.0).ttl, replace(long, ttl=60.0).kept_for) == (10.0, 60.0)
    assert (replace(long, ttl=2.0).ttl, replace(long, ttl=2.0).kept_for) == (2.0, 2.0)
    assert replace(long).kept_for == 30.0


# OPTIONS.

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hosts": ""}, "hosts"),
    ({"hosts": [7]}, "hosts"),
    ({"hosts": "one:port"}, "hosts"),
    ({"root": "distlock"}, "root"),
    ({"root": "/"}, "root"),
    ({"root": "/a/../b"}, "root"),
    ({"root": "/zookeeper/x"}, "root"),
    ({"session_timeout": 0}, "session_timeout"),
    ({"io_timeout": -1}, "io_timeout"),
    ({"auth": "digest"}, "auth"),
    ({"acl": "closed"}, "acl"),
    ({"acl": "creator"}, "acl"),
    ({"sasl": "DIGEST-MD5"}, "sasl"),
    ({"tls": "yes"}, "tls"),
    ({"ca": "/etc/ca.pem"}, "ca"),
    ({"tls": True, "ca": 7}, "ca"),
    ({"tls": True, "certfile": "/etc/me.pem"}, "keyfile"),
    ({"tls": True, "verify_certs": False}, "check_hostname"),
    ({"tls": True, "ca": "/no.pem"}, "ca"),
    ({"tls": True, "certfile": __file__, "keyfile": "/no.pem"}, "keyfile"),
    ({"host": "one"}, "host"),
]


@pytest.mark.parametrize(("options", "named"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidLockBackend) as caught:
        make_backend(BackendSettings("zk", BACKEND, options=options))

    assert "DISTLOCK['zk']" in str(caught.value)
    assert f"'{named}'" in str(caught.value)


def test_credentials_are_not_shown() -> None:
    options = ZooKeeperOptions(
        auth=[("digest", "me:secret")], tls=True, keyfile_password="secret", acl="creator"
    )

    assert "secret" not in repr(options)


def test_options_are_what_kazoo_takes() -> None:
    options = ZooKeeperOptions(
        hosts=["one:1", "two"], auth=[("digest", "me:pw")], acl="creator", tls=True, ca=__file__
    )

    told = options.client_arguments()

    assert options.servers == "one:1, two:2181"
    assert told["hosts"] == ["one:1", "two"]
    assert told["auth_data"] == [("digest", "me:pw")]
    assert told["default_acl"] == CREATOR_ALL_ACL
    assert (told["use_ssl"], told["ca"], told["check_hostname"]) == (True, __file__, True)
    assert "use_ssl" not in ZooKeeperOptions().client_arguments()


@pytest.mark.parametrize("first", [0, 2**30 - 1, 2**31 - 2, -(2**30) - 1, -(2**31)])
def test_a_line_is_ordered_by_arrival_wherever_its_numbers_are(first: int) -> None:
    # The counter of 32 bits begins again below zero.
    numbers = [(first + step + 2**31) % 2**32 - 2**31 for step in (0, 1, 2, 3, 2**31 - 3)]
    names = [node(number) for number in numbers]

    children = Children(reversed(names)).all

    assert [each.number for each in children] == numbers
    assert [each.owner_digest for each in children] == [name[:16] for name in names]


def test_only_names_that_a_folder_cannot_have_are_changed() -> None:
    assert quoted("shop.fee:42") == "shop.fee:42"
    assert quoted("..") == "%2E%2E"


@pytest.mark.parametrize(("shared", "kind"), [(True, "r"), (False, "w")])
def test_the_name_of_a_node_says_whose_it_is_and_which_kind(shared: bool, kind: str) -> None:
    mine = request(owner="me", shared=shared)

    assert prefix(mine, "attempt") == f"{digest('me')}-attempt-{kind}-"
