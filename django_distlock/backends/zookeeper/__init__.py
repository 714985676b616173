"""ZooKeeper: exclusive and shared locks, first come, first served, that end with the session of their holder."""

from .backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
