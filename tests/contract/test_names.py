"""Any text names a lock, and no two texts name the same one."""

from __future__ import annotations

import unicodedata
from contextlib import ExitStack

from django_distlock import lock
from django_distlock.backends.base import BaseLockBackend

from .profiles import needs
from .rivals import Rivals

ACCENTED = "r\u00e9port"

HOSTILE = {
    "10 kB": "x" * 9_900,
    "emoji": "\U0001f512\U0001f469\u200d\U0001f4bb",
    "NUL": "a\0b",
    "newline": "a\nb\r\n",
    "quotes": "'\"`; DROP TABLE django_distlock_methodlock; --",
    "percent": "100% %s %(key)s %%",
    "braces": "{} {0} {name} {{x}}",
    "script": "<script>alert(1)</script>",
    "space": " ",
    "slash": "/../a//b/",
    "star": "*?[a-z]",
    "backslash": "a\\b\\",
    "pipe": "a|b||",
    "hash": "a#b" + "0" * 64,
    "surrogate": "a\ud800b",
    "right to left": "\u202ecba",
}

LOOKALIKES = [
    ("a", "A"),
    ("report", ACCENTED),
    ("t", "t "),
    ("t", "t\0"),
    ("t", "t\t"),
    ("t", " t"),
    ("i", "\u0131"),
    ("ss", "\u00df"),
    ("a", "\u0430"),
    ("a" * 100, "a" * 101),
    ("x" * 9_900, "x" * 9_899 + "y"),
    ("%", "%%"),
    ("a|b", "a||b"),
    ("\ud800", "\ud801"),
    ("1", "\uff11"),
]


def test_any_text_is_a_lock(using: str, name: str, rival: Rivals, backend: BaseLockBackend) -> None:
    texts = {kind: f"{name}{text}" for kind, text in HOSTILE.items()}
    others = {kind: rival(of=text) for kind, text in texts.items()}

    with ExitStack() as stack:
        leases = {
            kind: stack.enter_context(lock(text, using=using)) for kind, text in texts.items()
        }
        for kind, lease in leases.items():
            assert lease.name == unicodedata.normalize("NFC", texts[kind]), kind
            assert not others[kind].tries(), kind
        if backend.supports_listing:
            listed = {held.key for held in backend.held()}
            assert [kind for kind, each in leases.items() if each.request.key not in listed] == []

    for kind, other in others.items():
        assert other.tries(), kind


def test_names_that_look_alike_are_two_locks(name: str, rival: Rivals) -> None:
    for number, pair in enumerate(LOOKALIKES):
        first, second = (rival(of=f"{name}{number}{part}") for part in pair)

        assert first.tries(), pair
        assert second.tries(), pair
        first.leaves()
        second.leaves()


def test_both_normal_forms_of_a_text_are_one_lock(using: str, name: str, rival: Rivals) -> None:
    composed, decomposed = (unicodedata.normalize(form, ACCENTED) for form in ("NFC", "NFD"))
    assert composed != decomposed

    assert rival(of=name + composed).tries()
    assert not lock(name + decomposed, using=using, timeout=0).acquire()


@needs("listing")
def test_the_full_name_is_kept_for_people(
    name: str, rival: Rivals, backend: BaseLockBackend
) -> None:
    long = f"{name} {ACCENTED} " + "x" * 1_000
    holder = rival(of=long)
    holder.takes()

    [record] = [held for held in backend.held() if held.key == holder.request.key]

    assert record.name == long
