"""Names of locks: from what people write to keys that every server keeps apart."""

from __future__ import annotations

import hashlib
import json
import re
import string
import unicodedata
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect

#: What stays as it is. No upper case, spaces or accents: collations would fold them together.
_PLAIN = re.compile(r"[a-z0-9._:@=/-]{1,100}", re.ASCII)
_UNSAFE = re.compile(r"[^a-z0-9._:@=/-]+")
_STUB = 40
#: Characters of a name.
LONGEST_NAME = 10_000
#: Bytes of a text in a log or an error; and where a whole name is listed, all of it escaped.
LONGEST_SHOWN, LONGEST_LISTED = 1_000, 100_000


def checked_name(name: object) -> str:
    """Return *name* in its normal form (NFC); ValueError or TypeError if it can name no lock."""
    if not isinstance(name, str):
        msg = f"A lock's name must be text, not {type(name).__name__}."
        raise TypeError(msg)
    if not name:
        msg = "A lock's name must not be empty."
        raise ValueError(msg)
    name = unicodedata.normalize("NFC", name)
    if len(name) > LONGEST_NAME:
        msg = f"A lock's name must have {LONGEST_NAME:,} characters at most, not {len(name):,}."
        raise ValueError(msg)
    return name


def server_key(name: str, *, prefix: str = "", kind: str = "") -> str:
    """Return a key for *name*: at most 255 ASCII characters, different for different arguments.

    Names of lower-case letters, digits and ``._:@=/-`` stay readable as they are. Any other
    becomes a readable stub and its SHA-256: no collation, padding or limit of a server can
    make two of them one. Parts are told apart by ``|``, which no part contains.
    """
    parts = [kind, prefix, name] if kind else [prefix, name] if prefix else [name]
    return "|".join(map(_plain, parts))


def printable(text: object, most: int = LONGEST_SHOWN) -> str:
    """Return *text* for people, all that is not printable escaped, and cut to *most* bytes.

    Every text from outside goes by this way into logs, errors and listings: names, purposes, what
    servers say. A line break in one would forge a line of a log, a bidi mark turn the rest around.
    """
    shown = str(text)[: most + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    if len(encoded := shown.encode()) > most:
        return f"{encoded[: most - 3].decode(errors='ignore')}..."
    return shown


def stored(name: str) -> str:
    """Return *name* for a column of text: in ASCII, which any character set has; shown() gives it back."""
    text = printable(name, LONGEST_LISTED)
    return text if text.isascii() and not text.startswith('"') else json.dumps(text)


def shown(text: str) -> str:
    """Return the name that *text* stands for in a column, for people."""
    if text.startswith('"'):
        with suppress(ValueError):
            return str(json.loads(text))
    return text


def _plain(part: str) -> str:
    if _PLAIN.fullmatch(part) or not part:
        return part
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_UNSAFE.sub('-', part.lower())[:_STUB]}#{digest}"


class NameTemplate:
    """A name with fields for a call's arguments: ``"fee:{account_id}"``, ``"{account.pk}"``."""

    def __init__(self, text: str, signature: inspect.Signature) -> None:
        """Raise ValueError for a field that is no parameter of *signature*, or for bad syntax."""
        self.text = checked_name(text)
        self._signature = signature
        for field in self._fields():
            self._check(field)

    def name_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name for one call; TypeError if the arguments do not fit the function."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        extra = next(
            (p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), ""
        )
        known = {**bound.arguments.get(extra, {}), **bound.arguments}
        return string.Formatter().vformat(self.text, (), known)

    def _fields(self) -> list[str]:
        parsed = string.Formatter().parse(self.text)
        return [
            re.split(r"[.\[]", field, maxsplit=1)[0]
            for _, field, _, _ in parsed
            if field is not None
        ]

    def _check(self, field: str) -> None:
        parameters = self._signature.parameters
        if field in parameters or (
            any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and field
        ):
            return
        msg = f"The lock name {self.text!r} has a field {field!r}, but the function takes {[*parameters]}."
        raise ValueError(msg)
