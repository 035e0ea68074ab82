-- rowlock: the tables of schedules and of their runs, on MySQL and MariaDB. Every statement here may run again on a database that has them already. Times are UTC.
CREATE TABLE IF NOT EXISTS t_resource_schedule (
    name         VARBINARY(255) NOT NULL PRIMARY KEY,                             -- compared byte by byte
    spec         VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL, -- 'cron ...', 'every ...' or 'after ...'
    zone         VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,  -- the time zone of a cron pattern
    version      BIGINT         NOT NULL DEFAULT 0,                               -- of the instance that set spec and zone; a lower one does not replace them
    slot         DATETIME(6)    NOT NULL,                                         -- the tick that is next, or that is run
    due_at       DATETIME(6)    NOT NULL,                                         -- when an instance has to look: the slot, a retry, or the end of a lease
    paused       TINYINT        NOT NULL DEFAULT 0,
    triggered_at DATETIME(6)    NULL,                                             -- a run that an operator asked for, beside the ticks
    run_slot     DATETIME(6)    NULL,                                             -- the slot of the last run: the slot, or the time of a trigger
    attempt      INT            NOT NULL DEFAULT 0,                               -- of run_slot; 0 when that has come to its end
    missed       INT            NOT NULL DEFAULT 0,                               -- how many earlier ticks run_slot stands for
    holder       BINARY(16)     NULL,                                             -- the claim under which it runs; NULL when nothing runs
    token        BIGINT         NOT NULL DEFAULT 0,                               -- fencing token
    client_ip    VARCHAR(45) CHARACTER SET utf8mb4 NOT NULL DEFAULT '',           -- the instance that ran it last
    begin_time   DATETIME(6)    NULL,
    KEY (paused, due_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;

CREATE TABLE IF NOT EXISTS t_resource_schedule_run (
    name       VARBINARY(255) NOT NULL,
    slot       DATETIME(6)    NOT NULL,
    attempt    INT            NOT NULL,                                           -- 0 for ticks that were skipped
    token      BIGINT         NOT NULL,
    client_ip  VARCHAR(45) CHARACTER SET utf8mb4 NOT NULL,
    begin_time DATETIME(6)    NOT NULL,
    end_time   DATETIME(6)    NOT NULL,
    status     CHAR(1)        NOT NULL,                                           -- 'S' success, 'F' failure, 'L' lost, 'M' missed
    missed     INT            NOT NULL DEFAULT 0,
    error      TEXT CHARACTER SET utf8mb4,
    PRIMARY KEY (name, slot, attempt),
    KEY (end_time)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;
