//! Orders, and the details of runs.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres};

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        orders::{AttemptOf, Given, Order, OrderStore, What},
        postgres::row::finite,
        schedule::to_stored_count,
    },
};

const ORDER: &str = "
INSERT INTO t_resource_order (what, name, since, until, who) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (what, name) DO UPDATE SET since = excluded.since, until = excluded.until, who = excluded.who";

const ORDERED: &str = concat!(
    "SELECT ",
    finite!("since"),
    ", ",
    finite!("until"),
    ", who::text FROM t_resource_order WHERE what = $1 AND name = $2"
);

const CANCEL: &str =
    "DELETE FROM t_resource_order WHERE what = $1 AND name = $2 AND ($3::timestamptz IS NULL OR until <= $3)";

/// The row of a run keeps its token. A claim that takes over compares the time since which it is
/// due.
const LATCH: &str = concat!(
    "UPDATE t_resource_schedule SET token = CASE WHEN holder IS NULL THEN token + 1 ELSE token END,
         due_at = CASE WHEN holder IS NOT NULL AND due_at <= clock_timestamp() THEN due_at - interval '1 microsecond' ELSE due_at END
     WHERE name = $1 AND attempt = $3 AND ",
    finite!("slot"),
    " = $2"
);

const WAKE: &str = "
UPDATE t_resource_schedule SET due_at = least(due_at, clock_timestamp()) WHERE name = $1 AND holder IS NULL AND attempt > 0";

const NOTE: &str = "
INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, note)
SELECT name, run_slot, attempt, token, $4 FROM t_resource_schedule WHERE name = $1 AND holder = $2 AND token = $3
ON CONFLICT (name, slot, attempt) DO UPDATE SET note = excluded.note, token = excluded.token";

const OUTPUT: &str = "SELECT output FROM t_resource_schedule_detail WHERE name = $1 AND slot = $2 AND attempt = $3";

impl OrderStore for Postgres {
    async fn order(conn: &mut PgConnection, order: &Order<'_>) -> Reply<()> {
        let query = sqlx::query(ORDER).bind(order.what.name()).bind(order.name).bind(order.since).bind(order.until);
        query.bind(order.who).execute(conn).await.map(drop)
    }

    async fn ordered(conn: &mut PgConnection, what: What, name: &str) -> Reply<Option<Given>> {
        let given = sqlx::query_as(ORDERED).bind(what.name()).bind(name).fetch_optional(conn).await?;
        Ok(given.map(|(since, until, who)| Given { since, until, who }))
    }

    async fn cancel(conn: &mut PgConnection, what: What, name: &str, by: Option<DateTime<Utc>>) -> Reply<bool> {
        let query = sqlx::query(CANCEL).bind(what.name()).bind(name).bind(by);
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn latch(conn: &mut PgConnection, name: &Key, slot: DateTime<Utc>, attempt: u32) -> Reply<bool> {
        let query = sqlx::query(LATCH).bind(name.as_str()).bind(slot).bind(to_stored_count(attempt));
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn wake(conn: &mut PgConnection, name: &Key) -> Reply<()> {
        sqlx::query(WAKE).bind(name.as_str()).execute(conn).await.map(drop)
    }

    async fn set_note(conn: &mut PgConnection, claim: &Claim, note: &str) -> Reply<()> {
        let query = sqlx::query(NOTE).bind(claim.key.as_str()).bind(claim.holder.as_uuid()).bind(claim.token.get());
        query.bind(note).execute(conn).await.map(drop)
    }

    async fn output(conn: &mut PgConnection, of: &AttemptOf<'_>) -> Reply<Option<Vec<u8>>> {
        let query = sqlx::query_scalar(OUTPUT).bind(of.name.as_str()).bind(of.slot).bind(to_stored_count(of.attempt));
        Ok(query.fetch_optional(conn).await?.flatten())
    }
}
