"""What `manage.py check --database` says of a server that cannot be asked: one error, with advice by its text."""

from __future__ import annotations

import re

from django.core.checks import Error

from django_distlock.exceptions import LockBackendError

#: What drivers and servers write, and what to do about it. The first that fits is given.
ADVICE = {
    r"no master found": (
        "Start the Sentinels, or correct the settings: are they listening on {place}, and is that the master's name?"
    ),
    r"invalid connection option|unexpected keyword|invalid keyword|invalid integer": (
        "Correct the settings: the driver refuses one of them."
    ),
    r"to database|database \S+ does not exist|unknown database|db index": (
        "Create the database, or correct its name in the settings; the user needs the right to use it."
    ),
    r"password|access denied|authent|authfailed|authoriz|invalid username|pg_hba|role \S+ does not exist": (
        "The server refuses the login: correct the user and the password in the settings."
    ),
    r"noperm|no permissions|permission denied|denied to user": (
        "The server refuses the command: give the user the rights that locks need."
    ),
    r"ssl|tls|certificate": "Correct the settings for TLS, here or on the server.",
    r"resolve|name or service|translate host|getaddrinfo|unknown.*host|name resolution": (
        "Correct the name of the host in the settings."
    ),
    r"too many|connection slots|max number of clients": (
        "The server has as many connections as it allows: raise its limit, or use fewer."
    ),
    r"unable to open|not a database": (
        "Correct the name of the file; its folder must exist, and this process must be able to write there."
    ),
    r"timed out|timeout|in time|no reply|\(110\)": (
        "Start it, or correct the settings: can this machine reach {place}?"
    ),
    "": "Start it, or correct the settings: is it listening on {place}?",
}


def server_error(error: LockBackendError, place: str) -> Error:
    """Return the message for *error*; *place* is where the server should listen."""
    text = str(error)
    advice = next(ADVICE[each] for each in ADVICE if re.search(each, text, re.IGNORECASE))
    return Error(text, hint=advice.format(place=place), id="distlock.E006")
