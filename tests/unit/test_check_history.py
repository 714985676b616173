"""tools/check-history: it accepts a recorded history of Redis, and finds each mistake that is planted in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.pages import ROOT, table

EXAMPLE = ROOT / "tests" / "torture" / "example.jsonl.gz"
README = ROOT / "tests" / "torture" / "README.md"
_loader = SourceFileLoader("check_history", str(ROOT / "tools" / "check-history"))
_spec = spec_from_loader(_loader.name, _loader)
assert _spec is not None
checker: Any = module_from_spec(_spec)
_loader.exec_module(checker)

Event = dict[str, Any]
RECORDED: list[Event] = checker.read(EXAMPLE)
HOT, READERS, FEW = "redis-hot", "redis-readers", "redis-few"


def rules(events: list[Event]) -> set[str]:
    events.sort(key=lambda event: event["at"])
    return {rule for rule, _ in checker.findings(checker.History(events))}


class Plant:
    """A copy of the recorded history, in which a mistake is planted after the faults are over."""

    def __init__(self) -> None:
        self.events = deepcopy(RECORDED)
        [calm] = (event["at"] for event in self.events if event["kind"] == "calm")
        holds = checker.History(self.events).holds
        self.holds = [hold for hold in holds if hold.asked > calm and hold.sure]
        self.calm = calm

    def pair(self, lock: str, *, shared: tuple[bool, bool] = (False, False)) -> Any:
        """Return two holds, one right after the other."""
        same = sorted((hold for hold in self.holds if hold.lock == lock), key=lambda hold: hold.got)
        return next(
            (one, two)
            for one, two in pairwise(same)
            if (one.shared, two.shared) == shared and one.sure[1] < two.sure[0]
        )

    def event(self, hold: Any, kind: str) -> Event:
        """Return the last event of this kind."""
        found: Event = [event for event in hold.life if event["kind"] == kind][-1]
        return found

    def keep_until(self, hold: Any, at: float) -> None:
        """Let *hold* be sure until *at*."""
        later = at - hold.sure[1]
        last = hold.life.index(self.event(hold, "checked"))
        for event in hold.life[last:]:
            event["at"] += later

    def fault(self, what: str, effect: str, at: float) -> None:
        common = {"at": at, "kind": "fault", "worker": "nemesis", "target": "", "told": 1.0}
        self.events.append({**common, "what": what, "effect": effect, "began": at, "ended": at})


def no_owner_compare(plant: Plant) -> None:
    one, two = plant.pair(HOT)  # the release of a third one has freed it
    plant.keep_until(one, two.sure[1] + 0.1)


def loss_without_a_cause(plant: Plant) -> None:
    one, _ = plant.pair(HOT)
    last = one.life[-1]
    last["how"] = "LockLost"
    reason = "the server says that it is not ours any more"
    plant.events.append({**last, "kind": "lost", "reason": reason, "at": last["at"] - 1e-6})


def reader_beside_writer(plant: Plant) -> None:
    one, two = plant.pair(READERS, shared=(False, True))
    plant.keep_until(one, two.sure[1])


def one_place_twice(plant: Plant) -> None:
    one, two = plant.pair(FEW)
    plant.event(two, "got")["place"] = one.place
    # Of one place, tokens rise.
    plant.event(two, "got")["token"] = one.token + 1
    plant.keep_until(one, two.sure[1])


def token_reused(plant: Plant) -> None:
    one, two = plant.pair(HOT)
    plant.event(two, "got")["token"] = one.token


def token_falls(plant: Plant) -> None:
    one, two = plant.pair(HOT)
    plant.event(two, "got")["token"] = one.token - 1


def renewal_after_loss(plant: Plant) -> None:
    one, _ = plant.pair(HOT)
    checked = plant.event(one, "checked")
    lost = {**checked, "kind": "lost", "reason": "its deadline passed", "at": one.sure[0]}
    plant.events.append(lost)


def update_lost_at_the_end(plant: Plant) -> None:
    row = next(event for event in plant.events if event.get("row") == "claimed" and "lock" in event)
    row["counted"] -= 1


def write_by_a_former_holder(plant: Plant) -> None:
    one, two = plant.pair(HOT)
    first, second = plant.event(one, "wrote"), plant.event(two, "wrote")
    first["value"], second["value"] = second["value"], first["value"]


def granted_by_a_server_that_hangs(plant: Plant) -> None:
    one, _ = plant.pair(HOT)
    plant.fault("server hangs", "X", one.asked - 0.001)
    plant.events[-1]["ended"] = one.got + 0.001


def held_for_ever(plant: Plant) -> None:
    at = RECORDED[-1]["at"]
    plant.events.append(
        {"at": at, "kind": "stuck", "worker": "operator", "lock": HOT, "why": "busy"}
    )


def process_that_vanishes(plant: Plant) -> None:
    ended = next(event for event in plant.events if event["kind"] == "ended")
    plant.events.remove(ended)


def cut_off(plant: Plant) -> None:
    plant.events = [event for event in plant.events if event["at"] < plant.calm]


def lost_behind(plant: Plant, at: float) -> None:
    plant.fault("server's clock is set back", "X", at)
    plant.fault("eviction, `FLUSHALL`", "F", at)


PLANTED: dict[Callable[[Plant], None], str] = {
    no_owner_compare: "exclusion",
    loss_without_a_cause: "loss",
    reader_beside_writer: "reader beside writer",
    one_place_twice: "exclusion",
    token_reused: "token reused",
    token_falls: "token falls",
    renewal_after_loss: "life",
    update_lost_at_the_end: "lost update",
    write_by_a_former_holder: "late write",
    granted_by_a_server_that_hangs: "hang",
    held_for_ever: "stuck",
    process_that_vanishes: "life",
    cut_off: "incomplete",
}


def test_a_recorded_history_breaks_no_promise() -> None:
    assert rules(deepcopy(RECORDED)) == set()


@pytest.mark.parametrize("mistake", PLANTED, ids=lambda mistake: mistake.__name__)
def test_a_planted_mistake_is_found(mistake: Callable[[Plant], None]) -> None:
    plant = Plant()

    mistake(plant)

    assert PLANTED[mistake] in rules(plant.events)


def test_two_holders_are_allowed_after_a_forced_release() -> None:
    plant = Plant()
    one, _ = plant.pair(HOT)

    no_owner_compare(plant)
    plant.fault("forced release", "F", one.got)

    assert rules(plant.events) == set()


def test_a_token_may_come_again_after_the_server_has_lost_its_data_behind_its_clock() -> None:
    plant = Plant()
    one, two = plant.pair(READERS, shared=(True, True))
    plant.event(two, "got")["token"] = one.token

    assert "token reused" in rules(plant.events)

    lost_behind(plant, one.got)

    assert rules(plant.events) == set()


def test_runs_add_up_by_backend_and_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    upgrade = deepcopy(RECORDED)
    began = next(event for event in upgrade if event["kind"] == "began")
    began["version"] = "1.0.0rc1"
    file = tmp_path / "upgrade.jsonl"
    file.write_text(
        "".join(f"{json.dumps(event)}\n" for event in upgrade if event["kind"] != "calm")
    )
    files = [str(EXAMPLE), str(EXAMPLE), str(file)]
    monkeypatch.setattr(sys, "argv", ["check-history", "--table", *files])

    status = checker.main()

    said = capsys.readouterr().out
    assert status == 1
    assert "| redis | 1.0.0rc2 | none | 2 | 1.2 | 674 | 10 |" in said
    assert "| redis | 1.0.0rc1 and 1.0.0rc2 | incomplete 1 | 1 |" in said
    assert f"{file}: " in said


def test_each_kind_of_event_and_its_fields_are_described() -> None:
    written = {
        (event["kind"], *sorted(event.keys() - {"at", "kind", "worker"})) for event in RECORDED
    }

    described = table(README, "## Events")

    for kind, *names in written:
        assert set(names) <= set(described[kind][0].replace("`", "").split(", "))
