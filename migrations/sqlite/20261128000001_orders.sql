-- rowlock: the orders of operators that instances obey, and the details of runs. May run again on a database that has them already. Times are microseconds since 1970, UTC.
CREATE TABLE IF NOT EXISTS t_resource_order (
    what  TEXT    NOT NULL,                          -- 'stop', 'skip' or 'pause' a schedule, 'drain' an instance
    name  TEXT    NOT NULL,                          -- of the schedule, or the label of the instance
    until INTEGER NOT NULL,                          -- the slot to stop, the last slot to skip, the end of the pause, the latest start
    who   TEXT    NOT NULL,
    PRIMARY KEY (what, name)
) STRICT;

CREATE TABLE IF NOT EXISTS t_resource_schedule_detail (
    name    TEXT    NOT NULL,
    slot    INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    note    TEXT    NOT NULL DEFAULT '',             -- what the run says of itself while it goes on
    output  BLOB,                                    -- the end of what it printed
    PRIMARY KEY (name, slot, attempt)
) STRICT;
