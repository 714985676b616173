"""The steps of Lease.detach() and Lease.attach(): one process hands its lease to another."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from django.core import signing

from django_distlock.conf import LEAST_TTL
from django_distlock.exceptions import LockLost, NotSupported
from django_distlock.ground import clock
from django_distlock.ground.holder import Holder
from django_distlock.ground.naming import checked_name, printable

from .holding import note_held_here
from .registry import registry
from .steps import Steps, run, settled
from .values import Grant, Request, Secret, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django_distlock.backends.base import BaseLockBackend

    from .holding import Holding

    _Held = TypeVar("_Held", bound=Holding)

#: Returns the backend of an alias. handler.py, which is above the engine, sets this function.
backend_of: Callable[[str], BaseLockBackend] = dict[str, "BaseLockBackend"]().__getitem__
#: Salt of the text that detach() signs.
SALT = "django_distlock.lease"


class TakeOver(NamedTuple):
    """The request of attach() to a backend: the owner of *request* takes over the lease of *former*."""

    backend: BaseLockBackend
    request: Request
    former: str


def hand_over(lease: Holding, ttl: float | timedelta | None = None) -> str:
    """Do what Lease.detach() does, without a warning about open transactions."""
    extend = lease.backend.extend
    return run(detaching(lease, ttl), lambda asked: settled(partial(extend, asked)))


def detaching(lease: Holding, ttl: float | timedelta | None) -> Steps[list[Request], str]:
    if not lease.backend.supports_detach:
        instead = lease.backend.instead or "The lock is bound to this process."
        raise NotSupported(lease.using, "detach()", instead)
    own_ttl = lease.request.ttl
    yield from lease.extending(ttl)
    try:
        if lease.end(State.DETACHED):
            return _text_of(lease, own_ttl)
    except BaseException:
        lease.backend.abandon_later(lease.request)  # nobody gets the text
        raise
    raise LockLost(lease.name, lease.reason)


def _text_of(lease: Holding, own_ttl: float) -> str:
    request = lease.request
    known = {
        "renew": lease.renews,
        "max_hold": lease.max_hold_left,
        "postmark": clock.postmark(),
        "using": lease.using,
        "name": request.name,
        "owner": request.owner,
        "ttl": own_ttl,
        "shared": request.shared,
        "min_hold": request.min_hold,
        "hold_on_success": lease.hold_on_success,
        "token": lease.fencing_token,
        "limit": request.holder.limit,
        "place": request.place,
    }
    if lease.backend.keys_vary:  # only then, because processes of an earlier release refuse a key
        known["key"] = request.lock_key
    return signing.dumps(known, salt=SALT)


def name_in(text: str) -> str:
    """Return the name of the lock whose lease is in *text*; "" if *text* cannot be read."""
    with suppress(signing.BadSignature, UnicodeError):
        return str(signing.loads(text, salt=SALT)["name"])
    return ""


def attaching(make: Callable[..., _Held], text: str, purpose: str) -> Steps[TakeOver, _Held]:
    """Return the lease in *text*, held by a new owner; LockLost if it had ended or was attached before."""
    if not isinstance(text, str):
        what = type(text).__name__
        raise TypeError(f"Lease.attach() takes the text that detach() returned, not {what}.")
    try:
        known = signing.loads(text, salt=SALT)
    except (signing.BadSignature, UnicodeError) as error:
        # "from None", as Django's error has the end of the text unescaped.
        raise signing.BadSignature(printable(error)) from None
    backend, former = backend_of(known.pop("using")), Secret(known.pop("owner"))
    token = known.pop("token")
    own = {key: known.pop(key) for key in ("renew", "max_hold", "hold_on_success")}
    name = checked_name(known.pop("name"))
    start, on_its_way = clock.lease_time(), clock.travelled(*known.pop("postmark"))
    if own["max_hold"] is not None:
        own["max_hold"] -= on_its_way
        known["ttl"] = min(known["ttl"], own["max_hold"])
        if own["max_hold"] < LEAST_TTL:
            raise LockLost(name, "its max_hold is over")
    limit, place = known.pop("limit"), known.pop("place")
    request = backend.request(name, **known, holder=Holder.current(purpose))
    if limit is not None:
        request = request.with_limit(limit).at(place)
    lease = make(backend, request, **own)
    try:
        registry.add(lease)
        is_ours = yield TakeOver(backend, request, former)
        if is_ours and registry.grant(lease, Grant(token), start):
            note_held_here(lease.using, request.lock_key, lease.ref)
            return lease
    except BaseException:
        lease.end(State.RELEASED, frees=True)
        raise
    lease.end(State.RELEASED, frees=is_ours)
    raise LockLost(name, "it had ended, or was attached elsewhere, before")
