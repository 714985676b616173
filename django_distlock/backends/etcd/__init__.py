"""etcd: exclusive and shared locks, first come, first served, which end with the session of their holder."""

from .backend import EtcdBackend

__all__ = ["EtcdBackend"]
