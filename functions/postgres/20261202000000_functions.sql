-- rowlock: the lock as functions of PostgreSQL, for programs in any language. May run again: the
-- functions are replaced, unless they are newer. They are made in the schema of the t_resource_lock
-- to which the search_path leads, and find that table whatever the caller's search_path is. The
-- rules are those of src/rules.rs, the statements those of src/store/postgres. The number that
-- rowlock_version returns is the date in this file's name, as is the number that is compared with
-- it; each change of the file raises all three.
DO $install$
DECLARE
    other text;
    wrong text;
    style text := current_setting('IntervalStyle');
    path  text := current_setting('search_path');
    place text := (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('t_resource_lock'));
BEGIN
    IF place IS NULL THEN
        RAISE EXCEPTION 'the table t_resource_lock does not exist here: run rowlock migrate first'
            USING ERRCODE = 'undefined_table';
    END IF;
    IF EXISTS (SELECT FROM pg_proc WHERE oid = to_regprocedure(place || '.rowlock_version()') AND substring(prosrc, '[0-9]{8}')::int > 20261202) THEN
        RAISE NOTICE 'newer functions are installed here, and stay as they are';
        RETURN;
    END IF;
    -- The rules for the table are those of src/store/postgres/schema.rs.
    SELECT w.wrong INTO wrong
    FROM pg_attribute a LEFT JOIN pg_collation l ON l.oid = a.attcollation
    CROSS JOIN LATERAL (SELECT format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull AND a.attname = 'end_time' THEN ' NOT NULL' ELSE '' END AS type) t
    CROSS JOIN LATERAL (SELECT CASE
        WHEN a.attname = 'key_resource' AND NOT EXISTS (
            SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid AND i.indimmediate
            AND i.indpred IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum) THEN
            'its column key_resource is not unique by itself; delete rows with the same key, and make it the primary key'
        WHEN a.attname = 'key_resource' AND (t.type !~ '^(character varying|text$)' OR NOT l.collisdeterministic) THEN
            format('its column key_resource (%s) does not compare byte by byte; use varchar(255) COLLATE "C"', t.type)
        WHEN a.attname IN ('begin_time', 'end_time') AND t.type !~ '^timestamp.*time zone$' THEN
            format('its column %s (%s) does not hold what rowlock writes there; use timestamptz, NULL allowed', a.attname, t.type)
        WHEN a.attname IN ('lock_flag', 'time') AND t.type NOT IN ('smallint', 'integer', 'bigint') THEN
            format('its column %s (%s) does not hold what rowlock writes there; use int', a.attname, t.type)
        END AS wrong) w
    WHERE a.attrelid = to_regclass('t_resource_lock') AND a.attnum > 0 AND NOT a.attisdropped AND w.wrong IS NOT NULL
    ORDER BY a.attnum LIMIT 1;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'the table t_resource_lock cannot be used: %', wrong USING ERRCODE = 'invalid_table_definition';
    END IF;
    SELECT string_agg(wanted, ', ') INTO wrong
    FROM unnest(ARRAY['key_resource', 'status', 'lock_flag', 'begin_time', 'end_time', 'client_ip', 'time', 'holder', 'token', 'expires_at', 'claimed_at',
                      'confirms', 'prior_token', 'prior_client_ip', 'prior_status', 'prior_begin_time', 'prior_end_time', 'awaited']) wanted
    WHERE NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('t_resource_lock') AND attname = wanted AND attnum > 0 AND NOT attisdropped);
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 't_resource_lock lacks %: run rowlock migrate first', wrong USING ERRCODE = 'undefined_column';
    END IF;
    -- What SET search_path FROM CURRENT keeps. pg_catalog comes first by itself, temporary tables
    -- last.
    PERFORM set_config('search_path', place || ', pg_temp', true);

    -- Those of another version that CREATE OR REPLACE would refuse, or leave beside the new ones: a
    -- call with defaults would find two functions. The others keep their oid, so that calls find
    -- them at all times.
    PERFORM set_config('IntervalStyle', 'postgres', true);
    FOR other IN
        SELECT p.oid::regprocedure::text FROM pg_proc p
        WHERE p.pronamespace = place::regnamespace
          AND p.proname IN ('rowlock_try_acquire', 'rowlock_unmatched', 'rowlock_renew', 'rowlock_release', 'rowlock_abandon', 'rowlock_put_back', 'rowlock_confirm', 'rowlock_list', 'rowlock_version')
          AND format('%s(%s) %s', p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)) NOT IN (
              'rowlock_try_acquire(key text, lease interval DEFAULT ''00:00:30''::interval, label text DEFAULT NULL::text, min_interval interval DEFAULT ''00:00:00''::interval, rules text DEFAULT ''recover''::text, OUT granted boolean, OUT token bigint, INOUT holder uuid DEFAULT NULL::uuid, OUT expires_at timestamp with time zone, OUT previous_token bigint, OUT previous_label text, OUT reason text, OUT by text, OUT since timestamp with time zone, OUT until timestamp with time zone, OUT retry_after interval) record',
              'rowlock_unmatched(change text, key text, holder uuid, token bigint) text',
              'rowlock_renew(key text, holder uuid, token bigint, lease interval DEFAULT ''00:00:30''::interval) text',
              'rowlock_release(key text, holder uuid, token bigint, status text DEFAULT ''S''::text) text',
              'rowlock_abandon(key text, holder uuid, token bigint) text',
              'rowlock_put_back(key text, holder uuid, token bigint) text',
              'rowlock_confirm(key text, holder uuid, token bigint) void',
              'rowlock_list() TABLE(key text, state text, since timestamp with time zone, until timestamp with time zone, by text, holder uuid, token bigint, ended timestamp with time zone, status text)',
              'rowlock_version() integer')
    LOOP
        EXECUTE 'DROP FUNCTION ' || other;
    END LOOP;
    PERFORM set_config('IntervalStyle', style, true);

    CREATE OR REPLACE FUNCTION rowlock_try_acquire(
        key text, lease interval DEFAULT '30 seconds', label text DEFAULT NULL,
        min_interval interval DEFAULT '0', rules text DEFAULT 'recover',
        OUT granted boolean, OUT token bigint, INOUT holder uuid DEFAULT NULL, OUT expires_at timestamptz,
        OUT previous_token bigint, OUT previous_label text,
        OUT reason text, OUT "by" text, OUT since timestamptz, OUT until timestamptz, OUT retry_after interval)
    LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT SET TimeZone = 'UTC' AS $body$
#variable_conflict use_column
DECLARE
    asked_key text     := rowlock_try_acquire.key;
    asker     uuid     := coalesce(rowlock_try_acquire.holder, gen_random_uuid());
    who       text     := coalesce(rowlock_try_acquire.label, concat_ws('/', nullif(right(current_setting('application_name'), 44 - char_length(pg_backend_pid()::text)), ''), pg_backend_pid()));
    length    interval := coalesce(rowlock_try_acquire.lease, '30 seconds');
    gap       interval := coalesce(rowlock_try_acquire.min_interval, '0');
    recover   boolean  := coalesce(rowlock_try_acquire.rules, 'recover') = 'recover';
    spaces    int[]    := ARRAY[9,10,11,12,13,32,133,160,5760,8192,8193,8194,8195,8196,8197,8198,8199,8200,8201,8202,8232,8233,8239,8287,12288];
    left_to   int := 20; -- Counted, not timed: the clock may be set back.
    created   int := 0;
    problem   text;
    timeout   text;
    seen      record;
BEGIN
    -- A character has at most 6 bytes of UTF-8, but for a database whose texts have no encoding.
    problem := CASE
        WHEN coalesce(asked_key, '') = '' OR ((char_length(asked_key) > 40 OR getdatabaseencoding() = 'SQL_ASCII') AND octet_length(convert_to(asked_key, 'UTF8')) > 255)
             OR ascii(asked_key) = ANY (spaces) OR ascii(right(asked_key, 1)) = ANY (spaces) THEN
            format('key %s is not valid: use 1 to 255 bytes of UTF-8, without white space at the start or end', quote_nullable(left(asked_key, 80)))
        WHEN asker = '00000000-0000-0000-0000-000000000000' THEN 'the holder is not valid: use a UUID that is not all zeros, or NULL for a new one'
        WHEN length NOT BETWEEN interval '100 milliseconds' AND interval '30 days' THEN
            format('lease %s is not valid: it has to be from 100 ms to 30 days', length)
        WHEN gap NOT BETWEEN interval '0' AND interval '3653 days' THEN
            format('min_interval %s is not valid: it has to be from zero to ten years', gap)
        WHEN rowlock_try_acquire.rules NOT IN ('recover', 'article') THEN
            format('rules %s are not known: they are recover or article', quote_literal(rowlock_try_acquire.rules))
        WHEN char_length(rowlock_try_acquire.label) > 45 OR rowlock_try_acquire.label ~ E'[\\x01-\\x1f\\x7f]'
             OR (getdatabaseencoding() = 'UTF8' AND rowlock_try_acquire.label ~ E'[\\u0080-\\u009f]') THEN
            format('label %s is not valid: it has to have at most 45 characters, and no control characters',
                   quote_literal(regexp_replace(left(rowlock_try_acquire.label, 45), '[^ -~]', '?', 'g')))
    END;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION '%', problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A month is 30 days, whichever it is added to or subtracted from.
    gap := make_interval(secs => extract(epoch FROM gap));
    LOOP
        -- Takes the row if the rules grant it. A row that is not granted is not locked, and a
        -- locked row is not waited for.
        UPDATE t_resource_lock t SET
            lock_flag = 1, status = 'P', client_ip = who, holder = asker, end_time = NULL,
            begin_time = CASE j.verdict WHEN 'same' THEN t.begin_time ELSE j.now END,
            claimed_at = CASE j.verdict WHEN 'same' THEN t.begin_time ELSE j.now END,
            token = CASE j.verdict WHEN 'same' THEN t.token ELSE greatest(t.token + 1, (extract(epoch FROM j.now) * 1000000)::bigint) END,
            prior_token = CASE j.verdict WHEN 'same' THEN t.prior_token WHEN 'taken over' THEN
                coalesce(CASE WHEN t.holder = '00000000-0000-0000-0000-000000000000' AND t.claimed_at = t.begin_time THEN t.prior_token END, t.token) END,
            prior_client_ip = CASE j.verdict WHEN 'same' THEN t.prior_client_ip ELSE left(t.client_ip, 45) END,
            prior_status = CASE j.verdict WHEN 'same' THEN t.prior_status ELSE t.status END,
            prior_begin_time = CASE j.verdict WHEN 'same' THEN t.prior_begin_time ELSE t.begin_time END,
            prior_end_time = CASE j.verdict WHEN 'same' THEN t.prior_end_time ELSE t.end_time END,
            expires_at = greatest(CASE j.verdict WHEN 'same' THEN t.expires_at END, j.now + length), awaited = t.awaited AND j.verdict = 'same'
        FROM (
            SELECT c.key_resource, n.now, v.verdict
            FROM t_resource_lock c CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
            CROSS JOIN LATERAL (SELECT
                CASE WHEN c.lock_flag = 1 AND c.holder = asker AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN 'same'
                     WHEN c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN
                         CASE WHEN recover AND n.now >= c.expires_at THEN 'taken over' END
                     WHEN c.lock_flag = 1 THEN NULL
                     WHEN (recover OR c.status = 'S')
                          AND (c.begin_time IS NULL OR gap = interval '0' OR n.now - gap >= c.begin_time) THEN 'acquired'
                END AS verdict) v
            WHERE c.key_resource = asked_key AND v.verdict IS NOT NULL
            FOR UPDATE OF c SKIP LOCKED) j
        WHERE t.key_resource = j.key_resource
        RETURNING true, t.token, asker, t.expires_at, t.prior_token,
                  CASE WHEN t.prior_token IS NOT NULL THEN t.prior_client_ip::text END
        INTO granted, token, holder, expires_at, previous_token, previous_label;
        IF FOUND THEN
            -- A claim that the server forgets in a crash would be granted a second time. Any other
            -- value stays as it is.
            IF current_setting('synchronous_commit') = 'off' THEN
                PERFORM set_config('synchronous_commit', 'on', true);
            END IF;
            RETURN;
        END IF;
        -- A row that has become free since is 'busy', and is asked for again.
        SELECT coalesce(c.lock_flag = 1, false) AS locked, c.status::text AS status, c.client_ip::text AS label,
               c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL AS stands,
               c.holder = asker AS same, clock_timestamp() AS now,
               CASE WHEN c.begin_time IS NOT NULL THEN greatest(least(c.begin_time::timestamptz, '9999-12-31Z'), '0001-01-01Z') END AS begun,
               CASE WHEN c.expires_at IS NOT NULL THEN greatest(least(c.expires_at, '9999-12-31Z'), '0001-01-01Z') END AS ends
        FROM t_resource_lock c WHERE c.key_resource = asked_key INTO seen;
        IF NOT FOUND THEN
            -- A row that another transaction is creating is waited for only briefly.
            timeout := current_setting('lock_timeout');
            BEGIN
                PERFORM set_config('lock_timeout', '100ms', true);
                INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
                VALUES (asked_key, 'S', 0, 'epoch', '', greatest(60, ceil(extract(epoch FROM gap) / 60)::int), 0, 0)
                ON CONFLICT (key_resource) DO NOTHING;
                PERFORM set_config('lock_timeout', timeout, true);
                reason := 'missing';
                created := created + 1;
            EXCEPTION WHEN lock_not_available THEN
                reason := 'busy';
                left_to := 0;
            END;
        ELSE
            -- The refusing half of the rules.
            "by" := seen.label;
            since := seen.begun;
            IF seen.stands THEN
                reason := CASE WHEN seen.same THEN 'busy' WHEN seen.ends IS NULL OR seen.now < seen.ends THEN 'held'
                               WHEN recover THEN 'busy' ELSE 'timed_out_unfinished' END;
                until := CASE WHEN reason = 'held' THEN seen.ends END;
            ELSIF seen.locked THEN
                reason := 'held_by_another_program';
            ELSIF NOT recover AND seen.status IS DISTINCT FROM 'S' THEN
                reason := CASE WHEN seen.status = 'F' THEN 'last_run_failed' ELSE 'not_succeeded' END;
            ELSIF gap <> interval '0' AND seen.now - gap < seen.begun THEN
                reason := 'within_min_interval';
                until := seen.begun + gap;
            ELSE
                reason := 'busy';
            END IF;
        END IF;
        left_to := left_to - 1;
        EXIT WHEN reason NOT IN ('busy', 'missing') OR created > 20 OR (left_to <= 0 AND reason = 'busy')
            OR (reason = 'busy' AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable'));
        IF reason = 'busy' THEN
            PERFORM pg_sleep(0.005);
        END IF;
        SELECT NULL, NULL, NULL, NULL INTO reason, "by", since, until;
    END LOOP;
    granted := false;
    IF reason = 'missing' THEN
        RAISE EXCEPTION 'the row of key % was created, and is not visible: check the table''s policies and triggers', quote_literal(asked_key);
    END IF;
    retry_after := CASE WHEN reason = 'busy' THEN interval '100 milliseconds' WHEN until IS NOT NULL THEN greatest(until - seen.now, interval '0') END;
END $body$;

    -- What became of a change that matched no row: 'done' by an earlier request, 'lost', or 'busy'.
    -- The condition of a claim that stands is the same in all functions: the row is locked by it,
    -- and no other program has overwritten it. A snapshot that is older than the claim tells
    -- nothing of it.
    CREATE OR REPLACE FUNCTION rowlock_unmatched(change text, key text, holder uuid, token bigint) RETURNS text
    LANGUAGE sql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT AS $body$
SELECT CASE WHEN current_setting('transaction_isolation') IN ('repeatable read', 'serializable') AND coalesce(t.token < $4, true) THEN 'busy'
            WHEN t.token = $4 AND change IN ('release', 'abandon', 'put back') AND t.lock_flag <> 1 AND t.holder IS NULL THEN 'done'
            WHEN t.token = $4 AND change = 'put back' AND t.holder = '00000000-0000-0000-0000-000000000000' THEN 'done'
            WHEN t.token = $4 AND t.lock_flag = 1 AND t.holder = $3 AND t.claimed_at = t.begin_time AND t.end_time IS NULL THEN
                CASE WHEN change = 'abandon' AND t.expires_at <= clock_timestamp() THEN 'done' ELSE 'busy' END
            ELSE 'lost' END
FROM (SELECT) one LEFT JOIN t_resource_lock t ON t.key_resource = $2
$body$;

    CREATE OR REPLACE FUNCTION rowlock_renew(key text, holder uuid, token bigint, lease interval DEFAULT '30 seconds') RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT SET TimeZone = 'UTC' AS $body$
DECLARE
    outcome text;
BEGIN
    lease := coalesce(lease, '30 seconds');
    IF lease NOT BETWEEN interval '100 milliseconds' AND interval '30 days' THEN
        RAISE EXCEPTION 'lease % is not valid: it has to be from 100 ms to 30 days', lease USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR attempt IN 1..20 LOOP
        UPDATE t_resource_lock t SET expires_at = greatest(t.expires_at, clock_timestamp() + $4)
        FROM (SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = $1 AND c.lock_flag = 1 AND c.holder = $2
              AND c.token = $3 AND c.claimed_at = c.begin_time AND c.end_time IS NULL FOR UPDATE SKIP LOCKED) l
        WHERE t.key_resource = l.key_resource;
        IF FOUND THEN
            IF current_setting('synchronous_commit') = 'off' THEN
                PERFORM set_config('synchronous_commit', 'on', true);
            END IF;
            RETURN 'done';
        END IF;
        outcome := rowlock_unmatched('renew', $1, $2, $3);
        EXIT WHEN outcome <> 'busy' OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
        PERFORM pg_sleep(0.005);
    END LOOP;
    RETURN outcome;
END $body$;

    CREATE OR REPLACE FUNCTION rowlock_release(key text, holder uuid, token bigint, status text DEFAULT 'S') RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT SET TimeZone = 'UTC' AS $body$
DECLARE
    outcome text;
    awaited boolean;
BEGIN
    IF coalesce(rowlock_release.status, 'S') NOT IN ('S', 'F') THEN
        RAISE EXCEPTION 'status % is not valid: it has to be S or F', quote_nullable(rowlock_release.status) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR attempt IN 1..20 LOOP
        UPDATE t_resource_lock t
        SET lock_flag = 0, status = coalesce($4, 'S'), end_time = clock_timestamp(), holder = NULL, expires_at = NULL,
            claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL
        FROM (SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = $1 AND c.lock_flag = 1 AND c.holder = $2
              AND c.token = $3 AND c.claimed_at = c.begin_time AND c.end_time IS NULL FOR UPDATE SKIP LOCKED) l
        WHERE t.key_resource = l.key_resource RETURNING t.awaited INTO awaited;
        IF FOUND THEN
            -- A claim whose release is forgotten is taken over, also within a minimum interval.
            IF current_setting('synchronous_commit') = 'off' THEN
                PERFORM set_config('synchronous_commit', 'on', true);
            END IF;
            IF awaited AND pg_notification_queue_usage() < 0.9 THEN
                PERFORM pg_notify('rowlock', $1);
            END IF;
            RETURN 'done';
        END IF;
        outcome := rowlock_unmatched('release', $1, $2, $3);
        EXIT WHEN outcome <> 'busy' OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
        PERFORM pg_sleep(0.005);
    END LOOP;
    RETURN outcome;
END $body$;

    CREATE OR REPLACE FUNCTION rowlock_abandon(key text, holder uuid, token bigint) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT AS $body$
DECLARE
    outcome text;
    awaited boolean;
BEGIN
    FOR attempt IN 1..20 LOOP
        UPDATE t_resource_lock t SET expires_at = least(t.expires_at, clock_timestamp())
        FROM (SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = $1 AND c.lock_flag = 1 AND c.holder = $2
              AND c.token = $3 AND c.claimed_at = c.begin_time AND c.end_time IS NULL FOR UPDATE SKIP LOCKED) l
        WHERE t.key_resource = l.key_resource RETURNING t.awaited INTO awaited;
        IF FOUND THEN
            IF awaited AND pg_notification_queue_usage() < 0.9 THEN
                PERFORM pg_notify('rowlock', $1);
            END IF;
            RETURN 'done';
        END IF;
        outcome := rowlock_unmatched('abandon', $1, $2, $3);
        EXIT WHEN outcome <> 'busy' OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
        PERFORM pg_sleep(0.005);
    END LOOP;
    RETURN outcome;
END $body$;

    -- Ends a claim under which no work was begun: the row is as it was before, under the claim's token.
    -- A claim that it took over is taken over by the next one: it has the holder 0 until then.
    CREATE OR REPLACE FUNCTION rowlock_put_back(key text, holder uuid, token bigint) RETURNS text
    LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT AS $body$
DECLARE
    outcome text;
    awaited boolean;
BEGIN
    FOR attempt IN 1..20 LOOP
        UPDATE t_resource_lock t
        SET lock_flag = CASE WHEN t.prior_token IS NULL THEN 0 ELSE 1 END, status = t.prior_status, begin_time = t.prior_begin_time,
            end_time = t.prior_end_time, client_ip = t.prior_client_ip, prior_client_ip = NULL,
            holder = CASE WHEN t.prior_token IS NOT NULL THEN '00000000-0000-0000-0000-000000000000'::uuid END,
            expires_at = CASE WHEN t.prior_token IS NOT NULL THEN clock_timestamp() END,
            claimed_at = CASE WHEN t.prior_token IS NOT NULL THEN t.prior_begin_time END
        FROM (SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = $1 AND c.lock_flag = 1 AND c.holder = $2
              AND c.token = $3 AND c.claimed_at = c.begin_time AND c.end_time IS NULL FOR UPDATE SKIP LOCKED) l
        WHERE t.key_resource = l.key_resource RETURNING t.awaited INTO awaited;
        IF FOUND THEN
            IF current_setting('synchronous_commit') = 'off' THEN
                PERFORM set_config('synchronous_commit', 'on', true);
            END IF;
            IF awaited AND pg_notification_queue_usage() < 0.9 THEN
                PERFORM pg_notify('rowlock', $1);
            END IF;
            RETURN 'done';
        END IF;
        outcome := rowlock_unmatched('put back', $1, $2, $3);
        EXIT WHEN outcome <> 'busy' OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
        PERFORM pg_sleep(0.005);
    END LOOP;
    RETURN outcome;
END $body$;

    -- Makes the commit of the caller's transaction depend on the claim: the row stays locked until
    -- that transaction ends.
    CREATE OR REPLACE FUNCTION rowlock_confirm(key text, holder uuid, token bigint) RETURNS void
    LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT AS $body$
DECLARE
    outcome text;
BEGIN
    FOR attempt IN 1..20 LOOP
        UPDATE t_resource_lock t SET confirms = t.confirms + 1
        FROM (SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = $1 AND c.lock_flag = 1 AND c.holder = $2
              AND c.token = $3 AND c.claimed_at = c.begin_time AND c.end_time IS NULL FOR UPDATE SKIP LOCKED) l
        WHERE t.key_resource = l.key_resource;
        IF FOUND THEN
            RETURN;
        END IF;
        outcome := rowlock_unmatched('confirm', $1, $2, $3);
        EXIT WHEN outcome <> 'busy' OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
        PERFORM pg_sleep(0.005);
    END LOOP;
    IF outcome = 'busy' THEN
        RAISE EXCEPTION 'the row of key % is locked by another transaction, or younger than this one: repeat the transaction', quote_nullable($1)
            USING ERRCODE = 'serialization_failure';
    END IF;
    RAISE EXCEPTION 'the claim on key % under token % is lost: roll the transaction back', quote_nullable($1), $3 USING ERRCODE = 'RL001';
END $body$;

    CREATE OR REPLACE FUNCTION rowlock_list()
    RETURNS TABLE (key text, state text, since timestamptz, until timestamptz, "by" text, holder uuid, token bigint, ended timestamptz, status text)
    LANGUAGE sql VOLATILE SECURITY INVOKER SET search_path FROM CURRENT SET TimeZone = 'UTC' AS $body$
SELECT c.key_resource::text,
       CASE WHEN c.stands THEN CASE WHEN n.now >= c.expires_at THEN 'expired' ELSE 'held' END
            WHEN c.lock_flag = 1 THEN 'held_by_another_program'
            WHEN c.status = 'F' THEN 'failed' WHEN c.begin_time > n.now THEN 'within_min_interval' ELSE 'free' END,
       c.begin_time::timestamptz,
       CASE WHEN c.stands THEN c.expires_at WHEN c.lock_flag = 1 THEN NULL WHEN c.begin_time > n.now THEN c.begin_time::timestamptz END,
       c.client_ip::text, c.holder, c.token, c.end_time::timestamptz, c.status::text
FROM (SELECT t.*, t.lock_flag = 1 AND t.holder IS NOT NULL AND t.claimed_at = t.begin_time AND t.end_time IS NULL AS stands
      FROM t_resource_lock t) c
CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
ORDER BY c.key_resource
$body$;

    CREATE OR REPLACE FUNCTION rowlock_version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 20261202';

    PERFORM set_config('search_path', path, true);
END $install$;
