"""``manage.py migrate``, one process at a time."""

from django_distlock.management.commands.migrate_locked import Command

__all__ = ["Command"]
