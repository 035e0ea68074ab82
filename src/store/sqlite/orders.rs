//! Orders, and the details of runs.

use chrono::{DateTime, Utc};
use sqlx::{Row as _, Sqlite, SqliteConnection, sqlite::SqliteRow};

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        orders::{AttemptOf, Given, Order, OrderStore, What},
        schedule::to_stored_count,
        sqlite::row::{now, time},
    },
};

const ORDER: &str = "
INSERT INTO t_resource_order (what, name, since, until, who) VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (what, name) DO UPDATE SET since = excluded.since, until = excluded.until, who = excluded.who";

const ORDERED: &str = "SELECT since, until, who FROM t_resource_order WHERE what = ?1 AND name = ?2";

const CANCEL: &str = "DELETE FROM t_resource_order WHERE what = ?1 AND name = ?2 AND (?3 IS NULL OR until <= ?3)";

/// The row of a run keeps its token. A claim that takes over compares the time since which it is
/// due.
const LATCH: &str = concat!(
    "UPDATE t_resource_schedule
     SET token = iif(holder IS NULL, token + 1, token), due_at = iif(holder IS NOT NULL AND due_at <= ",
    now!(),
    ", due_at - 1, due_at) WHERE name = ?1 AND slot = ?2 AND attempt = ?3"
);

const WAKE: &str = concat!(
    "UPDATE t_resource_schedule SET due_at = min(due_at, ",
    now!(),
    ") WHERE name = ?1 AND holder IS NULL AND attempt > 0"
);

const NOTE: &str = "
INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, note)
SELECT name, run_slot, attempt, token, ?4 FROM t_resource_schedule WHERE name = ?1 AND holder = ?2 AND token = ?3
ON CONFLICT (name, slot, attempt) DO UPDATE SET note = excluded.note, token = excluded.token";

const OUTPUT: &str = "SELECT output FROM t_resource_schedule_detail WHERE name = ?1 AND slot = ?2 AND attempt = ?3";

impl OrderStore for Sqlite {
    async fn order(conn: &mut SqliteConnection, order: &Order<'_>) -> Reply<()> {
        let (since, until) = (order.since.timestamp_micros(), order.until.timestamp_micros());
        let query = sqlx::query(ORDER).bind(order.what.name()).bind(order.name).bind(since).bind(until);
        query.bind(order.who).execute(conn).await.map(drop)
    }

    async fn ordered(conn: &mut SqliteConnection, what: What, name: &str) -> Reply<Option<Given>> {
        let row = sqlx::query(ORDERED).bind(what.name()).bind(name).fetch_optional(conn).await?;
        let at = |row: &SqliteRow, name| time(row, name).map(Option::unwrap_or_default);
        let given = |row| Ok(Given { since: at(&row, "since")?, until: at(&row, "until")?, who: row.try_get("who")? });
        row.map(given).transpose()
    }

    async fn cancel(conn: &mut SqliteConnection, what: What, name: &str, by: Option<DateTime<Utc>>) -> Reply<bool> {
        let query = sqlx::query(CANCEL).bind(what.name()).bind(name).bind(by.map(|by| by.timestamp_micros()));
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn latch(conn: &mut SqliteConnection, name: &Key, slot: DateTime<Utc>, attempt: u32) -> Reply<bool> {
        let query = sqlx::query(LATCH).bind(name.as_str()).bind(slot.timestamp_micros());
        Ok(query.bind(to_stored_count(attempt)).execute(conn).await?.rows_affected() > 0)
    }

    async fn wake(conn: &mut SqliteConnection, name: &Key) -> Reply<()> {
        sqlx::query(WAKE).bind(name.as_str()).execute(conn).await.map(drop)
    }

    async fn set_note(conn: &mut SqliteConnection, claim: &Claim, note: &str) -> Reply<()> {
        let query = sqlx::query(NOTE).bind(claim.key.as_str()).bind(*claim.holder.as_uuid()).bind(claim.token.get());
        query.bind(note).execute(conn).await.map(drop)
    }

    async fn output(conn: &mut SqliteConnection, of: &AttemptOf<'_>) -> Reply<Option<Vec<u8>>> {
        let query = sqlx::query_scalar(OUTPUT).bind(of.name.as_str()).bind(of.slot.timestamp_micros());
        Ok(query.bind(to_stored_count(of.attempt)).fetch_optional(conn).await?.flatten())
    }
}
