"""etcd: exclusive and shared locks, first come, first served, that end with the session of their holder."""

from .backend import EtcdBackend

__all__ = ["EtcdBackend"]
