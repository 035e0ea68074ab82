//! The statements of schedules. MySQL assigns from left to right: what depends on a column comes
//! before the change of that column.

use std::sync::LazyLock;

use crate::store::{
    mysql::row::{IN_TIME, NOW, sql},
    schedule_operations::{columns, reads, select_runs, select_schedules},
};

pub(super) const COLUMNS: &str = columns!();

pub(super) const REGISTERED: &str = select_schedules!("IN");

reads!();

pub(super) const LOOK: &str = "FROM t_resource_schedule s WHERE paused = 0 AND (name, spec, zone) IN";

pub(super) const PAUSE: &str = "
UPDATE t_resource_schedule SET due_at = IF(paused = 1 AND ? = 0, GREATEST(due_at, UTC_TIMESTAMP(6)), due_at), paused = ?
WHERE name = ? AND spec <> 'none' AND spec NOT LIKE 'renamed %'";

/// A row that is still as it was seen.
const AS_SEEN: &str = "c.name = ? AND c.spec = ? AND c.zone = ? AND c.token = ? AND c.slot = ? AND c.attempt = ? AND c.due_at = ? AND c.triggered_at <=> ? AND c.paused = 0";

/// Claims those of the rows that are as they were seen. The derived table skips locked rows; the
/// update takes what it found. Its assignments depend on no column that it changes.
pub(super) fn claim_statement(rows: usize) -> String {
    let seen = vec![AS_SEEN; rows].join(" OR ");
    format!(
        "
UPDATE (
    SELECT c.name, c.token, c.attempt,
           COALESCE(IF(c.attempt > 0, c.run_slot, NULL), c.triggered_at, c.slot) AS to_run
    FROM t_resource_schedule c FORCE INDEX (PRIMARY) WHERE {seen} LIMIT {rows} FOR UPDATE SKIP LOCKED
) j STRAIGHT_JOIN t_resource_schedule t FORCE INDEX (PRIMARY) ON t.name = j.name
SET t.holder = ?, t.client_ip = ?, t.begin_time = ?, t.token = GREATEST(j.token + 1, ?), t.run_slot = j.to_run,
    t.attempt = j.attempt + 1, t.due_at = {NOW} + INTERVAL ? MICROSECOND WHERE {IN_TIME}"
    )
}

/// The names of the rows that a holder has claimed, or may be claiming in a statement that is still
/// carried out. The rows of other runs are not among them.
pub(super) const MAY_BE_HELD: &str =
    "SELECT name FROM t_resource_schedule WHERE (holder = ? OR due_at <= UTC_TIMESTAMP(6)) AND name IN";

/// Selects a column of the run that a claim took over, if it was lost.
macro_rules! of_lost_run {
    ($column:literal) => {
        concat!(
            "(SELECT r.",
            $column,
            " FROM t_resource_schedule_run r WHERE r.name = s.name AND r.slot = s.run_slot AND r.attempt = s.attempt - 1
              AND r.status = 'L')"
        )
    };
}

/// The parameters are the holder until the next takeover, and the holder of the claim. A slot of a
/// first attempt that was moved for the claim, or is one of other times by now, is not that of the
/// row before the claim. The history is read only where there may be a run that was lost: the read
/// locks what it finds, or the gap.
pub(super) const PUT_BACK: &str = concat!(
    "
UPDATE t_resource_schedule s FORCE INDEX (PRIMARY)
SET s.due_at = IF(s.attempt > 1 OR s.triggered_at IS NOT NULL, UTC_TIMESTAMP(6), s.slot),
    s.holder = IF(s.attempt > 1 AND EXISTS ",
    of_lost_run!("name"),
    ", ?, NULL),
    s.begin_time = IF(s.attempt > 1, COALESCE(",
    of_lost_run!("begin_time"),
    ", s.begin_time), s.begin_time),
    s.client_ip = IF(s.attempt > 1, COALESCE(",
    of_lost_run!("client_ip"),
    ", s.client_ip), s.client_ip),
    s.attempt = s.attempt - 1
WHERE s.holder = ? AND (s.attempt > 1 OR MICROSECOND(s.run_slot) % 1000 <> 0 OR (s.run_slot = s.slot AND s.missed = 0))
  AND s.name IN"
);

pub(super) static EXTEND: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
UPDATE (
    SELECT c.name FROM t_resource_schedule c WHERE c.name = ? AND c.holder = ? AND c.token = ? LIMIT 1 FOR UPDATE SKIP LOCKED
) j STRAIGHT_JOIN t_resource_schedule t FORCE INDEX (PRIMARY) ON t.name = j.name
SET t.due_at = {NOW} + INTERVAL ? MICROSECOND WHERE {IN_TIME}
  AND (? OR NOT EXISTS (SELECT 1 FROM t_resource_order o WHERE o.what = 'stop' AND o.name = t.name AND o.until = t.run_slot))"
    )
});

/// Adds the run of a row to the history as lost. One that is there already stays. The parameters
/// are the error, the name, and those of the condition.
macro_rules! record_lost {
    ($condition:literal) => {
        concat!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
             SELECT name, run_slot, attempt, token, client_ip, begin_time, UTC_TIMESTAMP(6), 'L', missed, ?
             FROM t_resource_schedule WHERE name = ? AND ",
            $condition,
            " ON DUPLICATE KEY UPDATE t_resource_schedule_run.name = t_resource_schedule_run.name"
        )
    };
}

pub(super) const RECORD_HANDED_BACK: &str = record_lost!("holder = ? AND token = ?");

/// A run whose lease has ended.
pub(super) const LOSE: &str = record_lost!("holder IS NOT NULL AND due_at <= UTC_TIMESTAMP(6) FOR UPDATE");

pub(super) const LEFT: &str = "
SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), due_at) AS left_micros, UTC_TIMESTAMP(6) AS now,
       CAST(EXISTS (SELECT 1 FROM t_resource_order o WHERE o.what = 'stop' AND o.name = s.name AND o.until = s.run_slot) AS SIGNED) AS stopped
FROM t_resource_schedule s WHERE name = ? AND holder = ? AND token = ?";

/// The end of what a run printed.
pub(super) const KEEP: &str = "
INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, output) VALUES (?, ?, ?, ?, ?)
ON DUPLICATE KEY UPDATE output = VALUES(output)";

/// Adds a run that was lost to the history. One that is there already stays.
pub(super) const RECORD_LOST: &str = "
INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
VALUES (?, ?, ?, ?, ?, ?, UTC_TIMESTAMP(6), 'L', ?, ?) ON DUPLICATE KEY UPDATE name = name";

/// Adds a row to the history for a claim, whose row in `t_resource_schedule` may already be free.
/// The parameters are the slot, the attempt, the status, missed, the error, and the claim's name
/// and token.
macro_rules! record {
    ($rest:literal) => {
        concat!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
             SELECT name, ?, ?, token, client_ip, begin_time, UTC_TIMESTAMP(6), ?, ?, ? FROM t_resource_schedule
             WHERE name = ? AND token = ?",
            $rest
        )
    };
}

/// No attempt ends twice: a second row is an error.
pub(super) const RECORD_ENDED: &str = record!("");

/// A pass that is repeated after a lost reply finds its row.
pub(super) const RECORD_PASSED: &str =
    record!(" ON DUPLICATE KEY UPDATE t_resource_schedule_run.name = t_resource_schedule_run.name");

/// A tick that an operator has stopped is not moved, nor one for which the order to skip it was
/// taken back, unless this move was made before. The last parameters are who has ordered that, if
/// anyone, and the slot.
pub(super) const PASS: &str = "
UPDATE t_resource_schedule
SET due_at = CASE WHEN ? THEN due_at WHEN triggered_at IS NOT NULL THEN UTC_TIMESTAMP(6) ELSE ? END,
    slot = ?, run_slot = IF(?, ?, run_slot), attempt = IF(?, 1, 0), missed = IF(?, ?, 0), holder = IF(?, holder, NULL)
WHERE name = ? AND holder = ? AND token = ? AND slot = run_slot AND spec = ? AND zone = ?
  AND NOT EXISTS (SELECT 1 FROM t_resource_order o WHERE o.what = 'stop' AND o.name = t_resource_schedule.name
                  AND o.until = t_resource_schedule.run_slot)
  AND (? IS NULL OR run_slot = ? OR EXISTS (
          SELECT 1 FROM t_resource_order o WHERE o.what = 'skip' AND o.name = t_resource_schedule.name
          AND t_resource_schedule.run_slot BETWEEN o.since AND o.until))";

/// The parameters of the conditions: the next slot, and for a move spec and zone as well.
pub(super) static END: LazyLock<String> = LazyLock::new(|| {
    let moves = "(? IS NOT NULL AND spec = ? AND zone = ? AND slot = run_slot)";
    format!(
        "
UPDATE t_resource_schedule
SET due_at = CASE WHEN ? IS NULL THEN UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND
                  WHEN triggered_at <> run_slot THEN UTC_TIMESTAMP(6) WHEN {moves} THEN ? ELSE slot END,
    attempt = IF(? IS NULL, attempt, 0), missed = IF(? IS NULL, missed, 0),
    triggered_at = IF(triggered_at = run_slot AND ? IS NOT NULL, NULL, triggered_at),
    slot = IF({moves}, ?, slot), holder = NULL
WHERE name = ? AND holder = ? AND token = ?"
    )
});

pub(super) const TRIGGER: &str = "
UPDATE t_resource_schedule
SET triggered_at = IF(triggered_at IS NULL OR (holder IS NOT NULL AND triggered_at = run_slot),
        GREATEST(UTC_TIMESTAMP(3), COALESCE(run_slot, '1970-01-01'))
            + INTERVAL IF(MICROSECOND(run_slot) % 1000 = 999, 2, 1) MICROSECOND, triggered_at),
    due_at = IF(holder IS NULL, LEAST(due_at, UTC_TIMESTAMP(6)), due_at)
WHERE name = ? AND spec <> 'none' AND spec NOT LIKE 'renamed %'";

/// Builds the statement that deletes these runs from a table. Each is looked up by its primary key:
/// a condition with a list would read the whole of the table, and wait for the runs that are being
/// recorded.
pub(super) fn forget_statement(table: &str, count: usize) -> String {
    let one = "SELECT CAST(? AS BINARY) AS name, CAST(? AS DATETIME(6)) AS slot, ? AS attempt";
    let rows = vec![one; count].join(" UNION ALL ");
    format!(
        "DELETE r FROM ({rows}) j STRAIGHT_JOIN {table} r FORCE INDEX (PRIMARY)
         ON r.name = j.name AND r.slot = j.slot AND r.attempt = j.attempt"
    )
}

/// Rows that may be deleted. The statement that deletes them names them, since one that looked for
/// them would lock what it reads.
pub(super) const OLD: &str = "
SELECT r.name, r.slot, r.attempt FROM t_resource_schedule_run r
WHERE r.end_time < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND
  AND NOT EXISTS (SELECT 1 FROM t_resource_schedule s WHERE s.name = r.name AND (
      (s.attempt > 0 AND s.run_slot = r.slot)
      OR (r.status = 'S' AND NOT EXISTS (SELECT 1 FROM t_resource_schedule_run x
                                         WHERE x.name = r.name AND x.status = 'S' AND x.slot > r.slot))))
ORDER BY r.end_time LIMIT ?";
