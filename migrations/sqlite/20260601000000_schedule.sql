-- rowlock: the tables of schedules and of their runs. May run again on a database that has them already. Times are microseconds since 1970, UTC.
CREATE TABLE IF NOT EXISTS t_resource_schedule (
    name         TEXT    NOT NULL PRIMARY KEY,       -- compared byte by byte
    spec         TEXT    NOT NULL,                   -- 'cron ...', 'every ...' or 'after ...'
    zone         TEXT    NOT NULL,                   -- the time zone of a cron pattern
    version      INTEGER NOT NULL DEFAULT 0,         -- of the instance that set spec and zone; a lower one does not replace them
    slot         INTEGER NOT NULL,                   -- the tick that is next, or that is run
    due_at       INTEGER NOT NULL,                   -- when an instance has to look: the slot, a retry, or the end of a lease
    paused       INTEGER NOT NULL DEFAULT 0,
    triggered_at INTEGER,                            -- a run that an operator asked for, beside the ticks
    run_slot     INTEGER,                            -- the slot of the last run: the slot, or the time of a trigger
    attempt      INTEGER NOT NULL DEFAULT 0,         -- of run_slot; 0 when that has come to its end
    missed       INTEGER NOT NULL DEFAULT 0,         -- how many earlier ticks run_slot stands for
    holder       BLOB,                               -- the claim under which it runs; NULL when nothing runs
    token        INTEGER NOT NULL DEFAULT 0,         -- fencing token
    client_ip    TEXT    NOT NULL DEFAULT '',        -- the instance that ran it last
    begin_time   INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS t_resource_schedule_due ON t_resource_schedule (due_at) WHERE NOT paused;

CREATE TABLE IF NOT EXISTS t_resource_schedule_run (
    name       TEXT    NOT NULL,
    slot       INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,                     -- 0 for ticks that were skipped
    token      INTEGER NOT NULL,
    client_ip  TEXT    NOT NULL,
    begin_time INTEGER NOT NULL,
    end_time   INTEGER NOT NULL,
    status     TEXT    NOT NULL,                     -- 'S' success, 'F' failure, 'L' lost, 'M' missed
    missed     INTEGER NOT NULL DEFAULT 0,
    error      TEXT,
    PRIMARY KEY (name, slot, attempt)
) STRICT;
CREATE INDEX IF NOT EXISTS t_resource_schedule_run_end ON t_resource_schedule_run (end_time);
