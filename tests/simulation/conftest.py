"""Leaves the simulation out where lupa cannot be installed: it carries out the scripts of Redis."""

from importlib.util import find_spec

if not find_spec("lupa"):
    collect_ignore_glob = ["test_*.py"]
