-- rowlock: what operators have changed. May run again on a database that has it already. Times are microseconds since 1970, UTC.
CREATE TABLE IF NOT EXISTS t_resource_change (
    id     INTEGER NOT NULL PRIMARY KEY,
    at     INTEGER NOT NULL,
    who    TEXT    NOT NULL,                         -- the label of the operator
    what   TEXT    NOT NULL,                         -- 'released', 'paused', 'stopped' and so on
    name   TEXT    NOT NULL,                         -- of the key, the schedule or the instance
    detail TEXT    NOT NULL DEFAULT ''               -- such as the holder from whom a key was taken
) STRICT;
CREATE INDEX IF NOT EXISTS t_resource_change_name ON t_resource_change (name, id);
