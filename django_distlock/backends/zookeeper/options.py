"""The OPTIONS of ZooKeeperBackend, and a request whose deadline does not outlast the session that keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from kazoo.hosts import collect_hosts
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from django_distlock.conf import LONGEST, check_values
from django_distlock.engine.values import Request

_ACLS = {"open": OPEN_ACL_UNSAFE, "creator": CREATOR_ALL_ACL}
_FILES = ("ca", "certfile", "keyfile", "keyfile_password")
#: Where the servers keep what is theirs.
_RESERVED = "zookeeper"


@dataclass(frozen=True, slots=True)
class ZooKeeperOptions:
    """The OPTIONS of ZooKeeperBackend; docs/reference/settings.md tells what they are. Times are seconds."""

    hosts: str | Sequence[str] = "127.0.0.1:2181"
    root: str = "/distlock"
    session_timeout: float = 10.0
    io_timeout: float = 1.5
    auth: Sequence[tuple[str, str]] = field(default=(), repr=False)
    acl: str | Sequence[Any] = "open"
    sasl: dict[str, Any] | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    keyfile_password: str | None = field(default=None, repr=False)
    verify_certs: bool = True
    check_hostname: bool = True

    def __post_init__(self) -> None:
        check_values(self)
        _check_hosts(self.hosts)
        _check_root(self.root)
        is_pairs = _is_list(self.auth) and all(
            _is_list(p, of=str) and len(p) == 2 for p in self.auth
        )
        _must(is_pairs, "'auth' must be a list of pairs of a scheme and a credential.", TypeError)
        self._check_sasl()
        self._check_acl()
        self._check_tls()

    @property
    def acls(self) -> list[Any]:
        return list(_ACLS[self.acl] if isinstance(self.acl, str) else self.acl)

    @property
    def servers(self) -> str:
        found, _ = collect_hosts(_listed(self.hosts))
        return ", ".join(f"{host}:{port}" for host, port in found)

    def client_arguments(self) -> dict[str, Any]:
        tls = {name: getattr(self, name) for name in (*_FILES, "verify_certs", "check_hostname")}
        return {
            "hosts": _listed(self.hosts),
            "timeout": self.session_timeout,
            "auth_data": [tuple(pair) for pair in self.auth],
            "default_acl": self.acls,
            # kazoo writes into it.
            "sasl_options": None if self.sasl is None else dict(self.sasl),
            **({"use_ssl": True, **tls} if self.tls else {}),
        }

    def _check_sasl(self) -> None:
        if self.sasl is not None:
            _must(isinstance(self.sasl, dict), "'sasl' must be a dict.", TypeError)
            msg = "'sasl' needs the package pure-sasl, which is not installed."
            _must(find_spec("puresasl"), msg)

    def _check_acl(self) -> None:
        known = ", ".join(map(repr, _ACLS))
        msg = f"'acl' must be one of {known}, or a list of kazoo.security.ACL, not {self.acl!r}."
        if isinstance(self.acl, str):
            _must(self.acl in _ACLS, msg)
        else:
            _must(self.acl and _is_list(self.acl, of=ACL), msg, TypeError)
        msg = "'acl' is 'creator': without 'auth', 'sasl' or 'certfile' nobody tells who that is."
        _must(self.acl != "creator" or self.auth or self.sasl or self.certfile, msg)

    def _check_tls(self) -> None:
        for name in _FILES:
            if (given := getattr(self, name)) is not None:
                _must(isinstance(given, str), f"{name!r} must be text.", TypeError)
                _must(self.tls, f"{name!r} is of use only with 'tls'.")
        has_both = (self.certfile is None) is (self.keyfile is None)
        _must(has_both, "'certfile' and 'keyfile' belong together.")
        is_verified = self.verify_certs or not self.check_hostname
        _must(is_verified, "'check_hostname' needs 'verify_certs'.")


def _must(fact: object, msg: str, error: type[Exception] = ValueError) -> None:
    if not fact:
        raise error(msg)


def _is_list(value: Any, of: type[Any] = object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, of) for each in value)


def _listed(hosts: str | Sequence[str]) -> str | list[str]:
    return hosts if isinstance(hosts, str) else list(hosts)


def _check_hosts(hosts: Any) -> None:
    is_text = isinstance(hosts, str) or _is_list(hosts, of=str)
    _must(is_text, f"'hosts' must be text or a list of texts, not {hosts!r}.", TypeError)
    try:
        found = hosts and collect_hosts(_listed(hosts))[0]
    except ValueError as error:
        msg = f"'hosts' must be like 'one:2181,two:2181', not {hosts!r}: {error}."
        raise ValueError(msg) from error
    _must(found, "'hosts' must name at least one server.")


def _check_root(root: object) -> None:
    if not isinstance(root, str):
        raise TypeError(f"'root' must be text, not {root!r}.")
    first, *parts = root.split("/")
    is_path = not first and parts and all(part not in {"", ".", ".."} for part in parts)
    _must(
        is_path and root.isprintable() and parts[0] != _RESERVED,
        f"'root' must be the path of a node, like '/distlock', and not below '/{_RESERVED}', not {root!r}.",
    )


@dataclass(frozen=True, slots=True)
class ZooKeeperRequest(Request):
    """*ttl* is cut to *limit*, the session timeout: for no longer is a silent holder's node kept.

    *wished* is the ttl before that: a session that goes on keeps the node for so long, renewed or not.
    """

    limit: float = LONGEST
    wished: float = 0.0

    def __post_init__(self) -> None:
        # What is cut already was wished for longer; replace() comes here as well.
        if self.ttl != self.limit or not self.wished:
            object.__setattr__(self, "wished", self.ttl)
        object.__setattr__(self, "ttl", min(self.ttl, self.limit))


def wished_ttl(request: Request) -> float:
    """Return for how long the holder would keep it without an extension, in seconds."""
    return request.wished if isinstance(request, ZooKeeperRequest) else request.ttl
