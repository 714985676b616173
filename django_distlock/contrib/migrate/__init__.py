"""An app that makes plain ``manage.py migrate`` the same as ``manage.py migrate_locked``."""
