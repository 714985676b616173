"""Locks among the checks of django-health-check 4: what ``manage.py check_locks`` does for an alias."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import close_old_connections
from health_check.base import HealthCheck
from health_check.exceptions import ServiceUnavailable

from django_distlock.conf import DEFAULT_ALIAS
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.management.commands.check_locks import StepFailed, try_out


@dataclass
class Locks(HealthCheck):  # type: ignore[misc]  # it has no types
    """Acquire, contend for, extend, list and release a test lock on the alias *using*.

    The page shows which step failed; the log of django-health-check has the error of the server.
    """

    using: str = DEFAULT_ALIAS

    def run(self) -> None:
        """Raise ServiceUnavailable if locks cannot be used."""
        try:
            try_out(self.using)
        except StepFailed as failed:
            # Everybody may read the page: no address of a server.
            raise ServiceUnavailable(f"{failed.step} failed") from failed
        except InvalidLockBackend as wrong:
            raise ServiceUnavailable("the settings are wrong") from wrong
        finally:
            close_old_connections()  # its thread serves no request
