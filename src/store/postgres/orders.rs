//! Orders, and the details of runs.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres};

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        orders::{Given, Order, OrderStore, What, given, operations},
        postgres::row::{finite, stored},
        schedule::to_stored_count,
    },
};

const ORDER: &str = "
INSERT INTO t_resource_order (what, name, since, until, who) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (what, name) DO UPDATE SET since = excluded.since, until = excluded.until, who = excluded.who";

const ORDERED: &str = concat!(
    "SELECT ",
    finite!("since"),
    " AS since, ",
    finite!("until"),
    " AS until, who::text AS who FROM t_resource_order WHERE what = $1 AND name = $2"
);

const CANCEL: &str =
    "DELETE FROM t_resource_order WHERE what = $1 AND name = $2 AND until <= coalesce($3::timestamptz, until)";

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
SELECT name, run_slot, attempt, token, $1 FROM t_resource_schedule WHERE name = $2 AND holder = $3 AND token = $4
ON CONFLICT (name, slot, attempt) DO UPDATE SET note = excluded.note, token = excluded.token";

const OUTPUT: &str = "SELECT output FROM t_resource_schedule_detail WHERE name = $1 AND slot = $2 AND attempt = $3";

impl OrderStore for Postgres {
    operations!(PgConnection);
}
