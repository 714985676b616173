import os
from pathlib import Path
from typing import Any

from django.core.management.commands import migrate


class Command(migrate.Command):
    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        (Path(os.environ["PODS_FOLDER"]) / "own").touch()
