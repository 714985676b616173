"""The two-servers scenario: without a lock, and with it."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from testproject.fees import after, fee_on
from testproject.models import Account, Fee
from testproject.servers import Servers, Size
from testproject.services import WORK, Audit, audit, open_account

if TYPE_CHECKING:
    from argparse import ArgumentParser

OPENING_BALANCE = Decimal("100000.00")
HEADINGS = ("", "updates\nmade", "updates\nlost", "final\nbalance", "should\nbe", "money\nwrong")
#: By whether it is locked.
TITLES = {False: "no lock", True: "@distributed_lock"}


class Command(BaseCommand):
    help = "Several servers charge one account a fee: without a lock, then with it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--servers", type=int, default=4, help="processes (default: %(default)s)"
        )
        parser.add_argument(
            "--charges", type=int, default=50, help="fees each (default: %(default)s)"
        )
        parser.add_argument(
            "--work",
            type=float,
            default=WORK,
            help="seconds of work in each (default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        size = Size(options["servers"], options["charges"], options["work"])
        if not fee_on(after(size.total, OPENING_BALANCE)):
            raise CommandError(f"{size.total} fees are too many: the last ones would be nothing.")
        call_command("migrate", verbosity=0)
        show = Show(size)
        show.introduce()
        audits = {is_locked: show.run(is_locked=is_locked) for is_locked in TITLES}
        show.compare(audits)
        if not audits[False].lost or audits[True].lost or audits[True].wrong:
            raise CommandError(
                "The demo failed: updates must get lost without the lock, and none with it."
            )


class Show:
    """The output of the demo."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self._console = Console(highlight=False)

    def introduce(self) -> None:
        """Say what will be seen."""
        self._console.print(
            f"{self._size.servers} servers take a 3 % fee from one account, {self._size.charges} times each: "
            f"each reads the balance, works for {self._size.work * 1000:.0f} ms, and writes the new one."
        )

    def run(self, *, is_locked: bool) -> Audit:
        """Run the servers on an account of their own and return what they left of it."""
        account = open_account(f"charged with {TITLES[is_locked]}", OPENING_BALANCE)
        with Servers(self._size, account.pk, is_locked) as servers:
            self._watch(servers, account)
        return audit(account.pk)

    def compare(self, audits: dict[bool, Audit]) -> None:
        """Print the table, and how to go on."""
        self._console.print(self._table(audits))
        self._console.print("See accounts, fees and locks in the admin: make demo-server")

    def _watch(self, servers: Servers, account: Account) -> None:
        """Show how many fees there are until the servers are done."""
        title = TITLES[servers.is_locked]
        if not self._console.is_terminal:
            self._console.print(f"{title}: charging {self._size.total} fees ...")
        with self._progress() as progress:
            bar = progress.add_task(title, total=self._size.total)
            while servers.are_working:
                time.sleep(0.1)
                progress.update(bar, completed=Fee.objects.filter(account=account).count())
        if servers.failed:
            raise CommandError(f"{servers.failed} servers failed; what they said is above.")

    def _progress(self) -> Progress:
        columns = (
            TextColumn("{task.description:<17}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        # A file or a pipe is no place for a bar.
        return Progress(*columns, console=self._console, disable=not self._console.is_terminal)

    def _table(self, audits: dict[bool, Audit]) -> Table:
        table = Table(box=box.ROUNDED if self._console.is_terminal else box.ASCII)
        for title in HEADINGS:
            table.add_column(title, no_wrap=True, justify="right" if title else "left")
        for is_locked, found in audits.items():
            style = "red" if found.lost else "green"
            money = (f"{amount:,.2f}" for amount in (found.balance, found.expected, found.wrong))
            table.add_row(TITLES[is_locked], str(found.made), str(found.lost), *money, style=style)
        return table
