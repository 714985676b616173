"""The checker: reads the histories of a run, nothing else, and tells what broke a promise.

Fencing tokens give the total order of the holders, so checking is sorting.

A holder is sure of its lock from its first ``check()`` that passed to its last: the time is read
before each check, and a lost lease stays lost. So what is found here is never a fault of the reading.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.torture.history import Event

#: Seconds that an attempt may take beyond its timeout: the longest until an error (4), and a busy machine.
LATE = 10.0
#: Seconds of a worker's life before which its use of memory is not compared: it still loads and fills.
YOUNG = 8.0
#: By how many descriptors and threads a worker may grow: connections come and go.
MORE = 12
#: By how many KiB its memory may grow.
MORE_MEMORY = 12 * 1024
#: Events that end an attempt.
OUTCOMES = ("got", "refused", "failed", "cancelled")
#: Effects of faults after which two holders are possible: see the guarantees page.
TWO_HOLDERS = "FB"
#: A token may fall only if the server loses its record of the lock while its clock is behind the last token: it was
#: set back since the last grant, or so many seconds before it at most, the size of a step.
BEHIND = 3.0
LOSSES = {
    "server restarts and has lost its last writes",
    "fail-over to an asynchronous replica",
    "eviction, `FLUSHALL`",
}
SET_BACK = "server's clock is set back"


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: the *rule*, and what happened."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(slots=True)
class Attempt:
    """One attempt to acquire a lock, and the holding that it led to."""

    id: str
    worker: str
    lock: str
    asked: float
    timeout: float
    shared: bool = False
    limit: int | None = None
    ended: float | None = None
    outcome: str = ""
    token: int | None = None
    place: int | None = None
    first_checked: float | None = None
    last_checked: float | None = None
    left: float | None = None

    @property
    def over(self) -> float | None:
        """When the holding has ended, or the attempt without one; None for that of a process that was killed meanwhile."""
        return self.left if self.outcome == "got" else self.ended

    @property
    def of_what(self) -> str:
        """The lock, or the place of it, that has one holder."""
        return self.lock if self.place is None else f"{self.lock}, place {self.place}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What the nemesis did from *began* to *ended*; *effect* is what the guarantees page promises.

    *told*: the seconds after its end within which the former holder has learnt that its lease is lost.
    """

    kind: str
    began: float
    ended: float
    effect: str
    target: str = ""
    told: float = 0.0


@dataclass(slots=True)
class Verdict:
    """The findings, and numbers for people."""

    findings: list[Finding] = field(default_factory=list)
    grants: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    #: Pairs of holders that were sure at once, as the page allows after some faults.
    allowed_pairs: int = 0
    #: Writes of claimed rows that were refused, for the fencing token of a later holder.
    refused_writes: int = 0
    #: Rows by kind: committed writes, and how many of them the row does not show.
    written: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    #: The longest time in seconds without a grant of a lock.
    longest_gap: float = 0.0


class Run:
    """A history, sorted by what the rules ask for."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.attempts: dict[str, Attempt] = {}
        self.faults = [
            Fault(
                kind=event["what"], **_fields(event, "began", "ended", "effect", "target", "told")
            )
            for event in events
            if event.kind == "fault"
        ]
        self.ended = {event.worker for event in events if event.kind == "ended"}
        for event in events:
            self._read(event)

    def of_kind(self, kind: str) -> Iterator[Event]:
        """Return the events of one kind."""
        return (event for event in self.events if event.kind == kind)

    @property
    def granted(self) -> list[Attempt]:
        """The attempts that were granted, in the order of their grants."""
        found = [each for each in self.attempts.values() if each.outcome == "got"]
        return sorted(found, key=lambda each: each.ended or 0.0)

    def by_lock(self) -> dict[str, list[Attempt]]:
        """Return what was granted, by the lock or the place of it."""
        found: defaultdict[str, list[Attempt]] = defaultdict(list)
        for each in self.granted:
            found[each.of_what].append(each)
        return dict(found)

    def frozen(self, worker: str, begin: float, end: float) -> float:
        """Return for how many seconds *worker* was stopped in that time."""
        return sum(
            max(0.0, min(end, fault.ended) - max(begin, fault.began))
            for fault in self.faults
            if fault.target == worker and fault.kind.startswith("holder stopped")
        )

    def _read(self, event: Event) -> None:
        id_ = event["id"]
        if event.kind == "asked":
            terms = _fields(event, "lock", "timeout", "shared", "limit")
            self.attempts[id_] = Attempt(id_, event.worker, asked=event.at, **terms)
        elif event.kind in OUTCOMES:
            attempt = self.attempts[id_]
            attempt.outcome, attempt.ended = event.kind, event.at
            attempt.token, attempt.place = event["token"], event["place"]
        elif event.kind == "checked":
            attempt = self.attempts[id_]
            if attempt.first_checked is None:
                attempt.first_checked = event.at
            attempt.last_checked = event.at
        elif event.kind == "left":
            self.attempts[id_].left = event.at


def _fields(event: Event, *names: str) -> dict[str, Any]:
    return {name: event[name] for name in names if event[name] is not None}


def check(events: Sequence[Event], *, unfenced: bool = False) -> Verdict:
    """Return what the history proves. *unfenced*: rows written without a fence must have lost nothing either."""
    run = Run(events)
    verdict = Verdict()
    for rule in (_exclusion, _tokens, _progress, _truth, _errors):
        verdict.findings += rule(run, verdict)
    verdict.findings += _rows(run, verdict, "unfenced" if unfenced else "")
    verdict.findings += _resources(run)
    _count(run, verdict)
    return verdict


def _exclusion(run: Run, verdict: Verdict) -> Iterator[Finding]:
    """No two holders of a lock, or of one of its places, are sure of it at once, unless both read."""
    for lock, granted in run.by_lock().items():
        for each in granted:
            if each.place is not None and each.limit is not None and each.place >= each.limit:
                yield Finding("exclusion", f"{lock!r} of {each.limit} was granted: {_named(each)}")
        sure = [each for each in granted if each.first_checked is not None]
        sure.sort(key=lambda each: each.first_checked or 0.0)
        open_ones: list[Attempt] = []
        for later in sure:
            open_ones = [
                each for each in open_ones if (each.last_checked or 0) > (later.first_checked or 0)
            ]
            for earlier in open_ones:
                if earlier.shared and later.shared:
                    continue
                if _is_allowed(run.faults, earlier, later):
                    verdict.allowed_pairs += 1
                else:
                    yield Finding("exclusion", _pair(lock, earlier, later))
            open_ones.append(later)


def _is_allowed(faults: Iterable[Fault], earlier: Attempt, later: Attempt) -> bool:
    """Return whether a fault gives both the lock; the former holder must have been told in time."""
    both_until = min(earlier.last_checked or 0.0, later.last_checked or 0.0)
    granted = max(earlier.ended or 0.0, later.ended or 0.0)
    return any(
        fault.effect in TWO_HOLDERS
        and fault.began <= granted
        and fault.ended >= min(earlier.asked, later.asked)
        and both_until <= fault.ended + fault.told
        for fault in faults
    )


def _pair(lock: str, earlier: Attempt, later: Attempt) -> str:
    both = min(earlier.last_checked or 0.0, later.last_checked or 0.0) - (
        later.first_checked or 0.0
    )
    return (
        f"{lock!r} had two holders for {both:.4f} s: {_named(earlier)}, sure from "
        f"{earlier.first_checked:.4f} to {earlier.last_checked:.4f}, and {_named(later)}, sure from "
        f"{later.first_checked:.4f} to {later.last_checked:.4f}"
    )


def _named(attempt: Attempt) -> str:
    return f"{attempt.worker}'s {attempt.id} (token {attempt.token})"


def _tokens(run: Run, verdict: Verdict) -> Iterator[Finding]:
    """Who asked after another had been granted has a higher token; no two have the same."""
    for lock, granted in run.by_lock().items():
        numbered = [each for each in granted if each.token is not None]
        numbered.sort(key=lambda each: (each.token or 0, each.ended or 0.0))
        latest: Attempt | None = None
        for each in numbered:
            if latest is not None and _falls(run.faults, each, latest):
                text = f"{lock!r}: {_named(latest)} asked after {_named(each)} was granted"
                yield Finding("tokens", text)
            if latest is None or each.asked > latest.asked:
                latest = each
        for one, other in pairwise(numbered):
            if one.token == other.token and not _may_fall(run.faults, one, other):
                yield Finding("tokens", f"{lock!r}: {_named(one)} and {_named(other)} are the same")


def _falls(faults: Iterable[Fault], before: Attempt, after: Attempt) -> bool:
    """Return whether *after*, which has the lower token, asked when *before* had been granted, and no faults explain it."""
    return (before.ended or 0.0) < after.asked and not _may_fall(faults, before, after)


def _may_fall(faults: Iterable[Fault], one: Attempt, other: Attempt) -> bool:
    begin, end = min(one.asked, other.asked), max(one.ended or 0.0, other.ended or 0.0)
    until_then = [fault for fault in faults if fault.began <= end]
    return any(
        fault.kind == SET_BACK and fault.ended >= begin - BEHIND for fault in until_then
    ) and any(fault.kind in LOSSES and fault.ended >= begin for fault in until_then)


def _progress(run: Run, verdict: Verdict) -> Iterator[Finding]:
    """Every attempt ends in time, and once the faults are over no lock is wanted in vain."""
    yield from _late(run)
    for event in run.of_kind("stuck"):
        yield Finding("progress", f"{event['lock']!r} was not free at the end: {event['why']}")
    for calm in run.of_kind("calm"):
        refused = {
            each.lock
            for each in run.attempts.values()
            if each.asked > calm.at and each.outcome == "refused"
        }
        held = {
            each.lock
            for each in run.granted
            if max(each.ended or 0.0, each.last_checked or 0.0) > calm.at
        }
        for lock in sorted(refused - held):
            yield Finding(
                "progress", f"{lock!r} was refused, and held by nobody, after the last fault"
            )


def _late(run: Run) -> Iterator[Finding]:
    for each in run.attempts.values():
        if each.ended is None:
            if each.worker in run.ended:
                yield Finding("progress", f"{each.worker}'s {each.id} had no outcome")
            continue
        took = each.ended - each.asked
        spare = LATE + run.frozen(each.worker, each.asked, each.ended)
        if took > each.timeout + spare:
            text = f"{each.worker}'s {each.id} took {took:.1f} s with a timeout of {each.timeout:g}"
            yield Finding("progress", text)


def _truth(run: Run, verdict: Verdict) -> Iterator[Finding]:
    """While the only server hangs nobody is granted, nor told that somebody else has the lock."""
    for fault in run.faults:
        if fault.kind != "server hangs":
            continue
        during = [
            each
            for each in run.attempts.values()
            if each.asked > fault.began and each.ended is not None and each.ended < fault.ended
        ]
        for each in during:
            if each.outcome == "got":
                yield Finding("truth", f"{_named(each)} was granted while the server hung")
            elif each.outcome == "refused" and not _has_rival(run, each):
                yield Finding("truth", f"{_named(each)} was refused while the server hung")


def _has_rival(run: Run, attempt: Attempt) -> bool:
    """Return whether another caller of the same process wanted or had the lock: it may be refused for that."""
    return any(
        each.id != attempt.id
        and (each.worker, each.lock) == (attempt.worker, attempt.lock)
        and each.asked <= (attempt.ended or 0.0)
        and (each.over is None or each.over >= attempt.asked)
        for each in run.attempts.values()
    )


def _errors(run: Run, verdict: Verdict) -> Iterator[Finding]:
    """What goes wrong is told by errors of this package alone."""
    for event in run.of_kind("broke"):
        yield Finding("errors", f"{event.worker}'s {event['id']}: {event['text']}")


def _rows(run: Run, verdict: Verdict, judged: str) -> Iterator[Finding]:
    """No update of a claimed row is lost: each was committed with a receipt, and the row counts them."""
    for event in run.of_kind("row"):
        kind, receipts, counted = event["row"], event["receipts"], event["counted"]
        verdict.written[kind] += receipts
        verdict.lost[kind] += receipts - counted
        if receipts != counted and kind in ("claimed", judged):
            text = f"the {kind} row of {event['lock']!r} shows {counted} of {receipts} updates"
            yield Finding("lost updates", text)


def _resources(run: Run) -> Iterator[Finding]:
    """The processes that lived to the end use no more at the end than when they were young."""
    began = {event.worker: event.at for event in run.of_kind("began")}
    used: defaultdict[str, list[Event]] = defaultdict(list)
    for event in run.of_kind("uses"):
        if event.worker in run.ended and event.at - began[event.worker] >= YOUNG:
            used[event.worker].append(event)
    for worker, samples in used.items():
        third = len(samples) // 3
        if third < 3:
            continue
        for what, more in (("descriptors", MORE), ("threads", MORE), ("memory", MORE_MEMORY)):
            first, last = (_median(part, what) for part in (samples[:third], samples[-third:]))
            if last > first + more:
                yield Finding("resources", f"{worker} used {first} {what} first, and {last} last")


def _median(samples: Sequence[Event], what: str) -> int:
    found = sorted(int(event[what]) for event in samples)
    return found[len(found) // 2]


def _count(run: Run, verdict: Verdict) -> None:
    verdict.outcomes.update(each.outcome or "none" for each in run.attempts.values())
    verdict.grants = verdict.outcomes["got"]
    verdict.errors.update(event["error"] for event in run.of_kind("failed"))
    verdict.faults.update(fault.kind for fault in run.faults)
    verdict.refused_writes = sum(1 for _ in run.of_kind("stale"))
    for granted in run.by_lock().values():
        gaps = ((after.ended or 0) - (before.ended or 0) for before, after in pairwise(granted))
        verdict.longest_gap = max(verdict.longest_gap, *gaps, 0.0)
