"""What to write instead of keyword arguments that other libraries have."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

#: The advice for words of redis-py, django-redis, python-redis-lock, django-pglock, sherlock, pottery and others.
_ADVICE = {
    "use ttl": "expire expires expires_in expiry expire_time ex px lease lease_time lifetime lock_timeout lock_ttl "
    "auto_release_time max_age",
    "use timeout": "blocking_timeout wait wait_timeout wait_time max_wait acquire_timeout context_manager_timeout "
    "retry retries retry_count retry_times",
    "use timeout=0 to try once": "blocking block nowait no_wait non_blocking context_manager_blocking skip_locked",
    "use renew": "auto_renewal auto_renew auto_extend auto_refresh num_extensions keepalive keep_alive watchdog",
    "use max_hold": "lock_at_most_for max_lifetime",
    "use min_hold": "lock_at_least_for",
    "use using": "alias backend client connection database db redis cache masters",
    "use purpose": "reason description comment",
    'use release="on_commit"': "on_commit",
    "use transaction_lock()": "xact",
    "use on_busy of distributed_lock()": "side_effect policy graceful suppress_acquisition_exceptions",
    "use KEY_PREFIX in DISTLOCK": "namespace prefix key_prefix version",
    "leave it out: waiters are woken": "sleep sleep_time interval poll_interval retry_interval retry_delay",
    "leave it out: every lease has a secret owner": "id token owner identifier",
    "leave it out": "thread_local strict signal_expire raise_on_release_error raise_on_redis_errors ephemeral",
}


def unknown_word(
    call: str, word: str, known: Collection[str], of_lock: Collection[str] = ()
) -> TypeError:
    """Return the error for *word*, which *call* does not have, with what to write instead.

    *known* are the words that it has, *of_lock* those that only lock() has.
    """
    near = get_close_matches(word, {*known, *of_lock}, 1)
    advice = f"use {near[0]}" if near else f"it takes {', '.join(sorted(known))}"
    advice = next((to for to, words in _ADVICE.items() if word in words.split()), advice)
    if advice.removeprefix("use ").partition("=")[0] in of_lock:
        advice += " of lock()"
    return TypeError(f"{call} has no {word!r}; {advice}")
