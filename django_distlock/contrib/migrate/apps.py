"""The Django app, and the check whether it is in effect."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Warning as CheckWarning, register

from django_distlock.checks import told
from django_distlock.management.base import CONTRIB, apps_with_migrate


class MigrateConfig(AppConfig):
    """django_distlock.contrib.migrate as an installed app."""

    name = CONTRIB

    def ready(self) -> None:
        register(check_migrate, "distlock")


def check_migrate(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Warn if ``migrate`` takes no lock, or leaves out the command of an app."""
    names = apps_with_migrate()
    others = [name for name in names if name != CONTRIB]
    if names == others:  # a test had installed the app for a while
        return []
    if names[0] != CONTRIB:
        text = f"migrate takes no lock: it is the command of {names[0]!r}."
        hint = f"Write {CONTRIB!r} before {names[0]!r} in INSTALLED_APPS."
    elif len(others) > 1:
        listed = ", ".join(map(repr, others))
        text = f"{listed} have a command migrate each: only that of {others[0]!r} is run."
        hint = "Write one command that does what they do, in an app before them."
    else:
        return []
    return told([CheckWarning(text, hint=hint, id="distlock.W004")])
