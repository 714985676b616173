-- the first acquire, with a new connection
SELECT VERSION(),
                       @@sql_mode,
                       @@default_storage_engine,
                       @@sql_auto_is_null,
                       @@lower_case_table_names,
                       CONVERT_TZ('2001-01-01 01:00:00', 'UTC', 'UTC') IS NOT NULL;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION';
SET SESSION innodb_lock_wait_timeout = %s;
SHOW VARIABLES WHERE variable_name IN ('wsrep_on', 'read_only', 'group_replication_single_primary_mode');
SET SESSION max_statement_time = 0, idle_write_transaction_timeout = 0, idle_readonly_transaction_timeout = 0;
SET SESSION wait_timeout = 60, idle_transaction_timeout = 60;
/*distlock:advisory||test:HEX*/ SELECT GET_LOCK(%s, %s);
SET STATEMENT innodb_lock_wait_timeout = 0 FOR
UPDATE django_distlock_fencingcounter SET value = LAST_INSERT_ID(GREATEST(value + 1, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))), holder = %(holder)s
WHERE method_name = %(key)s;
INSERT IGNORE INTO django_distlock_fencingcounter (method_name, value) VALUES (%(key)s, 0);

-- release
SELECT RELEASE_LOCK(%s);

-- acquire
/*distlock:advisory||test:HEX*/ SELECT GET_LOCK(%s, %s);
SET STATEMENT innodb_lock_wait_timeout = 0 FOR
UPDATE django_distlock_fencingcounter SET value = LAST_INSERT_ID(GREATEST(value + 1, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED))), holder = %(holder)s
WHERE method_name = %(key)s;

-- acquire, refused
SELECT VERSION(),
                       @@sql_mode,
                       @@default_storage_engine,
                       @@sql_auto_is_null,
                       @@lower_case_table_names,
                       CONVERT_TZ('2001-01-01 01:00:00', 'UTC', 'UTC') IS NOT NULL;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION';
SET SESSION innodb_lock_wait_timeout = %s;
SHOW VARIABLES WHERE variable_name IN ('wsrep_on', 'read_only', 'group_replication_single_primary_mode');
SET SESSION max_statement_time = 0, idle_write_transaction_timeout = 0, idle_readonly_transaction_timeout = 0;
SET SESSION wait_timeout = 60, idle_transaction_timeout = 60;
/*distlock:advisory||test:HEX*/ SELECT GET_LOCK(%s, %s);
SELECT holder FROM django_distlock_fencingcounter WHERE method_name = %(key)s;

-- probe
SELECT IS_USED_LOCK(%s);
SELECT holder FROM django_distlock_fencingcounter WHERE method_name = %(key)s;

-- extend
SHOW VARIABLES WHERE variable_name IN ('wsrep_on', 'read_only', 'group_replication_single_primary_mode');
SET SESSION wait_timeout = 60, idle_transaction_timeout = 60;

-- list
SELECT c.method_name, c.value, c.holder, l.description, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED) - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name;
SELECT info FROM information_schema.processlist WHERE info LIKE '/*distlock:%%';
SELECT IS_USED_LOCK(%s);

-- force release
SELECT c.method_name, c.value, c.holder, l.description, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED) - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name WHERE c.method_name = %(key)s OR c.method_name LIKE %(readers)s;
SELECT info FROM information_schema.processlist WHERE info LIKE '/*distlock:%%';
SELECT IS_USED_LOCK(%s);
SELECT c.method_name, c.value, c.holder, l.description, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED) - c.value
        FROM django_distlock_fencingcounter AS c LEFT JOIN django_distlock_methodlock AS l ON l.method_name = c.method_name WHERE c.method_name IN (%(key)s, %(reader)s);
SELECT 1 FROM information_schema.processlist WHERE id = %s;
SELECT 1 FROM django_distlock_fencingcounter WHERE value > %(token)s AND holder LIKE %(session)s LIMIT 1;
KILL %s;
SELECT id FROM django_distlock_fencingcounter WHERE method_name = %(key)s FOR UPDATE SKIP LOCKED;
UPDATE django_distlock_fencingcounter SET value = value + 1 WHERE method_name = %(key)s;
