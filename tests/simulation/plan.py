"""What a schedule consists of: callers, what they do, and what goes wrong. A seed makes it; it can be made smaller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Self

#: Faults that may let two in at once, as the table of faults in the docs says.
WIPE, FORWARD = "wipe", "forward"
#: A restart without its data, behind a proxy that keeps the connections.
UNSEEN_WIPE = "unseen_wipe"
#: Faults of callers: all else is as if nothing had happened.
OF_CALLERS = frozenset({"interrupt", "cancel", "kill"})
#: Faults of which callers learn nothing: the others, and one message that is lost, since it is sent again.
UNSEEN = OF_CALLERS | {"drop"}
BACKENDS = {
    "redis": 5,
    "redis-fair": 4,
    "redlock-3": 2,
    "redlock-3-fencing": 2,
    "redlock-5-fencing": 1,
}


@dataclass(frozen=True)
class Round:
    """One use of a lock: *pause* seconds after the one before, held for *hold* seconds."""

    how: str
    name: str
    pause: float
    timeout: float | None
    ttl: float
    hold: float
    shared: bool = False
    limit: int | None = None


@dataclass(frozen=True)
class Actor:
    """A thread, or a task, of the process with this number."""

    process: int
    is_task: bool
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, at which second, for how long, and to whom; see Schedule."""

    kind: str
    at: float
    length: float = 0.0
    who: int = 0
    server: int = 0
    places: int = 0


@dataclass(frozen=True)
class Plan:
    """One schedule. *seed* decides all that the plan leaves open."""

    seed: int
    backend: str
    actors: tuple[Actor, ...]
    faults: tuple[Fault, ...]
    rates: tuple[float, ...]
    switching: float
    stalling: float
    grain: float
    has_receivers: bool

    @property
    def servers(self) -> int:
        return int(self.backend.split("-")[1]) if self.backend.startswith("redlock") else 1

    @property
    def promises_exclusion(self) -> bool:
        kinds = {fault.kind for fault in self.faults}
        is_told = not {FORWARD, UNSEEN_WIPE} & kinds
        return is_told and (WIPE not in kinds or self.servers > 1)

    @property
    def keeps_leases(self) -> bool:
        """Whether no server forgets a lease before its time."""
        return not {WIPE, UNSEEN_WIPE, FORWARD} & {fault.kind for fault in self.faults}

    @property
    def has_fencing(self) -> bool:
        return self.servers == 1 or self.backend.endswith("fencing")

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong that callers may learn of."""
        kinds = [fault.kind for fault in self.faults]
        return UNSEEN.issuperset(kinds) and kinds.count("drop") <= 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        known: dict[str, Any] = json.loads(text)
        actors = [
            Actor(**{**each, "rounds": tuple(Round(**one) for one in each["rounds"])})
            for each in known["actors"]
        ]
        faults = [Fault(**each) for each in known["faults"]]
        lists = {"actors": tuple(actors), "faults": tuple(faults), "rates": tuple(known["rates"])}
        return cls(**{**known, **lists})

    def __str__(self) -> str:
        lines = [
            f"{self.backend}, seed {self.seed}, grain {self.grain}, receivers: {self.has_receivers}"
        ]
        for number, actor in enumerate(self.actors):
            kind = "task" if actor.is_task else "thread"
            lines += [f"  {kind} {number} of process {actor.process}:"]
            lines += [f"    {one}" for one in actor.rounds]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


def plan_of(seed: int) -> Plan:
    """Return the plan of *seed*."""
    random = Random(f"plan {seed}")
    (backend,) = random.choices([*BACKENDS], [*BACKENDS.values()])
    is_plain = backend.startswith("redis")
    limit = random.choice((2, 3)) if random.random() < 0.2 else None
    has_readers = is_plain and limit is None and random.random() < 0.25
    names = ["a", "a", "b"] if random.random() < 0.3 else ["a"]
    ttl = random.choice((0.4, 1.0, 3.0, 30.0))
    processes = random.choice((1, 2, 2, 3))

    def round_() -> Round:
        return Round(
            how=random.choices(("with", "acquire", "nested", "extend", "all"), (6, 3, 1, 1, 1))[0],
            name=random.choice(names),
            pause=random.choice((0.0, 0.0, 0.01, 0.3)) * random.random(),
            timeout=random.choice((0.0, 0.05, 1.0, 5.0, None)),
            ttl=ttl,
            hold=random.choice((0.0, 0.002, 0.05, ttl * 0.4, min(ttl, 2.0) * 1.2)),
            shared=has_readers and random.random() < 0.6,
            limit=limit,
        )

    actors = tuple(
        Actor(
            number % processes if number < processes else random.randrange(processes),
            random.random() < 0.35,
            tuple(round_() for _ in range(random.choice((1, 2, 3)))),
        )
        for number in range(random.choice((2, 3, 4, 5)))
    )
    plan = Plan(
        seed=seed,
        backend=backend,
        actors=actors,
        faults=(),
        rates=tuple(random.uniform(0.997, 1.003) for _ in range(processes + 5)),
        switching=random.choice((0.02, 0.1, 0.5)),
        stalling=random.choice((0.0, 0.0, 0.002)),
        grain=random.choice((0.0, 0.0, 0.0, 0.0, 0.01, 0.1)),
        has_receivers=random.random() < 0.5,
    )
    return replace(plan, faults=tuple(_faults(random, plan)))


def _faults(random: Random, plan: Plan) -> Iterator[Fault]:
    kinds = [
        "interrupt", "interrupt", "cancel", "kill", "drop", "drop", "freeze", "cut", "reset", "lossy", "lossy", "slow", "hang", "restart",
        "back", UNSEEN_WIPE, WIPE if plan.servers > 1 else random.choice((WIPE, FORWARD)),
    ]  # fmt: skip
    count = random.choice((0, 1, 1, 2, 3))
    for kind in random.sample(kinds, count):
        yield Fault(
            kind,
            at=random.choice((0.01, 0.1, 1.0, 3.0)) * random.random(),
            length=random.choice((0.05, 0.3, 1.2, 2.5)) * random.random(),
            who=random.randrange(len(plan.actors)),
            server=random.randrange(plan.servers),
            places=random.choice((0, random.randrange(1, 20), random.randrange(1, 200))),
        )


def smaller(plan: Plan) -> Iterator[Plan]:
    """Give the plans that lack one thing of *plan*, the largest things first."""
    yield from _without_an_actor(plan)
    for number in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
    yield from _without_a_round(plan)
    simpler = (
        replace(plan, grain=0.0),
        replace(plan, stalling=0.0),
        replace(plan, has_receivers=False),
    )
    yield from (each for each in simpler if each != plan)


def _without_an_actor(plan: Plan) -> Iterator[Plan]:
    for number in range(len(plan.actors)):
        others = plan.actors[:number] + plan.actors[number + 1 :]
        faults = tuple(
            replace(fault, who=fault.who - (fault.who > number))
            for fault in plan.faults
            if fault.who != number
        )
        if others:
            yield replace(plan, actors=others, faults=faults)


def _without_a_round(plan: Plan) -> Iterator[Plan]:
    for number, actor in enumerate(plan.actors):
        for at in range(len(actor.rounds) if len(actor.rounds) > 1 else 0):
            less = replace(actor, rounds=actor.rounds[:at] + actor.rounds[at + 1 :])
            actors = (*plan.actors[:number], less, *plan.actors[number + 1 :])
            yield replace(plan, actors=actors)
