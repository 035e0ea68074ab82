#!/bin/sh
# The procedure that is the work, and the schedules.
set -eu
exec psql -Xq -v ON_ERROR_STOP=1 -v jobs="$CHAOS_JOBS" -d "$DATABASE_URL" <<'SQL'
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
SELECT cron.schedule(job.name,
    CASE job.every WHEN 60 THEN '* * * * *' ELSE format('*/%s * * * *', job.every / 60) END,
    format('CALL chaos_work(%L)', job.name))
FROM json_to_recordset(:'jobs') AS job (name text, every int) \g /dev/null
SQL
