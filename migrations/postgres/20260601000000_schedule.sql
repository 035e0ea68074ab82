-- rowlock: the tables of schedules and of their runs. Every statement here may run again on a database that has them already.
-- They are created beside t_resource_lock if the search_path leads to one, else in the first schema of the search_path.
DO $$
DECLARE
    path  text := current_setting('search_path');
    place text := coalesce(
        (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('t_resource_schedule')),
        (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('t_resource_lock')),
        quote_ident(current_schema()), '');
BEGIN
    PERFORM set_config('search_path', place, true);

    CREATE TABLE IF NOT EXISTS t_resource_schedule (
        name         varchar(255) COLLATE "C" PRIMARY KEY, -- compared byte by byte
        spec         varchar(255) COLLATE "C" NOT NULL,    -- 'cron ...', 'every ...' or 'after ...'
        zone         varchar(64) COLLATE "C" NOT NULL,     -- the time zone of a cron pattern
        version      bigint      NOT NULL DEFAULT 0,       -- of the instance that set spec and zone; a lower one does not replace them
        slot         timestamptz NOT NULL,                 -- the tick that is next, or that is run
        due_at       timestamptz NOT NULL,                 -- when an instance has to look: the slot, a retry, or the end of a lease
        paused       boolean     NOT NULL DEFAULT false,
        triggered_at timestamptz,                          -- a run that an operator asked for, beside the ticks
        run_slot     timestamptz,                          -- the slot of the last run: the slot, or the time of a trigger
        attempt      int         NOT NULL DEFAULT 0,       -- of run_slot; 0 when that has come to its end
        missed       int         NOT NULL DEFAULT 0,       -- how many earlier ticks run_slot stands for
        holder       uuid,                                 -- the claim under which it runs; NULL when nothing runs
        token        bigint      NOT NULL DEFAULT 0,       -- fencing token
        client_ip    varchar(45) NOT NULL DEFAULT '',      -- the instance that ran it last
        begin_time   timestamptz
    );
    CREATE INDEX IF NOT EXISTS t_resource_schedule_due ON t_resource_schedule (due_at) WHERE NOT paused;

    CREATE TABLE IF NOT EXISTS t_resource_schedule_run (
        name       varchar(255) COLLATE "C" NOT NULL,
        slot       timestamptz NOT NULL,
        attempt    int         NOT NULL,                   -- 0 for ticks that were skipped
        token      bigint      NOT NULL,
        client_ip  varchar(45) NOT NULL,
        begin_time timestamptz NOT NULL,
        end_time   timestamptz NOT NULL,
        status     char(1)     NOT NULL,                   -- 'S' success, 'F' failure, 'L' lost, 'M' missed
        missed     int         NOT NULL DEFAULT 0,
        error      text,
        PRIMARY KEY (name, slot, attempt)
    );
    CREATE INDEX IF NOT EXISTS t_resource_schedule_run_end ON t_resource_schedule_run (end_time);

    PERFORM set_config('search_path', path, true);
END $$;
