"""Locks among the packages that Django teams have: `make test-stacks`, each stack in processes of its own.

``profiles.py`` lists the stacks, ``test_*.py`` are the acts, and ``python -m tests.stacks NAME`` runs one.
"""
