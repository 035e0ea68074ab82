//! Orders, and the details of runs.

use chrono::{DateTime, Utc};
use sqlx::{MySql, MySqlConnection};

use crate::{
    key::{Claim, Key},
    store::{
        Reply,
        mysql::row::stored,
        orders::{Given, Order, OrderStore, What, given, operations},
        schedule::to_stored_count,
    },
};

const ORDER: &str = "
INSERT INTO t_resource_order (what, name, since, until, who) VALUES (?, ?, ?, ?, ?)
ON DUPLICATE KEY UPDATE since = VALUES(since), until = VALUES(until), who = VALUES(who)";

const ORDERED: &str =
    "SELECT since, until, CONVERT(who USING utf8mb4) AS who FROM t_resource_order WHERE what = ? AND name = ?";

const CANCEL: &str = "DELETE FROM t_resource_order WHERE what = ? AND name = ? AND until <= COALESCE(?, until)";

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
    operations!(MySqlConnection);
}
