"""``manage.py check_locks`` on every backend: each step of one real lock."""

import io
import json

from django.core.management import call_command

from django_distlock.backends.base import BaseLockBackend
from django_distlock.management.commands.check_locks import PURPOSE


def test_each_step_is_done_and_nothing_is_left(using: str, backend: BaseLockBackend) -> None:
    out = io.StringIO()

    call_command("check_locks", "--json", "--using", using, stdout=out)

    [report] = json.loads(out.getvalue())["aliases"]
    steps = {"acquire", "contend", "extend", "release"}
    assert {*report["milliseconds"]} - {"list"} == steps
    assert ("list" in report["milliseconds"]) is backend.supports_listing
    assert ("listing" in report["cannot"]) is not backend.supports_listing
    if backend.supports_listing:
        assert not [held for held in backend.held() if held.name.startswith(PURPOSE)]
