"""A lock that the demo shows in the admin: held, or left behind by a crash."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand

from django_distlock import lock

if TYPE_CHECKING:
    from argparse import ArgumentParser


class Command(BaseCommand):
    help = "Hold a lock until stdin is closed; with --crash, die at once and leave it behind."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument(
            "--ttl", type=float, default=30.0, help="seconds (default: %(default)s)"
        )
        parser.add_argument("--purpose", default="", help="what for, shown to people")
        parser.add_argument("--crash", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        with lock(options["name"], ttl=options["ttl"], purpose=options["purpose"]):
            if options["crash"]:
                os._exit(1)
            self.stdout.write("held")
            self.stdout.flush()
            sys.stdin.read()
