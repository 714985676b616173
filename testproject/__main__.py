"""`python -m testproject <command>`: Django's commands with the demo's settings."""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line


def main() -> None:
    """Run the command that the command line names."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
