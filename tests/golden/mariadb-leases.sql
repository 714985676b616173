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
PREPARE distlock_0 FROM %s;
EXECUTE distlock_0 USING %s, %s, %s, %s, %s, %s, %s;
SELECT l.owner <=> %(owner)s, c.value, IF(l.expires_at > SYSDATE(6), l.holder, NULL), TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), available_at) / 1e6, TRUE
FROM django_distlock_methodlock AS l JOIN django_distlock_fencingcounter AS c ON c.method_name = l.method_name WHERE l.method_name = %(key)s;
INSERT IGNORE INTO django_distlock_methodlock (method_name, description, fencing_token, available_at, updated_at)
    VALUES (%(key)s, %(name)s, 0, SYSDATE(6), SYSDATE(6));
INSERT IGNORE INTO django_distlock_fencingcounter (method_name, value) VALUES (%(key)s, 0);

-- release
PREPARE distlock_1 FROM %s;
EXECUTE distlock_1 USING %s, %s, %s, %s;

-- acquire
EXECUTE distlock_0 USING %s, %s, %s, %s, %s, %s, %s;

-- acquire, refused
EXECUTE distlock_0 USING %s, %s, %s, %s, %s, %s, %s;
SELECT l.owner <=> %(owner)s, c.value, IF(l.expires_at > SYSDATE(6), l.holder, NULL), TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), available_at) / 1e6, TRUE
FROM django_distlock_methodlock AS l JOIN django_distlock_fencingcounter AS c ON c.method_name = l.method_name WHERE l.method_name = %(key)s;

-- probe
SELECT method_name, CASE WHEN expires_at > SYSDATE(6) THEN holder END, TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), available_at) / 1e6 FROM django_distlock_methodlock WHERE available_at > SYSDATE(6) AND method_name IN (%(item0)s);

-- extend
UPDATE django_distlock_methodlock SET updated_at = SYSDATE(6), available_at = greatest(available_at, SYSDATE(6) + INTERVAL CAST(%(ttl)s * 1000000 AS SIGNED) MICROSECOND),
    expires_at = greatest(expires_at, SYSDATE(6) + INTERVAL CAST(%(ttl)s * 1000000 AS SIGNED) MICROSECOND)
WHERE method_name = %(key)s AND owner = %(owner)s AND expires_at > SYSDATE(6);

-- list
SELECT UTC_TIMESTAMP(6);
SELECT `django_distlock_methodlock`.`method_name` AS `method_name`, `django_distlock_methodlock`.`description` AS `description`, `django_distlock_methodlock`.`holder` AS `holder`, `django_distlock_methodlock`.`owner` AS `owner`, `django_distlock_methodlock`.`fencing_token` AS `fencing_token`, NULL AS `waiters`, `django_distlock_methodlock`.`acquired_at` AS `read_acquired_at`, `django_distlock_methodlock`.`expires_at` AS `read_expires_at`, `django_distlock_methodlock`.`available_at` AS `read_available_at` FROM `django_distlock_methodlock` WHERE (`django_distlock_methodlock`.`owner` IS NOT NULL OR `django_distlock_methodlock`.`available_at` > (UTC_TIMESTAMP(6))) ORDER BY `django_distlock_methodlock`.`available_at` ASC;

-- force release
SELECT UTC_TIMESTAMP(6);
SELECT `django_distlock_methodlock`.`method_name` AS `method_name`, `django_distlock_methodlock`.`description` AS `description`, `django_distlock_methodlock`.`holder` AS `holder`, `django_distlock_methodlock`.`owner` AS `owner`, `django_distlock_methodlock`.`fencing_token` AS `fencing_token`, NULL AS `waiters`, `django_distlock_methodlock`.`acquired_at` AS `read_acquired_at`, `django_distlock_methodlock`.`expires_at` AS `read_expires_at`, `django_distlock_methodlock`.`available_at` AS `read_available_at` FROM `django_distlock_methodlock` WHERE ((`django_distlock_methodlock`.`owner` IS NOT NULL OR `django_distlock_methodlock`.`available_at` > (UTC_TIMESTAMP(6))) AND `django_distlock_methodlock`.`method_name` = %s) ORDER BY `django_distlock_methodlock`.`available_at` ASC;
SELECT `django_distlock_methodlock`.`method_name` AS `method_name`, `django_distlock_methodlock`.`description` AS `description`, `django_distlock_methodlock`.`holder` AS `holder`, `django_distlock_methodlock`.`owner` AS `owner`, `django_distlock_methodlock`.`fencing_token` AS `fencing_token`, COALESCE((SELECT COUNT(U0.`ticket`) AS `number` FROM `django_distlock_lockwaiter` U0 WHERE (U0.`expires_at` > (UTC_TIMESTAMP(6)) AND U0.`method_name` = (`django_distlock_methodlock`.`method_name`)) GROUP BY U0.`method_name` ORDER BY NULL), %s) AS `waiters`, `django_distlock_methodlock`.`acquired_at` AS `read_acquired_at`, `django_distlock_methodlock`.`expires_at` AS `read_expires_at`, `django_distlock_methodlock`.`available_at` AS `read_available_at` FROM `django_distlock_methodlock` WHERE ((`django_distlock_methodlock`.`owner` IS NOT NULL OR `django_distlock_methodlock`.`available_at` > (UTC_TIMESTAMP(6))) AND `django_distlock_methodlock`.`method_name` = %s) ORDER BY `django_distlock_methodlock`.`available_at` ASC;
UPDATE django_distlock_methodlock SET owner = NULL, holder = NULL, fencing_token = fencing_token + 1,
    available_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6)
WHERE method_name = %(key)s AND owner = %(owner)s;
SELECT id FROM django_distlock_fencingcounter WHERE method_name = %(key)s FOR UPDATE SKIP LOCKED;
UPDATE django_distlock_fencingcounter SET value = value + 1 WHERE method_name = %(key)s;
