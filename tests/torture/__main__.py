"""`make torture`: processes that lock, on each backend, while a nemesis breaks what can break."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from tests.fixtures.environment import sqlite_path


def main() -> int:
    """Print what each run has shown; return 1 if a promise was broken."""
    arguments = _arguments()
    # Before Django reads its settings.
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "DISTLOCK_SQLITE_PATH": sqlite_path(),
        "DISTLOCK_MARIADB_PORT": "1",  # its driver
    }
    import django

    django.setup()
    from tests.torture.power import own_mounts
    from tests.torture.session import torture, write

    if arguments.again:
        write(arguments.folder, arguments.report)
        return 0
    own_mounts()
    return torture(
        arguments.backend,
        minutes=arguments.minutes,
        seed=arguments.seed,
        folder=arguments.folder,
        history=arguments.history,
        report=arguments.report,
        beside=arguments.beside,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="for all backends together (default: 5)")
    add("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the faults")
    add("--backend", action="append", default=[], help="one of the backends; may be repeated")
    folder = Path(tempfile.gettempdir()) / f"torture-{os.getpid()}"
    add("--folder", type=Path, default=folder, help="where the histories go (default: %(default)s)")
    add(
        "--history",
        type=Path,
        help="write each history to one file too, such as histories/{backend}.jsonl.gz",
    )
    add("--report", type=Path, help="a page to write, in Markdown")
    add(
        "--beside",
        type=Path,
        help="a folder with another version's django_distlock, for every second worker",
    )
    add("--again", action="store_true", help="only write the page of the run that is in the folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
