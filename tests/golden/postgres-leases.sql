-- the first acquire, with a new connection
SELECT pg_backend_pid();
SELECT set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only', 'off', false), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, false);
SET plan_cache_mode = force_generic_plan;
WITH seen AS (
    SELECT owner = %(owner)s AS mine, available_at <= clock_timestamp() AS free, CASE WHEN expires_at > clock_timestamp() THEN holder END AS holder,
           extract(epoch FROM available_at - clock_timestamp())::float8 AS remaining
    FROM django_distlock_methodlock WHERE method_name = %(key)s
), allowed AS MATERIALIZED (
    SELECT coalesce((SELECT mine FROM seen), false) AS mine,
           coalesce((SELECT free FROM seen), true) AND TRUE AS free
), counter AS MATERIALIZED (
    SELECT value FROM django_distlock_fencingcounter
    WHERE method_name = %(key)s AND (SELECT free AND NOT mine FROM allowed) FOR UPDATE SKIP LOCKED
), configured AS MATERIALIZED (
    SELECT set_config('lock_timeout', '1s', true), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, true)
    FROM allowed
    WHERE mine OR (free AND (EXISTS (SELECT FROM counter)
        OR NOT EXISTS (SELECT FROM django_distlock_fencingcounter WHERE method_name = %(key)s)))
), granted AS (
    INSERT INTO django_distlock_methodlock AS l (method_name, description, owner, holder, fencing_token, acquired_at,
                             expires_at, available_at, updated_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s,
           greatest(coalesce((SELECT value FROM counter), 0) + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), clock_timestamp(),
           clock_timestamp() + make_interval(secs => %(ttl)s), clock_timestamp() + make_interval(secs => %(taken_for)s), clock_timestamp()
    FROM configured
    ON CONFLICT (method_name) DO UPDATE SET
        owner = excluded.owner, holder = excluded.holder,
        fencing_token = CASE WHEN l.owner = %(owner)s THEN l.fencing_token ELSE
            greatest(l.fencing_token + 1, coalesce((SELECT value FROM counter), 0) + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) END,
        acquired_at = CASE WHEN l.owner = %(owner)s THEN l.acquired_at ELSE clock_timestamp() END,
        expires_at = clock_timestamp() + make_interval(secs => %(ttl)s),
        available_at = clock_timestamp() + make_interval(secs => %(taken_for)s), updated_at = clock_timestamp()
    WHERE l.owner = %(owner)s OR l.available_at <= clock_timestamp()
    RETURNING fencing_token, holder
), counted AS (
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder)
    SELECT %(key)s, fencing_token, holder FROM granted
    ON CONFLICT (method_name) DO UPDATE SET value = excluded.value, holder = excluded.holder
    WHERE c.value < excluded.value
)
SELECT (SELECT fencing_token FROM granted), (SELECT holder FROM seen), (SELECT remaining FROM seen),
       (SELECT free FROM allowed);

-- release
UPDATE django_distlock_methodlock SET updated_at = clock_timestamp(), owner = NULL, last_owner = %(owner)s, holder = NULL,
    available_at = CASE WHEN expires_at > clock_timestamp() THEN acquired_at + make_interval(secs => %(min_hold)s) ELSE available_at END
WHERE method_name = %(key)s AND owner = %(owner)s
RETURNING expires_at > clock_timestamp(), (
SELECT pg_notify(channel, ticket::text) FROM django_distlock_lockwaiter
WHERE method_name = %(line)s AND expires_at > clock_timestamp() AND channel <> '' ORDER BY ticket LIMIT 1), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, true);

-- acquire
WITH seen AS (
    SELECT owner = %(owner)s AS mine, available_at <= clock_timestamp() AS free, CASE WHEN expires_at > clock_timestamp() THEN holder END AS holder,
           extract(epoch FROM available_at - clock_timestamp())::float8 AS remaining
    FROM django_distlock_methodlock WHERE method_name = %(key)s
), allowed AS MATERIALIZED (
    SELECT coalesce((SELECT mine FROM seen), false) AS mine,
           coalesce((SELECT free FROM seen), true) AND TRUE AS free
), counter AS MATERIALIZED (
    SELECT value FROM django_distlock_fencingcounter
    WHERE method_name = %(key)s AND (SELECT free AND NOT mine FROM allowed) FOR UPDATE SKIP LOCKED
), configured AS MATERIALIZED (
    SELECT set_config('lock_timeout', '1s', true), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, true)
    FROM allowed
    WHERE mine OR (free AND (EXISTS (SELECT FROM counter)
        OR NOT EXISTS (SELECT FROM django_distlock_fencingcounter WHERE method_name = %(key)s)))
), granted AS (
    INSERT INTO django_distlock_methodlock AS l (method_name, description, owner, holder, fencing_token, acquired_at,
                             expires_at, available_at, updated_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s,
           greatest(coalesce((SELECT value FROM counter), 0) + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), clock_timestamp(),
           clock_timestamp() + make_interval(secs => %(ttl)s), clock_timestamp() + make_interval(secs => %(taken_for)s), clock_timestamp()
    FROM configured
    ON CONFLICT (method_name) DO UPDATE SET
        owner = excluded.owner, holder = excluded.holder,
        fencing_token = CASE WHEN l.owner = %(owner)s THEN l.fencing_token ELSE
            greatest(l.fencing_token + 1, coalesce((SELECT value FROM counter), 0) + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) END,
        acquired_at = CASE WHEN l.owner = %(owner)s THEN l.acquired_at ELSE clock_timestamp() END,
        expires_at = clock_timestamp() + make_interval(secs => %(ttl)s),
        available_at = clock_timestamp() + make_interval(secs => %(taken_for)s), updated_at = clock_timestamp()
    WHERE l.owner = %(owner)s OR l.available_at <= clock_timestamp()
    RETURNING fencing_token, holder
), counted AS (
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder)
    SELECT %(key)s, fencing_token, holder FROM granted
    ON CONFLICT (method_name) DO UPDATE SET value = excluded.value, holder = excluded.holder
    WHERE c.value < excluded.value
)
SELECT (SELECT fencing_token FROM granted), (SELECT holder FROM seen), (SELECT remaining FROM seen),
       (SELECT free FROM allowed);

-- acquire, refused
WITH seen AS (
    SELECT owner = %(owner)s AS mine, available_at <= clock_timestamp() AS free, CASE WHEN expires_at > clock_timestamp() THEN holder END AS holder,
           extract(epoch FROM available_at - clock_timestamp())::float8 AS remaining
    FROM django_distlock_methodlock WHERE method_name = %(key)s
), allowed AS MATERIALIZED (
    SELECT coalesce((SELECT mine FROM seen), false) AS mine,
           coalesce((SELECT free FROM seen), true) AND TRUE AS free
), counter AS MATERIALIZED (
    SELECT value FROM django_distlock_fencingcounter
    WHERE method_name = %(key)s AND (SELECT free AND NOT mine FROM allowed) FOR UPDATE SKIP LOCKED
), configured AS MATERIALIZED (
    SELECT set_config('lock_timeout', '1s', true), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, true)
    FROM allowed
    WHERE mine OR (free AND (EXISTS (SELECT FROM counter)
        OR NOT EXISTS (SELECT FROM django_distlock_fencingcounter WHERE method_name = %(key)s)))
), granted AS (
    INSERT INTO django_distlock_methodlock AS l (method_name, description, owner, holder, fencing_token, acquired_at,
                             expires_at, available_at, updated_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s,
           greatest(coalesce((SELECT value FROM counter), 0) + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), clock_timestamp(),
           clock_timestamp() + make_interval(secs => %(ttl)s), clock_timestamp() + make_interval(secs => %(taken_for)s), clock_timestamp()
    FROM configured
    ON CONFLICT (method_name) DO UPDATE SET
        owner = excluded.owner, holder = excluded.holder,
        fencing_token = CASE WHEN l.owner = %(owner)s THEN l.fencing_token ELSE
            greatest(l.fencing_token + 1, coalesce((SELECT value FROM counter), 0) + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) END,
        acquired_at = CASE WHEN l.owner = %(owner)s THEN l.acquired_at ELSE clock_timestamp() END,
        expires_at = clock_timestamp() + make_interval(secs => %(ttl)s),
        available_at = clock_timestamp() + make_interval(secs => %(taken_for)s), updated_at = clock_timestamp()
    WHERE l.owner = %(owner)s OR l.available_at <= clock_timestamp()
    RETURNING fencing_token, holder
), counted AS (
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder)
    SELECT %(key)s, fencing_token, holder FROM granted
    ON CONFLICT (method_name) DO UPDATE SET value = excluded.value, holder = excluded.holder
    WHERE c.value < excluded.value
)
SELECT (SELECT fencing_token FROM granted), (SELECT holder FROM seen), (SELECT remaining FROM seen),
       (SELECT free FROM allowed);

-- probe
SELECT method_name, CASE WHEN expires_at > clock_timestamp() THEN holder END, extract(epoch FROM available_at - clock_timestamp())::float8 FROM django_distlock_methodlock WHERE available_at > clock_timestamp() AND method_name IN (%(item0)s);

-- extend
WITH configured AS MATERIALIZED (SELECT set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, true))
UPDATE django_distlock_methodlock AS l SET
    expires_at = greatest(l.expires_at, clock_timestamp() + make_interval(secs => e.ttl)),
    available_at = greatest(l.available_at, clock_timestamp() + make_interval(secs => e.ttl)),
    updated_at = clock_timestamp()
FROM json_to_recordset(%(leases)s::json) AS e (key text, owner text, ttl float8), configured
WHERE l.method_name = e.key AND l.owner = e.owner AND l.expires_at > clock_timestamp()
RETURNING l.owner;

-- list
SELECT CLOCK_TIMESTAMP();
SELECT "django_distlock_methodlock"."method_name" AS "method_name", "django_distlock_methodlock"."description" AS "description", "django_distlock_methodlock"."holder" AS "holder", "django_distlock_methodlock"."owner" AS "owner", "django_distlock_methodlock"."fencing_token" AS "fencing_token", COALESCE((SELECT COUNT(U0."ticket") AS "number" FROM "django_distlock_lockwaiter" U0 WHERE (U0."expires_at" > (CLOCK_TIMESTAMP()) AND U0."method_name" = ("django_distlock_methodlock"."method_name")) GROUP BY U0."method_name"), %s) AS "waiters", "django_distlock_methodlock"."acquired_at" AS "read_acquired_at", "django_distlock_methodlock"."expires_at" AS "read_expires_at", "django_distlock_methodlock"."available_at" AS "read_available_at" FROM "django_distlock_methodlock" WHERE ("django_distlock_methodlock"."owner" IS NOT NULL OR "django_distlock_methodlock"."available_at" > (CLOCK_TIMESTAMP())) ORDER BY "django_distlock_methodlock"."available_at" ASC;

-- force release
SELECT CLOCK_TIMESTAMP();
SELECT "django_distlock_methodlock"."method_name" AS "method_name", "django_distlock_methodlock"."description" AS "description", "django_distlock_methodlock"."holder" AS "holder", "django_distlock_methodlock"."owner" AS "owner", "django_distlock_methodlock"."fencing_token" AS "fencing_token", COALESCE((SELECT COUNT(U0."ticket") AS "number" FROM "django_distlock_lockwaiter" U0 WHERE (U0."expires_at" > (CLOCK_TIMESTAMP()) AND U0."method_name" = ("django_distlock_methodlock"."method_name")) GROUP BY U0."method_name"), %s) AS "waiters", "django_distlock_methodlock"."acquired_at" AS "read_acquired_at", "django_distlock_methodlock"."expires_at" AS "read_expires_at", "django_distlock_methodlock"."available_at" AS "read_available_at" FROM "django_distlock_methodlock" WHERE (("django_distlock_methodlock"."owner" IS NOT NULL OR "django_distlock_methodlock"."available_at" > (CLOCK_TIMESTAMP())) AND "django_distlock_methodlock"."method_name" = %s) ORDER BY "django_distlock_methodlock"."available_at" ASC;
UPDATE django_distlock_methodlock SET owner = NULL, holder = NULL, fencing_token = fencing_token + 1,
    available_at = CLOCK_TIMESTAMP(), updated_at = CLOCK_TIMESTAMP()
WHERE method_name = %(key)s AND owner = %(owner)s;
SELECT id FROM django_distlock_fencingcounter WHERE method_name = %(key)s FOR UPDATE SKIP LOCKED;
UPDATE django_distlock_fencingcounter SET value = value + 1 WHERE method_name = %(key)s;
SELECT (
SELECT pg_notify(channel, ticket::text) FROM django_distlock_lockwaiter
WHERE method_name = %(line)s AND expires_at > clock_timestamp() AND channel <> '' ORDER BY ticket LIMIT 1), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, true);
