-- rowlock: the tables of the instances of schedules, and of the times that schedules have had, on MySQL and MariaDB. Every statement here may run again on a database that has them already. Times are UTC.
CREATE TABLE IF NOT EXISTS t_resource_schedule_instance (
    id          BINARY(16)     NOT NULL PRIMARY KEY,                              -- random for each start
    label       VARCHAR(45) CHARACTER SET utf8mb4 NOT NULL,
    build       VARCHAR(64) CHARACTER SET utf8mb4 NOT NULL DEFAULT '',            -- for display
    calls       TINYINT        NOT NULL DEFAULT 0,                                -- all processes of one crontab, each of which lives for one tick
    since       DATETIME(6)    NOT NULL,
    beat_at     DATETIME(6)    NOT NULL,
    lives       BIGINT         NOT NULL,                                          -- for how many microseconds after beat_at it counts as alive
    beats       INT            NOT NULL DEFAULT 1,                                -- without a break
    declares_id BIGINT         NOT NULL,                                          -- hash of declares: equal for all instances of a release
    declares    MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL     -- a line for each schedule: its name, its times, its zone
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;

CREATE TABLE IF NOT EXISTS t_resource_schedule_times (
    name     VARBINARY(255) NOT NULL PRIMARY KEY,
    known    VARCHAR(300) CHARACTER SET ascii NOT NULL DEFAULT '',                -- hashes of the times that it has had, the newest first
    times_at DATETIME(6)    NULL,                                                 -- when its times took effect
    gone_at  DATETIME(6)    NULL                                                  -- since when no instance has it, although its service lives
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;
