"""Implementations: each a few verbs over one kind of server."""
