"""Traces and metrics of locks for OpenTelemetry: ``pip install django-distlock[opentelemetry]``.

Call instrument() once at start-up, where the rest of OpenTelemetry is set up. The labels of metrics are the
alias and the *template* of the name, which has few values; spans have the name, too.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django.apps import apps
from django.core.exceptions import AppRegistryNotReady
from opentelemetry import metrics, trace
from opentelemetry.metrics import Observation
from opentelemetry.trace import Status, StatusCode

from django_distlock.engine.registry import registry
from django_distlock.engine.values import State
from django_distlock.ground.naming import printable
from django_distlock.signals import (
    backend_failed,
    lock_acquired,
    lock_busy,
    lock_detached,
    lock_lost,
    lock_released,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django.dispatch import Signal
    from opentelemetry.metrics import CallbackOptions, MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from django_distlock import Lease
    from django_distlock.ground.holder import Holder

    #: Takes the name of a lock and its template ("" if it is not known), and returns the label.
    Label = Callable[[str, str], str]
    Labels = dict[str, str]

#: Bounds of the histograms, in seconds: from one round trip to long jobs.
BOUNDS = [0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800]
#: Parts of a name that differ between similar locks: UUIDs, numbers, and ids of eight or more hexadecimal digits.
_ONE_OF_MANY = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{8,}|\d+")


def template_of(name: str, template: str = "") -> str:
    """Return the label for all locks with names like *name*: *template*, or the name with ``*`` for numbers and ids.

    For the lock and the edit lock of a model instance, ``*`` replaces the whole primary key.
    """
    return printable(template or _template_of_object(name) or _ONE_OF_MANY.sub("*", name), 100)


def _template_of_object(name: str) -> str:
    """Return "shop.page:*" for "shop.page:home", "edit:shop.page:*" for its edit lock; "" if *name* names no model."""
    label, colon, _ = name.removeprefix("edit:").partition(":")
    if colon:
        with suppress(LookupError, ValueError, AppRegistryNotReady):
            apps.get_model(label)
            return f"{name[: name.index(label)]}{label}:*"
    return ""


class _Instruments:
    """The receivers of the signals, and the instruments in which they record."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        label: Label,
    ) -> None:
        self.label = label
        self._tracer = trace.get_tracer("django_distlock", tracer_provider=tracer_provider)
        self._meter_provider = meter_provider
        meter = self.provider.get_meter("django_distlock")
        count = meter.create_counter
        seconds = partial(
            meter.create_histogram, unit="s", explicit_bucket_boundaries_advisory=BOUNDS
        )
        self._wait = seconds("distlock.wait", description="How long a lock was waited for")
        self._hold = seconds("distlock.hold", description="How long a lock was held")
        self._busy = count("distlock.busy", description="Locks that were not acquired in time")
        self._lost = count("distlock.lost", description="Leases lost before their release")
        self._errors = count("distlock.backend.errors", description="Errors of lock servers")
        for metric, state, text in (
            ("distlock.held", State.HELD, "Locks that this process holds"),
            ("distlock.waiting", State.PENDING, "Callers of this process that wait for a lock"),
        ):
            count_leases = partial(self._count_leases, state)
            meter.create_observable_gauge(metric, [count_leases], description=text)
        self._seen: set[tuple[MeterProvider, str, str]] = set()
        # No mutex: a fork while another thread holds it would stop the locks of the child.
        self._spans: WeakKeyDictionary[Lease, tuple[Span, int]] = WeakKeyDictionary()
        self._receivers: dict[Signal, Callable[..., Any]] = {
            lock_acquired: self.acquired,
            lock_busy: self.was_busy,
            lock_released: self.released,
            lock_lost: self.was_lost,
            lock_detached: self.detached,
            backend_failed: self.failed,
        }
        for signal, receiver in self._receivers.items():
            signal.connect(receiver)

    @property
    def provider(self) -> MeterProvider:
        """The provider of the metrics; the global one may be set after instrument()."""
        return self._meter_provider or metrics.get_meter_provider()

    def stop(self) -> None:
        for signal, receiver in self._receivers.items():
            signal.disconnect(receiver)
        with suppress(KeyError):
            while True:
                self._spans.popitem()[1][0].end()

    def acquired(self, lease: Lease, waited: float, **facts: Any) -> None:
        _labels, known, span = self._waited(waited, **facts)
        span.end()
        now = time.time_ns()
        held = self._tracer.start_span("distlock.hold", attributes=known, start_time=now)
        if lease.fencing_token is not None:
            held.set_attribute("distlock.fencing_token", lease.fencing_token)
        self._spans[lease] = held, now

    def was_busy(self, waited: float, holder: Holder | None, **facts: Any) -> None:
        labels, _known, span = self._waited(waited, **facts)
        self._busy.add(1, labels)
        if holder is not None:
            span.set_attribute("distlock.holder", str(holder))
        span.set_status(Status(StatusCode.ERROR, "busy"))
        span.end()

    def failed(self, error: BaseException, waited: float | None, **facts: Any) -> None:
        self._errors.add(1, self._labels(**facts))
        if waited is not None:  # otherwise a renewal failed, for which no caller waits
            _labels, _known, span = self._waited(waited, **facts)
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, printable(error)))
            span.end()

    def released(self, lease: Lease, held: float, took: float, **facts: Any) -> None:
        labels, span, end = self._held(lease, held, **facts)
        if span:
            within = trace.set_span_in_context(span)
            release = self._tracer.start_span(
                "distlock.release", within, attributes=labels, start_time=end
            )
            end += int(took * 1e9)
            release.end(end)
            span.end(end)

    def was_lost(self, lease: Lease, held: float, reason: str, **facts: Any) -> None:
        labels, span, end = self._held(lease, held, **facts)
        self._lost.add(1, labels)
        if span:
            span.set_status(Status(StatusCode.ERROR, f"lost: {printable(reason)}"))
            span.end(end)

    def detached(self, lease: Lease, held: float, **facts: Any) -> None:
        _labels, span, end = self._held(lease, held, **facts)
        if span:
            span.end(end)

    def _count_leases(self, state: State, _options: CallbackOptions) -> Iterable[Observation]:
        # A meter never removes a gauge, and ignores further ones with the same name.
        leases = Counter(
            (lease.using, used.label(lease.name, lease.template))
            for used in _used
            if used.provider is self.provider
            for lease in registry.leases()
            if lease.look() is state
        )
        for (using, template), number in leases.items():
            labels = {"distlock.alias": using, "distlock.template": template}
            yield Observation(number, labels)

    def _waited(self, waited: float, **facts: Any) -> tuple[Labels, Labels, Span]:
        """Record a wait that ends now; return its labels, the labels with the name, and its span."""
        labels = self._labels(**facts)
        self._wait.record(waited, labels)
        known = {**labels, "distlock.name": printable(facts["name"])}
        begin = time.time_ns() - int(waited * 1e9)
        span = self._tracer.start_span("distlock.acquire", attributes=known, start_time=begin)
        return labels, known, span

    def _held(self, lease: Lease, held: float, **facts: Any) -> tuple[Labels, Span | None, int]:
        """Record a hold; return its labels, its span or None, and the time of its end, perhaps long ago."""
        labels = self._labels(**facts)
        self._hold.record(held, labels)
        span, start = self._spans.pop(lease, (None, 0))
        return labels, span, start + int(held * 1e9)

    def _labels(self, name: str, using: str, template: str, **_: Any) -> Labels:
        label = self.label(name, template)
        labels = {"distlock.alias": using, "distlock.template": label}
        if (seen := (self.provider, using, label)) not in self._seen:
            self._seen.add(seen)
            # A rate needs a value before the first loss or error.
            for counter in (self._busy, self._lost, self._errors):
                counter.add(0, labels)
        return labels


#: The instruments in use: one or none.
_used: list[_Instruments] = []


def instrument(
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    label: Label = template_of,
) -> None:
    """Record traces and metrics of locks from now on; None: use the global providers.

    *label* returns the label of a lock in metrics, for its name and template ("" if that is not known).
    It must return few different texts. A further call replaces the first one.
    """
    uninstrument()
    _used.append(_Instruments(tracer_provider, meter_provider, label))


def uninstrument() -> None:
    """Stop recording; the spans of held locks end now."""
    while _used:
        _used.pop().stop()
