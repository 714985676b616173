"""The OPTIONS of ZooKeeperBackend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kazoo.hosts import collect_hosts
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from django_distlock.conf import check_values, must
from django_distlock.engine.values import Secret

_ACLS = {"open": OPEN_ACL_UNSAFE, "creator": CREATOR_ALL_ACL}
_FILES = ("ca", "certfile", "keyfile", "keyfile_password")
#: The servers' own root node.
_RESERVED = "zookeeper"


@dataclass(frozen=True, slots=True)
class ZooKeeperOptions:
    """The OPTIONS of ZooKeeperBackend, described in docs/reference/settings.md. Times are in seconds."""

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
        self._check_hosts()
        self._check_root()
        self._check_credentials()
        for name in _FILES:
            must(self.tls or not getattr(self, name), f"{name!r} is of use only with 'tls'.")
        has_both = (self.certfile is None) is (self.keyfile is None)
        must(has_both, "'certfile' and 'keyfile' belong together.")
        is_verified = self.verify_certs or not self.check_hostname
        must(is_verified, "'check_hostname' needs 'verify_certs'.")
        self._check_files()

    @property
    def servers(self) -> str:
        found, _ = collect_hosts(self._hosts)
        return ", ".join(f"{host}:{port}" for host, port in found)

    @property
    def _hosts(self) -> str | list[str]:
        return self.hosts if isinstance(self.hosts, str) else list(self.hosts)

    def client_arguments(self) -> dict[str, Any]:
        tls = {name: getattr(self, name) for name in (*_FILES, "verify_certs", "check_hostname")}
        return {
            "hosts": self._hosts,
            "timeout": self.session_timeout,
            # kazoo logs them.
            "auth_data": [(scheme, Secret(credential)) for scheme, credential in self.auth],
            "default_acl": list(_ACLS[self.acl] if isinstance(self.acl, str) else self.acl),
            # A copy, because kazoo writes into it.
            "sasl_options": None if self.sasl is None else dict(self.sasl),
            **({"use_ssl": True, **tls} if self.tls else {}),
        }

    def _check_hosts(self) -> None:
        is_text = isinstance(self.hosts, str) or _is_list(self.hosts, of=str)
        must(is_text and self.hosts, "'hosts' must be text or a list of texts, and not be empty.")
        try:
            for host, _ in collect_hosts(self._hosts)[0]:
                host.encode("idna")  # as the socket does
        except ValueError as error:
            msg = f"'hosts' must be like 'one:2181,two:2181', not {self.hosts!r}: {error}."
            raise ValueError(msg) from error

    def _check_files(self) -> None:
        """Read the files now: kazoo would report a wrong file as a server that does not answer."""
        for name in ("ca", "certfile", "keyfile"):
            if (file := getattr(self, name)) is not None:
                try:
                    Path(file).read_bytes()
                except OSError as error:
                    raise ValueError(f"{name!r} cannot be read: {error}.") from error

    def _check_root(self) -> None:
        root: object = self.root
        parts = root.split("/") if isinstance(root, str) and root.isprintable() else []
        is_path = len(parts) > 1 and not parts[0] and not {"", ".", ".."}.intersection(parts[1:])
        must(
            is_path and parts[1] != _RESERVED,
            f"'root' must be the path of a node, like '/distlock', and not below '/{_RESERVED}', not {root!r}.",
        )

    def _check_credentials(self) -> None:
        is_pairs = _is_list(self.auth) and all(
            _is_list(p, of=str) and len(p) == 2 for p in self.auth
        )
        must(is_pairs, "'auth' must be a list of pairs of a scheme and a credential.")
        if self.sasl is not None:
            must(isinstance(self.sasl, dict), "'sasl' must be a dict.")
            has_sasl = find_spec("puresasl")
            must(has_sasl, "'sasl' needs the package pure-sasl, which is not installed.")
        is_acl = self.acl in _ACLS if isinstance(self.acl, str) else _is_list(self.acl, of=ACL)
        known = ", ".join(map(repr, _ACLS))
        msg = f"'acl' must be one of {known}, or a list of kazoo.security.ACL, not {self.acl!r}."
        must(is_acl and self.acl, msg)
        msg = "'acl': 'creator' needs 'auth', 'sasl' or 'certfile', by which the servers know the creator."
        must(self.acl != "creator" or self.auth or self.sasl or self.certfile, msg)


def _is_list(value: Any, of: type[Any] = object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, of) for each in value)
