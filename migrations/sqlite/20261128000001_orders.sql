-- rowlock: the orders of operators that instances obey, and the details of runs. May run again on a database that has them already. Times are microseconds since 1970, UTC.
CREATE TABLE IF NOT EXISTS t_resource_order (
    what  TEXT    NOT NULL,                          -- 'stop', 'skip' or 'pause' a schedule, 'drain' an instance
    name  TEXT    NOT NULL,                          -- of the schedule, or the id of the instance
    since INTEGER NOT NULL,                          -- the first slot to skip
    until INTEGER NOT NULL,                          -- the slot to stop, the last slot to skip, the end of the pause
    who   TEXT    NOT NULL,
    PRIMARY KEY (what, name)
) STRICT;

CREATE TABLE IF NOT EXISTS t_resource_schedule_detail (
    name    TEXT    NOT NULL,
    slot    INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    token   INTEGER NOT NULL,                        -- of the run
    note    TEXT    NOT NULL DEFAULT '',             -- what the run says of itself while it goes on
    output  BLOB,                                    -- the end of what it printed
    PRIMARY KEY (name, slot, attempt)
) STRICT;
