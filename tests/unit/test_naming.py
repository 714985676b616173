"""Names become keys that no server confuses, and templates become names."""

from __future__ import annotations

import enum
import functools
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser

from django_distlock.ground.naming import (
    NameTemplate,
    checked_name,
    printable,
    server_key,
    shown,
    stored,
    title_of,
    warn,
)
from testproject.models import Account

#: Characters that keys treat in different ways, and that tools confuse.
ALPHABET = "abAB01 \t\n._:@=/-|#%{}'\"\\\0\u00e9\u0301\u0130\u0131\u00df\u212a\ud800\U0001f512"
KINDS = ["", "row", "lease"]


def _words(count: int) -> list[str]:
    """Return random texts, many of which are nearly the same."""
    texts = {"a", "A", "a ", "a|b", "a||b", "|", "#", "a#b"}
    while len(texts) < count:
        length = random.choice([1, 1, 2, 3, 5, 40, 99, 100, 101, 300])
        text = "".join(random.choice(ALPHABET) for _ in range(min(length, 6)))
        texts.add((text * length)[:length])
    return sorted(texts)


class Named(str, enum.Enum):  # noqa: UP042 - its str() is what this is about
    """Has another text for people than its value."""

    REPORT = "report"


def test_a_member_of_a_text_enum_is_its_value() -> None:
    name = checked_name(Named.REPORT)

    assert type(name) is str
    assert (name, printable(name), stored(name)) == ("report",) * 3


def test_different_kinds_and_prefixes_and_names_have_different_keys() -> None:
    words = [checked_name(word) for word in _words(40)]
    triples = {(kind, prefix, name) for kind in KINDS for prefix in ["", *words] for name in words}

    keys = {server_key(name, prefix=prefix, kind=kind) for kind, prefix, name in triples}

    assert len(keys) == len(triples)


def test_a_key_is_short_plain_ascii_that_no_collation_folds() -> None:
    for word in _words(1_000):
        for prefix in ("", word):
            key = server_key(checked_name(word), prefix=prefix, kind="row")
            assert re.fullmatch(r"[a-z0-9._:@=/|#-]{1,255}", key), ascii(word)


def test_the_key_of_a_name_is_the_same_in_every_version() -> None:
    # Servers of one application, and rows in a table, outlive a release of this package.
    assert server_key("fee:42") == "fee:42"
    assert server_key("fee:42", prefix="shop", kind="row") == "row|shop|fee:42"
    assert server_key("fee:42", kind="row") == "row||fee:42"
    assert server_key("Fee 42") == (
        "fee-42#3fdf548e347a755a97427b2862a85eefdfff9b2952019ef3201139704a128e90"
    )


def test_a_readable_name_stays_readable() -> None:
    assert server_key("shop.services.charge:fee/7@eu=1") == "shop.services.charge:fee/7@eu=1"
    assert server_key("Charge the fee of M\u00fcller").startswith("charge-the-fee-of-m-ller#")


def test_both_normal_forms_of_a_text_are_one_name() -> None:
    composed, decomposed = "r\u00e9port", "re\u0301port"

    assert checked_name(composed) == checked_name(decomposed) == composed


@pytest.mark.parametrize("name", [None, 42, b"bytes", ["a"], object()])
def test_what_is_no_text_names_no_lock(name: object) -> None:
    with pytest.raises(TypeError, match="must be text"):
        checked_name(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain name", "plain name"),
        ("M\u00fcller \U0001f512", "M\u00fcller \U0001f512"),
        ("a\0b\nc", "a\\x00b\\nc"),
        ("a\ud800b", "a\\ud800b"),
        ("\u202ecba", "\\u202ecba"),
        ("\x1b[31mred", "\\x1b[31mred"),
    ],
)
def test_what_cannot_be_printed_is_escaped_for_people(name: str, shown: str) -> None:
    assert printable(name) == shown
    assert printable(name).encode()


@pytest.mark.parametrize(
    "name",
    ["plain name", "M\u00fcller \U0001f512", 'q"', '"q"', '"', "a\\u0041", "\\", "42", "null"],
)
def test_what_a_column_keeps_is_ascii_and_stands_for_the_whole_name(name: str) -> None:
    assert stored(name).isascii()
    assert shown(stored(name)) == name
    # Plain names are kept as they are, however long.
    assert stored("fee:42" * 9_999) == "fee:42" * 9_999


@pytest.mark.parametrize("text", ["M\u00fcller", "a\\u0041", '"', '"a" and "b"', ""])
def test_what_a_column_kept_before_is_shown_as_it_is(text: str) -> None:
    assert shown(text) == text


def _template(text: str, function: Callable[..., Any]) -> Callable[..., str]:
    template = NameTemplate(text, function)
    return lambda *args, **kwargs: template.name_for(args, kwargs)


def work(number: int) -> None: ...


def charge(account: Any, month: int = 5, **more: object) -> None: ...


def test_fields_are_filled_from_the_arguments_however_they_are_given() -> None:
    def pay(
        account_id: int, rate: float = 0.03, *rest: int, note: str = "-", **more: int
    ) -> None: ...

    name_of = _template("fee:{account_id}:{rate}:{note}", pay)

    assert name_of(7) == "fee:7:0.03:-"
    assert name_of(account_id=7, rate=1) == "fee:7:1:-"
    assert name_of(7, 1, 2, 3, note="x", extra=1) == "fee:7:1:x"
    assert _template("{pk}", lambda **fields: None)(pk=7) == "7"


def test_fields_reach_attributes_and_formats() -> None:
    account = SimpleNamespace(pk=7, owner=SimpleNamespace(name="Ann"))

    assert _template("{account.pk}", charge)(account) == "7"
    assert _template("{account.owner.name!s:.2}", charge)(account) == "An"
    assert _template("{account.pk:04d}-{month:02d}", charge)(account) == "0007-05"


@pytest.mark.parametrize("name", ["fee:{account_id", "fee:}", "fee:{"])
def test_a_brace_that_is_not_of_a_field_is_refused_with_the_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{re.escape(name)}'.*write {{{{ or }}}}"):
        _template(name, charge)


@pytest.mark.parametrize(
    "field",
    [
        "account.__class__",
        "account._secret",
        "account[pk]",
        "account.charge()",
        "account.",
        "account!r",
        "account:{month}",
    ],
)
def test_fields_reach_nothing_else(field: str) -> None:
    class Spy:
        def __getattr__(self, name: str) -> object:
            pytest.fail(f"{name} was read")

    with pytest.raises(ValueError, match=r"more than an argument, its public attributes"):
        _template(f"fee:{{{field}}}", charge)(Spy())


def test_what_an_argument_says_is_never_taken_for_a_field() -> None:
    assert _template("fee:{account}", charge)("{month}") == "fee:{month}"


@pytest.mark.parametrize(
    ("text", "account"),
    [
        ("fee:{account}", None),
        ("fee:{account}", ""),
        ("fee:{account:04d}", None),
        ("fee:{account}", AnonymousUser()),
        ("fee:{account.pk}", None),
        ("fee:{account.pk}", Account()),
        ("fee:{account.owner.pk}", SimpleNamespace(owner=None)),
        ("fee:{account}", SimpleNamespace(pk=(1, None))),
    ],
)
def test_a_field_without_a_value_names_no_lock(text: str, account: object) -> None:
    with pytest.raises(ValueError, match=r"^\{account.*would share one lock") as caught:
        _template(text, charge)(account)
    assert f"in the lock name '{text}' of {__name__}." in str(caught.value)
    assert "charge() is None, empty or not saved" in str(caught.value)


class Colours(set[str]):
    """A set that writes its items in order."""

    def __repr__(self) -> str:
        return " ".join(sorted(self))


@pytest.mark.parametrize("text", ["{account}", "{account.charge}", "{account!s:>200}"])
def test_what_each_process_calls_otherwise_names_no_lock(text: str) -> None:
    class Plain:
        def charge(self) -> None: ...

    with pytest.raises(ValueError, match="the same in every process; use an attribute such as pk"):
        _template(text, charge)(Plain())
    inside: list[object] = [[{"red"}], {"colours": ({"red"},)}]
    for several in ([Plain()], {"red", "green"}, frozenset({1}), *inside):
        with pytest.raises(ValueError, match="the same in every process"):
            _template("{account}", charge)(several)
    for room in ("<room at 0x1f>", Path("cam at 0x1f"), Colours({"red"}), [Colours({"red"})]):
        assert _template("{account}", charge)(room) == str(room)


def test_what_is_no_field_stays_as_it_is() -> None:
    assert _template("50% of {{braces}} {number}", work)(1) == "50% of {braces} 1"
    assert _template("no field", work)(1) == "no field"


@pytest.mark.parametrize(
    "text", ["{account}", "{0}", "{}", "{number.x} {other}", "{", "}", "{number"]
)
def test_a_template_that_does_not_fit_the_function_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        NameTemplate(text, work)


def test_arguments_that_do_not_fit_the_function_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        _template("{number}", work)(1, 2)


def test_a_warning_has_printable_values_and_fields_of_its_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lease = SimpleNamespace(name="fee\n1", using="shop")

    warn("Lock %s: %s", "fee\n1", 7, of=lease, token=8, why=ValueError("x\0"))

    [record] = caplog.records
    fields = {key: value for key, value in vars(record).items() if key.startswith("distlock_")}
    assert record.getMessage() == r"Lock fee\n1: 7"
    assert fields == {
        "distlock_name": r"fee\n1",
        "distlock_using": "shop",
        "distlock_token": 8,
        "distlock_why": r"x\x00",
    }


def test_a_warning_tells_the_place_that_it_comes_from(caplog: pytest.LogCaptureFixture) -> None:
    warn("something")

    assert caplog.records[0].filename == "test_naming.py"


def test_a_function_without_a_name_has_that_of_its_kind() -> None:
    class Callable:
        def __call__(self) -> None: ...

    own = "test_a_function_without_a_name_has_that_of_its_kind"
    assert title_of(title_of) == "django_distlock.ground.naming.title_of"
    assert title_of(Callable()) == f"{__name__}.{own}.<locals>.Callable"


def test_fields_of_a_partial_are_those_that_it_leaves_open() -> None:
    def pay(account: int, amount: int) -> None: ...

    some = functools.update_wrapper(functools.partial(pay, 7), pay)

    assert NameTemplate("fee:{amount}", some).name_for((5,), {}) == "fee:5"
