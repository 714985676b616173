import os
from pathlib import Path

from tests.fixtures.eventually import eventually


def begin(*_: object) -> Path:
    """Write down that it began, wait for the word to go on, and return the folder."""
    folder = Path(os.environ["PODS_FOLDER"])
    with (folder / "diary").open("a") as diary:
        diary.write(f"{os.getpid()}\n")
    eventually((folder / "go").exists, 120)
    return folder
