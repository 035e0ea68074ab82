//! The instances of schedules, the orders that they obey, and the details of runs. MySQL assigns
//! from left to right: what depends on a column comes before the change of that column.

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, MySql, MySqlConnection};
use uuid::Uuid;

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        instances::{
            Announcement, Beat, Given, InstanceInfo, InstanceStore, Order, TimesChange, What, given, instance,
        },
        mysql::{
            row::{marks, sql, stored},
            schedule_sql::LOSE,
        },
        schedule::{LOST, ListedSchedule, ScheduleStore as _, to_stored_count},
        schedule_operations::instance_operations,
    },
};

const ANNOUNCE: &str = "
INSERT INTO t_resource_schedule_instance (id, label, build, calls, since, beat_at, lives, declares_id, declares)
VALUES (?, ?, ?, ?, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), ?, ?, ?)
ON DUPLICATE KEY UPDATE beat_at = VALUES(beat_at), lives = VALUES(lives), label = VALUES(label), build = VALUES(build)";

const BEAT: &str = "
UPDATE t_resource_schedule_instance
SET beats = IF(beat_at + INTERVAL lives MICROSECOND < UTC_TIMESTAMP(6) OR beat_at > UTC_TIMESTAMP(6), 1, beats + 1),
    beat_at = UTC_TIMESTAMP(6) WHERE id = ?";

/// The parameter is the instance itself.
const SETS: &str = "
SELECT m.*, s.*, UTC_TIMESTAMP(6) AS now
FROM (SELECT 1) one LEFT JOIN (
    SELECT CAST(i.beats AS SIGNED) AS beats, CAST(EXISTS (
        SELECT 1 FROM t_resource_order o WHERE o.what = 'drain' AND o.name = CAST(LOWER(HEX(i.id)) AS BINARY)) AS SIGNED) AS drained
    FROM t_resource_schedule_instance i WHERE i.id = ?
) m ON TRUE LEFT JOIN (
    SELECT declares_id, COUNT(*) AS present, MIN(since) AS since, CAST(MAX(IF(calls = 1, 0, lives)) AS SIGNED) AS lives,
           CAST(SUM(lived) AS SIGNED) AS alive, CAST(SUM(lived AND (calls = 1 OR beats >= 2)) AS SIGNED) AS counting,
           CAST(SUM(beat_at + INTERVAL 2 * lives MICROSECOND < UTC_TIMESTAMP(6)
                    OR beat_at > UTC_TIMESTAMP(6) + INTERVAL 2 * lives MICROSECOND) AS SIGNED) AS forgotten
    FROM (SELECT i.*, beat_at + INTERVAL lives MICROSECOND > UTC_TIMESTAMP(6)
                      AND beat_at <= UTC_TIMESTAMP(6) + INTERVAL lives MICROSECOND AS lived
          FROM t_resource_schedule_instance i) i
    GROUP BY declares_id
) s ON TRUE";

const DECLARES: &str =
    "SELECT declares_id, CONVERT(MIN(declares) USING utf8mb4) FROM t_resource_schedule_instance WHERE declares_id IN";

const CREATE: &str = "INSERT INTO t_resource_schedule (name, spec, zone, slot, due_at) VALUES (?, ?, ?, ?, ?)";

const CHANGE: &str = "
UPDATE t_resource_schedule
SET due_at = CASE WHEN holder IS NOT NULL OR attempt > 0 THEN due_at WHEN triggered_at IS NOT NULL THEN UTC_TIMESTAMP(6) ELSE ? END,
    run_slot = IF(? AND holder IS NULL, NULL, run_slot), slot = ?, spec = ?, zone = ?
WHERE name = ? AND spec = ? AND zone = ? AND run_slot <=> ? AND attempt = ? AND slot = ?";

/// The parameters are the schedule whose place is taken, and the one that takes it. A tick that was
/// begun goes on there. A pause or a trigger of either stays.
const INHERIT: &str = "
UPDATE t_resource_schedule t JOIN t_resource_schedule o ON o.name = ?
SET t.paused = GREATEST(t.paused, o.paused), t.triggered_at = COALESCE(o.triggered_at, t.triggered_at),
    t.token = GREATEST(t.token, o.token), t.run_slot = o.run_slot, t.attempt = o.attempt, t.missed = o.missed, t.client_ip = o.client_ip,
    t.begin_time = o.begin_time, t.holder = NULL,
    t.due_at = CASE WHEN o.attempt > 0 THEN o.due_at WHEN COALESCE(o.triggered_at, t.triggered_at) IS NULL
                    THEN t.slot ELSE UTC_TIMESTAMP(6) END
WHERE t.name = ?";

/// The parameters are the name, what is known, and whether the times are new ones.
const REMEMBER: &str = "
INSERT INTO t_resource_schedule_times (name, known, times_at) VALUES (?, ?, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE known = VALUES(known), times_at = IF(?, VALUES(times_at), times_at), gone_at = NULL";

const GONE: &str = "
INSERT INTO t_resource_schedule_times (name, gone_at)
SELECT s.name, UTC_TIMESTAMP(6) FROM t_resource_schedule s WHERE s.name IN";

const FORGET: &str = "
DELETE FROM t_resource_schedule_instance
WHERE beat_at + INTERVAL 2 * lives MICROSECOND < UTC_TIMESTAMP(6) OR beat_at > UTC_TIMESTAMP(6) + INTERVAL 2 * lives MICROSECOND";

const LIST: &str = "
SELECT id, CONVERT(label USING utf8mb4) AS label, CONVERT(build USING utf8mb4) AS build, CAST(calls AS SIGNED) AS calls, since,
       beat_at, lives, declares_id, UTC_TIMESTAMP(6) AS now
FROM t_resource_schedule_instance ORDER BY t_resource_schedule_instance.label, id";

const ORDER: &str = "
INSERT INTO t_resource_order (what, name, since, until, who) VALUES (?, ?, ?, ?, ?)
ON DUPLICATE KEY UPDATE since = VALUES(since), until = VALUES(until), who = VALUES(who)";

const ORDERED: &str =
    "SELECT since, until, CONVERT(who USING utf8mb4) AS who FROM t_resource_order WHERE what = ? AND name = ?";

const LATCH: &str = "
UPDATE t_resource_schedule
SET token = IF(holder IS NULL, token + 1, token),
    due_at = IF(holder IS NOT NULL AND due_at <= UTC_TIMESTAMP(6), due_at - INTERVAL 1 MICROSECOND, due_at)
WHERE name = ? AND slot = ? AND attempt = ? AND run_slot <=> ?";

const NOTE: &str = "
INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, note)
SELECT name, run_slot, attempt, token, ? FROM t_resource_schedule WHERE name = ? AND holder = ? AND token = ?
ON DUPLICATE KEY UPDATE t_resource_schedule_detail.note = VALUES(note), t_resource_schedule_detail.token = VALUES(token)";

impl InstanceStore for MySql {
    instance_operations!(MySqlConnection);

    async fn beat(conn: &mut MySqlConnection, instance: Option<Uuid>) -> Reply<Beat> {
        if let Some(instance) = instance {
            sqlx::query(BEAT).bind(instance).execute(&mut *conn).await?;
        }
        Beat::read(&sqlx::query(SETS).bind(instance).fetch_all(conn).await?)
    }

    async fn declares(conn: &mut MySqlConnection, declares_ids: &[i64]) -> Reply<Vec<(i64, String)>> {
        let sql = format!("{DECLARES} ({}) GROUP BY declares_id", marks("?", declares_ids.len()));
        let query = declares_ids.iter().fold(sqlx::query_as(AssertSqlSafe(sql)), |query, id| query.bind(id));
        query.fetch_all(conn).await
    }

    async fn mark_gone(conn: &mut MySqlConnection, names: &[Key]) -> Reply<()> {
        let sql = format!(
            "{GONE} ({}) ON DUPLICATE KEY UPDATE gone_at = COALESCE(t_resource_schedule_times.gone_at, VALUES(gone_at))",
            marks("?", names.len())
        );
        let query = names.iter().fold(sqlx::query(AssertSqlSafe(sql)), |query, name| query.bind(name.as_str()));
        query.execute(conn).await.map(drop)
    }
}

async fn change_row(conn: &mut MySqlConnection, change: &TimesChange) -> Reply<bool> {
    let times = &change.times;
    let (name, spec, zone, slot) = (times.name.as_str(), &times.spec, &times.zone, stored(change.slot));
    let query = match &change.seen {
        None => sqlx::query(CREATE).bind(name).bind(spec).bind(zone).bind(slot).bind(slot),
        Some(seen) => {
            let query = sqlx::query(CHANGE).bind(slot).bind(change.run_ahead).bind(slot).bind(spec).bind(zone);
            let query = query.bind(name).bind(&seen.times.spec).bind(&seen.times.zone);
            query.bind(seen.run_slot.map(stored)).bind(to_stored_count(seen.attempt)).bind(stored(seen.slot))
        }
    };
    match query.execute(conn).await {
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
        changed => Ok(changed?.rows_affected() > 0),
    }
}
