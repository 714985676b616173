from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def index(_: object, editor: BaseDatabaseSchemaEditor) -> None:
    """Add an index; on PostgreSQL by a statement that waits for all transactions, also of those who wait for us."""
    concurrently = "CONCURRENTLY" if editor.connection.vendor == "postgresql" else ""
    editor.execute(f"CREATE INDEX {concurrently} parcel_weight ON pods_parcel (weight)")


class Migration(migrations.Migration):
    atomic = False
    dependencies = (("pods", "0001_initial"),)
    operations = (migrations.RunPython(index, migrations.RunPython.noop),)
