"""A real beat, which sends a tick every second: ``python -m tests.integration.beat PAGE QUEUE FILE``."""

from __future__ import annotations

import sys

from testproject.celery import app

if __name__ == "__main__":
    page, queue, file = sys.argv[1:]
    app.conf.beat_schedule = {
        "tick": {
            "task": "tests.integration.celery_tasks.tick",
            "schedule": 1.0,
            "args": (page,),
            "options": {"queue": queue},
        }
    }
    app.Beat(schedule=file, loglevel="WARNING").run()
