-- rowlock: the orders of operators that instances obey, and the details of runs. Every statement here may run again on a database that has them already.
-- They are created beside t_resource_schedule.
DO $$
DECLARE
    path  text := current_setting('search_path');
    place text := coalesce(
        (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('t_resource_order')),
        (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('t_resource_schedule')),
        quote_ident(current_schema()), '');
BEGIN
    PERFORM set_config('search_path', place, true);

    CREATE TABLE IF NOT EXISTS t_resource_order (
        what  varchar(16) COLLATE "C" NOT NULL,            -- 'stop', 'skip' or 'pause' a schedule, 'drain' an instance
        name  varchar(255) COLLATE "C" NOT NULL,           -- of the schedule, or the id of the instance
        since timestamptz NOT NULL,                        -- the first slot to skip
        until timestamptz NOT NULL,                        -- the slot to stop, the last slot to skip, the end of the pause
        who   varchar(255) NOT NULL,
        PRIMARY KEY (what, name)
    );

    CREATE TABLE IF NOT EXISTS t_resource_schedule_detail (
        name    varchar(255) COLLATE "C" NOT NULL,
        slot    timestamptz NOT NULL,
        attempt int         NOT NULL,
        token   bigint      NOT NULL,                      -- of the run
        note    varchar(255) NOT NULL DEFAULT '',          -- what the run says of itself while it goes on
        output  bytea,                                     -- the end of what it printed
        PRIMARY KEY (name, slot, attempt)
    );

    PERFORM set_config('search_path', path, true);
END $$;
