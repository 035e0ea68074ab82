//! The instances of schedules, the orders that they obey, and the details of runs.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres};
use uuid::Uuid;

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        instances::{
            Announcement, Beat, Given, InstanceInfo, InstanceStore, Order, TimesChange, What, given, instance,
        },
        postgres::{
            row::{finite, names, sql, stored},
            schedule_sql::LOSE,
        },
        schedule::{LOST, ListedSchedule, ScheduleStore as _, to_stored_count},
        schedule_operations::{instance_operations, statements_with_on_conflict},
    },
};

const ANNOUNCE: &str = "
INSERT INTO t_resource_schedule_instance (id, label, build, calls, since, beat_at, lives, declares_id, declares)
VALUES ($1, $2, $3, $4, clock_timestamp(), clock_timestamp(), $5, $6, $7)
ON CONFLICT (id) DO UPDATE
SET beat_at = clock_timestamp(), lives = excluded.lives, label = excluded.label, build = excluded.build";

/// What all instances declare, with `$own`: the beats of this one, and whether it is drained.
macro_rules! sets {
    ($own:literal) => {
        concat!(
            "
SELECT ",
            $own,
            ", s.*, clock_timestamp() AS now
FROM (SELECT 1) one LEFT JOIN (
    SELECT declares_id, count(*) AS present, min(since) AS since, coalesce(max(lives) FILTER (WHERE NOT calls), 0) AS lives,
           count(*) FILTER (WHERE lived) AS alive, count(*) FILTER (WHERE lived AND (calls OR beats >= 2)) AS counting,
           count(*) FILTER (WHERE beat_at + 2 * life < now() OR beat_at > now() + 2 * life) AS forgotten
    FROM (SELECT *, lives * interval '1 microsecond' AS life,
                 beat_at + lives * interval '1 microsecond' > now() AND beat_at <= now() + lives * interval '1 microsecond' AS lived
          FROM t_resource_schedule_instance) i
    GROUP BY declares_id
) s ON true"
        )
    };
}

const SETS: &str = sets!("NULL::bigint AS beats, false AS drained");

/// The sets are those from before the beat.
const BEAT: &str = concat!(
    "
WITH me AS (
    UPDATE t_resource_schedule_instance
    SET beat_at = clock_timestamp(),
        beats = CASE WHEN beat_at + lives * interval '1 microsecond' < clock_timestamp() OR beat_at > clock_timestamp()
                     THEN 1 ELSE beats + 1 END
    WHERE id = $1 RETURNING beats
)",
    sets!(
        "(SELECT beats FROM me)::bigint AS beats,
         EXISTS (SELECT FROM t_resource_order o WHERE o.what = 'drain' AND o.name = replace($1::text, '-', '')) AS drained"
    )
);

const DECLARES: &str = "
SELECT declares_id, min(declares) FROM t_resource_schedule_instance WHERE declares_id = ANY ($1::bigint[]) GROUP BY declares_id";

/// $1 to $3 the times, $4 the slot, $5 to $9 what was seen, $10 whether the last run is forgotten.
///
/// Another trigger may have replaced that of a run that waits for its next attempt.
const CHANGE: &str = concat!(
    "
UPDATE t_resource_schedule
SET spec = $2, zone = $3, slot = $4, run_slot = CASE WHEN $10 AND holder IS NULL THEN NULL ELSE run_slot END,
    due_at = CASE WHEN holder IS NOT NULL OR attempt > 0 THEN due_at
                  WHEN triggered_at IS NOT NULL THEN clock_timestamp() ELSE $4 END
WHERE name = $1 AND spec = $5 AND zone = $6 AND attempt = $8 AND ",
    finite!("run_slot"),
    " IS NOT DISTINCT FROM $7 AND ",
    finite!("slot"),
    " = $9"
);

/// $1 the schedule whose place is taken, $2 the one that takes it. A tick that was begun goes on
/// there. A pause or a trigger of either stays.
const INHERIT: &str = "
UPDATE t_resource_schedule t
SET paused = t.paused OR o.paused, triggered_at = coalesce(o.triggered_at, t.triggered_at),
    token = greatest(t.token, o.token), run_slot = o.run_slot,
    attempt = o.attempt, missed = o.missed, client_ip = o.client_ip, begin_time = o.begin_time, holder = NULL,
    due_at = CASE WHEN o.attempt > 0 THEN o.due_at WHEN coalesce(o.triggered_at, t.triggered_at) IS NULL
                  THEN t.slot ELSE clock_timestamp() END
FROM t_resource_schedule o WHERE o.name = $1 AND t.name = $2";

const GONE: &str = "
INSERT INTO t_resource_schedule_times AS p (name, gone_at)
SELECT name, clock_timestamp() FROM t_resource_schedule WHERE name = ANY ($1::text[])
ON CONFLICT (name) DO UPDATE SET gone_at = coalesce(p.gone_at, excluded.gone_at)";

const FORGET: &str = "
DELETE FROM t_resource_schedule_instance
WHERE beat_at + 2 * lives * interval '1 microsecond' < clock_timestamp()
   OR beat_at > clock_timestamp() + 2 * lives * interval '1 microsecond'";

const LIST: &str = "
SELECT id, label::text AS label, build::text AS build, calls, since, beat_at, lives, declares_id, clock_timestamp() AS now
FROM t_resource_schedule_instance ORDER BY label, id";

const ORDERED: &str = concat!(
    "SELECT ",
    finite!("since"),
    " AS since, ",
    finite!("until"),
    " AS until, who::text AS who FROM t_resource_order WHERE what = $1 AND name = $2"
);

const LATCH: &str = concat!(
    "UPDATE t_resource_schedule SET token = CASE WHEN holder IS NULL THEN token + 1 ELSE token END,
         due_at = CASE WHEN holder IS NOT NULL AND due_at <= clock_timestamp() THEN due_at - interval '1 microsecond' ELSE due_at END
     WHERE name = $1 AND attempt = $3 AND ",
    finite!("slot"),
    " = $2 AND ",
    finite!("run_slot"),
    " IS NOT DISTINCT FROM $4"
);

statements_with_on_conflict!(PgConnection);

impl InstanceStore for Postgres {
    instance_operations!(PgConnection);

    async fn beat(conn: &mut PgConnection, instance: Option<Uuid>) -> Reply<Beat> {
        let query = instance.map_or(sqlx::query(SETS), |instance| sqlx::query(BEAT).bind(instance));
        Beat::read(&query.fetch_all(conn).await?)
    }

    async fn declares(conn: &mut PgConnection, declares_ids: &[i64]) -> Reply<Vec<(i64, String)>> {
        sqlx::query_as(DECLARES).bind(declares_ids).fetch_all(conn).await
    }

    async fn mark_gone(conn: &mut PgConnection, keys: &[Key]) -> Reply<()> {
        sqlx::query(GONE).bind(names(keys)).execute(conn).await.map(drop)
    }
}
