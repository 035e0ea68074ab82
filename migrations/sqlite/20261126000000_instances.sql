-- rowlock: the tables of the instances of schedules, and of the times that schedules have had. May run again on a database that has them already. Times are microseconds since 1970, UTC.
CREATE TABLE IF NOT EXISTS t_resource_schedule_instance (
    id          BLOB    NOT NULL PRIMARY KEY,        -- random for each start
    label       TEXT    NOT NULL,
    build       TEXT    NOT NULL DEFAULT '',         -- for display
    calls       INTEGER NOT NULL DEFAULT 0,          -- all processes of one crontab, each of which lives for one tick
    since       INTEGER NOT NULL,
    beat_at     INTEGER NOT NULL,
    lives       INTEGER NOT NULL,                    -- for how many microseconds after beat_at it counts as alive
    beats       INTEGER NOT NULL DEFAULT 1,          -- without a break
    declares_id INTEGER NOT NULL,                    -- hash of declares: equal for all instances of a release
    declares    TEXT    NOT NULL                     -- a line for each schedule: its name, its times, its zone
) STRICT;

CREATE TABLE IF NOT EXISTS t_resource_schedule_times (
    name     TEXT    NOT NULL PRIMARY KEY,
    known    TEXT    NOT NULL DEFAULT '',            -- hashes of the times that it has had, the newest first
    times_at INTEGER,                                -- when its times took effect
    gone_at  INTEGER                                 -- since when no instance has it, although its service lives
) STRICT;
