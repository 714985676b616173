"""How each row of the fault matrix is met: by what the nemesis does, or by tests that do it alone.

The rows are those of docs/explanation/guarantees.md; a test compares them.
"""

from __future__ import annotations

from tests.fixtures.pages import DOCS, section

GUARANTEES = DOCS / "explanation" / "guarantees.md"
HEADING = "## What each fault leads to"
DEATH = "tests/contract/test_death.py"
ETCD = "tests/backends/test_etcd_session.py"
FAULTS = "tests/backends/test_database_faults.py"
TRANSACTION = "tests/backends/test_transaction_lock.py"

#: By row: kinds of faults of the nemesis, and tests.
MET: dict[str, tuple[str, ...]] = {
    "holder killed": ("holder or waiter killed",),
    "holder's thread or task ends without releasing": (
        f"{DEATH}::test_the_lock_of_a_dead_thread_comes_free_soon",
        f"{DEATH}::test_the_lock_of_a_finished_task_comes_free_soon",
    ),
    "holder stopped for less than the ttl": ("holder stopped for less than the ttl",),
    "holder stopped for longer": ("holder stopped for longer",),
    "holder cut off from the server": (
        "holder cut off from the server",
        "holder cut off without a word",
        "slow line",
    ),
    "waiter dies": (
        "holder or waiter killed",
        f"{DEATH}::test_a_waiter_gets_the_lock_of_a_killed_process",
    ),
    "server restarts and has kept all its data": (
        "server restarts and has kept all its data",
        "power lost",
        "the leader of ZooKeeper or etcd is killed",
        "one of three members is killed",
        "two of three members are killed",
    ),
    "server restarts and has lost its last writes": (
        "server restarts and has lost its last writes",
    ),
    "fail-over to an asynchronous replica": ("fail-over to an asynchronous replica",),
    "server hangs": (
        "server hangs",
        "two of five servers hang",
        "one of three members hangs",
        "one of three members is cut off from the others",
    ),
    "leader or server paused for longer than the session, as by a snapshot of its virtual machine": (
        "server hangs",
        f"{ETCD}::test_a_leader_that_was_paused_takes_no_lock_from_a_holder_that_is_not_told",
    ),
    "reply lost": ("reply lost",),
    "client's clock is wrong or is set": ("client's clock is wrong or is set",),
    "server's clock jumps ahead by more than the lease has left": ("server's clock jumps ahead",),
    "server's clock is set back": (
        "server's clock is set back",
        f"{FAULTS}::test_token_rises_though_the_clock_of_the_server_was_put_back",
    ),
    "purge of stale rows": ("purge of stale rows",),
    "eviction, `FLUSHALL`": ("eviction, `FLUSHALL`",),
    "fork, cancelled task, signal, error in the body": (
        f"{DEATH}::test_a_forked_child_inherits_nothing_and_frees_nothing",
        "tests/contract/test_cancellation.py::test_a_task_cancelled_at_any_moment_of_its_acquire_leaves_nothing",
        "tests/contract/test_interruption.py::test_an_exception_at_any_step_of_an_acquire_goes_up_and_leaves_nothing",
        "tests/contract/test_masking.py::test_lost_and_an_error_raises_the_error_with_a_note",
    ),
}
#: The column "in your transaction", whose lock is no lease, is met by tests alone.
IN_TRANSACTION = (
    f"{TRANSACTION}::test_a_lock_in_the_transaction_loses_none",
    f"{TRANSACTION}::test_ctrl_c_ends_the_wait_for_it_and_the_transaction",
)


def rows() -> list[str]:
    """Return the faults that the guarantees page lists, without links and details."""
    lines = section(GUARANTEES, HEADING).splitlines()
    first = (line.split(" | ")[0].removeprefix("| ") for line in lines if line.count(" | ") > 4)
    named = (each.partition(", and [")[0].strip() for each in first)
    return [*dict.fromkeys(each for each in named if each != "Fault")]


def is_test(name: str) -> bool:
    """Return whether this way to meet a row is a test."""
    return name.startswith("tests/")
