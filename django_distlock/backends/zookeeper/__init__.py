"""ZooKeeper: exclusive and shared locks in the order of arrival, which end with the session that holds them."""

from .backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
