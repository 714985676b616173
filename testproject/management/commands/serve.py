"""The demo's pages and its admin, with something to see."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.utils import timezone

from django_distlock import lock
from django_distlock.models import MethodLock
from testproject.models import Account
from testproject.servers import let_go, read_line, start
from testproject.services import open_account

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator

#: The users, who have their names as passwords: two, as one of them keeps the other from editing.
NAMES = "demo", "guest"
CUSTOMERS = {"Ada": "1200.00", "Grace": "85000.50", "Linus": "310.75"}


class Command(BaseCommand):
    help = "Serve the demo's pages and its admin, with a demo user, some accounts and some locks."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", verbosity=0)
        for name in NAMES:
            make_user(name)
        make_accounts()
        address = f"127.0.0.1:{options['port']}"
        with some_locks():
            self.stdout.write(f"Pages: http://{address}/   Admin: http://{address}/admin/")
            for name in NAMES:
                self.stdout.write(f"User: {name}   Password: {name}")
            self.stdout.write("(Ctrl-C ends it)")
            # Written to a file, it would else be seen only when the server has ended.
            self.stdout.flush()
            call_command("runserver", address, use_reloader=False)


def make_user(name: str) -> None:
    """Make a user who may do everything, or give it its password back."""
    user, _ = User.objects.get_or_create(
        username=name, defaults={"is_staff": True, "is_superuser": True}
    )
    user.set_password(name)
    user.save()


def make_accounts() -> None:
    """Open the customers' accounts, those that are missing."""
    known = set(Account.objects.values_list("name", flat=True))
    for name, amount in CUSTOMERS.items():
        if name not in known:
            open_account(name, Decimal(amount))


@contextmanager
def some_locks() -> Iterator[None]:
    """Make locks that are free, reserved and left behind by a crash; hold one, and wait for one."""
    with lock("newsletter", purpose="sending the newsletter"):
        pass
    reserved = lock("reminders:daily", timeout=0, min_hold=timedelta(hours=1))
    if reserved.acquire():
        reserved.release()
    start("hold", "import:orders", "--purpose=importing orders", "--ttl=1", "--crash").wait()
    holder = start("hold", "report:monthly", "--purpose=the monthly report")
    read_line(holder)
    # For people, it began long ago.
    row = MethodLock.objects.filter(description="report:monthly")
    row.update(acquired_at=timezone.now() - timedelta(hours=3))
    cache = lock("cache:warm-up", using="locmem", timeout=None, purpose="filling the cache")
    try:
        with cache:
            threading.Thread(target=cache.acquire, daemon=True).start()
            yield
    finally:
        let_go(holder)
        holder.wait()
