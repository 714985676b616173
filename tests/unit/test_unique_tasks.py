"""Unique tasks of Celery beside the task classes that an app or a project has."""

from __future__ import annotations

from abc import ABC
from typing import Any
from uuid import uuid4

import pytest

from django_distlock import LockNotAcquired

celery = pytest.importorskip("celery")
unique_task: Any = pytest.importorskip("django_distlock.contrib.celery").unique_task
pytestmark = pytest.mark.usefixtures("memory")


class Counted(celery.Task):  # type: ignore[misc, name-defined]  # Celery has no types
    """Written as most task classes of projects are: apply_async() takes no task_id of its own."""

    sent = 0

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        type(self).sent += 1
        return super().apply_async(args, kwargs, **options)


class Abstract(Counted, ABC):
    """With a metaclass of its own."""


class Other(celery.Task):  # type: ignore[misc, name-defined]  # as above
    pass


@pytest.mark.parametrize("is_final", [True, False])
@pytest.mark.parametrize(
    ("of_app", "base"),
    [
        *((Counted, None), (Other, Counted), (Counted, Counted), (Other, None)),
        *((Abstract, None), (Other, Abstract)),
    ],
)
def test_a_task_is_of_the_class_of_its_app_or_of_its_own(
    of_app: type, base: type | None, is_final: bool
) -> None:
    app = celery.Celery(task_cls=of_app, set_as_current=False)
    app.conf.task_always_eager = True
    if is_final:
        app.finalize()

    name = f"import-{uuid4()}"

    def import_shop(shop_id: int) -> int:
        return shop_id

    unique_task("import:{shop_id}", base=base, name=name)(import_shop)
    task = app.tasks[name]
    shared = (base or of_app).__name__
    assert shared in [each.__name__ for each in type(task).__mro__]
    assert (Other in type(task).__mro__) == (shared == "Other")
    assert [task.delay(7).get(), task.delay(7).get()] == [7, 7]
    assert getattr(task, "sent", 0) == (0 if shared == "Other" else 2)


@pytest.mark.parametrize("thrown", [KeyError, (KeyError,), [KeyError], None], ids=str)
def test_throws_may_be_one_class_or_several_or_none(thrown: Any) -> None:
    app = celery.Celery(set_as_current=False)
    name = f"import-{uuid4()}"
    unique_task(throws=thrown, name=name)(test_throws_may_be_one_class_or_several_or_none)

    assert isinstance(KeyError(), app.tasks[name].throws) == bool(thrown)
    assert isinstance(LockNotAcquired("a"), app.tasks[name].throws)
