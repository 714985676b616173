from django.db.backends.postgresql import base

from tests.integration.pods.migrations import begin


class DatabaseWrapper(base.DatabaseWrapper):
    def prepare_database(self) -> None:
        super().prepare_database()
        with self.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_extension WHERE extname = 'hstore'")
            if not cursor.fetchone():
                begin()
                cursor.execute("CREATE EXTENSION hstore")
