//! Orders, and the details of runs.

use chrono::{DateTime, Utc};
use sqlx::{Sqlite, SqliteConnection};

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        orders::{Given, Order, OrderStore, What, given, operations},
        schedule::to_stored_count,
        sqlite::row::{sql, stored},
    },
};

const ORDER: &str = "
INSERT INTO t_resource_order (what, name, since, until, who) VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (what, name) DO UPDATE SET since = excluded.since, until = excluded.until, who = excluded.who";

const ORDERED: &str = "SELECT since, until, who FROM t_resource_order WHERE what = ?1 AND name = ?2";

const CANCEL: &str = "DELETE FROM t_resource_order WHERE what = ?1 AND name = ?2 AND until <= coalesce(?3, until)";

/// The row of a run keeps its token. A claim that takes over compares the time since which it is
/// due.
const LATCH: &str = sql!("
UPDATE t_resource_schedule
SET token = iif(holder IS NULL, token + 1, token),
    due_at = iif(holder IS NOT NULL AND due_at <= " now ", due_at - 1, due_at)
WHERE name = ?1 AND slot = ?2 AND attempt = ?3");

const WAKE: &str = sql!("
UPDATE t_resource_schedule SET due_at = min(due_at, " now ") WHERE name = ?1 AND holder IS NULL AND attempt > 0");

const NOTE: &str = "
INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, note)
SELECT name, run_slot, attempt, token, ?1 FROM t_resource_schedule WHERE name = ?2 AND holder = ?3 AND token = ?4
ON CONFLICT (name, slot, attempt) DO UPDATE SET note = excluded.note, token = excluded.token";

const OUTPUT: &str = "SELECT output FROM t_resource_schedule_detail WHERE name = ?1 AND slot = ?2 AND attempt = ?3";

impl OrderStore for Sqlite {
    operations!(SqliteConnection);
}
