"""Locks that a connection of their own holds: they end with it, or once it has been silent for the ttl."""
