-- rowlock: its columns of t_resource_lock are INVISIBLE, so that statements of other programs that have no list of columns go on, on MySQL from 8.0.23 on, and MariaDB. Every statement here may run again.
-- MariaDB has no SET INVISIBLE: the column is defined again as it is.
SET @rowlock_alter = (
    SELECT COALESCE(CONCAT('ALTER TABLE t_resource_lock ', GROUP_CONCAT(IF(
        VERSION() LIKE '%MariaDB%',
        CONCAT('MODIFY COLUMN ', column_name, ' ', column_type, COALESCE(CONCAT(' CHARACTER SET ', character_set_name, ' COLLATE ', collation_name), ''),
               IF(is_nullable = 'YES', ' NULL', ' NOT NULL DEFAULT 0'), ' INVISIBLE'),
        CONCAT('ALTER COLUMN ', column_name, ' SET INVISIBLE')) SEPARATOR ', ')), 'DO 0')
    FROM information_schema.columns
    WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND extra NOT LIKE '%INVISIBLE%'
      AND LOWER(column_name) IN ('holder', 'token', 'expires_at', 'claimed_at', 'confirms', 'prior_token', 'prior_client_ip', 'prior_status',
                                 'prior_begin_time', 'prior_end_time')
      AND (VERSION() LIKE '%MariaDB%' OR VERSION() NOT REGEXP '^8[.]0[.]([0-9]|1[0-9]|2[0-2])([^0-9]|$)')
);
PREPARE rowlock_alter FROM @rowlock_alter;
EXECUTE rowlock_alter;
DEALLOCATE PREPARE rowlock_alter;
