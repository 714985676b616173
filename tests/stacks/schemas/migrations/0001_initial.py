from django.db import migrations, models
from django_tenants.postgresql_backend.base import _check_schema_name


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.CreateModel(
            "Client",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True)),
                (
                    "schema_name",
                    models.CharField(
                        db_index=True, max_length=63, unique=True, validators=[_check_schema_name]
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            "Domain",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True)),
                ("domain", models.CharField(db_index=True, max_length=253, unique=True)),
                ("is_primary", models.BooleanField(db_index=True, default=True)),
                (
                    "tenant",
                    models.ForeignKey("schemas.Client", models.CASCADE, related_name="domains"),
                ),
            ],
        ),
    )
