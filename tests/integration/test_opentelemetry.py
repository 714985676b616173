"""Traces and metrics for OpenTelemetry, by its real SDK."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import generate_latest
from pytest_django.fixtures import Settings

from django_distlock import (
    Lease,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    distributed_lock,
    force_release,
    lock,
    locks,
)
from django_distlock.contrib import opentelemetry
from django_distlock.engine.registry import registry
from django_distlock.engine.values import State
from django_distlock.ground import clock
from tests.contract.crew import (
    elsewhere,
    held_in_thread,
    start,
    take_and_release,
    taken,
    waiting_for,
)
from tests.fixtures.eventually import eventually
from tests.fixtures.pages import DOCS
from tests.fixtures.processes import Spawn

from .aliases import DOWN, MEMORY

LABELS = {"distlock.alias": "default", "distlock.template": "fee:*"}


@pytest.fixture(autouse=True)
def in_memory(settings: Settings) -> Iterator[None]:
    settings.DISTLOCK = {"default": MEMORY, "down": DOWN}
    registry.release_all()  # by tests elsewhere: all that are held are counted
    yield
    locks.reset()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracers(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def reader(tracers: TracerProvider) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    opentelemetry.instrument(tracers, MeterProvider([reader]))
    yield reader
    opentelemetry.uninstrument()


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """Return by metric its data points now."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    found = [each for r in data.resource_metrics for s in r.scope_metrics for each in s.metrics]
    return {metric.name: list(metric.data.data_points) for metric in found}


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_holding_is_three_spans_within_that_of_its_caller(
    reader: InMemoryMetricReader, tracers: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    with tracers.get_tracer("test").start_as_current_span("request") as caller:
        with lock("fee:42") as lease:
            pass

    found = spans(exporter)
    assert set(found) == {"request", "distlock.acquire", "distlock.hold", "distlock.release"}
    hold, release = found["distlock.hold"], found["distlock.release"]
    for span in (found["distlock.acquire"], hold):
        assert span.parent
        assert span.parent.span_id == caller.get_span_context().span_id
    assert release.parent
    assert hold.context
    assert release.parent.span_id == hold.context.span_id
    assert dict(hold.attributes or {}) == {
        **LABELS,
        "distlock.name": "fee:42",
        "distlock.fencing_token": lease.fencing_token,
    }


def test_every_query_of_the_dashboard_asks_for_what_the_exporter_of_prometheus_tells() -> None:
    provider = MeterProvider([PrometheusMetricReader()])
    opentelemetry.instrument(meter_provider=provider)
    try:
        with lock("fee:42"):
            assert elsewhere(lock("fee:42", timeout=0).acquire) is None
            waiter = start(lock("fee:42", timeout=30).acquire)
            eventually(lambda: waiting_for(locks["default"], "fee:42"))
            lost = taken("import:7")
            assert force_release("import:7") == 1
            assert lost.lost
            with pytest.raises(LockBackendError):
                lock("fee:42", using="down", timeout=0).acquire()
            told = generate_latest().decode()
        assert waiter.result(30)
    finally:
        opentelemetry.uninstrument()
        provider.shutdown()

    dashboard = json.loads((DOCS / "_static" / "grafana-locks.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > len(dashboard["panels"])
    alerts = (DOCS / "_static" / "prometheus-locks.yml").read_text()
    for word in set(re.findall(r"distlock_\w+", " ".join([*queries, alerts]))):
        assert re.search(rf"\b{word}[{{=]", told), f"the exporter tells no {word}"


def test_the_span_of_a_lease_ends_where_it_is_handed_on(
    reader: InMemoryMetricReader, exporter: InMemorySpanExporter
) -> None:
    text = taken("fee:42").detach()

    assert set(spans(exporter)) == {"distlock.acquire", "distlock.hold"}
    Lease.attach(text).release()
    assert [point.count for point in points(reader)["distlock.hold"]] == [2]


def test_waits_and_holds_are_measured_by_alias_and_template(reader: InMemoryMetricReader) -> None:
    def held(labels: dict[str, str]) -> None:
        [point] = points(reader)["distlock.held"]
        assert (point.value, point.attributes) == (1, labels)

    @distributed_lock("fee:{account}")
    def charge(account: int) -> None:
        held({**LABELS, "distlock.template": "fee:{account}"})

    for account in range(3):
        with lock(f"fee:{account}"):
            held(LABELS)
        with lock(f"fee:{account}", limit=1):
            held(LABELS)  # without the place
        charge(account)

    found = points(reader)
    by_template = {
        name: {point.attributes["distlock.template"]: point.count for point in found[name]}
        for name in ("distlock.wait", "distlock.hold")
    }
    assert by_template == {key: {"fee:*": 6, "fee:{account}": 3} for key in by_template}
    assert "distlock.held" not in found


def test_those_that_wait_are_counted_until_they_have_the_lock_or_give_up(
    reader: InMemoryMetricReader,
) -> None:
    def waiting() -> list[tuple[int, object]]:
        return [
            (point.value, point.attributes) for point in points(reader).get("distlock.waiting", [])
        ]

    async def wait(number: int) -> None:
        async with lock(f"fee:{number}", timeout=30):
            pass

    with lock("fee:1"), lock("fee:2"):
        waiters: list[Future[Any]] = [start(lambda: asyncio.run(wait(2)))]
        waiters += [start(lambda: take_and_release("default", "fee:1")) for _ in range(2)]
        eventually(lambda: waiting() == [(3, LABELS)])
        with pytest.raises(LockNotAcquired):
            elsewhere(lock("fee:1", timeout=0.01).__enter__)
        assert waiting() == [(3, LABELS)]
    for waiter in waiters:
        waiter.result(30)

    assert waiting() == []


def record_before_the_provider_is_set(again: bool) -> dict[str, list[int]]:
    """Begin to record before the provider of metrics is set, perhaps *again* after that; return the values of a lock."""
    reader = InMemoryMetricReader()
    opentelemetry.instrument()
    with lock("fee:1"):
        metrics.set_meter_provider(MeterProvider([reader]))
    if again:
        opentelemetry.instrument()
    with lock("fee:1"):
        found = points(reader)
    return {
        metric: [point.value for point in found.get(f"distlock.{metric}", [])]
        for metric in ("held", "busy", "lost", "backend.errors")
    }


@pytest.mark.parametrize("again", [False, True])
def test_the_provider_of_metrics_may_be_set_later(spawn: Spawn, again: bool) -> None:
    target = f"{__name__}:record_before_the_provider_is_set"
    child = spawn(target, again=again, aliases={"default": MEMORY})

    told = child.expect("returned")["value"]
    assert told == {"held": [1], "busy": [0], "lost": [0], "backend.errors": [0]}


def test_refusals_losses_and_errors_are_counted(
    reader: InMemoryMetricReader, exporter: InMemorySpanExporter
) -> None:
    with held_in_thread(lock("fee:1")) as lease, pytest.raises(LockNotAcquired):
        lock("fee:1", timeout=0).__enter__()
    lost = taken("fee:2")
    lost.end(State.LOST, "a test says so")
    with pytest.raises(LockLost):
        lost.release()
    with pytest.raises(LockBackendError, match="Redis") as failed:
        lock("fee:3", using="down", timeout=0).acquire()

    found = points(reader)
    for metric, alias in (("busy", "default"), ("lost", "default"), ("backend.errors", "down")):
        [point] = [point for point in found[f"distlock.{metric}"] if point.value]
        assert (point.value, point.attributes) == (1, {**LABELS, "distlock.alias": alias})
    ends = {span.status.description: span for span in exporter.get_finished_spans()}
    assert ends["busy"].status.status_code is StatusCode.ERROR
    assert (ends["busy"].attributes or {})["distlock.holder"] == str(lease.holder)
    assert "distlock.holder" not in (ends[str(failed.value)].attributes or {})
    assert ends["lost: a test says so"].name == "distlock.hold"


@pytest.mark.parametrize(
    "end",
    [Lease.detach, lambda lease: lease.end(State.LOST, "a test says so")],
    ids=["detached", "lost"],
)
def test_a_span_is_as_long_as_the_lock_was_held(
    reader: InMemoryMetricReader, exporter: InMemorySpanExporter, end: Callable[[Lease], object]
) -> None:
    end(taken("fee:42"))

    span = spans(exporter)["distlock.hold"]
    [held] = points(reader)["distlock.hold"]
    assert span.start_time
    assert span.end_time
    assert span.end_time - span.start_time == int(held.sum * 1e9)


@pytest.mark.parametrize("form", ["sync", "async"])
def test_an_acquire_that_fails_has_a_span_with_the_error(
    reader: InMemoryMetricReader, tracers: TracerProvider, exporter: InMemorySpanExporter, form: str
) -> None:
    async def enter() -> None:
        async with lock("fee:3", using="down", timeout=5):
            pass

    with tracers.get_tracer("test").start_as_current_span("request") as caller:
        began = clock.wait_time()
        with pytest.raises(LockBackendError) as failed:
            if form == "async":
                asyncio.run(enter())
            else:
                with lock("fee:3", using="down", timeout=5):
                    pass
        took = clock.wait_time() - began
    eventually(lambda: "distlock.acquire" in spans(exporter))

    span = spans(exporter)["distlock.acquire"]
    assert span.parent
    assert span.parent.span_id == caller.get_span_context().span_id
    assert (span.status.status_code, span.status.description) == (
        StatusCode.ERROR,
        str(failed.value),
    )
    assert dict(span.attributes or {}) == {
        **LABELS,
        "distlock.alias": "down",
        "distlock.name": "fee:3",
    }
    [event] = span.events
    assert str((event.attributes or {})["exception.type"]).endswith("LockBackendError")
    assert span.start_time
    assert span.end_time
    assert 0 < (span.end_time - span.start_time) / 1e9 < took + 0.1
    assert [point.count for point in points(reader)["distlock.wait"]] == [1]


def test_a_renewal_that_fails_is_counted_and_makes_no_span(
    reader: InMemoryMetricReader, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(requests: Any) -> Any:
        raise LockBackendError("default", "a test says so")

    monkeypatch.setattr(locks["default"], "extend", fail)
    with lock("fee:42", ttl=3):
        eventually(lambda: points(reader)["distlock.backend.errors"][0].value)

    assert set(spans(exporter)) == {"distlock.acquire", "distlock.hold", "distlock.release"}


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("fee:42", "fee:*"),
        ("import:2026-11-22", "import:*-*-*"),
        ("user:550e8400-e29b-41d4-a716-446655440000", "user:*"),
        ("user:550E8400-e29b-41d4-a716-446655440000:mail", "user:*:mail"),
        ("eod-20261122-backup", "eod-*-backup"),
        ("20261122T0530-daily", "*T*-daily"),
        ("auth.user:7", "auth.user:*"),
        ("auth.user:ada@example.com", "auth.user:*"),
        ("edit:auth.user:ada:b", "edit:auth.user:*"),
        ("edit:7", "edit:*"),
        ("no.model:ada", "no.model:ada"),
        ("report", "report"),
        ("face", "face"),
    ],
)
def test_what_names_have_in_common(name: str, template: str) -> None:
    assert opentelemetry.template_of(name) == template
    assert opentelemetry.template_of(name, "given") == "given"
