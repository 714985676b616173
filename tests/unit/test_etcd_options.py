"""The OPTIONS of the etcd backend, and what its sessions make of a ttl."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from django_distlock import InvalidLockBackend
from django_distlock.backends.etcd.options import EtcdOptions
from django_distlock.conf import BackendSettings
from django_distlock.ground.holder import Holder
from django_distlock.handler import make_backend

if TYPE_CHECKING:
    from pathlib import Path

BACKEND = "django_distlock.backends.etcd.EtcdBackend"


@pytest.mark.parametrize(
    ("endpoints", "members"),
    [
        ("127.0.0.1", ["127.0.0.1:2379"]),
        ("one:2379, two:2380", ["one:2379", "two:2380"]),
        (["http://one:1", "[::1]:2"], ["one:1", "[::1]:2"]),
        (("https://one",), ["one:2379"]),
    ],
    ids=["no port", "text", "list", "tls"],
)
def test_endpoints_are_text_or_a_list(endpoints: Any, members: list[str]) -> None:
    options = EtcdOptions(endpoints=endpoints)

    assert [str(member) for member in options.members] == members
    assert options.servers == ", ".join(members)
    assert options.uses_tls is any("https" in each for each in endpoints)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"endpoints": ""}, "'endpoints' must be like"),
        ({"endpoints": []}, "'endpoints' must not be empty"),
        ({"endpoints": 2379}, "'endpoints' must be text or a list of texts, not 2379"),
        ({"endpoints": "etcd://one"}, "'endpoints' must be like"),
        ({"endpoints": "one..two"}, "'endpoints' must be like"),
        ({"endpoints": "http://me:secret@one"}, "'endpoints' must contain no user"),
        ({"namespace": ""}, "'namespace' must be text"),
        ({"user": "shop", "password": b"secret"}, "'password' must be a str, not bytes"),
        ({"user": "shop"}, "'user' and 'password' belong together"),
        ({"ca_cert": "ca.pem"}, "'ca_cert' is of use only with an endpoint"),
        ({"endpoints": "https://one", "key": "key.pem"}, "'key' is of use only with 'cert'"),
        ({"endpoints": "https://one", "key_password": "hush"}, "'key_password' is of use only"),
        ({"endpoints": "https://one", "ca_cert": "/no.pem"}, "'ca_cert' cannot be read"),
        ({"endpoints": "https://one", "cert": __file__}, "'cert' cannot be read"),
        ({"endpoints": "https://one", "cert": __file__, "key": "/no"}, "'key' cannot be read"),
        ({"session_timeout": 0}, "'session_timeout' must be more than 0"),
        ({"io_timeout": "1"}, "'io_timeout' must be a number"),
        ({"verify_certs": 1}, "'verify_certs' must be True or False"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidLockBackend) as caught:
        make_backend(BackendSettings("locks", BACKEND, options=options))

    assert str(caught.value).startswith("DISTLOCK['locks']: ")
    assert text in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_session_lasts_at_least_as_long_as_is_wished() -> None:
    assert EtcdOptions(session_timeout=2.1).lease_ttl == 3


def test_a_ttl_is_cut_to_the_session_timeout() -> None:
    backend = make_backend(BackendSettings("locks", BACKEND, options={"session_timeout": 5}))

    request = backend.request("x", ttl=60, holder=Holder.current(""))

    assert (request.ttl, replace(request, ttl=3.0).ttl) == (5, 3)


def test_an_encrypted_key_needs_its_password(certificate: Path, tmp_path: Path) -> None:
    key, sealed = str(certificate), str(tmp_path / "key.pem")
    encrypt = ["openssl", "rsa", "-aes256", "-passout", "pass:hush", "-in", key, "-out", sealed]
    subprocess.run(encrypt, check=True, capture_output=True)
    options = {"endpoints": "https://one", "cert": key, "key": sealed}

    for password, text in ((None, "set 'key_password'"), ("wrong", "'key' cannot be read")):
        settings = BackendSettings("locks", BACKEND, options={**options, "key_password": password})
        with pytest.raises(InvalidLockBackend, match=text):
            make_backend(settings)

    make_backend(BackendSettings("locks", BACKEND, options={**options, "key_password": "hush"}))


def test_a_namespace_in_another_one_is_in_a_folder_that_no_lock_has() -> None:
    assert EtcdOptions(namespace="shop/locks").namespace == "shop/%/locks"
