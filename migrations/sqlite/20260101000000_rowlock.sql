-- rowlock: the table of its locks, and the queue of requests that wait in order. May run again on a database that has it already. Times are microseconds since 1970, UTC.
CREATE TABLE IF NOT EXISTS t_resource_lock (
    key_resource    TEXT    NOT NULL PRIMARY KEY,       -- compared byte by byte
    status          TEXT    NOT NULL DEFAULT 'S',       -- 'S' success, 'F' failure, 'P' in progress
    lock_flag       INTEGER NOT NULL DEFAULT 0,         -- 1 locked, 0 free
    begin_time      INTEGER          DEFAULT 0,
    end_time        INTEGER,
    client_ip       TEXT    NOT NULL DEFAULT '',        -- the label of the last claim
    time            INTEGER NOT NULL DEFAULT 60,        -- minutes within which only one node may take it
    holder          BLOB,                               -- UUID of the claim; NULL when free
    token           INTEGER NOT NULL DEFAULT 0,         -- fencing token
    expires_at      INTEGER,                            -- end of the lease; NULL when free
    claimed_at      INTEGER,                            -- begin_time, repeated by rowlock's claims
    confirms        INTEGER NOT NULL DEFAULT 0,         -- confirmed transactions
    prior_token     INTEGER,                            -- the claim that this one took over from
    prior_client_ip TEXT,                               -- the row before the claim, which may be put back
    prior_status    TEXT,
    prior_begin_time INTEGER,
    prior_end_time  INTEGER
) STRICT;

CREATE TABLE IF NOT EXISTS t_resource_lock_queue (
    key_resource TEXT    NOT NULL,
    ticket       INTEGER NOT NULL,
    alive_until  INTEGER NOT NULL,                      -- a waiter that does not extend this is gone
    PRIMARY KEY (key_resource, ticket)
) STRICT;
CREATE INDEX IF NOT EXISTS t_resource_lock_queue_ticket ON t_resource_lock_queue (ticket);
