-- the first acquire, with a new connection
SELECT pg_backend_pid();
SELECT set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only', 'off', false), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, false);
SET plan_cache_mode = force_generic_plan;
SELECT set_config(s.name, v.value, false) FROM pg_settings AS s JOIN (VALUES
    ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'), ('idle_session_timeout', '0'),
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3')
) AS v (name, value) ON v.name = s.name;
SET client_connection_check_interval = '200ms';
PREPARE distlock_count(text, text, int) AS 
WITH configured AS MATERIALIZED (SELECT set_config('lock_timeout', greatest(1, least(1000, $3 - extract(epoch FROM clock_timestamp() - now()) * 1000))::int::text, true))
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder) SELECT $1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, $2 FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), holder = excluded.holder
    RETURNING value;
WITH taken AS MATERIALIZED (
    SELECT pg_try_advisory_lock(%(number)s::bigint) AS ok
), configured AS MATERIALIZED (
    SELECT set_config('idle_session_timeout', %(silence)s, false) || set_config('application_name', %(label)s, false) || set_config('lock_timeout', %(patience)s, true) FROM taken WHERE ok
), counted AS (
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder) SELECT %(key)s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, %(holder)s FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), holder = excluded.holder
    RETURNING value
)
SELECT ok, (SELECT value FROM counted), (SELECT holder FROM django_distlock_fencingcounter WHERE method_name = %(key)s AND NOT ok) FROM taken;

-- release
SELECT pg_advisory_unlock(%(number)s::bigint),
    set_config('idle_session_timeout', '0', false), set_config('application_name', 'distlock:', false);

-- acquire
WITH taken AS MATERIALIZED (
    SELECT pg_try_advisory_lock(%(number)s::bigint) AS ok
), configured AS MATERIALIZED (
    SELECT set_config('idle_session_timeout', %(silence)s, false) || set_config('application_name', %(label)s, false) || set_config('lock_timeout', %(patience)s, true) FROM taken WHERE ok
), counted AS (
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder) SELECT %(key)s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, %(holder)s FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), holder = excluded.holder
    RETURNING value
)
SELECT ok, (SELECT value FROM counted), (SELECT holder FROM django_distlock_fencingcounter WHERE method_name = %(key)s AND NOT ok) FROM taken;

-- acquire, refused
SELECT pg_backend_pid();
SELECT set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only', 'off', false), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, false);
SET plan_cache_mode = force_generic_plan;
SELECT set_config(s.name, v.value, false) FROM pg_settings AS s JOIN (VALUES
    ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'), ('idle_session_timeout', '0'),
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3')
) AS v (name, value) ON v.name = s.name;
SET client_connection_check_interval = '200ms';
PREPARE distlock_count(text, text, int) AS 
WITH configured AS MATERIALIZED (SELECT set_config('lock_timeout', greatest(1, least(1000, $3 - extract(epoch FROM clock_timestamp() - now()) * 1000))::int::text, true))
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder) SELECT $1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, $2 FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), holder = excluded.holder
    RETURNING value;
WITH taken AS MATERIALIZED (
    SELECT pg_try_advisory_lock(%(number)s::bigint) AS ok
), configured AS MATERIALIZED (
    SELECT set_config('idle_session_timeout', %(silence)s, false) || set_config('application_name', %(label)s, false) || set_config('lock_timeout', %(patience)s, true) FROM taken WHERE ok
), counted AS (
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder) SELECT %(key)s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, %(holder)s FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), holder = excluded.holder
    RETURNING value
)
SELECT ok, (SELECT value FROM counted), (SELECT holder FROM django_distlock_fencingcounter WHERE method_name = %(key)s AND NOT ok) FROM taken;

-- probe
SELECT pg_backend_pid();
SELECT set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only', 'off', false), set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
    THEN 'on' ELSE current_setting('synchronous_commit') END, false);
SET plan_cache_mode = force_generic_plan;
SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND classid = %(high)s::bigint::oid AND objid = %(low)s::bigint::oid LIMIT 1;
SELECT holder FROM django_distlock_fencingcounter WHERE method_name = %(key)s;

-- extend
SET idle_session_timeout = 60000;

-- list
SELECT c.method_name, c.value, c.holder, l.description, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name;
SELECT pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted), CASE WHEN wait_event_type = 'Lock' OR state IS NULL THEN pg_blocking_pids(pid) END, application_name
FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'distlock:%%';

-- force release
SELECT c.method_name, c.value, c.holder, l.description, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name WHERE c.method_name = %(key)s OR c.method_name LIKE %(readers)s;
SELECT pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted), CASE WHEN wait_event_type = 'Lock' OR state IS NULL THEN pg_blocking_pids(pid) END, application_name
FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'distlock:%%';
SELECT c.method_name, c.value, c.holder, l.description, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name WHERE c.method_name IN (%(key)s, %(reader)s);
SELECT pg_terminate_backend(pid, %(patience)s) FROM pg_stat_activity WHERE application_name LIKE %(label)s;
SELECT id FROM django_distlock_fencingcounter WHERE method_name = %(key)s FOR UPDATE SKIP LOCKED;
UPDATE django_distlock_fencingcounter SET value = value + 1 WHERE method_name = %(key)s;
