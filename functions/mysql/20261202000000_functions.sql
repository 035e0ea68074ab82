-- rowlock: the lock as stored procedures of MySQL and MariaDB, for programs in any language. May
-- run again: the procedures are replaced, unless they are newer. The mysql program runs this file
-- with --comments --delimiter=//. The rules are those of src/rules.rs, the statements those of
-- src/store/mysql. Durations are in seconds, times in UTC. NULL as a setting means its default. The
-- number that rowlock_version returns is the date in this file's name, as is the number that is
-- compared with it; each change of the file raises all three. MariaDB replaces a procedure while it
-- is called. On MySQL it is dropped first; MariaDB ignores these comments, and refuses a statement
-- that is empty without them.

-- The rules for the table are those of src/store/mysql/schema.rs. The text of a SIGNAL has at most
-- 128 characters.
SET @rowlock_wrong = COALESCE(
    (SELECT 'newer functions are installed here, and stay as they are' FROM information_schema.routines
     WHERE routine_schema = DATABASE() AND routine_type = 'PROCEDURE' AND routine_name = 'rowlock_version'
       AND (routine_comment > 20261202 OR REGEXP_SUBSTR(routine_definition, '[0-9]{8}') > 20261202)),
    IF(EXISTS (SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 't_resource_lock'),
       NULL, 'the table t_resource_lock does not exist here: run rowlock migrate first'),
    (SELECT CONCAT('t_resource_lock: its engine (', COALESCE(engine, 'none'), ') keeps no row locks; use InnoDB') FROM information_schema.tables
     WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND NOT (engine <=> 'InnoDB')),
    (SELECT 't_resource_lock: its primary key is not the column key_resource alone; make it that' FROM information_schema.statistics
     WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND index_name = 'PRIMARY'
     HAVING NOT (GROUP_CONCAT(LOWER(column_name), IF(sub_part IS NULL, '', ' in part') ORDER BY seq_in_index) <=> 'key_resource')),
    (SELECT CASE
         WHEN name = 'key_resource' AND NOT (kind = 'varbinary' OR (kind = 'varchar' AND collation LIKE 'utf8%' AND RIGHT(collation, 4) = '_bin')) THEN
             CONCAT('t_resource_lock: its column key_resource (', LEFT(CONCAT(type, ' ', collation), 35), ') does not compare byte by byte; use VARBINARY(255)')
         WHEN name IN ('begin_time', 'end_time') AND (kind <> 'datetime' OR more <> '') THEN
             CONCAT('t_resource_lock: its column ', name, ' (', LEFT(CONCAT(type, more), 26), ') does not hold what rowlock writes there; use DATETIME(6) NULL')
         WHEN name IN ('lock_flag', 'time') AND RIGHT(kind, 3) <> 'int' THEN
             CONCAT('t_resource_lock: its column ', name, ' (', LEFT(type, 26), ') does not hold what rowlock writes there; use INT')
         END AS wrong
     FROM (SELECT LOWER(column_name) AS name, LOWER(data_type) AS kind, column_type AS type, COALESCE(collation_name, 'binary') AS collation,
                  CONCAT(IF(is_nullable = 'NO' AND column_name = 'end_time', ' NOT NULL', ''), IF(extra LIKE '%on update%', ' ON UPDATE', '')) AS more
           FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 't_resource_lock') c
     HAVING wrong IS NOT NULL ORDER BY name LIMIT 1),
    (SELECT IF(COUNT(*) = 17, NULL, 't_resource_lock lacks columns that rowlock writes: run rowlock migrate first') FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name = 't_resource_lock'
       AND column_name IN ('key_resource', 'status', 'lock_flag', 'begin_time', 'end_time', 'client_ip', 'time', 'holder', 'token', 'expires_at', 'claimed_at',
                           'confirms', 'prior_token', 'prior_client_ip', 'prior_status', 'prior_begin_time', 'prior_end_time')));
/*!80000 DROP PROCEDURE IF EXISTS rowlock_check */ /*M! DO 0 */;
/*!80000 CREATE PROCEDURE rowlock_check() */ BEGIN /*M! NOT ATOMIC */
    IF @rowlock_wrong IS NOT NULL THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = @rowlock_wrong;
    END IF;
END;
/*!80000 CALL rowlock_check() */ /*M! DO 0 */;
/*!80000 DROP PROCEDURE IF EXISTS rowlock_check */ /*M! DO 0 */;

SET @rowlock_sql_mode = @@SESSION.sql_mode;
SET SESSION sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION';

/*!80000 DROP PROCEDURE IF EXISTS rowlock_try_acquire */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_try_acquire(
    p_key VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_lease DECIMAL(20, 6),
    p_label VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_min_interval DECIMAL(20, 6),
    p_rules VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_holder VARCHAR(36) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin)
MODIFIES SQL DATA SQL SECURITY INVOKER
claim: BEGIN
    DECLARE v_key VARBINARY(4096) DEFAULT CAST(p_key AS BINARY);
    DECLARE v_length BIGINT DEFAULT COALESCE(p_lease, 30) * 1000000;
    DECLARE v_gap BIGINT DEFAULT COALESCE(p_min_interval, 0) * 1000000;
    DECLARE v_recover BOOLEAN DEFAULT COALESCE(p_rules, 'recover') = 'recover';
    DECLARE v_label VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
        DEFAULT COALESCE(p_label, CONCAT(RIGHT(USER(), 44 - CHAR_LENGTH(CONNECTION_ID())), '/', CONNECTION_ID()));
    -- The characters from 0x01 to 0x1F, and from 0x7F to 0x9F.
    DECLARE v_control VARCHAR(8) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin DEFAULT _utf8mb4 0x5B012D1F7F2DC29F5D;
    DECLARE v_asker BINARY(16);
    DECLARE v_granted BOOLEAN DEFAULT FALSE;
    DECLARE v_token BIGINT;
    DECLARE v_now, v_expires DATETIME(6);

    -- White space at an end: that of one byte, then that of UTF-8 with two bytes and with three. A
    -- visible character of ASCII is none.
    IF ASCII(v_key) NOT BETWEEN 33 AND 126 OR ASCII(RIGHT(v_key, 1)) NOT BETWEEN 33 AND 126 THEN
        IF LOCATE(LEFT(v_key, 1), 0x090A0B0C0D20) > 0 OR LOCATE(RIGHT(v_key, 1), 0x090A0B0C0D20) > 0
            OR HEX(LEFT(v_key, 2)) IN ('C285', 'C2A0') OR HEX(RIGHT(v_key, 2)) IN ('C285', 'C2A0')
            OR HEX(LEFT(v_key, 3)) IN ('E19A80', 'E28080', 'E28081', 'E28082', 'E28083', 'E28084', 'E28085', 'E28086', 'E28087', 'E28088', 'E28089', 'E2808A', 'E280A8', 'E280A9', 'E280AF', 'E2819F', 'E38080')
            OR HEX(RIGHT(v_key, 3)) IN ('E19A80', 'E28080', 'E28081', 'E28082', 'E28083', 'E28084', 'E28085', 'E28086', 'E28087', 'E28088', 'E28089', 'E2808A', 'E280A8', 'E280A9', 'E280AF', 'E2819F', 'E38080') THEN
            SET v_key = NULL;
        END IF;
    END IF;
    IF v_key IS NULL OR OCTET_LENGTH(v_key) NOT BETWEEN 1 AND 255 OR LOCATE(0x00, v_key) > 0 THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the key is not valid: use 1 to 255 bytes of UTF-8, without NUL and without white space at the ends';
    ELSEIF v_length NOT BETWEEN 100000 AND 2592000000000 THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the lease is not valid: it has to be from 0.1 s to 30 days';
    ELSEIF v_gap NOT BETWEEN 0 AND 315619200000000 THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the min_interval is not valid: it has to be from zero to ten years';
    ELSEIF NOT v_recover AND p_rules <> 'article' THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'these rules are not known: they are recover or article';
    ELSEIF CHAR_LENGTH(p_label) > 45 OR LOCATE(0x00, p_label) > 0 OR p_label REGEXP v_control THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the label is not valid: it has to have at most 45 characters, and no control characters';
    ELSEIF p_holder IS NULL THEN
        SET p_holder = INSERT(INSERT(INSERT(INSERT(LEFT(SHA2(CONCAT(UUID(), RAND()), 256), 32), 21, 0, '-'), 17, 0, '-'), 13, 0, '-'), 9, 0, '-');
    ELSEIF LOWER(p_holder) NOT REGEXP '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' OR p_holder NOT REGEXP '[1-9a-fA-F]' THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the holder is not valid: use a UUID that is not all zeros, or NULL for a new one';
    END IF;
    SET v_asker = UNHEX(REPLACE(p_holder, '-', ''));

    -- A free row is taken under a token and until a time that are chosen before: then it need not
    -- be read afterwards. Every other row, also one whose token is not below the clock, is left to
    -- the loop, and so is a claim that had to wait for another session's lock on the table. A row
    -- that is refused is not locked: within a transaction of the caller it would stay locked. So it
    -- is looked at first, by a SELECT; a query within IF would lock the row. MariaDB tells whether
    -- there is a transaction, and outside of one uses a statement that does not wait for a locked
    -- row. Its error would end a transaction under innodb_rollback_on_timeout. The time is the
    -- earlier one of two: SET timestamp changes UTC_TIMESTAMP, and a clock change of the time zone
    -- may fall between the start of the statement and SYSDATE.
    SET v_expires = SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND;
    SET v_token = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', v_expires), v_now = LEAST(UTC_TIMESTAMP(6), v_expires),
        v_expires = v_expires + INTERVAL v_length MICROSECOND;
    SELECT COUNT(*) > 0 INTO v_granted FROM t_resource_lock c
    WHERE c.key_resource = v_key AND NOT COALESCE(c.lock_flag = 1, FALSE) AND c.token < v_token
      AND (v_recover OR CAST(c.status AS BINARY) = 'S')
      AND (v_gap = 0 OR c.begin_time IS NULL OR v_now - INTERVAL v_gap MICROSECOND >= c.begin_time);
    IF v_granted THEN
        SET v_granted = FALSE;
        /*M!
        IF @@autocommit AND NOT @@in_transaction THEN
            BEGIN
                DECLARE CONTINUE HANDLER FOR 1205 BEGIN END;
                SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE t_resource_lock c FORCE INDEX (PRIMARY)
                SET c.prior_token = NULL, c.prior_client_ip = LEFT(c.client_ip, 45), c.prior_status = c.status,
                    c.prior_begin_time = IF(c.begin_time >= '1000-01-01', c.begin_time, NULL),
                    c.prior_end_time = IF(c.end_time >= '1000-01-01', c.end_time, NULL),
                    c.lock_flag = 1, c.status = 'P', c.client_ip = v_label, c.holder = v_asker, c.token = v_token,
                    c.begin_time = v_now, c.claimed_at = v_now, c.end_time = NULL, c.expires_at = v_expires
                WHERE c.key_resource = v_key AND NOT COALESCE(c.lock_flag = 1, FALSE) AND c.token < v_token
                  AND (v_recover OR CAST(c.status AS BINARY) = 'S')
                  AND (v_gap = 0 OR c.begin_time IS NULL OR v_now - INTERVAL v_gap MICROSECOND >= c.begin_time)
                  AND TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6)) + TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) < v_token + 100000;
                SET v_granted = ROW_COUNT() > 0;
            END;
        END IF;
        */
        /*!80000
        UPDATE (
            SELECT c.key_resource, c.status, IF(c.begin_time >= '1000-01-01', c.begin_time, NULL) AS began,
                   IF(c.end_time >= '1000-01-01', c.end_time, NULL) AS ended, c.client_ip
            FROM t_resource_lock c
            WHERE c.key_resource = v_key AND NOT COALESCE(c.lock_flag = 1, FALSE) AND c.token < v_token
              AND (v_recover OR CAST(c.status AS BINARY) = 'S')
              AND (v_gap = 0 OR c.begin_time IS NULL OR v_now - INTERVAL v_gap MICROSECOND >= c.begin_time)
              AND TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6)) + TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) < v_token + 100000
            LIMIT 1 FOR UPDATE SKIP LOCKED
        ) j STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource
        SET t.prior_token = NULL, t.prior_client_ip = LEFT(j.client_ip, 45), t.prior_status = j.status,
            t.prior_begin_time = j.began, t.prior_end_time = j.ended,
            t.lock_flag = 1, t.status = 'P', t.client_ip = v_label, t.holder = v_asker, t.token = v_token,
            t.begin_time = v_now, t.claimed_at = v_now, t.end_time = NULL, t.expires_at = v_expires;
        SET v_granted = ROW_COUNT() > 0;
        */
    END IF;
    IF v_granted THEN
        SELECT v_granted AS granted, v_token AS token, LOWER(p_holder) AS holder, v_expires AS expires_at, NULL AS previous_token,
               NULL AS previous_label, NULL AS reason, NULL AS `by`, NULL AS since, NULL AS until, NULL AS retry_after;
        LEAVE claim;
    END IF;

    BEGIN
        DECLARE v_left INT DEFAULT 20;
        DECLARE v_exists, v_stands, v_locked, v_same BOOLEAN DEFAULT FALSE;
        DECLARE v_reason VARCHAR(30) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
        DECLARE v_status VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
        DECLARE v_by, v_previous_label VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
        DECLARE v_previous_token BIGINT;
        DECLARE v_begun, v_until DATETIME(6);
        DECLARE v_timeout INT;
        DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_exists = FALSE;

        attempts: LOOP
            SET v_exists = TRUE, v_reason = 'busy', v_until = NULL;
            SELECT COALESCE(c.lock_flag = 1, FALSE), CONVERT(c.status USING utf8mb4), CONVERT(c.client_ip USING utf8mb4),
                   COALESCE(c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL, FALSE),
                   COALESCE(c.holder = v_asker, FALSE), IF(c.begin_time >= '1000-01-01', c.begin_time, NULL), c.expires_at,
                   LEAST(UTC_TIMESTAMP(6), SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND)
            INTO v_locked, v_status, v_by, v_stands, v_same, v_begun, v_expires, v_now
            FROM t_resource_lock c WHERE c.key_resource = v_key;
            IF NOT v_exists THEN
                BEGIN
                    -- A row that another transaction is creating is waited for only briefly.
                    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN
                        SET SESSION innodb_lock_wait_timeout = v_timeout;
                        RESIGNAL;
                    END;
                    DECLARE CONTINUE HANDLER FOR 1205 BEGIN
                        IF @@GLOBAL.innodb_rollback_on_timeout THEN
                            SET SESSION innodb_lock_wait_timeout = v_timeout;
                            RESIGNAL;
                        END IF;
                        SET v_left = 0;
                    END;
                    SET v_timeout = @@SESSION.innodb_lock_wait_timeout;
                    SET SESSION innodb_lock_wait_timeout = 1;
                    INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
                    VALUES (v_key, 'S', 0, '1970-01-01', '', GREATEST(60, CEIL(v_gap / 60000000)), 0, 0)
                    ON DUPLICATE KEY UPDATE key_resource = key_resource;
                    SET SESSION innodb_lock_wait_timeout = v_timeout;
                END;
                SET v_by = NULL, v_begun = NULL;
            ELSEIF v_stands THEN
                IF NOT v_same AND (v_expires IS NULL OR v_now < v_expires) THEN
                    SET v_reason = 'held', v_until = v_expires;
                ELSEIF NOT v_same AND NOT v_recover THEN
                    SET v_reason = 'timed_out_unfinished';
                END IF;
            ELSEIF v_locked THEN
                SET v_reason = 'held_by_another_program';
            ELSEIF NOT v_recover AND (v_status IS NULL OR CAST(v_status AS BINARY) <> 'S') THEN
                SET v_reason = IF(CAST(v_status AS BINARY) = 'F', 'last_run_failed', 'not_succeeded');
            ELSEIF v_gap > 0 AND v_now - INTERVAL v_gap MICROSECOND < v_begun THEN
                SET v_reason = 'within_min_interval', v_until = v_begun + INTERVAL v_gap MICROSECOND;
            END IF;
            IF v_reason <> 'busy' THEN
                LEAVE attempts;
            END IF;

            -- Takes the row if the rules still grant it, and no other transaction has locked it.
            -- ROW_COUNT counts the rows that it changes: a claim that is repeated for a shorter time
            -- ends a microsecond later than before.
            UPDATE (
                SELECT c.key_resource, c.token, COALESCE(IF(c.holder = REPEAT(x'00', 16) AND c.claimed_at = c.begin_time, c.prior_token, NULL), c.token) AS prior, c.status,
                       IF(c.begin_time >= '1000-01-01', c.begin_time, NULL) AS began, IF(c.end_time >= '1000-01-01', c.end_time, NULL) AS ended, c.client_ip, c.prior_token, c.prior_status,
                       c.prior_begin_time, c.prior_end_time, c.prior_client_ip,
                       LEAST(UTC_TIMESTAMP(6), SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND) AS now,
                       TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6)) + TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) AS micros,
                       CASE WHEN c.lock_flag = 1 AND c.holder = v_asker AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN 'same'
                            WHEN c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN
                                CASE WHEN v_recover AND LEAST(UTC_TIMESTAMP(6), SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND) >= c.expires_at
                                     THEN 'taken over' END
                            WHEN c.lock_flag = 1 THEN NULL
                            WHEN (v_recover OR CAST(c.status AS BINARY) = 'S') AND (c.begin_time IS NULL OR v_gap = 0
                                OR LEAST(UTC_TIMESTAMP(6), SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND)
                                   - INTERVAL v_gap MICROSECOND >= c.begin_time) THEN 'acquired'
                       END AS verdict
                FROM t_resource_lock c WHERE c.key_resource = v_key LIMIT 1 FOR UPDATE SKIP LOCKED
            ) j STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource
            SET t.lock_flag = 1, t.status = 'P', t.client_ip = v_label, t.holder = v_asker, t.end_time = NULL,
                t.begin_time = IF(j.verdict = 'same', t.begin_time, j.now),
                t.claimed_at = IF(j.verdict = 'same', t.claimed_at, j.now),
                t.prior_token = CASE j.verdict WHEN 'same' THEN j.prior_token WHEN 'taken over' THEN j.prior END,
                t.prior_client_ip = IF(j.verdict = 'same', j.prior_client_ip, LEFT(j.client_ip, 45)),
                t.prior_status = IF(j.verdict = 'same', j.prior_status, j.status),
                t.prior_begin_time = IF(j.verdict = 'same', j.prior_begin_time, j.began),
                t.prior_end_time = IF(j.verdict = 'same', j.prior_end_time, j.ended),
                t.expires_at = GREATEST(IF(j.verdict = 'same', IFNULL(t.expires_at, j.now) + INTERVAL 1 MICROSECOND, j.now),
                    SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND + INTERVAL v_length MICROSECOND),
                t.token = IF(j.verdict = 'same', j.token, GREATEST(j.token + 1, j.micros))
            WHERE j.verdict IS NOT NULL;
            IF ROW_COUNT() > 0 THEN
                SET v_exists = TRUE;
                SELECT c.token, c.expires_at, c.prior_token, CONVERT(c.prior_client_ip USING utf8mb4)
                INTO v_token, v_expires, v_previous_token, v_previous_label
                FROM t_resource_lock c WHERE c.key_resource = v_key AND c.holder = v_asker;
                -- It is missing if an operator has freed the key since: it is claimed anew.
                IF v_exists THEN
                    SET v_granted = TRUE;
                    LEAVE attempts;
                END IF;
            END IF;
            SET v_left = v_left - 1;
            IF v_left <= 0 THEN
                LEAVE attempts;
            END IF;
            DO SLEEP(0.005);
        END LOOP;
        SELECT v_granted AS granted, IF(v_granted, v_token, NULL) AS token,
               IF(v_granted, LOWER(p_holder), NULL) AS holder,
               IF(v_granted, v_expires, NULL) AS expires_at, v_previous_token AS previous_token,
               IF(v_previous_token IS NULL, NULL, v_previous_label) AS previous_label,
               IF(v_granted, NULL, v_reason) AS reason, IF(v_granted, NULL, v_by) AS `by`, IF(v_granted, NULL, v_begun) AS since,
               IF(v_granted, NULL, v_until) AS until,
               CASE WHEN v_granted THEN NULL WHEN v_reason = 'busy' THEN 0.1E0
                    ELSE GREATEST(TIMESTAMPDIFF(MICROSECOND, v_now, v_until), 0) / 1E6 END AS retry_after;
    END;
END;

-- What became of a change that matched no row: 'done' by an earlier request, 'lost', or 'busy'. The
-- first read sees the row as it is now, and no row that another transaction has locked. The second,
-- within a transaction, sees the row as it was when that first read without a lock, and so do all
-- later reads of that transaction. A confirmation that is tried again does without it.
/*!80000 DROP PROCEDURE IF EXISTS rowlock_unmatched */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_unmatched(
    p_change VARCHAR(10) CHARACTER SET utf8mb4, p_key VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_holder BINARY(16),
    p_token BIGINT, p_until DATETIME(6), OUT p_outcome VARCHAR(10) CHARACTER SET utf8mb4)
READS SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE v_key VARBINARY(4096) DEFAULT CAST(p_key AS BINARY);
    DECLARE v_is_now BOOLEAN DEFAULT TRUE;
    DECLARE v_free, v_stands BOOLEAN DEFAULT FALSE;
    DECLARE v_token BIGINT;
    DECLARE v_expires DATETIME(6);
    DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_is_now = FALSE;
    SELECT c.token, (c.lock_flag <> 1 AND c.holder IS NULL) OR COALESCE(p_change = 'put back' AND c.holder = REPEAT(x'00', 16), FALSE), c.expires_at,
           COALESCE(c.lock_flag = 1 AND c.holder = p_holder AND c.claimed_at = c.begin_time AND c.end_time IS NULL, FALSE)
    INTO v_token, v_free, v_expires, v_stands FROM t_resource_lock c WHERE c.key_resource = v_key FOR UPDATE SKIP LOCKED;
    IF NOT v_is_now AND p_change <> 'confirm' THEN
        SELECT c.token, (c.lock_flag <> 1 AND c.holder IS NULL) OR COALESCE(p_change = 'put back' AND c.holder = REPEAT(x'00', 16), FALSE), c.expires_at,
               COALESCE(c.lock_flag = 1 AND c.holder = p_holder AND c.claimed_at = c.begin_time AND c.end_time IS NULL, FALSE)
        INTO v_token, v_free, v_expires, v_stands FROM t_resource_lock c WHERE c.key_resource = v_key;
    END IF;
    SET p_outcome = CASE
        WHEN NOT v_is_now AND (p_change = 'confirm' OR v_token < p_token) THEN 'busy'
        WHEN NOT v_token <=> p_token THEN 'lost'
        WHEN p_change IN ('release', 'abandon', 'put back') AND v_free THEN 'done'
        WHEN NOT v_stands THEN 'lost'
        WHEN p_change = 'abandon' AND v_expires <= UTC_TIMESTAMP(6) THEN 'done'
        WHEN v_is_now AND v_expires >= p_until THEN 'done' -- A renewal that changes nothing.
        ELSE 'busy' END;
END;

/*!80000 DROP PROCEDURE IF EXISTS rowlock_renew */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_renew(
    p_key VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_holder VARCHAR(36) CHARACTER SET utf8mb4, p_token BIGINT, p_lease DECIMAL(20, 6))
MODIFIES SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE v_holder BINARY(16) DEFAULT UNHEX(REPLACE(p_holder, '-', ''));
    DECLARE v_key VARBINARY(4096) DEFAULT CAST(p_key AS BINARY);
    DECLARE v_length BIGINT DEFAULT COALESCE(p_lease, 30) * 1000000;
    DECLARE v_outcome VARCHAR(10) CHARACTER SET utf8mb4;
    DECLARE v_until DATETIME(6);
    DECLARE v_left INT DEFAULT 20;
    IF v_length NOT BETWEEN 100000 AND 2592000000000 THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the lease is not valid: it has to be from 0.1 s to 30 days';
    END IF;
    attempts: LOOP
        SET v_until = UTC_TIMESTAMP(6) + INTERVAL v_length MICROSECOND;
        UPDATE (
            SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = v_key AND c.holder = v_holder AND c.token = p_token
            AND c.lock_flag = 1 AND c.claimed_at = c.begin_time AND c.end_time IS NULL LIMIT 1 FOR UPDATE SKIP LOCKED
        ) j STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource
        SET t.expires_at = GREATEST(IFNULL(t.expires_at, t.claimed_at),
            SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND + INTERVAL v_length MICROSECOND);
        IF ROW_COUNT() > 0 THEN
            SET v_outcome = 'done';
        ELSE
            CALL rowlock_unmatched('renew', p_key, v_holder, p_token, v_until, v_outcome);
        END IF;
        SET v_left = v_left - 1;
        IF v_outcome <> 'busy' OR v_left = 0 THEN
            LEAVE attempts;
        END IF;
        DO SLEEP(0.005);
    END LOOP;
    SELECT v_outcome AS outcome;
END;

/*!80000 DROP PROCEDURE IF EXISTS rowlock_release */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_release(
    p_key VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_holder VARCHAR(36) CHARACTER SET utf8mb4, p_token BIGINT,
    p_status VARCHAR(10) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin)
MODIFIES SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE v_holder BINARY(16) DEFAULT UNHEX(REPLACE(p_holder, '-', ''));
    DECLARE v_key VARBINARY(4096) DEFAULT CAST(p_key AS BINARY);
    DECLARE v_outcome VARCHAR(10) CHARACTER SET utf8mb4;
    DECLARE v_left INT DEFAULT 20;
    IF COALESCE(p_status, 'S') NOT IN ('S', 'F') THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the status is not valid: it has to be S or F';
    END IF;
    attempts: LOOP
        UPDATE (
            SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = v_key AND c.holder = v_holder AND c.token = p_token
            AND c.lock_flag = 1 AND c.claimed_at = c.begin_time AND c.end_time IS NULL LIMIT 1 FOR UPDATE SKIP LOCKED
        ) j STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource
        SET t.lock_flag = 0, t.status = COALESCE(p_status, 'S'), t.end_time = UTC_TIMESTAMP(6), t.holder = NULL,
            t.expires_at = NULL, t.claimed_at = NULL, t.prior_token = NULL, t.prior_client_ip = NULL;
        IF ROW_COUNT() > 0 THEN
            SET v_outcome = 'done';
        ELSE
            CALL rowlock_unmatched('release', p_key, v_holder, p_token, NULL, v_outcome);
        END IF;
        SET v_left = v_left - 1;
        IF v_outcome <> 'busy' OR v_left = 0 THEN
            LEAVE attempts;
        END IF;
        DO SLEEP(0.005);
    END LOOP;
    SELECT v_outcome AS outcome;
END;

/*!80000 DROP PROCEDURE IF EXISTS rowlock_abandon */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_abandon(
    p_key VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_holder VARCHAR(36) CHARACTER SET utf8mb4, p_token BIGINT)
MODIFIES SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE v_holder BINARY(16) DEFAULT UNHEX(REPLACE(p_holder, '-', ''));
    DECLARE v_key VARBINARY(4096) DEFAULT CAST(p_key AS BINARY);
    DECLARE v_outcome VARCHAR(10) CHARACTER SET utf8mb4;
    DECLARE v_left INT DEFAULT 20;
    attempts: LOOP
        UPDATE (
            SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = v_key AND c.holder = v_holder AND c.token = p_token
            AND c.lock_flag = 1 AND c.claimed_at = c.begin_time AND c.end_time IS NULL LIMIT 1 FOR UPDATE SKIP LOCKED
        ) j STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource
        SET t.expires_at = LEAST(t.expires_at, UTC_TIMESTAMP(6));
        IF ROW_COUNT() > 0 THEN
            SET v_outcome = 'done';
        ELSE
            CALL rowlock_unmatched('abandon', p_key, v_holder, p_token, NULL, v_outcome);
        END IF;
        SET v_left = v_left - 1;
        IF v_outcome <> 'busy' OR v_left = 0 THEN
            LEAVE attempts;
        END IF;
        DO SLEEP(0.005);
    END LOOP;
    SELECT v_outcome AS outcome;
END;

-- Ends a claim under which no work was begun: the row is as it was before, under the claim's token.
-- A claim that it took over is taken over by the next one: it has the holder 0 until then.
/*!80000 DROP PROCEDURE IF EXISTS rowlock_put_back */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_put_back(
    p_key VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_holder VARCHAR(36) CHARACTER SET utf8mb4, p_token BIGINT)
MODIFIES SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE v_holder BINARY(16) DEFAULT UNHEX(REPLACE(p_holder, '-', ''));
    DECLARE v_key VARBINARY(4096) DEFAULT CAST(p_key AS BINARY);
    DECLARE v_outcome VARCHAR(10) CHARACTER SET utf8mb4;
    DECLARE v_left INT DEFAULT 20;
    attempts: LOOP
        UPDATE (
            SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = v_key AND c.holder = v_holder AND c.token = p_token
            AND c.lock_flag = 1 AND c.claimed_at = c.begin_time AND c.end_time IS NULL LIMIT 1 FOR UPDATE SKIP LOCKED
        ) j STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource
        SET t.status = t.prior_status, t.begin_time = t.prior_begin_time, t.end_time = t.prior_end_time, t.client_ip = t.prior_client_ip,
            t.lock_flag = t.prior_token IS NOT NULL, t.holder = IF(t.prior_token IS NULL, NULL, REPEAT(x'00', 16)),
            t.expires_at = IF(t.prior_token IS NULL, NULL, UTC_TIMESTAMP(6)),
            t.claimed_at = IF(t.prior_token IS NULL, NULL, t.prior_begin_time);
        IF ROW_COUNT() > 0 THEN
            SET v_outcome = 'done';
        ELSE
            CALL rowlock_unmatched('put back', p_key, v_holder, p_token, NULL, v_outcome);
        END IF;
        SET v_left = v_left - 1;
        IF v_outcome <> 'busy' OR v_left = 0 THEN
            LEAVE attempts;
        END IF;
        DO SLEEP(0.005);
    END LOOP;
    SELECT v_outcome AS outcome;
END;

-- Makes the commit of the caller's transaction depend on the claim: the row stays locked until that
-- transaction ends.
/*!80000 DROP PROCEDURE IF EXISTS rowlock_confirm */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_confirm(
    p_key VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, p_holder VARCHAR(36) CHARACTER SET utf8mb4, p_token BIGINT)
MODIFIES SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE v_holder BINARY(16) DEFAULT UNHEX(REPLACE(p_holder, '-', ''));
    DECLARE v_key VARBINARY(4096) DEFAULT CAST(p_key AS BINARY);
    DECLARE v_outcome VARCHAR(10) CHARACTER SET utf8mb4;
    DECLARE v_left INT DEFAULT 20;
    attempts: LOOP
        UPDATE (
            SELECT c.key_resource FROM t_resource_lock c WHERE c.key_resource = v_key AND c.holder = v_holder AND c.token = p_token
            AND c.lock_flag = 1 AND c.claimed_at = c.begin_time AND c.end_time IS NULL LIMIT 1 FOR UPDATE SKIP LOCKED
        ) j STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource
        SET t.confirms = t.confirms + 1;
        IF ROW_COUNT() > 0 THEN
            SET v_outcome = 'done';
        ELSE
            CALL rowlock_unmatched('confirm', p_key, v_holder, p_token, NULL, v_outcome);
        END IF;
        SET v_left = v_left - 1;
        IF v_outcome <> 'busy' OR v_left = 0 THEN
            LEAVE attempts;
        END IF;
        DO SLEEP(0.005);
    END LOOP;
    -- Nothing is confirmed after this read: what the transaction sees may be older than the row.
    IF v_outcome = 'busy' THEN
        CALL rowlock_unmatched('none', p_key, v_holder, p_token, NULL, v_outcome);
    END IF;
    IF v_outcome = 'busy' THEN
        SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'the row of the key is locked by another transaction: repeat the transaction';
    ELSEIF v_outcome <> 'done' THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the claim on the key is lost: roll the transaction back';
    END IF;
END;

/*!80000 DROP PROCEDURE IF EXISTS rowlock_list */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_list()
READS SQL DATA SQL SECURITY INVOKER
BEGIN
    SELECT CONVERT(c.key_resource USING utf8mb4) AS `key`,
           CASE WHEN c.stands THEN IF(UTC_TIMESTAMP(6) >= c.expires_at, 'expired', 'held')
                WHEN c.lock_flag = 1 THEN 'held_by_another_program'
                WHEN CAST(c.status AS BINARY) = 'F' THEN 'failed' WHEN c.begun > UTC_TIMESTAMP(6) THEN 'within_min_interval' ELSE 'free' END AS state,
           c.begun AS since,
           CASE WHEN c.stands THEN c.expires_at WHEN c.lock_flag = 1 THEN NULL WHEN c.begun > UTC_TIMESTAMP(6) THEN c.begun END AS until,
           CONVERT(c.client_ip USING utf8mb4) AS `by`,
           IF(c.holder IS NULL, NULL, LOWER(CONCAT_WS('-', HEX(LEFT(c.holder, 4)), HEX(SUBSTR(c.holder, 5, 2)), HEX(SUBSTR(c.holder, 7, 2)), HEX(SUBSTR(c.holder, 9, 2)), HEX(RIGHT(c.holder, 6))))) AS holder,
           c.token, IF(c.end_time >= '1000-01-01', c.end_time, NULL) AS ended, CONVERT(c.status USING utf8mb4) AS status
    FROM (SELECT t.key_resource, t.status, t.lock_flag, t.end_time, t.client_ip, t.holder, t.token, t.expires_at,
                 IF(t.begin_time >= '1000-01-01', t.begin_time, NULL) AS begun,
                 COALESCE(t.lock_flag = 1 AND t.holder IS NOT NULL AND t.claimed_at = t.begin_time AND t.end_time IS NULL, FALSE) AS stands
          FROM t_resource_lock t) c
    ORDER BY c.key_resource;
END;

/*!80000 DROP PROCEDURE IF EXISTS rowlock_version */ /*M! DO 0 */;
CREATE /*M!100103 OR REPLACE */ PROCEDURE rowlock_version()
SQL SECURITY INVOKER COMMENT '20261202' -- A user without the right to see the body compares it.
BEGIN
    SELECT 20261202 AS version;
END;

SET SESSION sql_mode = @rowlock_sql_mode;
