//! Orders, and the details of runs.

use chrono::{DateTime, NaiveDateTime, Utc};
use sqlx::{MySql, MySqlConnection};

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        orders::{AttemptOf, Given, Order, OrderStore, What},
        schedule::to_stored_count,
    },
};

const ORDER: &str = "
INSERT INTO t_resource_order (what, name, since, until, who) VALUES (?, ?, ?, ?, ?)
ON DUPLICATE KEY UPDATE since = VALUES(since), until = VALUES(until), who = VALUES(who)";

const ORDERED: &str =
    "SELECT since, until, CONVERT(who USING utf8mb4) FROM t_resource_order WHERE what = ? AND name = ?";

const CANCEL: &str = "DELETE FROM t_resource_order WHERE what = ? AND name = ? AND (? IS NULL OR until <= ?)";

/// The row of a run keeps its token. A claim that takes over compares the time since which it is
/// due.
const LATCH: &str = "
UPDATE t_resource_schedule
SET token = IF(holder IS NULL, token + 1, token),
    due_at = IF(holder IS NOT NULL AND due_at <= UTC_TIMESTAMP(6), due_at - INTERVAL 1 MICROSECOND, due_at)
WHERE name = ? AND slot = ? AND attempt = ?";

const WAKE: &str = "
UPDATE t_resource_schedule SET due_at = LEAST(due_at, UTC_TIMESTAMP(6)) WHERE name = ? AND holder IS NULL AND attempt > 0";

const NOTE: &str = "
INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, note)
SELECT name, run_slot, attempt, token, ? FROM t_resource_schedule WHERE name = ? AND holder = ? AND token = ?
ON DUPLICATE KEY UPDATE t_resource_schedule_detail.note = VALUES(note), t_resource_schedule_detail.token = VALUES(token)";

const OUTPUT: &str = "SELECT output FROM t_resource_schedule_detail WHERE name = ? AND slot = ? AND attempt = ?";

impl OrderStore for MySql {
    async fn order(conn: &mut MySqlConnection, order: &Order<'_>) -> Reply<()> {
        let (since, until) = (order.since.naive_utc(), order.until.naive_utc());
        let query = sqlx::query(ORDER).bind(order.what.name()).bind(order.name).bind(since).bind(until);
        query.bind(order.who).execute(conn).await.map(drop)
    }

    async fn ordered(conn: &mut MySqlConnection, what: What, name: &str) -> Reply<Option<Given>> {
        let query = sqlx::query_as::<_, (NaiveDateTime, NaiveDateTime, String)>(ORDERED).bind(what.name()).bind(name);
        let given = query.fetch_optional(conn).await?;
        Ok(given.map(|(since, until, who)| Given { since: since.and_utc(), until: until.and_utc(), who }))
    }

    async fn cancel(conn: &mut MySqlConnection, what: What, name: &str, by: Option<DateTime<Utc>>) -> Reply<bool> {
        let by = by.map(|by| by.naive_utc());
        let query = sqlx::query(CANCEL).bind(what.name()).bind(name).bind(by).bind(by);
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn latch(conn: &mut MySqlConnection, name: &Key, slot: DateTime<Utc>, attempt: u32) -> Reply<bool> {
        let query = sqlx::query(LATCH).bind(name.as_str()).bind(slot.naive_utc()).bind(to_stored_count(attempt));
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn wake(conn: &mut MySqlConnection, name: &Key) -> Reply<()> {
        sqlx::query(WAKE).bind(name.as_str()).execute(conn).await.map(drop)
    }

    async fn set_note(conn: &mut MySqlConnection, claim: &Claim, note: &str) -> Reply<()> {
        let query = sqlx::query(NOTE).bind(note).bind(claim.key.as_str()).bind(*claim.holder.as_uuid());
        query.bind(claim.token.get()).execute(conn).await.map(drop)
    }

    async fn output(conn: &mut MySqlConnection, of: &AttemptOf<'_>) -> Reply<Option<Vec<u8>>> {
        let query = sqlx::query_scalar(OUTPUT).bind(of.name.as_str()).bind(of.slot.naive_utc());
        Ok(query.bind(to_stored_count(of.attempt)).fetch_optional(conn).await?.flatten())
    }
}
