"""Where a run takes place: a backend, its servers, the lines to them, and what may happen to them."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import redis as driver

from django_distlock.ground import clock
from testproject.redis_aliases import HOST, cluster_cache, five_caches, sentinel_cache
from tests.contract.profiles import (
    ADVISORY,
    BY_CACHE,
    DATABASE,
    ETCD,
    LOCMEM,
    REDLOCK,
    ROWLOCK,
    ZOOKEEPER,
)
from tests.fixtures.environment import free_port, sqlite_path
from tests.fixtures.etcd import Cluster
from tests.fixtures.eventually import eventually
from tests.fixtures.folders import private_folder
from tests.fixtures.galera import PACKAGES, SUSPECT, Galera, is_installed
from tests.fixtures.mariadb import MariaDB
from tests.fixtures.postgres import PostgreSQL
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import Redis, Replicated, Sentinel
from tests.fixtures.redis_servers import AT_ONCE, cluster_node, make_cluster
from tests.fixtures.servers import Server
from tests.fixtures.zookeeper import Ensemble
from tests.torture.clocks import (
    ClockedMember,
    ClockedMemcached,
    ClockedPostgreSQL,
    ClockedRedis,
    HasClock,
)
from tests.torture.power import Disk, LeftOut, PoweredPostgreSQL, PoweredRedis

if TYPE_CHECKING:
    from collections.abc import Iterator

REDIS = "django_distlock.backends.redis.RedisBackend"
DUMMY = "django_distlock.backends.dummy.DummyBackend"
#: Seconds that a clock is set ahead or back.
STEP = 3.0
#: Seconds for which a server hangs.
HANG = 2.0
#: What is said of sessions that hold locks.
SESSION: dict[str, Any] = {"shared": True, "effect_of_cut": "F", "effect_of_lost_reply": "F"}
#: An error within so many seconds tells of a server that hangs.
IO = {"io_timeout": 1.0}
#: Many a lease outlives a restart of the server, and a loss of it would be seen.
LONG: dict[str, Any] = {"ttl": 4.0, "work": 0.5, "free_within": 8.0}
POWER_LOST = "power lost"


@dataclass(frozen=True, slots=True)
class Blow:
    """One kind of fault of the servers; *kind* is what the guarantees page calls it, *effect* what it promises."""

    kind: str
    effect: str
    #: It may return from when to when it was surely in force.
    strike: Callable[[random.Random], tuple[float, float] | None]


@dataclass(slots=True)
class Arena:
    """One backend as workers use it, and the faults that its servers can have.

    *alias* are its settings in DISTLOCK; *lined*: the same by lines that the nemesis can break.
    """

    alias: dict[str, Any]
    ttl: float = 1.0
    lined: dict[str, Any] = field(default_factory=dict)
    lines: list[Proxy] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)
    databases: dict[str, dict[str, Any]] = field(default_factory=dict)
    lined_databases: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: If each worker is to reach another server: the databases of the first one, of the second one, and so on.
    spread: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)
    migrated: list[str] = field(default_factory=list)
    fencing: bool = True
    shared: bool = False
    purge: bool = False
    listing: bool = True
    #: What happens if a connection ends, or a reply is lost with it: a session holds the lock no longer.
    effect_of_cut: str = "V"
    effect_of_lost_reply: str = "X"
    #: All workers lose their power with this one.
    disk: Disk | None = None
    #: Has the tables on the disk before anything happens to it.
    settle: Callable[[], object] = lambda: None
    #: The backend works in one process alone.
    alone: bool = False
    #: Rows are written without a check and without a fence.
    careless: bool = False
    workers: int = 4
    #: Seconds between reading a row and writing it.
    work: float = 0.003
    #: The only kind of fault of workers; all of them if it is empty.
    only: str = ""
    #: Seconds until the lock of a killed holder is free.
    free_within: float = 3.0
    #: Seconds that a caller rests at most after each attempt.
    pause: float = 0.02
    #: Seconds without faults at the end, in which every lock must be granted.
    calm: float = 3.0
    versions: list[str] = field(default_factory=list)


#: Makes an arena, and ends its servers.
Make = Callable[[], AbstractContextManager[Arena]]


def postgres_database(port: int | str, host: str = HOST, **options: Any) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": host,
        "PORT": str(port),
        "NAME": "distlock",
        "USER": "distlock",
        "PASSWORD": "distlock",
        "OPTIONS": options,
    }


def _mariadb(port: int) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.mysql",
        "HOST": HOST,
        "PORT": str(port),
        "NAME": "distlock",
        "USER": "distlock",
        "PASSWORD": "distlock",
        "OPTIONS": {"charset": "utf8mb4", "ssl_disabled": True},
    }


# What happens to servers.


def _restart(server: Server, _random: random.Random) -> None:
    server.stop()
    server.start()


def _crash(server: Server, _random: random.Random) -> None:
    server.kill()
    server.start()


def _hang(server: Server, chance: random.Random) -> tuple[float, float]:
    server.pause()
    began = clock.lease_time()
    time.sleep(HANG * (0.7 + chance.random()))
    ended = clock.lease_time()
    server.resume()
    return began, ended


def _step_clocks(servers: list[HasClock], seconds: float, _random: random.Random) -> None:
    for server in servers:
        server.clock.set(seconds)
    time.sleep(1.5)


def _crash_all(ensemble: Ensemble | Cluster, _random: random.Random) -> None:
    for member in ensemble.members:
        member.kill()
    ensemble.start()


def _lose_one(ensemble: Ensemble | Cluster, what: str, chance: random.Random) -> None:
    member = ensemble.leader if what == "leader" else chance.choice(ensemble.members)
    member.kill()
    time.sleep(0.5 + chance.random())
    ensemble.start()


def _ensemble_blows(ensemble: Ensemble | Cluster) -> list[Blow]:
    lose = partial(_lose_one, ensemble)
    return [
        Blow("the leader of ZooKeeper or etcd is killed", "X", partial(lose, "leader")),
        Blow("one of three members is killed", "X", partial(lose, "any")),
        Blow("server restarts and has kept all its data", "X", partial(_crash_all, ensemble)),
    ]


def _clock_blows(servers: list[HasClock], ahead: str) -> list[Blow]:
    """Two blows: ahead, and back again; one that is back twice, or ahead twice, is not set at all."""
    return [
        Blow("server's clock jumps ahead", ahead, partial(_step_clocks, servers, STEP)),
        Blow("server's clock is set back", "X", partial(_step_clocks, servers, 0.0)),
    ]


# Databases.


@contextmanager
def memory() -> Iterator[Arena]:
    """Locks in memory: one process."""
    yield Arena({"BACKEND": LOCMEM}, alone=True, workers=1, shared=True)


@contextmanager
def sqlite(path: str = "", synchronous: str = "NORMAL", **arena: Any) -> Iterator[Arena]:
    """Leases in a file of SQLite."""
    import sqlite3

    database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path or sqlite_path(),
        "OPTIONS": {
            "timeout": 20,
            "init_command": f"PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous}",
        },
    }
    yield Arena(
        {"BACKEND": DATABASE, "OPTIONS": {"using": "locks"}},
        databases={"locks": database},
        migrated=["locks"],
        versions=[f"SQLite {sqlite3.sqlite_version}"],
        **arena,
    )


@contextmanager
def sqlite_power(synchronous: str = "NORMAL") -> Iterator[Arena]:
    """Leases in a file of SQLite, on a machine whose power is cut."""
    with ExitStack() as stack:
        folder = private_folder("power")
        stack.callback(shutil.rmtree, folder)
        disk = Disk(folder)
        stack.callback(disk.close)
        # The operator has no power cut, and so must leave the file alone.
        quiet = {"listing": False, "disk": disk, "settle": disk.sync}
        yield stack.enter_context(sqlite(str(folder / "locks.sqlite3"), synchronous, **quiet))


@contextmanager
def _on_postgres(backend: str, blows: str, **arena: Any) -> Iterator[Arena]:
    """*blows*: the effect of a restart."""
    options = arena.pop("options", {})
    with ClockedPostgreSQL() as server, Proxy(server.port) as line:
        with server.admin() as admin:
            [version] = admin.execute("SHOW server_version").fetchone() or [""]
        yield Arena(
            {"BACKEND": backend, "OPTIONS": {"using": "locks", **IO, **options}},
            databases={"locks": postgres_database(server.port)},
            lined_databases={"locks": postgres_database(line.port)},
            lines=[line],
            migrated=["locks"],
            blows=[
                Blow("server restarts and has kept all its data", blows, partial(_restart, server)),
                Blow("server restarts and has kept all its data", blows, partial(_crash, server)),
                Blow("server hangs", "X", partial(_hang, server)),
                *_clock_blows([server], "F"),
            ],
            versions=[f"PostgreSQL {version.split()[0]}", f"psycopg {psycopg.__version__}"],
            **arena,
        )


@contextmanager
def postgres_power(**settings: str) -> Iterator[Arena]:
    """Leases on a PostgreSQL whose power is cut, and whose clients do not wait for its disk of their own accord."""
    lazy = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    quick = {"recovery_init_sync_method": "syncfs"}
    settings = {"fsync": "on", **lazy, **quick, **settings}
    with PoweredPostgreSQL(settings=settings) as server:
        with server.admin() as admin:
            [version] = admin.execute("SHOW server_version").fetchone() or [""]
        yield Arena(
            {"BACKEND": DATABASE, "OPTIONS": {"using": "locks", **IO}},
            databases={"locks": postgres_database(server.port)},
            migrated=["locks"],
            settle=partial(_checkpoint, server),
            purge=True,
            blows=[Blow(POWER_LOST, "X", server.lose_power)],
            versions=[f"PostgreSQL {version.split()[0]}", f"psycopg {psycopg.__version__}"],
            **LONG,
        )


def _checkpoint(server: PostgreSQL) -> None:
    with server.admin() as admin:
        admin.execute("CHECKPOINT")


class Standby(PostgreSQL):
    """A PostgreSQL that follows *primary*, asynchronously, until it is promoted."""

    def __init__(self, primary: PostgreSQL, port: int | None = None) -> None:
        super().__init__(port)
        self._primary = primary

    def prepare(self) -> None:
        """Copy the primary."""
        copy = self.binary("/usr/lib/postgresql/*/bin/pg_basebackup", "pg_basebackup")
        source = f"host={HOST} port={self._primary.port} user=postgres"
        target = f"--pgdata={self.folder / 'data'}"
        options = ["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"]
        self.run(copy, f"--dbname={source}", target, *options)

    def after_first_start(self) -> None:
        """See Server.after_first_start(): all was copied."""

    def promote(self) -> None:
        """Make it the primary, and return once it writes."""
        with self.admin() as admin:
            admin.execute("SELECT pg_promote()")
            ask = "SELECT pg_is_in_recovery()"
            eventually(lambda: admin.execute(ask).fetchone() == (False,), 20, "a new primary")


class Pair:
    """A primary and its standby; a fail-over kills the one, promotes the other, and makes a new standby."""

    def __init__(self) -> None:
        self.ports = [free_port(), free_port()]
        self.primary: PostgreSQL = PostgreSQL(self.ports[0])
        self.primary.start()
        self.standby = Standby(self.primary, self.ports[1])
        self.standby.start()

    def fail_over(self, _random: random.Random) -> None:
        """Lose the primary."""
        port = self.primary.port
        self.primary.close()
        self.standby.promote()
        self.primary = self.standby
        self.standby = Standby(self.primary, port)
        self.standby.start()

    def close(self) -> None:
        """End both."""
        self.standby.close()
        self.primary.close()


@contextmanager
def postgres_standby() -> Iterator[Arena]:
    """Leases on a PostgreSQL with an asynchronous standby."""
    pair = Pair()
    try:
        ports = ",".join(map(str, pair.ports))
        with pair.primary.admin() as admin:
            [version] = admin.execute("SHOW server_version").fetchone() or [""]
        yield Arena(
            {"BACKEND": DATABASE, "OPTIONS": {"using": "locks", **IO}},
            databases={
                "locks": postgres_database(
                    ports, f"{HOST},{HOST}", target_session_attrs="read-write"
                )
            },
            migrated=["locks"],
            purge=True,
            blows=[Blow("fail-over to an asynchronous replica", "F", pair.fail_over)],
            versions=[f"PostgreSQL {version.split()[0]} with a standby"],
        )
    finally:
        pair.close()


@contextmanager
def _on_mariadb(backend: str, restart: str, **arena: Any) -> Iterator[Arena]:
    with MariaDB() as server, Proxy(server.port) as line:
        yield Arena(
            {"BACKEND": backend, "OPTIONS": {"using": "locks", **IO}},
            ttl=2.0,
            free_within=5.0,
            databases={"locks": _mariadb(server.port)},
            lined_databases={"locks": _mariadb(line.port)},
            lines=[line],
            migrated=["locks"],
            blows=[
                Blow("server restarts and has kept all its data", restart, partial(_crash, server)),
                Blow("server hangs", "X", partial(_hang, server)),
            ],
            versions=[_mariadb_version(server)],
            **arena,
        )


def _mariadb_version(server: MariaDB) -> str:
    with server.admin() as admin, admin.cursor() as cursor:
        cursor.execute("SELECT version()")
        [version] = cursor.fetchone()
    return f"MariaDB {version.partition('-')[0]}"


# Galera.


def _kill_some(cluster: Galera, number: int, chance: random.Random) -> None:
    """Kill so many nodes at once; some of them come back without their data, if another one has it."""
    killed = chance.sample(cluster.members, number)
    for node in killed:
        node.kill()
    time.sleep(2 * SUSPECT * chance.random())
    if number < len(cluster.members) and chance.random() < 0.3:
        killed[0].empty()
    cluster.start()


def _hang_one(cluster: Galera, chance: random.Random) -> None:
    """Stop a node for less or for more than the others wait for it."""
    node = chance.choice(cluster.members)
    node.pause()
    time.sleep(SUSPECT * chance.choice((0.5, 3.0)))
    node.resume()
    cluster.wait_until_serving()


def _cut_one_off(cluster: Galera, chance: random.Random) -> None:
    node = chance.choice(cluster.members)
    node.isolate(isolated=True)
    time.sleep(SUSPECT * chance.choice((0.5, 3.0)))
    node.isolate(isolated=False)
    cluster.wait_until_serving()


def _fail_over(cluster: Galera, lines: list[Proxy], chance: random.Random) -> None:
    """Lose the node that all use, by its death or because it hangs, and let all use the next one."""
    former, *_ = cluster.members
    cluster.members.append(cluster.members.pop(0))
    is_killed = chance.random() < 0.5
    former.kill() if is_killed else former.pause()
    for line in lines:
        line.aim_at(cluster.members[0].port)
        line.cut()
        line.pass_through()
    time.sleep(2 * SUSPECT * chance.random())
    if not is_killed:
        former.resume()
    cluster.start()


@contextmanager
def _on_galera(*, all_write: bool, sync_wait: int) -> Iterator[Arena]:
    """Leases on three nodes, to which the workers write, or on one of them until it is lost."""
    if not is_installed():
        raise LeftOut(f"it needs tools/install-debian-packages {PACKAGES}")
    with ExitStack() as stack:
        cluster = stack.enter_context(Galera(wsrep_sync_wait=sync_wait))
        nodes = cluster.members
        direct, *lines = [
            stack.enter_context(Proxy(node.port)) for node in (nodes[0], nodes[1], nodes[0])
        ]
        ways = [nodes[0].port, lines[0].port, nodes[2].port, lines[1].port]
        if not all_write:
            ways = [direct.port, lines[1].port]
        blows = [
            Blow("one of three members is killed", "X", partial(_kill_some, cluster, 1)),
            Blow("two of three members are killed", "X", partial(_kill_some, cluster, 2)),
            Blow("server restarts and has kept all its data", "X", partial(_kill_some, cluster, 3)),
            Blow("one of three members hangs", "X", partial(_hang_one, cluster)),
            Blow(
                "one of three members is cut off from the others",
                "X",
                partial(_cut_one_off, cluster),
            ),
        ]
        if not all_write:
            over = partial(_fail_over, cluster, [direct, lines[1]])
            blows.append(Blow("fail-over to another member", "X", over))
        [provider, *_] = nodes[0].status["wsrep_provider_version"].split("(")
        yield Arena(
            {"BACKEND": DATABASE, "OPTIONS": {"using": "locks", **IO}},
            ttl=4.0,
            free_within=15.0,
            databases={"locks": _mariadb(ways[0])},
            spread=[{"locks": _mariadb(port)} for port in ways],
            lines=lines if all_write else [lines[1]],
            migrated=["locks"],
            purge=True,
            # A forced release would allow two holders, and nothing else here does.
            listing=False,
            blows=blows,
            versions=[_mariadb_version(nodes[0]), f"Galera {provider}, three nodes"],
        )


# Redis and memcached.


def _redis_alias(port: int, **options: Any) -> dict[str, Any]:
    return {"BACKEND": REDIS, "OPTIONS": {"location": f"redis://{HOST}:{port}/1", **options}}


def _flush(servers: list[Redis], _random: random.Random) -> None:
    for server in servers:
        with server.client() as client:
            client.flushall()


def _redis_versions(server: Redis) -> list[str]:
    return [f"Redis {server.info('server')['redis_version']}", f"redis-py {driver.__version__}"]


@contextmanager
def _on_redis(
    settings: dict[str, str], restart: Blow | None = None, **options: Any
) -> Iterator[Arena]:
    with ClockedRedis(settings=settings) as server, Proxy(server.port) as line:
        keeps = settings.get("appendonly") == "yes"
        kept = Blow("server restarts and has kept all its data", "X", partial(_crash, server))
        lost = Blow("server restarts and has lost its last writes", "F", partial(_crash, server))
        yield Arena(
            _redis_alias(server.port, **options),
            lined=_redis_alias(line.port, **options),
            lines=[line],
            shared=True,
            blows=[
                kept if keeps else lost,
                Blow("server hangs", "X", partial(_hang, server)),
                Blow("eviction, `FLUSHALL`", "F", partial(_flush, [server])),
                *_clock_blows([server], "F"),
            ],
            versions=_redis_versions(server),
        )


@contextmanager
def redis_power(fsync: str, **options: Any) -> Iterator[Arena]:
    """A Redis whose power is cut."""
    with PoweredRedis(settings={"appendonly": "yes", "appendfsync": fsync}) as server:
        [version] = _redis_versions(server)[:1]
        if options.get("wait_disk") and version < "Redis 8":
            raise LeftOut(
                f"wait_disk needs Redis 8, and this is {version}: set DISTLOCK_REDIS_SERVER"
            )
        yield Arena(
            _redis_alias(server.port, **options),
            shared=True,
            blows=[Blow(POWER_LOST, "X", server.lose_power)],
            versions=_redis_versions(server),
            **LONG,
        )


@contextmanager
def redis_sentinel() -> Iterator[Arena]:
    """A master of Redis, its replica and a sentinel."""
    with ExitStack() as stack:
        master = stack.enter_context(Redis(settings=AT_ONCE))
        follows = {"replicaof": f"{master.host} {master.port}"}
        replica = stack.enter_context(Redis(settings={**AT_ONCE, **follows}))
        sentinel = stack.enter_context(Sentinel(master))
        pair = Replicated((master, replica), sentinel)
        pair.wait_for_replica()

        def fail_over(chance: random.Random) -> None:
            if chance.random() < 0.5:
                pair.master.kill()
            pair.fail_over()
            pair.heal()

        yield Arena(
            {"BACKEND": BY_CACHE, "OPTIONS": {"cache": "locks"}},
            caches={"locks": sentinel_cache(sentinel.port)},
            shared=True,
            blows=[Blow("fail-over to an asynchronous replica", "F", fail_over)],
            versions=[*_redis_versions(master)],
        )


@contextmanager
def redis_cluster() -> Iterator[Arena]:
    """Three masters of a cluster of Redis."""
    with ExitStack() as stack:
        servers = [stack.enter_context(cluster_node()) for _ in range(3)]
        make_cluster(servers)

        def crash(chance: random.Random) -> None:
            _crash(chance.choice(servers), chance)
            eventually(lambda: all(map(_is_whole, servers)), 20, "the cluster is whole")

        yield Arena(
            {"BACKEND": BY_CACHE, "OPTIONS": {"cache": "locks", "cluster": True}},
            caches={"locks": cluster_cache(str(servers[0].port))},
            shared=True,
            blows=[Blow("server restarts and has lost its last writes", "F", crash)],
            versions=[*_redis_versions(servers[0])],
        )


def _is_whole(server: Redis) -> bool:
    with suppress(driver.RedisError), server.client() as client:
        return bool(client.cluster("INFO")["cluster_state"] == "ok")
    return False


@contextmanager
def _on_redlock(*, fencing: bool) -> Iterator[Arena]:
    ttl = 2.0
    with ExitStack() as stack:
        servers = [stack.enter_context(ClockedRedis()) for _ in range(5)]
        lines = [stack.enter_context(Proxy(server.port)) for server in servers]
        names = [f"redis_{number}" for number in ("one", "two", "three", "four", "five")]
        options = {"servers": names, "fencing": fencing, "longest_ttl": ttl}
        # The guard lets a server that has just started grant nothing.
        time.sleep(ttl + 1.5)

        def crash_one(chance: random.Random) -> None:
            _crash(chance.choice(servers), chance)

        def hang_two(chance: random.Random) -> None:
            chosen = chance.sample(servers, 2)
            for server in chosen:
                server.pause()
            time.sleep(HANG)
            for server in chosen:
                server.resume()

        alias = {"BACKEND": REDLOCK, "OPTIONS": options}
        yield Arena(
            alias,
            ttl=ttl,
            free_within=6.0,
            caches={
                **five_caches(",".join(str(server.port) for server in servers)),
                **_lined(five_caches(",".join(str(line.port) for line in lines))),
            },
            lined=_through(alias, names),
            lines=lines,
            fencing=fencing,
            blows=[
                Blow("server restarts and has lost its last writes", "X", crash_one),
                Blow("two of five servers hang", "X", hang_two),
                # Two of five are enough for two holders, if the first was granted by no more than three.
                *_clock_blows(list[HasClock](servers[:2]), "F"),
            ],
            versions=[*_redis_versions(servers[0])],
        )


def _lined(caches: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"lined_{name}": cache for name, cache in caches.items()}


def _through(alias: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the same alias over caches whose names begin with "lined_"."""
    options = {**alias["OPTIONS"], "servers": [f"lined_{name}" for name in names]}
    return {**alias, "OPTIONS": options}


@contextmanager
def memcached() -> Iterator[Arena]:
    """memcached."""
    with ClockedMemcached() as server, Proxy(server.port) as line:

        def cache(port: int) -> dict[str, Any]:
            kind = "django.core.cache.backends.memcached.PyMemcacheCache"
            return {"BACKEND": kind, "LOCATION": f"{HOST}:{port}"}

        yield Arena(
            {"BACKEND": BY_CACHE, "OPTIONS": {"cache": "locks"}},
            lined={"BACKEND": BY_CACHE, "OPTIONS": {"cache": "lined_locks"}},
            caches={"locks": cache(server.port), "lined_locks": cache(line.port)},
            lines=[line],
            ttl=2.0,
            free_within=6.0,
            fencing=False,
            listing=False,
            blows=[
                Blow("server restarts and has lost its last writes", "B", partial(_crash, server)),
                Blow("server hangs", "X", partial(_hang, server)),
                Blow("eviction, `FLUSHALL`", "B", lambda _: server.flush()),
                *_clock_blows([server], "X"),
            ],
            versions=[f"memcached {server.stats()['version']}"],
        )


# ZooKeeper and etcd.


class ClockedEnsemble(Ensemble):
    """An ensemble whose servers have wall clocks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.members = [
            ClockedMember(each.number, each.port, dict(_peers(each.settings)))
            for each in self.members
        ]


def _peers(settings: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in settings.items() if name.startswith("server."))


@contextmanager
def zookeeper() -> Iterator[Arena]:
    """An ensemble of three ZooKeeper servers."""
    session = 2.0
    with ExitStack() as stack:
        ensemble = ClockedEnsemble()
        stack.enter_context(ensemble)
        lines = [stack.enter_context(Proxy(member.port)) for member in ensemble.members]
        clocks = [each for each in ensemble.members if isinstance(each, ClockedMember)]
        options = {"session_timeout": session, "io_timeout": 1.5}
        hosts = ",".join(f"{HOST}:{line.port}" for line in lines)
        release = ensemble.members[0].says("srvr").partition("-")[0].rpartition(" ")[2]
        yield Arena(
            {"BACKEND": ZOOKEEPER, "OPTIONS": {"hosts": ensemble.hosts, **options}},
            lined={"BACKEND": ZOOKEEPER, "OPTIONS": {"hosts": hosts, **options}},
            lines=lines,
            ttl=session,
            free_within=15.0,
            shared=True,
            purge=True,
            blows=[*_ensemble_blows(ensemble), *_clock_blows(list[HasClock](clocks), "X")],
            versions=[f"ZooKeeper {release}, three servers"],
        )


@contextmanager
def etcd() -> Iterator[Arena]:
    """A cluster of three etcd members."""
    session = 2.0
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        lines = [stack.enter_context(Proxy(member.port)) for member in cluster.members]

        def hang_one(chance: random.Random) -> tuple[float, float]:
            return _hang(chance.choice(cluster.members), chance)

        options = {"session_timeout": session, "io_timeout": 2.0}
        endpoints = [f"{HOST}:{line.port}" for line in lines]
        yield Arena(
            {"BACKEND": ETCD, "OPTIONS": {"endpoints": cluster.endpoints, **options}},
            lined={"BACKEND": ETCD, "OPTIONS": {"endpoints": endpoints, **options}},
            lines=lines,
            ttl=session,
            free_within=15.0,
            shared=True,
            blows=[*_ensemble_blows(cluster), Blow("one of three members hangs", "X", hang_one)],
            versions=[f"etcd {cluster.members[0].status['version']}, three members"],
        )


# What the checker must find.


@contextmanager
def no_lock() -> Iterator[Arena]:
    """No lock at all: a lease is granted to everybody."""
    yield Arena({"BACKEND": DUMMY}, fencing=False, listing=False, free_within=0.1, calm=1.0)


@contextmanager
def careless() -> Iterator[Arena]:
    """A lock of Redis, whose holders neither check it nor write through a fence."""
    with Redis() as server:
        yield Arena(
            _redis_alias(server.port),
            ttl=0.4,
            fencing=False,
            careless=True,
            workers=2,
            work=0.1,
            only="holder stopped for longer",
            free_within=1.0,
            calm=1.0,
            versions=_redis_versions(server),
        )


ARENAS: dict[str, Make] = {
    "memory": memory,
    "sqlite": partial(sqlite, purge=True),
    "postgres": partial(_on_postgres, DATABASE, "X", purge=True),
    "postgres-fair": partial(_on_postgres, DATABASE, "X", purge=True, options={"fair": True}),
    "postgres-standby": postgres_standby,
    "postgres-rowlock": partial(_on_postgres, ROWLOCK, "F", **SESSION),
    "postgres-advisory": partial(_on_postgres, ADVISORY, "F", **SESSION),
    "mariadb": partial(_on_mariadb, DATABASE, "X", purge=True),
    "mariadb-rowlock": partial(_on_mariadb, ROWLOCK, "F", **SESSION),
    "mariadb-advisory": partial(_on_mariadb, ADVISORY, "F", **{**SESSION, "shared": False}),
    "redis": partial(_on_redis, {}),
    "redis-durable": partial(_on_redis, {"appendonly": "yes", "appendfsync": "always"}, fair=True),
    "redis-sentinel": redis_sentinel,
    "redis-cluster": redis_cluster,
    "redlock": partial(_on_redlock, fencing=False),
    "redlock-fencing": partial(_on_redlock, fencing=True),
    "memcached": memcached,
    "zookeeper": zookeeper,
    "etcd": etcd,
    "sqlite-power": sqlite_power,
    "postgres-power": postgres_power,
    "redis-power": partial(redis_power, "always"),
    "redis-power-wait-disk": partial(redis_power, "everysec", wait_disk=True),
}
#: Run only if they are named.
NAMED: dict[str, Make] = {
    "mariadb-galera": partial(_on_galera, all_write=True, sync_wait=0),
    "mariadb-galera-synced": partial(_on_galera, all_write=True, sync_wait=7),
    "mariadb-galera-one": partial(_on_galera, all_write=False, sync_wait=0),
}
#: Arenas without a lock, or without what a lock needs: the checker must find that.
CONTROLS: dict[str, Make] = {"no-lock": no_lock, "careless": careless}
