"""The OPTIONS of EtcdBackend."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from django_distlock.conf import check_values, must

#: The port of etcd's clients.
PORT = 2379
#: What an endpoint looks like.
_LIKE = "like '10.0.0.1:2379' or 'https://etcd.example.com:2379'"


class Endpoint(NamedTuple):
    """The address of one member."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """The OPTIONS of EtcdBackend, described in docs/reference/settings.md. Times are in seconds."""

    endpoints: str | Sequence[str] = "127.0.0.1:2379"
    namespace: str = "distlock"
    session_timeout: float = 10.0
    io_timeout: float = 3.0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    key_password: str | None = field(default=None, repr=False)
    verify_certs: bool = True

    def __post_init__(self) -> None:
        check_values(self)
        must(self.members, "'endpoints' must not be empty.")
        namespace: object = self.namespace
        is_name = isinstance(namespace, str) and namespace.isprintable()
        must(
            is_name and namespace and str(namespace).strip("/") == namespace,
            f"'namespace' must be text without '/' at its ends, like 'distlock', not {namespace!r}.",
        )
        # "/%/" is a folder that no lock has: the lock 'b' in the namespace 'a' must not have its keys in 'a/b'.
        object.__setattr__(self, "namespace", self.namespace.replace("/", "/%/"))
        has_both = (self.user is None) is (self.password is None)
        must(has_both, "'user' and 'password' belong together.")
        for name in ("key", "key_password"):
            must(self.cert or not getattr(self, name), f"{name!r} is of use only with 'cert'.")
        for name in ("ca_cert", "cert"):
            is_used = self.uses_tls or not getattr(self, name)
            must(is_used, f"{name!r} is of use only with an endpoint that begins with 'https://'.")
        if self.uses_tls:
            self.tls_context()

    @property
    def members(self) -> list[Endpoint]:
        some = self.endpoints.split(",") if isinstance(self.endpoints, str) else self.endpoints
        if not isinstance(some, (list, tuple)):
            raise TypeError(f"'endpoints' must be text or a list of texts, not {some!r}.")
        return [_endpoint(each) for each in some]

    @property
    def servers(self) -> str:
        return ", ".join(map(str, self.members))

    @property
    def uses_tls(self) -> bool:
        return any(member.tls for member in self.members)

    @property
    def lease_ttl(self) -> int:
        """The ttl of the session's lease: etcd takes whole seconds."""
        return math.ceil(self.session_timeout)

    def tls_context(self) -> ssl.SSLContext:
        """Return the SSLContext, made again if a file has changed; ValueError if a file cannot be read."""
        files = [(name, getattr(self, name)) for name in ("ca_cert", "cert", "key")]
        changes = tuple(_changed_at(name, path) for name, path in files if path)
        password, verifies = self.key_password, self.verify_certs
        return _tls_context(self.ca_cert, self.cert, self.key, password, verifies, changes)


def _changed_at(name: str, path: str) -> int:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - its descriptor is asked
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError as error:
        raise ValueError(f"{name!r} cannot be read: {error}.") from error


@lru_cache(8)
def _tls_context(
    ca_cert: str | None,
    cert: str | None,
    key: str | None,
    password: str | None,
    verifies: bool,
    _changes: tuple[int, ...],
) -> ssl.SSLContext:
    def known_password() -> str:
        # Otherwise OpenSSL would ask for it on the terminal.
        must(password, "set 'key_password', as it is encrypted")
        return password or ""

    name = "ca_cert"
    try:
        context = ssl.create_default_context(cafile=ca_cert)
        name = "key" if key else "cert"
        if cert:
            context.load_cert_chain(cert, key, known_password)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be read: {error}.") from error
    if not verifies:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _endpoint(text: object) -> Endpoint:
    known = text.strip() if isinstance(text, str) else ""
    # Not shown, because a password may be part of it.
    must("@" not in known, "'endpoints' must contain no user: use 'user' and 'password'.")
    try:
        parts = urlsplit(known if "://" in known else f"http://{known}")
        host, port = parts.hostname or "", parts.port or PORT
        host.encode("idna")  # as the socket does
    except ValueError as error:
        raise ValueError(f"'endpoints' must be {_LIKE}, not {text!r}: {error}.") from error
    is_address = parts.scheme in {"http", "https"} and host and not parts.path.strip("/")
    must(is_address, f"'endpoints' must be {_LIKE}, not {text!r}.")
    return Endpoint(host, port, parts.scheme == "https")
