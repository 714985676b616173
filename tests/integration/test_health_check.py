"""The check for django-health-check, on the page that it makes."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from django.test import RequestFactory
from health_check.views import HealthCheckView

from django_distlock import locks
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.contrib.health_check import Locks

from .aliases import DOWN, DUMMY, MEMORY

if TYPE_CHECKING:
    from pytest_django import Settings

    from tests.fixtures.redis import Redis


def shown(*aliases: str) -> tuple[int, dict[str, str]]:
    """Return the status of the page, and what it says of each check."""
    checks = [("django_distlock.contrib.health_check.Locks", {"using": alias}) for alias in aliases]
    view = HealthCheckView.as_view(checks=checks)
    response: Any = asyncio.run(view(RequestFactory().get("/health/?format=json")))
    return response.status_code, json.loads(response.content)


def test_each_alias_is_a_check(redis: Redis, settings: Settings) -> None:
    settings.DISTLOCK = {"redis": settings.DISTLOCK["redis"], "default": {}, "memory": MEMORY}

    assert shown("redis", "default", "memory") == (
        200,
        {f"Locks(using={alias!r})": "OK" for alias in ("redis", "default", "memory")},
    )


def test_what_is_down_or_wrong_is_told_without_its_address(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DISTLOCK = {"memory": MEMORY, "down": DOWN, "wrong": {"BACKEND": "redis"}}
    caplog.set_level(logging.WARNING, "health_check")

    assert shown("memory", "down", "wrong") == (
        500,
        {
            "Locks(using='memory')": "OK",
            "Locks(using='down')": "Unavailable: acquire failed",
            "Locks(using='wrong')": "Unavailable: the settings are wrong",
        },
    )
    assert "127.0.0.1:1" in caplog.text


def test_a_server_that_excludes_nobody_is_not_well(settings: Settings) -> None:
    settings.DISTLOCK = {"default": DUMMY}

    assert shown("default") == (500, {"Locks(using='default')": "Unavailable: contend failed"})


def test_a_probe_closes_no_connection_that_others_use(redis: Redis, settings: Settings) -> None:
    address = f"redis://127.0.0.1:{redis.port}"
    options = {"location": address, "options": {"client_name": "probed"}}
    settings.DISTLOCK = {"redis": {**DOWN, "OPTIONS": options}}
    probe = Locks("redis")
    probe.run()

    with redis.client() as client:

        def connected() -> list[str]:
            return [each["id"] for each in client.client_list() if each["name"] == "probed"]

        before = connected()
        probe.run()
        assert connected() == before != []


def test_it_leaves_nothing(settings: Settings) -> None:
    settings.DISTLOCK = {"default": MEMORY}
    Locks().run()

    backend = locks["default"]
    assert isinstance(backend, LocMemBackend)
    assert [*backend.held()] == []
