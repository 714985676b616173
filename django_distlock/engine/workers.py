"""What runs this process: locks need threads, or greenlets that took their place before anything else."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading

from django_distlock.exceptions import InvalidLockBackend

logger = logging.getLogger("django_distlock")

_MUTEX = type(threading.Lock())


def check_threads() -> None:
    """Raise InvalidLockBackend where locks would hang, and warn once where leases are extended late."""
    if type(threading.Lock()) is not _MUTEX:
        msg = (
            "gevent or eventlet took the place of threads after django_distlock was imported, and locks would "
            "hang. Patch first of all: gunicorn without --preload, uWSGI with --gevent-early-monkey-patch."
        )
        raise InvalidLockBackend(msg)
    _warn_of_no_threads(os.getpid())


@functools.cache
def _warn_of_no_threads(pid: int) -> None:
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is not None and not getattr(uwsgi, "has_threads", True):
        logger.warning(
            "uWSGI runs process %d without threads: between two requests no lease is extended or given back. "
            "Start it with --enable-threads.",
            pid,
        )
