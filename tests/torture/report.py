"""The page of the documentation that a run writes: what was tortured, with what, and what was found."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.torture.matrix import IN_TRANSACTION, MET, is_test

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.torture.run import Result

INTRODUCTION = """\
# What happens under torture

`make torture` runs locks on real servers while processes, lines and servers fail, and checks afterwards that no promise was broken.
This page was written by the run that it tells of: `python -m tests.torture --report docs/explanation/torture.md`.

## How it works

On each backend, four processes with two threads and two asyncio tasks each take the same six locks: exclusive ones, one with readers, one with a limit of two.
Holders update two rows of a database that no fault reaches: one after a `check()`, and one through `claim()`.
Some attempts are cancelled, some holders keep the lock until it has been renewed.

Meanwhile a *nemesis* kills and stops processes, cuts and delays their lines, and loses replies.
It kills, hangs and restarts the servers, sets their clocks, and has an operator purge records and free locks that are held.
Two of the four processes reach the server by lines that can be broken, and one has a wall clock that is wrong.
The seed decides which faults come in which order; how the processes get on is decided by the machine.

Each process appends what it sees to a file of its own, which survives its death.
A checker then reads these files, and nothing else:

- **Exclusion**: no two holders are sure of a lock at the same time. A holder is sure from its first `check()` that passes to its last, which is more careful than the processes themselves: a pause between the check and the writing down counts for nobody.
- **Tokens** rise: a process that asked after another had been granted has a higher one.
- **Lost updates**: each update is committed with a receipt, and a claimed row shows all of them.
- **Progress**: each attempt ends within its timeout, and once the faults are over, no lock is refused that nobody holds, and each is free at the end.
- **Truth**: nobody is granted a lock by a server that hangs, nor told that somebody else has it.
- **Errors** are those of this package, and **resources** (descriptors, threads, memory) are flat.

After a fault for which [the guarantees](guarantees.md#what-each-fault-leads-to) say F or B, two holders at once are allowed, for at most one ttl; they are counted.
The checker is tested on histories made by hand, good and bad, and by two controls that it must find: no lock at all, and a lock whose holders are stopped for longer than the ttl and write without a check or a fence.
A short run is part of `make test`.

### Loss of power

The arenas `sqlite-power`, `postgres-power`, `redis-power` and `redis-power-wait-disk` have their data on a disk of their own: an ext4 file system in a file.
At a random moment the file system is told to stop (`EXT4_IOC_SHUTDOWN`, without a last write of its journal), and the server is killed.
What was not fsynced is gone, except that some files, chosen by chance, had been written back before, as a kernel does.
The disk is mounted again, which replays its journal, and the server starts again with what is left.

On SQLite the machine that loses its power is that of the workers: all of them are killed, and others start.
The clients of PostgreSQL have `synchronous_commit = off`, which leases must overrule.
`redis-power` has `appendfsync always`; the other one has `everysec` and the option `wait_disk`, and needs Redis 8.
Leases last 4 seconds there, except on SQLite, so that most of them outlive the restart, and their loss would be seen.

This takes root on Linux, and `make histories` says why an arena is left out.

## Check it yourself

`make histories` runs the torture on every backend, and keeps what the processes wrote in `histories/`, in a folder named after the release and the seed: one compressed file of JSON lines for each backend.
Each release publishes that folder with its other files; the first line of each file has the release, the seed, the day and the versions of all software.

```shell
tools/check-history histories/*/*.jsonl.gz
```

This second checker needs Python and nothing else: no server, and not this package.
It was written from the description of the format (`tests/torture/README.md` in the repository) alone, without the code of the first one, and looks at the intervals in which holders were sure, at the order of tokens and at each value of the claimed rows.
Twenty-seven mistakes are planted in a recorded history, and it must find each of them: a release that does not compare the owner, a lease that is renewed after its loss, a deadline that counts from the reply, a token that falls, a value that is written twice.
"""
RESULTS = (
    "Backend",
    "Seconds",
    "Grants",
    "Refused",
    "Errors",
    "Faults",
    "Two holders, as allowed",
    "Writes refused by the fence",
    "Lost updates of claimed rows",
    "Lost updates of other rows",
    "Broken promises",
)
CONTROLS = """
The controls, in which the checker must find what is wrong:
"""
FOUND = """
To see that it finds what it is for, four protections were taken out of a copy of the code, one at a time, and a run of less than a minute found each:
a `check()` that does not compare the clock, and a renewal that reports a lost lease as extended (two holders), a token that is a plain counter (tokens that fall), and a write that does not compare the fence (lost updates).

On 28 November 2026, `tools/check-history` and the checker of the torture agreed on short runs on 14 backends (no broken promise), on both controls, and on runs with six mistakes in the code of Redis or the engine: each found all six, with the same number of pairs of holders.
The mistakes: a release that compares no owner, a writer beside readers, a token that is a plain counter, a save that compares no fence, a `check()` that does not compare the clock, and a refused renewal that counts as an extension.
A deadline that counts from the reply was found by neither in runs of 15 seconds; [the model](model.md) and [the simulation](simulation.md) find it.

On 28 November 2026, the arenas that lose their power ran for five minutes each, with the seed 71, beside other work of the machine, and broke no promise:
PostgreSQL 15.18 (113 cuts, 1,189 holds), Redis 8.0.2 with `wait_disk` and `appendfsync everysec` (128 cuts, 715 holds), and SQLite 3.40.1 (65 cuts, 6,754 holds).
What was planted:

- PostgreSQL with `fsync=off` did not start again after the first cut. Leases that leave `synchronous_commit = off` as it is had two holders 12 times in 28 cuts.
- Redis with `appendfsync everysec` alone gave a lock to two holders 9 times in 34 cuts.
- SQLite with tokens that are a plain counter: 674 tokens fell in 9 cuts.

With `synchronous = OFF`, SQLite lost its tables if they were new, and nothing was found in 26 cuts if they were not: the holders end with their machine, tokens rise by its clock, and so small a file is hardly ever torn.

Earlier runs have found three mistakes in the code, which are mended (the runs of these backends above were made after that):

- etcd: a key that was given up twice, by the end of its ttl and by a release that was under way, freed its name twice; two holders of one process could then have one key, with the same token.
- etcd: a session that had ended by the clock of the process, while the request to prolong it was under way, came back with the keys of locks that were lost.
- Row locks and advisory locks: `check()` passed for up to a second after the end of the connection had reached the process.

And what the pages did not say, and say now:

- On Redlock, one clock that jumps ahead is enough for two holders where the first had just a majority; the page spoke of the clocks of a majority.
- A row lock or an advisory lock has two holders for a moment if the server sees the end of the connection before the holder does; the page said so of restarts alone.
- PostgreSQL ends silent sessions by its wall clock, so a jump ahead can end the session of such a lock early; the page said that it makes no difference.
- On Redis, a token can fall when the server loses its data while its clock, which was set back, is behind the last token; the page spoke of purged rows alone.
"""
FAULTS = """
## The faults

"""
ROWS = """
## The rows of the fault matrix

Each fault of [the guarantees](guarantees.md#what-each-fault-leads-to) is met by the nemesis, by tests that bring it about alone, or by both.

"""
NOT_REACHED = """
Not reached by the nemesis: the clocks of etcd and of MariaDB, which cannot be set for one process alone; [locks in your transaction](transactions.md), which have tests of their own; and the loss of power on servers other than PostgreSQL, Redis and SQLite.
"""


def page(results: Sequence[Result], controls: Sequence[Result]) -> str:
    """Return the page of these *results*, and of *controls*, in which findings are expected."""
    parts = [INTRODUCTION, _run(results), _results(results)]
    if controls:
        parts += [CONTROLS, _controls(controls)]
    parts += [_findings(results), FOUND, FAULTS, _faults(results), ROWS, _rows(), NOT_REACHED]
    return "".join(parts)


def _run(results: Sequence[Result]) -> str:
    minutes = sum(result.seconds for result in results) / 60
    grants = sum(result.verdict.grants for result in results)
    faults = sum(result.verdict.faults.total() for result in results)
    versions = sorted({version for result in results for version in result.versions})
    return f"""
## The run of {results[0].day}

Seed {results[0].seed}, {minutes:.0f} minutes in all: {grants:,} grants and {faults:,} faults.
{"; ".join(versions)}.

"""


def _results(results: Sequence[Result]) -> str:
    lines = [_line(RESULTS), "|" + "---|" * len(RESULTS)]
    for result in results:
        verdict = result.verdict
        cells = (
            result.name,
            f"{result.seconds:.0f}",
            f"{verdict.grants:,}",
            f"{verdict.outcomes['refused']:,}",
            f"{verdict.outcomes['failed']:,}",
            verdict.faults.total(),
            verdict.allowed_pairs,
            verdict.refused_writes,
            _lost(result, "claimed"),
            _lost(result, "unfenced"),
            len(verdict.findings),
        )
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def _lost(result: Result, kind: str) -> str:
    written = result.verdict.written[kind]
    return f"{result.verdict.lost[kind]} of {written:,}" if written else "none"


def _controls(controls: Sequence[Result]) -> str:
    lines = ["| Control | Grants | Found | Lost updates |", "|---|---|---|---|"]
    for result in controls:
        found = Counter(finding.rule for finding in result.verdict.findings)
        told = ", ".join(f"{rule} {count:,}" for rule, count in sorted(found.items()))
        cells = (result.name, f"{result.verdict.grants:,}", told, _lost(result, "unfenced"))
        lines.append(_line(cells))
    return "\n" + "\n".join(lines) + "\n"


def _findings(results: Sequence[Result]) -> str:
    found = [(result.name, finding) for result in results for finding in result.verdict.findings]
    if not found:
        return "\nNo promise was broken.\n"
    lines = [f"- {name}: {str(finding).strip().splitlines()[0]}" for name, finding in found]
    return "\nBroken promises:\n\n" + "\n".join(lines) + "\n"


def _faults(results: Sequence[Result]) -> str:
    kinds = sorted({kind for result in results for kind in result.verdict.faults})
    lines = ["| Fault | Times | On |", "|---|---|---|"]
    for kind in kinds:
        on = {result.name: result.verdict.faults[kind] for result in results}
        where = [name for name, times in on.items() if times]
        told = "all" if len(where) == len(results) else ", ".join(where)
        lines.append(_line((kind, sum(on.values()), told)))
    return "\n".join(lines) + "\n"


def _rows() -> str:
    lines = ["| Row | Faults of the nemesis | Tests |", "|---|---|---|"]
    for row, met in MET.items():
        faults = [each for each in met if not is_test(each)]
        lines.append(_line((row, ", ".join(faults), _named(filter(is_test, met)))))
    lines.append(_line(("the column *in your transaction*", "", _named(IN_TRANSACTION))))
    return "\n".join(lines) + "\n"


def _named(tests: Iterable[str]) -> str:
    return ", ".join(f"`{test.partition('::')[2]}`" for test in tests)


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |")
