from django.db import migrations, models

from django_distlock import LockNotAcquired
from tests.integration.pods.migrations import begin


def begin_or_fail(*_: object) -> None:
    """Wait before any table may tell two apart."""
    if (begin() / "busy").exists():
        raise LockNotAcquired("of-a-migration")


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.RunPython(begin_or_fail, migrations.RunPython.noop),
        migrations.CreateModel(
            "Parcel",
            [("id", models.BigAutoField(primary_key=True)), ("weight", models.IntegerField())],
        ),
    )
