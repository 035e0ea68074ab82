-- rowlock: the tables of the instances of schedules, and of the times that schedules have had. Every statement here may run again on a database that has them already.
-- They are created beside t_resource_schedule.
DO $$
DECLARE
    path  text := current_setting('search_path');
    place text := coalesce(
        (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('t_resource_schedule_instance')),
        (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('t_resource_schedule')),
        quote_ident(current_schema()), '');
BEGIN
    PERFORM set_config('search_path', place, true);

    CREATE TABLE IF NOT EXISTS t_resource_schedule_instance (
        id          uuid        PRIMARY KEY,               -- random for each start
        label       varchar(45) NOT NULL,
        build       varchar(64) NOT NULL DEFAULT '',       -- for display
        calls       boolean     NOT NULL DEFAULT false,    -- all processes of one crontab, each of which lives for one tick
        since       timestamptz NOT NULL,
        beat_at     timestamptz NOT NULL,
        lives       bigint      NOT NULL,                  -- for how many microseconds after beat_at it counts as alive
        beats       int         NOT NULL DEFAULT 1,        -- without a break
        declares_id bigint      NOT NULL,                  -- hash of declares: equal for all instances of a release
        declares    text        NOT NULL                   -- a line for each schedule: its name, its times, its zone
    );

    CREATE TABLE IF NOT EXISTS t_resource_schedule_times (
        name     varchar(255) COLLATE "C" PRIMARY KEY,
        known    varchar(300) NOT NULL DEFAULT '',         -- hashes of the times that it has had, the newest first
        times_at timestamptz,                              -- when its times took effect
        gone_at  timestamptz                               -- since when no instance has it, although its service lives
    );

    PERFORM set_config('search_path', path, true);
END $$;
