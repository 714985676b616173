"""The demo and the tests' settings in one: accounts, from which a fee is taken."""

import importlib
import os
import sys

if os.environ.get("DISTLOCK_POSTGRES_DRIVER") == "psycopg2":
    # Django takes psycopg 3 where it is there; the tests' own connections go on with it.
    kept = importlib.import_module("psycopg")
    sys.modules["psycopg"] = None  # type: ignore[assignment]
    importlib.import_module("django.db.backends.postgresql.base")
    sys.modules["psycopg"] = kept
