//! The statements of schedules. All assignments of an UPDATE see the row as it was.

use crate::store::{
    schedule_operations::{columns, reads, select_runs, select_schedules},
    sqlite::row::{listed, sql},
};

pub(super) const REGISTERED: &str = select_schedules!("IN (SELECT CAST(unhex(value) AS TEXT) FROM json_each(?1))");

pub(super) const LOOK: &str = sql!(
    "SELECT " {columns!()} " FROM t_resource_schedule s WHERE NOT paused AND (name, spec, zone) IN (
         SELECT CAST(unhex(value ->> 0) AS TEXT), CAST(unhex(value ->> 1) AS TEXT), CAST(unhex(value ->> 2) AS TEXT) FROM json_each(?1))
     ORDER BY due_at LIMIT ?2"
);

reads!();

/// Adds the runs of `$rows`, a condition on schedules, to the history. `$values` are the slot, the
/// attempt, the status, the slots missed and the error.
macro_rules! record {
    ($values:literal, $rows:expr) => {
        sql!("
INSERT INTO t_resource_schedule_run (name, token, client_ip, begin_time, end_time, slot, attempt, status, missed, error)
SELECT name, token, client_ip, COALESCE(begin_time, " now "), " now ", " $values "
FROM t_resource_schedule WHERE " {$rows} ";")
    };
}

/// The schedule whose run a claim holds.
macro_rules! held {
    () => {
        "name = ?1 AND holder = ?2 AND token = ?3"
    };
}

/// Claims those of the list ?1 that are as they were seen: each item is what was seen (the name,
/// the spec and the zone in hex, the token, the slot, the attempt, the due time), and then the
/// token and the slot of the claim. ?2 holder, ?3 label, ?4 lease, ?5 when the runs begin, ?6 the
/// limit.
pub(super) const CLAIM: &str = sql!({listed!()} "
UPDATE t_resource_schedule AS s
SET holder = ?2, token = j.value ->> 7, client_ip = ?3, run_slot = j.value ->> 8, attempt = s.attempt + 1, begin_time = ?5,
    due_at = " now " + ?4 FROM j
WHERE s.name = CAST(unhex(j.value ->> 0) AS TEXT) AND s.spec = CAST(unhex(j.value ->> 1) AS TEXT)
  AND s.zone = CAST(unhex(j.value ->> 2) AS TEXT) AND s.token = j.value ->> 3 AND s.slot = j.value ->> 4
  AND s.attempt = j.value ->> 5 AND s.due_at = j.value ->> 6 AND NOT s.paused AND " now " <= ?6 RETURNING name");

/// Adds a run that was lost to the history. One that is there already stays.
pub(super) const RECORD_LOST: &str = sql!("
INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, " now ", 'L', ?7, ?8) ON CONFLICT DO NOTHING");

/// ?3 the holder until the next takeover. A slot of a first attempt that was moved for the claim,
/// or is one of other times by now, is not that of the row before the claim.
pub(super) const PUT_BACK: &str = sql!("
UPDATE t_resource_schedule AS s
SET (holder, begin_time, client_ip) = (
        SELECT CASE WHEN r.name IS NOT NULL THEN ?3 END, coalesce(r.begin_time, s.begin_time), coalesce(r.client_ip, s.client_ip)
        FROM (SELECT 1) AS one LEFT JOIN t_resource_schedule_run r
        ON r.name = s.name AND r.slot = s.run_slot AND r.attempt = s.attempt - 1 AND r.status = 'L'),
    attempt = attempt - 1, due_at = CASE WHEN attempt > 1 OR triggered_at IS NOT NULL THEN " now " ELSE slot END
WHERE holder = ?1 AND name IN (SELECT CAST(unhex(value) AS TEXT) FROM json_each(?2))
  AND (attempt > 1 OR run_slot % 1000 <> 0 OR (run_slot = slot AND missed = 0))");

/// ?5 is the limit. An operator may have stopped the tick, unless ?6.
pub(super) const EXTEND: &str = sql!("
UPDATE t_resource_schedule AS s SET due_at = " now " + ?4
WHERE " {held!()} " AND " now " <= ?5 AND (?6 OR NOT EXISTS (
    SELECT 1 FROM t_resource_order o WHERE o.what = 'stop' AND o.name = s.name AND o.until = s.run_slot))");

/// ?1 the error, and the claim with the holder until the takeover.
pub(super) const RECORD_HANDED_BACK: &str =
    record!("run_slot, attempt, 'L', missed, ?1", "name = ?2 AND holder = ?3 AND token = ?4 ON CONFLICT DO NOTHING");

/// Records the run of the schedule ?2 as lost, with the error ?1, if its lease has ended.
pub(super) const LOSE: &str = record!(
    "run_slot, attempt, 'L', missed, ?1",
    sql!("name = ?2 AND holder IS NOT NULL AND due_at <= " now " ON CONFLICT DO NOTHING")
);

pub(super) const LEFT: &str = sql!("
SELECT due_at - " now " AS left_micros, " now " AS now,
    EXISTS (SELECT 1 FROM t_resource_order o WHERE o.what = 'stop' AND o.name = s.name AND o.until = s.run_slot) AS stopped
FROM t_resource_schedule AS s WHERE " {held!()});

/// The claim of a slot that may be moved, unless an operator has stopped the tick, or has taken
/// back the order to skip it, for which ?11 is set, and the move was not made before. Once other
/// times are in effect, the row has the slot after the claimed one, and a move would leave it
/// behind.
macro_rules! held_with_times {
    () => {
        sql!(
            {held!()} " AND slot = run_slot AND spec = ?5 AND zone = ?6 AND NOT EXISTS (
                SELECT 1 FROM t_resource_order o WHERE o.what = 'stop' AND o.name = ?1 AND o.until = run_slot)
              AND (?11 IS NULL OR run_slot = ?4 OR EXISTS (
                SELECT 1 FROM t_resource_order o
                WHERE o.what = 'skip' AND o.name = ?1 AND run_slot BETWEEN o.since AND o.until))"
        )
    };
}

/// ?4 the slot, ?5 and ?6 the times with which it was computed, ?7 whether it is run, ?8 missed, ?9
/// the first slot of ?10 that are skipped, ?11 why.
pub(super) const PASS: &str = sql!(
    "BEGIN IMMEDIATE;"
    {record!("?9, 0, 'M', ?10, ?11", sql!({held_with_times!()} " AND ?10 > 0 ON CONFLICT DO NOTHING"))} "
UPDATE t_resource_schedule
SET slot = ?4, run_slot = CASE WHEN ?7 THEN ?4 ELSE run_slot END, attempt = CASE WHEN ?7 THEN 1 ELSE 0 END,
    missed = CASE WHEN ?7 THEN ?8 ELSE 0 END, holder = CASE WHEN ?7 THEN holder END,
    due_at = CASE WHEN ?7 THEN due_at WHEN triggered_at IS NOT NULL THEN " now " ELSE ?4 END
WHERE " {held_with_times!()} " RETURNING 1; COMMIT"
);

/// ?4 the next slot, NULL for another attempt after ?7; ?5 and ?6 the times with which it was
/// computed. ?8 to ?12 are recorded, without ON CONFLICT: no attempt ends twice. ?13 is the output.
macro_rules! end {
    () => {
        sql!({record!("?8, ?9, ?10, ?11, ?12", held!())} "
INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, output)
SELECT name, ?8, ?9, token, ?13 FROM t_resource_schedule WHERE " {held!()} " AND ?13 IS NOT NULL
ON CONFLICT (name, slot, attempt) DO UPDATE SET output = excluded.output;
UPDATE t_resource_schedule
SET holder = NULL,
    due_at = CASE WHEN ?4 IS NULL THEN " now " + ?7 WHEN triggered_at <> run_slot THEN " now "
                  WHEN ?4 IS NOT NULL AND slot = run_slot AND spec = ?5 AND zone = ?6 THEN ?4 ELSE slot END,
    slot = CASE WHEN ?4 IS NOT NULL AND slot = run_slot AND spec = ?5 AND zone = ?6 THEN ?4 ELSE slot END,
    attempt = CASE WHEN ?4 IS NULL THEN attempt ELSE 0 END,
    missed = CASE WHEN ?4 IS NULL THEN missed ELSE 0 END,
    triggered_at = CASE WHEN triggered_at = run_slot AND ?4 IS NOT NULL THEN NULL ELSE triggered_at END
WHERE " {held!()} " RETURNING 1;")
    };
}

pub(super) const END: &str = sql!("BEGIN IMMEDIATE;" {end!()} "COMMIT");

/// The same in a transaction of the application.
pub(super) const END_WITHIN: &str = end!();

pub(super) const PAUSE: &str = sql!("
UPDATE t_resource_schedule
SET due_at = CASE WHEN paused AND NOT ?1 THEN max(due_at, " now ") ELSE due_at END, paused = ?2
WHERE name = ?3 AND spec <> 'none' AND spec NOT LIKE 'renamed %'");

pub(super) const TRIGGER: &str = sql!("
UPDATE t_resource_schedule
SET triggered_at = CASE WHEN triggered_at IS NULL OR (holder IS NOT NULL AND triggered_at = run_slot)
                        THEN max(" now ", COALESCE(run_slot, 0)) + iif(run_slot % 1000 = 999, 2, 1) ELSE triggered_at END,
    due_at = CASE WHEN holder IS NULL THEN min(due_at, " now ") ELSE due_at END
WHERE name = ?1 AND spec <> 'none' AND spec NOT LIKE 'renamed %'");

pub(super) const FORGET: &str = sql!("
DELETE FROM t_resource_schedule_run WHERE rowid IN (
    SELECT r.rowid FROM t_resource_schedule_run r WHERE r.end_time < " now " - ?1
      AND NOT EXISTS (SELECT 1 FROM t_resource_schedule s WHERE s.name = r.name AND (
          (s.attempt > 0 AND s.run_slot = r.slot)
          OR (r.status = 'S' AND NOT EXISTS (SELECT 1 FROM t_resource_schedule_run x
                                             WHERE x.name = r.name AND x.status = 'S' AND x.slot > r.slot))))
    LIMIT ?2) RETURNING name, slot, attempt");

/// The runs whose details are deleted, as an array.
pub(super) const FORGET_DETAILS: &str = "
DELETE FROM t_resource_schedule_detail WHERE (name, slot, attempt) IN (
    SELECT CAST(unhex(value ->> 0) AS TEXT), value ->> 1, value ->> 2 FROM json_each(?1))";
