"""Locks held by a connection each: a lock ends with its connection, or once that has been silent for the ttl."""
