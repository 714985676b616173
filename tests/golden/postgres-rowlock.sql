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
SET synchronous_commit = off;PREPARE distlock_row(text) AS SELECT c.holder FROM django_distlock_methodlock AS l LEFT JOIN django_distlock_fencingcounter AS c ON c.method_name = l.method_name WHERE l.method_name = $1;PREPARE distlock_update0(text) AS SELECT set_config('statement_timeout', '0', true) FROM django_distlock_methodlock WHERE method_name = $1 FOR update ;PREPARE distlock_update11(text) AS SELECT 1 FROM django_distlock_methodlock WHERE method_name = $1 FOR update SKIP LOCKED;PREPARE distlock_share0(text) AS SELECT set_config('statement_timeout', '0', true) FROM django_distlock_methodlock WHERE method_name = $1 FOR share ;PREPARE distlock_share11(text) AS SELECT 1 FROM django_distlock_methodlock WHERE method_name = $1 FOR share SKIP LOCKED;;
SET idle_in_transaction_session_timeout = 60000;
BEGIN; SET LOCAL application_name = 'distlock:w:HEX:HEX';  EXECUTE distlock_update11(convert_from(decode('HEX', 'hex'), 'UTF8'));
ROLLBACK; EXECUTE distlock_row(convert_from(decode('HEX', 'hex'), 'UTF8'));
INSERT INTO django_distlock_methodlock (method_name, description, fencing_token, available_at, updated_at)
    VALUES (%(key)s, %(name)s, 0, clock_timestamp(), clock_timestamp()) ON CONFLICT (method_name) DO NOTHING;
WITH configured AS MATERIALIZED (SELECT set_config('lock_timeout', %(patience)s, true))
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder) SELECT %(key)s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, %(holder)s FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), holder = excluded.holder
    RETURNING value;

-- release
COMMIT;

-- acquire
BEGIN; SET LOCAL application_name = 'distlock:w:HEX:HEX';  EXECUTE distlock_update11(convert_from(decode('HEX', 'hex'), 'UTF8'));
WITH configured AS MATERIALIZED (SELECT set_config('lock_timeout', %(patience)s, true))
    INSERT INTO django_distlock_fencingcounter AS c (method_name, value, holder) SELECT %(key)s, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, %(holder)s FROM configured
    ON CONFLICT (method_name) DO UPDATE SET value = greatest(c.value + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), holder = excluded.holder
    RETURNING value;

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
SET synchronous_commit = off;PREPARE distlock_row(text) AS SELECT c.holder FROM django_distlock_methodlock AS l LEFT JOIN django_distlock_fencingcounter AS c ON c.method_name = l.method_name WHERE l.method_name = $1;PREPARE distlock_update0(text) AS SELECT set_config('statement_timeout', '0', true) FROM django_distlock_methodlock WHERE method_name = $1 FOR update ;PREPARE distlock_update11(text) AS SELECT 1 FROM django_distlock_methodlock WHERE method_name = $1 FOR update SKIP LOCKED;PREPARE distlock_share0(text) AS SELECT set_config('statement_timeout', '0', true) FROM django_distlock_methodlock WHERE method_name = $1 FOR share ;PREPARE distlock_share11(text) AS SELECT 1 FROM django_distlock_methodlock WHERE method_name = $1 FOR share SKIP LOCKED;;
SET idle_in_transaction_session_timeout = 60000;
BEGIN; SET LOCAL application_name = 'distlock:w:HEX:HEX';  EXECUTE distlock_update11(convert_from(decode('HEX', 'hex'), 'UTF8'));
ROLLBACK; EXECUTE distlock_row(convert_from(decode('HEX', 'hex'), 'UTF8'));

-- probe
SELECT set_config('synchronous_commit', 'off', true) FROM django_distlock_methodlock WHERE method_name = %(key)s FOR UPDATE SKIP LOCKED;
SELECT 1 FROM django_distlock_methodlock WHERE method_name = %(key)s;
SELECT holder FROM django_distlock_fencingcounter WHERE method_name = %(key)s;

-- extend
SET idle_in_transaction_session_timeout = 60000;

-- list
SELECT c.method_name, c.value, c.holder, l.description, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name;
SELECT backend_xid IS NOT NULL, CASE WHEN wait_event_type = 'Lock' OR state IS NULL THEN pg_blocking_pids(pid) END, application_name
FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'distlock:%%';

-- force release
SELECT c.method_name, c.value, c.holder, l.description, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name WHERE c.method_name = %(key)s OR c.method_name LIKE %(readers)s;
SELECT backend_xid IS NOT NULL, CASE WHEN wait_event_type = 'Lock' OR state IS NULL THEN pg_blocking_pids(pid) END, application_name
FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'distlock:%%';
SELECT c.method_name, c.value, c.holder, l.description, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name WHERE c.method_name IN (%(key)s, %(reader)s);
SELECT pg_terminate_backend(pid, %(patience)s) FROM pg_stat_activity WHERE application_name LIKE %(label)s;
SELECT id FROM django_distlock_fencingcounter WHERE method_name = %(key)s FOR UPDATE SKIP LOCKED;
UPDATE django_distlock_fencingcounter SET value = value + 1 WHERE method_name = %(key)s;
