"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig
from django.conf import settings
from django.utils.translation import gettext_lazy as _


class DistlockConfig(AppConfig):
    """django_distlock as an installed app."""

    name = "django_distlock"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, and keep the last hour for the admin if settings say so."""
        from . import checks  # noqa: F401 - checks need the apps to be loaded

        if getattr(settings, "DISTLOCK_HISTORY", False):
            from . import history

            history.start()
