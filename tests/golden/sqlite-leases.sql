-- the first acquire, with a new connection
INSERT INTO django_distlock_methodlock (method_name, description, owner, holder, fencing_token, acquired_at, expires_at,
                    available_at, updated_at)
SELECT :key, :name, :owner, :holder, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000, strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl) || ' seconds'), strftime('%Y-%m-%d %H:%M:%f', 'now', (:taken_for) || ' seconds'), strftime('%Y-%m-%d %H:%M:%f', 'now')
WHERE TRUE OR EXISTS (SELECT 1 FROM django_distlock_methodlock WHERE method_name = :key AND owner = :owner)
ON CONFLICT (method_name) DO UPDATE SET
    holder = excluded.holder, expires_at = excluded.expires_at,
    available_at = excluded.available_at, updated_at = excluded.updated_at,
    acquired_at = CASE WHEN owner = :owner THEN acquired_at ELSE excluded.acquired_at END,
    fencing_token = CASE WHEN owner = :owner THEN fencing_token
                    ELSE max(fencing_token + 1, excluded.fencing_token) END,
    owner = excluded.owner
WHERE owner = :owner OR available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
RETURNING fencing_token;

-- release
UPDATE django_distlock_methodlock SET updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), owner = NULL, last_owner = :owner, holder = NULL,
    available_at = CASE WHEN expires_at > strftime('%Y-%m-%d %H:%M:%f', 'now') THEN strftime('%Y-%m-%d %H:%M:%f', acquired_at, (:min_hold) || ' seconds') ELSE available_at END
WHERE method_name = :key AND owner = :owner
RETURNING expires_at > strftime('%Y-%m-%d %H:%M:%f', 'now');

-- acquire
INSERT INTO django_distlock_methodlock (method_name, description, owner, holder, fencing_token, acquired_at, expires_at,
                    available_at, updated_at)
SELECT :key, :name, :owner, :holder, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000, strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl) || ' seconds'), strftime('%Y-%m-%d %H:%M:%f', 'now', (:taken_for) || ' seconds'), strftime('%Y-%m-%d %H:%M:%f', 'now')
WHERE TRUE OR EXISTS (SELECT 1 FROM django_distlock_methodlock WHERE method_name = :key AND owner = :owner)
ON CONFLICT (method_name) DO UPDATE SET
    holder = excluded.holder, expires_at = excluded.expires_at,
    available_at = excluded.available_at, updated_at = excluded.updated_at,
    acquired_at = CASE WHEN owner = :owner THEN acquired_at ELSE excluded.acquired_at END,
    fencing_token = CASE WHEN owner = :owner THEN fencing_token
                    ELSE max(fencing_token + 1, excluded.fencing_token) END,
    owner = excluded.owner
WHERE owner = :owner OR available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
RETURNING fencing_token;

-- acquire, refused
INSERT INTO django_distlock_methodlock (method_name, description, owner, holder, fencing_token, acquired_at, expires_at,
                    available_at, updated_at)
SELECT :key, :name, :owner, :holder, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000, strftime('%Y-%m-%d %H:%M:%f', 'now'), strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl) || ' seconds'), strftime('%Y-%m-%d %H:%M:%f', 'now', (:taken_for) || ' seconds'), strftime('%Y-%m-%d %H:%M:%f', 'now')
WHERE TRUE OR EXISTS (SELECT 1 FROM django_distlock_methodlock WHERE method_name = :key AND owner = :owner)
ON CONFLICT (method_name) DO UPDATE SET
    holder = excluded.holder, expires_at = excluded.expires_at,
    available_at = excluded.available_at, updated_at = excluded.updated_at,
    acquired_at = CASE WHEN owner = :owner THEN acquired_at ELSE excluded.acquired_at END,
    fencing_token = CASE WHEN owner = :owner THEN fencing_token
                    ELSE max(fencing_token + 1, excluded.fencing_token) END,
    owner = excluded.owner
WHERE owner = :owner OR available_at <= strftime('%Y-%m-%d %H:%M:%f', 'now')
RETURNING fencing_token;
SELECT CASE WHEN expires_at > strftime('%Y-%m-%d %H:%M:%f', 'now') THEN holder END, (julianday(available_at) - julianday('now')) * 86400.0 FROM django_distlock_methodlock WHERE method_name = :key;

-- probe
SELECT method_name, CASE WHEN expires_at > strftime('%Y-%m-%d %H:%M:%f', 'now') THEN holder END, (julianday(available_at) - julianday('now')) * 86400.0 FROM django_distlock_methodlock WHERE available_at > strftime('%Y-%m-%d %H:%M:%f', 'now') AND method_name IN (:item0);

-- extend
UPDATE django_distlock_methodlock SET updated_at = strftime('%Y-%m-%d %H:%M:%f', 'now'), available_at = max(available_at, strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl) || ' seconds')),
    expires_at = max(expires_at, strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl) || ' seconds'))
WHERE method_name = :key AND owner = :owner AND expires_at > strftime('%Y-%m-%d %H:%M:%f', 'now');

-- list
SELECT STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW');
SELECT "django_distlock_methodlock"."method_name" AS "method_name", "django_distlock_methodlock"."description" AS "description", "django_distlock_methodlock"."holder" AS "holder", "django_distlock_methodlock"."owner" AS "owner", "django_distlock_methodlock"."fencing_token" AS "fencing_token", NULL AS "waiters", "django_distlock_methodlock"."acquired_at" AS "read_acquired_at", "django_distlock_methodlock"."expires_at" AS "read_expires_at", "django_distlock_methodlock"."available_at" AS "read_available_at" FROM "django_distlock_methodlock" WHERE ("django_distlock_methodlock"."owner" IS NOT NULL OR "django_distlock_methodlock"."available_at" > (STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'))) ORDER BY "django_distlock_methodlock"."available_at" ASC;

-- force release
SELECT STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW');
SELECT "django_distlock_methodlock"."method_name" AS "method_name", "django_distlock_methodlock"."description" AS "description", "django_distlock_methodlock"."holder" AS "holder", "django_distlock_methodlock"."owner" AS "owner", "django_distlock_methodlock"."fencing_token" AS "fencing_token", NULL AS "waiters", "django_distlock_methodlock"."acquired_at" AS "read_acquired_at", "django_distlock_methodlock"."expires_at" AS "read_expires_at", "django_distlock_methodlock"."available_at" AS "read_available_at" FROM "django_distlock_methodlock" WHERE (("django_distlock_methodlock"."owner" IS NOT NULL OR "django_distlock_methodlock"."available_at" > (STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'))) AND "django_distlock_methodlock"."method_name" = %s) ORDER BY "django_distlock_methodlock"."available_at" ASC;
SELECT "django_distlock_methodlock"."method_name" AS "method_name", "django_distlock_methodlock"."description" AS "description", "django_distlock_methodlock"."holder" AS "holder", "django_distlock_methodlock"."owner" AS "owner", "django_distlock_methodlock"."fencing_token" AS "fencing_token", COALESCE((SELECT COUNT(U0."ticket") AS "number" FROM "django_distlock_lockwaiter" U0 WHERE (U0."expires_at" > (STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')) AND U0."method_name" = ("django_distlock_methodlock"."method_name")) GROUP BY U0."method_name"), %s) AS "waiters", "django_distlock_methodlock"."acquired_at" AS "read_acquired_at", "django_distlock_methodlock"."expires_at" AS "read_expires_at", "django_distlock_methodlock"."available_at" AS "read_available_at" FROM "django_distlock_methodlock" WHERE (("django_distlock_methodlock"."owner" IS NOT NULL OR "django_distlock_methodlock"."available_at" > (STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'))) AND "django_distlock_methodlock"."method_name" = %s) ORDER BY "django_distlock_methodlock"."available_at" ASC;
BEGIN IMMEDIATE;
UPDATE django_distlock_methodlock SET owner = NULL, holder = NULL, fencing_token = fencing_token + 1,
    available_at = STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'), updated_at = STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')
WHERE method_name = %(key)s AND owner = %(owner)s;
SELECT id FROM django_distlock_fencingcounter WHERE method_name = %(key)s;
