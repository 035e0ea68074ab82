-- rowlock: the orders of operators that instances obey, and the details of runs, on MySQL and MariaDB. Every statement here may run again on a database that has them already. Times are UTC.
CREATE TABLE IF NOT EXISTS t_resource_order (
    what  VARBINARY(16)  NOT NULL,                                                -- 'stop', 'skip' or 'pause' a schedule, 'drain' an instance
    name  VARBINARY(255) NOT NULL,                                                -- of the schedule, or the id of the instance
    since DATETIME(6)    NOT NULL,                                                -- the first slot to skip
    until DATETIME(6)    NOT NULL,                                                -- the slot to stop, the last slot to skip, the end of the pause
    who   VARCHAR(255) CHARACTER SET utf8mb4 NOT NULL,
    PRIMARY KEY (what, name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;

CREATE TABLE IF NOT EXISTS t_resource_schedule_detail (
    name    VARBINARY(255) NOT NULL,
    slot    DATETIME(6)    NOT NULL,
    attempt INT            NOT NULL,
    token   BIGINT         NOT NULL,                                              -- of the run
    note    VARCHAR(255) CHARACTER SET utf8mb4 NOT NULL DEFAULT '',               -- what the run says of itself while it goes on
    output  MEDIUMBLOB,                                                           -- the end of what it printed
    PRIMARY KEY (name, slot, attempt)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;
