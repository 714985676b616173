"""The OPTIONS of locks in Redis."""

from __future__ import annotations

from dataclasses import dataclass, field

from django_distlock.conf import seconds


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """What all ways to a Redis have in common. Times are seconds."""

    fair: bool = False
    scripting: bool = True
    wait_replicas: int = 0
    cluster: bool = False
    allow_eviction: bool = False
    connect_timeout: float = 0.25
    io_timeout: float = 1.0

    def __post_init__(self) -> None:
        for name in ("fair", "scripting", "cluster", "allow_eviction"):
            if not isinstance(getattr(self, name), bool):
                msg = f"{name!r} must be True or False, not {getattr(self, name)!r}."
                raise TypeError(msg)
        for name in ("connect_timeout", "io_timeout"):
            seconds(getattr(self, name), f"{name!r}")
        self._check_replicas()
        if self.cluster and not self.scripting:
            msg = "'scripting' cannot be False with a cluster."
            raise ValueError(msg)

    def _check_replicas(self) -> None:
        if isinstance(self.wait_replicas, bool) or not isinstance(self.wait_replicas, int):
            msg = f"'wait_replicas' must be a whole number, not {self.wait_replicas!r}."
            raise TypeError(msg)
        if self.wait_replicas < 0:
            msg = f"'wait_replicas' must be 0 or more, not {self.wait_replicas!r}."
            raise ValueError(msg)
        if self.wait_replicas and self.cluster:
            msg = "'wait_replicas' cannot be used with a cluster."
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True)
class RedisOptions(RedisSettings):
    """The OPTIONS of RedisBackend. *location* is a URL; it may hold a password."""

    location: str = field(default="redis://127.0.0.1:6379/0", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.location, str):
            msg = f"'location' must be a URL, not {type(self.location).__name__}."
            raise TypeError(msg)


@dataclass(frozen=True, kw_only=True)
class RedisCacheOptions(RedisSettings):
    """The OPTIONS of CacheBackend where its alias is a Redis. *cache* is an alias of CACHES."""

    cache: str = "default"
