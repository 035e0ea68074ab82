-- rowlock: the table of its locks, and the queue of requests that wait in order, on MySQL and MariaDB. Every statement here may run again on a database that has it already.
CREATE TABLE IF NOT EXISTS t_resource_lock (
    key_resource VARBINARY(255) NOT NULL PRIMARY KEY,                             -- compared byte by byte
    status       CHAR(1)        NOT NULL DEFAULT 'S',                             -- 'S' success, 'F' failure, 'P' in progress
    lock_flag    TINYINT        NOT NULL DEFAULT 0,                               -- 1 locked, 0 free
    begin_time   DATETIME(6)    NULL DEFAULT '1970-01-01 00:00:00',               -- UTC
    end_time     DATETIME(6)    NULL,
    client_ip    VARCHAR(45)    NOT NULL DEFAULT '',                              -- the label of the last claim
    time         INT            NOT NULL DEFAULT 60                               -- minutes within which only one node may take it
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;

-- MySQL has no ADD COLUMN IF NOT EXISTS: the statement is put together from the columns that are missing.
-- claimed_at and prior_begin_time repeat begin_time, so they have its type: they then round alike. So does prior_end_time.
SET @rowlock_alter = (
    SELECT COALESCE(CONCAT('ALTER TABLE t_resource_lock ', GROUP_CONCAT('ADD COLUMN ', wanted.name, ' ', wanted.type ORDER BY wanted.place SEPARATOR ', ')), 'DO 0')
    FROM (
        SELECT 1 AS place, 'holder' AS name, 'BINARY(16) NULL' AS type
        UNION ALL SELECT 2, 'token', 'BIGINT NOT NULL DEFAULT 0'
        UNION ALL SELECT 3, 'expires_at', 'DATETIME(6) NULL'
        UNION ALL SELECT 4, 'claimed_at', (
            SELECT CONCAT(column_type, ' NULL') FROM information_schema.columns
            WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND column_name = 'begin_time')
        UNION ALL SELECT 5, 'confirms', 'BIGINT NOT NULL DEFAULT 0'
        UNION ALL SELECT 6, 'prior_token', 'BIGINT NULL'
        UNION ALL SELECT 7, 'prior_client_ip', 'VARCHAR(45) CHARACTER SET utf8mb4 NULL' -- an existing table's default may hold less
        UNION ALL SELECT 8, 'prior_status', 'VARCHAR(255) CHARACTER SET utf8mb4 NULL'
        UNION ALL SELECT 9, 'prior_begin_time', (
            SELECT CONCAT(column_type, ' NULL') FROM information_schema.columns
            WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND column_name = 'begin_time')
        UNION ALL SELECT 10, 'prior_end_time', (
            SELECT CONCAT(column_type, ' NULL') FROM information_schema.columns
            WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND column_name = 'end_time')
    ) wanted
    WHERE wanted.name NOT IN (
        SELECT LOWER(column_name) FROM information_schema.columns
        WHERE table_schema = DATABASE() AND table_name = 't_resource_lock')
);
PREPARE rowlock_alter FROM @rowlock_alter;
EXECUTE rowlock_alter;
DEALLOCATE PREPARE rowlock_alter;

CREATE TABLE IF NOT EXISTS t_resource_lock_queue (
    key_resource VARBINARY(255) NOT NULL,
    ticket       BIGINT         NOT NULL AUTO_INCREMENT,
    alive_until  DATETIME(6)    NOT NULL,                                         -- a waiter that does not extend this is gone
    PRIMARY KEY (key_resource, ticket),
    KEY (ticket)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;
