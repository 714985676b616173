"""One of the demo's servers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand

from testproject.services import WORK, charge_fee, charge_fee_locked

if TYPE_CHECKING:
    from argparse import ArgumentParser


class Command(BaseCommand):
    help = "Be one server: charge an account so many fees, one after the other, once stdin says so."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("account_id", type=int)
        parser.add_argument("charges", type=int)
        parser.add_argument("--locked", action="store_true")
        parser.add_argument(
            "--work", type=float, default=WORK, help="seconds between reading and writing"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        charge = charge_fee_locked if options["locked"] else charge_fee
        # All servers begin together, however long each took to start.
        self.stdout.write("ready")
        self.stdout.flush()
        if not sys.stdin.readline():
            return
        for _ in range(options["charges"]):
            charge(options["account_id"], work=options["work"])
