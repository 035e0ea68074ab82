#!/bin/sh
# The procedure that is the work, and the two schedules.
set -eu
exec psql -Xq -v ON_ERROR_STOP=1 -d "$DATABASE_URL" <<'SQL'
CREATE EXTENSION pg_cron;
CREATE PROCEDURE chaos_work(name text) LANGUAGE plpgsql AS $$
DECLARE
    run bigint;
BEGIN
    INSERT INTO chaos_run (job, instance) VALUES (name, 'server') RETURNING id INTO run;
    COMMIT;
    PERFORM pg_sleep(0.2);
    UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = run;
END $$;
SELECT cron.schedule('second', '1 seconds', $$CALL chaos_work('second')$$);
SELECT cron.schedule('five', '5 seconds', $$CALL chaos_work('five')$$);
SQL
