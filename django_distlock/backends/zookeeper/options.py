"""The OPTIONS of ZooKeeperBackend."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kazoo.hosts import collect_hosts
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from django_distlock.conf import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

_ACLS = {"open": OPEN_ACL_UNSAFE, "creator": CREATOR_ALL_ACL}
_FLAGS = ("tls", "verify_certs", "check_hostname")
_FILES = ("ca", "certfile", "keyfile", "keyfile_password")
#: Where the servers keep what is theirs.
_RESERVED = "zookeeper"


@dataclass(frozen=True, slots=True)
class ZooKeeperOptions:
    """OPTIONS of ZooKeeperBackend.

    hosts: the servers of the ensemble, "one:2181,two:2181,three:2181" or a list; a chroot may follow.
    root: the node under which each lock has a node of its own.
    session_timeout: seconds of silence after which the ensemble frees what this process holds.
    io_timeout: seconds until a request that has no answer is given up.
    auth: pairs of a scheme and a credential, [("digest", "user:password")].
    acl: who may do what with the nodes: "open", "creator" (who has the same credentials), or a
        list of kazoo.security.ACL.
    sasl: what kazoo takes as sasl_options; needs the package pure-sasl.
    tls: speak TLS; ca, certfile, keyfile, keyfile_password, verify_certs, check_hostname belong to it.
    """

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
        seconds(self.session_timeout, "'session_timeout'")
        seconds(self.io_timeout, "'io_timeout'")
        _check_hosts(self.hosts)
        _check_root(self.root)
        _check_auth(self.auth)
        _check_sasl(self.sasl)
        self._check_acl()
        self._check_tls()

    @property
    def acls(self) -> list[Any]:
        """The ACL of every node, as kazoo takes it."""
        return list(_ACLS[self.acl] if isinstance(self.acl, str) else self.acl)

    @property
    def servers(self) -> str:
        """The servers, for people."""
        found, _ = collect_hosts(_listed(self.hosts))
        return ", ".join(f"{host}:{port}" for host, port in found)

    def client_arguments(self) -> dict[str, Any]:
        """Return what they are to a KazooClient."""
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

    def _check_acl(self) -> None:
        known = ", ".join(map(repr, _ACLS))
        msg = f"'acl' must be one of {known}, or a list of kazoo.security.ACL, not {self.acl!r}."
        if isinstance(self.acl, str):
            if self.acl not in _ACLS:
                raise ValueError(msg)
        elif (
            not _is_list(self.acl) or not self.acl or not all(isinstance(a, ACL) for a in self.acl)
        ):
            raise TypeError(msg)
        if self.acl == "creator" and not (self.auth or self.sasl or self.certfile):
            msg = "'acl' is 'creator', but without 'auth', 'sasl' or 'certfile' nobody tells who that is."
            raise ValueError(msg)

    def _check_tls(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                msg = f"{name!r} must be True or False, not {getattr(self, name)!r}."
                raise TypeError(msg)
        for name in _FILES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                msg = f"{name!r} must be text."
                raise TypeError(msg)
            if value is not None and not self.tls:
                msg = f"{name!r} is of use only with 'tls'."
                raise ValueError(msg)
        if (self.certfile is None) is not (self.keyfile is None):
            msg = "'certfile' and 'keyfile' belong together."
            raise ValueError(msg)
        if self.check_hostname and not self.verify_certs:
            msg = "'check_hostname' needs 'verify_certs'."
            raise ValueError(msg)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _listed(hosts: str | Sequence[str]) -> str | list[str]:
    return hosts if isinstance(hosts, str) else list(hosts)


def _check_hosts(hosts: object) -> None:
    if not (isinstance(hosts, str) or (_is_list(hosts) and all(isinstance(h, str) for h in hosts))):  # type: ignore[attr-defined]  # a list by then
        msg = f"'hosts' must be text or a list of texts, not {hosts!r}."
        raise TypeError(msg)
    try:
        found = hosts and collect_hosts(_listed(hosts))[0]  # type: ignore[arg-type]  # as above
    except ValueError as error:
        msg = f"'hosts' must be like 'one:2181,two:2181', not {hosts!r}: {error}."
        raise ValueError(msg) from error
    if not found:
        msg = "'hosts' must name at least one server."
        raise ValueError(msg)


def _check_root(root: object) -> None:
    if not isinstance(root, str):
        msg = f"'root' must be text, not {root!r}."
        raise TypeError(msg)
    first, *parts = root.split("/")
    is_path = not first and parts and all(part not in {"", ".", ".."} for part in parts)
    if not is_path or not root.isprintable() or parts[0] == _RESERVED:
        msg = f"'root' must be the path of a node, like '/distlock', and not below '/{_RESERVED}', not {root!r}."
        raise ValueError(msg)


def _check_auth(auth: object) -> None:
    is_fine = _is_list(auth) and all(
        _is_list(pair) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        for pair in auth  # type: ignore[attr-defined]  # a list by then
    )
    if not is_fine:
        msg = "'auth' must be a list of pairs of a scheme and a credential."
        raise TypeError(msg)


def _check_sasl(sasl: object) -> None:
    if sasl is None:
        return
    if not isinstance(sasl, dict):
        msg = "'sasl' must be a dict."
        raise TypeError(msg)
    if find_spec("puresasl") is None:
        msg = "'sasl' needs the package pure-sasl, which is not installed."
        raise ValueError(msg)
