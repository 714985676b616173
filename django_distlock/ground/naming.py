"""Names of locks: checks, keys for servers, texts for logs, and templates with the arguments of a call."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import re
import string
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from django.db.models import Model

from .objects import object_name

#: Returns the name of a lock for the positional and the keyword arguments of one call.
NameFor = Callable[[tuple[Any, ...], dict[str, Any]], str]

logger = logging.getLogger("django_distlock")

#: Text that is used in a key unchanged. No upper case, spaces or accents: some collations ignore them.
_PLAIN = re.compile(r"[a-z0-9._:@=/-]{1,100}", re.ASCII)
_UNSAFE = re.compile(r"[^a-z0-9._:@=/-]+")
_STUB = 40
#: The end of Python's text for an object that has none of its own, as for those in a list.
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+>")
#: An argument and its public attributes: no item, no call, no attribute with a leading underscore.
_FIELD = re.compile(r"[^\W\d]\w*(\.[^\W\d_]\w*)*")
#: How Python itself writes what has items.
_OWN_TEXTS = {kind.__repr__ for kind in (set, frozenset, list, tuple, dict)}
#: Characters that a label has as they are, beside letters, digits and ``~``.
_IN_LABEL = "!#$&'()*+,-./:;<=>?@[]^_`{}"
#: Characters of a name.
LONGEST_NAME = 10_000
#: Most places of a lock, and the characters by which the key of a place is longer than that of its name.
MOST_PLACES, LONGEST_MARK = 1000, len("~999")
#: Most bytes of a text in a log or an error, and of a name in a listing.
LONGEST_SHOWN, LONGEST_LISTED = 1_000, 100_000


def checked_name(name: object) -> str:
    """Return the name in Unicode's normal form (NFC); *name* is a text or a saved model instance, else TypeError or ValueError."""
    if isinstance(name, Model):
        name = object_name(name)
    if not isinstance(name, str):
        raise TypeError(f"A lock's name must be text, not {type(name).__name__}.")
    if not name:
        raise ValueError("A lock's name must not be empty.")
    # str.__str__(), because str() of a member of an Enum of texts is not its value.
    name = unicodedata.normalize("NFC", str.__str__(name))
    if len(name) > LONGEST_NAME:
        msg = f"A lock's name must have {LONGEST_NAME:,} characters at most, not {len(name):,}."
        raise ValueError(msg)
    return name


def server_key(name: str, prefix: str = "", label: str = "", *, kind: str = "") -> str:
    """Return a key for *name*: at most 255 ASCII characters and the *label*, different for different arguments.

    A name of lower-case letters, digits and ``._:@=/-`` is used unchanged. Any other name
    becomes a readable stub and its SHA-256, so that no collation, padding or limit of a server
    makes two names equal. Parts are separated by ``|``, which no part contains. The *label*, made
    by key_label(), comes first.
    """
    parts = [kind, prefix, name] if kind else [prefix, name] if prefix else [name]
    return with_label(label, "|".join(map(_plain, parts)))


def key_label(made: str) -> str:
    """Return a label for *made*, a key made by a cache: printable, without a space or ``|``."""
    return quote(made, safe=_IN_LABEL)


def with_label(label: str, key: str) -> str:
    return f"{label}|{key}" if label else key


def limit_key(key: str) -> str:
    """Return the key of a lock with a limit: *key* and a ``~``, which no key of a lock without a limit has."""
    return f"{key}~"


def place_key(key: str, place: int | str) -> str:
    """Return the key of one *place*, or of all places for ""; *key* is the key of all places or of any place."""
    return f"{key[: key.rindex('~') + 1]}{place}"


def lock_of(key: str) -> str:
    """Return the key of the lock to which *key* belongs: for a place, the key of all places."""
    return key if place_of(key) is None else place_key(key, "")


def place_of(key: str) -> int | None:
    """Return the place in *key*; None for a lock without a limit."""
    _, mark, place = key.rpartition("~")
    return int(place) if mark and place.isdecimal() else None


def printable(text: object, most: int = LONGEST_SHOWN) -> str:
    """Return *text* for people: unprintable characters are escaped, and it is cut to *most* bytes.

    Every text from outside goes through this into logs, errors and listings: names, purposes, messages of
    servers. Otherwise a line break could forge a line of a log, and a bidi mark reverse the rest.
    """
    shown = str(text)[: most + 1]
    if len(shown) <= most and shown.isascii() and shown.isprintable():
        return shown
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    if len(encoded := shown.encode()) > most:
        return f"{encoded[: most - 3].decode(errors='ignore')}..."
    return shown


def log_fields(
    name: str | None = None, using: str | None = None, **facts: object
) -> dict[str, object]:
    """Return the ``extra`` of a log record: fields called ``distlock_...``; *name* None: no single lock.

    The values are texts, numbers and None, which any JSON formatter can write.
    """
    known: dict[str, object] = {"name": name, "using": using, **facts}
    return {
        f"distlock_{key}": value if isinstance(value, int | float | None) else printable(value)
        for key, value in known.items()
    }


def warn(text: str, *values: object, of: Any = None, **facts: Any) -> None:
    """Log a warning with escaped *values* and the fields *facts*, and with the name and alias of the lease *of*."""
    if of is not None:
        facts = {"name": of.name, "using": of.using, **facts}
    logger.warning(text, *map(printable, values), extra=log_fields(**facts), stacklevel=2)


@lru_cache(maxsize=1000)
def stored(name: str) -> str:
    """Return *name* in ASCII, for a column with any character set; shown() decodes it."""
    text = printable(name, LONGEST_LISTED)
    return text if text.isascii() and not text.startswith('"') else json.dumps(text)


def shown(text: str) -> str:
    """Return the name, for people, that stored() encoded as *text*."""
    if text.startswith('"'):
        with suppress(ValueError):
            return str(json.loads(text))
    return text


def _plain(part: str) -> str:
    if _PLAIN.fullmatch(part) or not part:
        return part
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_UNSAFE.sub('-', part.lower())[:_STUB]}#{digest}"


def title_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of *function*; of a partial (by method_decorator()), not that of its __wrapped__."""
    is_partial = isinstance(function, functools.partial)
    return inspect.signature(function, follow_wrapped=not is_partial)


def name_maker(name: str | Callable[..., str], function: Callable[..., Any]) -> tuple[NameFor, str]:
    """Return what makes the names for calls of *function*, and their template; "" if *name* is a function."""
    if callable(name):
        return lambda args, kwargs: name(*args, **kwargs), ""
    template = NameTemplate(name, function)
    return template.name_for, template.text


class NameTemplate:
    """A name with fields for a call's arguments: ``"fee:{account_id}"``, ``"{account.pk}"``."""

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        """Raise ValueError for bad syntax, and for a field that *function* cannot fill."""
        self.text, self._title = checked_name(text), title_of(function)
        try:
            self._parts = [*string.Formatter().parse(self.text)]
        except ValueError as error:
            raise ValueError(
                f"The lock name {self.text!r} has a field that cannot be read: {error}; "
                "for a brace of the name itself write {{ or }}."
            ) from None
        self._has_fields = any(field is not None for _, field, _, _ in self._parts)
        self._signature = signature_of(function) if self._has_fields else inspect.Signature()
        parameters = self._signature.parameters
        self._extra = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")
        for _, field, form, conversion in self._parts:
            if field is None:
                continue
            if not _FIELD.fullmatch(field) or conversion not in {None, "s"} or "{" in (form or ""):
                raise ValueError(
                    f"The lock name {self.text!r} has a field {field!r} that is more than an argument, its "
                    "public attributes and a format, as in {account.pk} and {month:02d}; "
                    "use a function: distributed_lock(name=lambda account: ...)."
                )
            first = field.partition(".")[0]
            if first not in parameters and not self._extra:
                msg = f"The lock name {self.text!r} has a field {first!r}, but the function takes {[*parameters]}."
                raise ValueError(msg)

    def name_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name for one call; TypeError for wrong arguments, ValueError for a field without a value."""
        known: dict[str, Any] = {}
        if self._has_fields:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            known = {**bound.arguments.get(self._extra, {}), **bound.arguments}
        name = ""
        for literal, field, form, conversion in self._parts:
            name += literal
            if field is not None:
                name += self._filled(field, form or "", conversion, known)
        return name

    def _filled(self, field: str, form: str, conversion: str | None, known: dict[str, Any]) -> str:
        first, *path = field.split(".")
        value = known.get(first)
        for attribute in path:
            value = None if value is None else getattr(value, attribute)
        # The pk of an unsaved instance or an anonymous user is None, or a tuple with None.
        key = getattr(value, "pk", value)
        if key is None or (isinstance(key, tuple) and None in key):
            filled = ""
        elif isinstance(value, Model) and not form and not conversion:
            filled = object_name(value)
        else:
            filled = format(str(value) if conversion else value, form)
        if not filled:
            problem = (
                "is None, empty or not saved, so all such calls would share one lock; pass a value"
            )
        elif inspect.isroutine(value) or not _is_same_everywhere(value, filled):
            problem = "has no text that is the same in every process; use an attribute such as pk"
        else:
            return filled
        msg = f"{{{field}}} in the lock name {self.text!r} of {self._title}() {problem}."
        raise ValueError(msg)


def _is_same_everywhere(value: object, text: str) -> bool:
    """Return False if *text*, of *value*, is another in each process: it has the order of a set, or an object's address."""
    if isinstance(value, str):
        return True
    has_address = hex(id(value)) in text or _ADDRESS.search(text)
    return not has_address and not _has_set(value)


def _has_set(value: object) -> bool:
    """Return True if the text of *value* is Python's own for a set, or for a list, tuple or dict with one inside."""
    kind = type(value)
    if kind.__str__ is not object.__str__ or kind.__repr__ not in _OWN_TEXTS:
        return False
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return isinstance(value, (set, frozenset)) or any(map(_has_set, value))  # type: ignore[call-overload]
