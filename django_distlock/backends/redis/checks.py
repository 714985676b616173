"""What `manage.py check` says of a Redis that holds locks."""

from __future__ import annotations

from django.core.checks import CheckMessage, Error, Warning as CheckWarning

from django_distlock.engine.naming import printable

from .cluster import ClusterLink
from .connections import Conversation, PoolLink

#: BLPOP takes fractions of a second, and EVALSHA's effects are replicated, not the script.
OLDEST = (6, 0)


def check_facts(
    where: str, link: PoolLink | ClusterLink, *, allow_eviction: bool
) -> list[CheckMessage]:
    facts = link.converse(_facts())
    if isinstance(facts, Exception):
        text = f"{where}: its version and its maxmemory-policy are not known, since it refused INFO: {printable(str(facts))}"
        return [CheckWarning(text, hint="Let the user run INFO.", id="distlock.W020")]
    found: list[CheckMessage] = []
    version, policy = facts.get("redis_version", ""), facts.get("maxmemory_policy", "noeviction")
    if version and tuple(map(int, version.split(".")[:2])) < OLDEST:
        text = f"{where}: Redis {printable(version)} is too old."
        hint = "Use Redis 6.0 or later, or Valkey."
        found.append(Error(text, hint=hint, id="distlock.E020"))
    if policy == "noeviction":
        return found
    text = f"{where}: the server's maxmemory-policy is {printable(policy)}: it drops locks that are held when its memory is full."
    if allow_eviction:
        return [*found, CheckWarning(text, hint="Two holders are possible.", id="distlock.W021")]
    hint = (
        "Set it to noeviction, give locks a server of their own, or, if two holders at once are "
        "bearable, set OPTIONS 'allow_eviction': True."
    )
    return [*found, Error(text, hint=hint, id="distlock.E021")]


def _facts() -> Conversation[dict[str, str] | Exception]:
    (answer,) = yield (("INFO",),)
    if isinstance(answer, Exception):
        return answer
    if isinstance(answer, dict):  # as a cluster's client has read it already
        first = next(iter(answer.values()))
        return {
            name: str(value)
            for name, value in (first if isinstance(first, dict) else answer).items()
        }
    lines = answer.decode().splitlines() if isinstance(answer, bytes) else ()
    return dict(line.partition(":")[::2] for line in lines if ":" in line)
