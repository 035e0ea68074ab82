//! The instances of schedules, the orders that they obey, and the details of runs.

use chrono::{DateTime, Utc};
use sqlx::{Sqlite, SqliteConnection};
use uuid::Uuid;

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        instances::{
            Announcement, Beat, Given, InstanceInfo, InstanceStore, Order, TimesChange, What, given, instance,
        },
        schedule::{LOST, ListedSchedule, ScheduleStore as _, to_stored_count},
        schedule_operations::{instance_operations, statements_with_on_conflict},
        sqlite::{
            row::{json, keys, sql, stored},
            schedule_sql::LOSE,
        },
    },
};

const ANNOUNCE: &str = sql!("
INSERT INTO t_resource_schedule_instance (id, label, build, calls, since, beat_at, lives, declares_id, declares)
VALUES (?1, ?2, ?3, ?4, " now ", " now ", ?5, ?6, ?7) ON CONFLICT (id) DO UPDATE
    SET beat_at = excluded.beat_at, lives = excluded.lives, label = excluded.label, build = excluded.build");

const BEAT: &str = sql!("
UPDATE t_resource_schedule_instance
SET beat_at = " now ", beats = CASE WHEN beat_at + lives < " now " OR beat_at > " now " THEN 1 ELSE beats + 1 END
WHERE id = ?1");

/// ?1 the instance itself.
const SETS: &str = sql!("
SELECT m.*, s.*, " now " AS now
FROM (SELECT 1) LEFT JOIN (
    SELECT beats, EXISTS (SELECT 1 FROM t_resource_order o WHERE o.what = 'drain' AND o.name = lower(hex(i.id))) AS drained
    FROM t_resource_schedule_instance AS i WHERE i.id = ?1
) m LEFT JOIN (
    SELECT declares_id, count(*) AS present, min(since) AS since, coalesce(max(iif(calls, 0, lives)), 0) AS lives,
           sum(lived) AS alive, sum(lived AND (calls OR beats >= 2)) AS counting,
           sum(beat_at + 2 * lives < now OR beat_at > now + 2 * lives) AS forgotten
    FROM (SELECT *, beat_at + lives > now AND beat_at <= now + lives AS lived
          FROM t_resource_schedule_instance, (SELECT " now " AS now))
    GROUP BY declares_id
) s");

const DECLARES: &str = "
SELECT declares_id, min(declares) FROM t_resource_schedule_instance
WHERE declares_id IN (SELECT value FROM json_each(?1)) GROUP BY declares_id";

/// ?1 to ?3 the times, ?4 the slot, ?5 to ?9 what was seen, ?10 whether the last run is forgotten.
const CHANGE: &str = sql!("
UPDATE t_resource_schedule
SET spec = ?2, zone = ?3, slot = ?4, run_slot = CASE WHEN ?10 AND holder IS NULL THEN NULL ELSE run_slot END,
    due_at = CASE WHEN holder IS NOT NULL OR attempt > 0 THEN due_at WHEN triggered_at IS NOT NULL THEN " now " ELSE ?4 END
WHERE name = ?1 AND spec = ?5 AND zone = ?6 AND run_slot IS ?7 AND attempt = ?8 AND slot = ?9");

/// ?1 the schedule whose place is taken, ?2 the one that takes it. A tick that was begun goes on
/// there. A pause or a trigger of either stays.
const INHERIT: &str = sql!("
UPDATE t_resource_schedule AS t
SET paused = max(t.paused, o.paused), triggered_at = coalesce(o.triggered_at, t.triggered_at),
    token = max(t.token, o.token), run_slot = o.run_slot, attempt = o.attempt, missed = o.missed,
    client_ip = o.client_ip, begin_time = o.begin_time, holder = NULL,
    due_at = CASE WHEN o.attempt > 0 THEN o.due_at WHEN coalesce(o.triggered_at, t.triggered_at) IS NULL
                  THEN t.slot ELSE " now " END
FROM t_resource_schedule AS o WHERE o.name = ?1 AND t.name = ?2");

const GONE: &str = sql!("
INSERT INTO t_resource_schedule_times AS p (name, gone_at)
SELECT name, " now " FROM t_resource_schedule WHERE name IN (SELECT CAST(unhex(value) AS TEXT) FROM json_each(?1))
ON CONFLICT (name) DO UPDATE SET gone_at = coalesce(p.gone_at, excluded.gone_at)");

const FORGET: &str =
    sql!("DELETE FROM t_resource_schedule_instance WHERE beat_at + 2 * lives < " now " OR beat_at > 2 * lives + " now);

const LIST: &str = sql!("
SELECT id, label, build, calls, since, beat_at, lives, declares_id, " now " AS now
FROM t_resource_schedule_instance ORDER BY label, id");

const ORDERED: &str = "SELECT since, until, who FROM t_resource_order WHERE what = ?1 AND name = ?2";

const LATCH: &str = sql!("
UPDATE t_resource_schedule
SET token = iif(holder IS NULL, token + 1, token),
    due_at = iif(holder IS NOT NULL AND due_at <= " now ", due_at - 1, due_at)
WHERE name = ?1 AND slot = ?2 AND attempt = ?3 AND run_slot IS ?4");

statements_with_on_conflict!(SqliteConnection);

impl InstanceStore for Sqlite {
    instance_operations!(SqliteConnection);

    async fn beat(conn: &mut SqliteConnection, instance: Option<Uuid>) -> Reply<Beat> {
        if let Some(instance) = instance {
            sqlx::query(BEAT).bind(instance).execute(&mut *conn).await?;
        }
        Beat::read(&sqlx::query(SETS).bind(instance).fetch_all(conn).await?)
    }

    async fn declares(conn: &mut SqliteConnection, declares_ids: &[i64]) -> Reply<Vec<(i64, String)>> {
        let ids = json(declares_ids.iter().map(i64::to_string));
        sqlx::query_as(DECLARES).bind(ids).fetch_all(conn).await
    }

    async fn mark_gone(conn: &mut SqliteConnection, names: &[Key]) -> Reply<()> {
        sqlx::query(GONE).bind(keys(names)).execute(conn).await.map(drop)
    }
}
