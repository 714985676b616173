import os
from pathlib import Path

from django.db import migrations, models

from django_distlock import LockNotAcquired
from tests.fixtures.eventually import eventually


def begin(*_: object) -> None:
    """Write down that it began, and wait for the word to go on: before any table may tell two apart."""
    folder = Path(os.environ["PODS_FOLDER"])
    with (folder / "diary").open("a") as diary:
        diary.write(f"{os.getpid()}\n")
    eventually((folder / "go").exists, 120)
    if (folder / "busy").exists():
        raise LockNotAcquired("of-a-migration")


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.RunPython(begin, migrations.RunPython.noop),
        migrations.CreateModel(
            "Parcel",
            [("id", models.BigAutoField(primary_key=True)), ("weight", models.IntegerField())],
        ),
    )
