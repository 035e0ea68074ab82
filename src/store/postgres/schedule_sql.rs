//! The statements of schedules. All assignments of an UPDATE see the row as it was.

use crate::store::{
    postgres::row::{finite, in_time, sql},
    schedule_operations::{reads, select_runs, select_schedules},
};

pub(super) const REGISTERED: &str = select_schedules!("= ANY ($1::text[])");

reads!();

/// $1 to $3 the known schedules, $4 holder, $5 label, $6 their leases, $7 the most rows, $8 the
/// error of a lost run, $9 the limit.
///
/// The look compares with now(), because a volatile function is no condition of an index. A row is
/// judged again when it is locked. The rows are locked once: a plan that looks for each row of the
/// update again would claim more than $7.
///
/// The orders are those of before the rows were locked. So a row that is not as it was then is
/// locked, and not claimed: an order changes its token or the time since which it is due.
pub(super) const CLAIM: &str = concat!(
    "
WITH known AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $6::interval[]) AS k (name, spec, zone, lease)
), due AS MATERIALIZED (
    SELECT s.name, s.holder, s.token, s.due_at, s.attempt, s.client_ip, s.begin_time, n.now, k.lease
    FROM t_resource_schedule s JOIN known k ON k.name = s.name AND k.spec = s.spec AND k.zone = s.zone
    CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, s.token) n
    WHERE NOT s.paused AND s.due_at <= now()
    ORDER BY s.due_at LIMIT $7 FOR UPDATE OF s SKIP LOCKED
), claimed AS (
    UPDATE t_resource_schedule t
    SET holder = $4, client_ip = $5, begin_time = j.now, due_at = j.now + j.lease, attempt = t.attempt + 1,
        run_slot = CASE WHEN t.attempt > 0 THEN t.run_slot ELSE coalesce(t.triggered_at, t.slot) END,
        token = greatest(t.token + 1, (extract(epoch FROM j.now) * 1000000)::bigint)
    FROM due j WHERE t.name = j.name AND t.token = j.token AND t.due_at = j.due_at AND ",
    in_time!("$9"),
    "
    RETURNING t.name, t.token, t.run_slot, t.run_slot = t.slot AS own, t.attempt, t.missed, j.now,
              j.holder IS NOT NULL AS taken_over, j.token AS prior_token, j.attempt AS prior_attempt, j.client_ip AS prior_label,
              j.begin_time AS prior_begin
), lost AS (
    INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
    SELECT name, run_slot, prior_attempt, prior_token, prior_label, prior_begin, now, 'L', missed, $8 FROM claimed
    WHERE taken_over ON CONFLICT DO NOTHING
)
SELECT t.name::text AS name, t.token, t.own, t.attempt, t.missed, t.now, clock_timestamp() AS clock, EXISTS (SELECT FROM due) AS was_due,
       t.taken_over, t.prior_token, t.prior_label::text AS prior_label,
       (SELECT o.since FROM t_resource_order o WHERE o.what = 'skip' AND o.name = t.name) AS skip_since,
       (SELECT o.until FROM t_resource_order o WHERE o.what = 'skip' AND o.name = t.name) AS skip_until,
       EXISTS (SELECT FROM t_resource_order o WHERE o.what = 'stop' AND o.name = t.name AND o.until = t.run_slot) AS stopped, ",
    finite!("t.run_slot"),
    " AS run_slot, ",
    finite!("t.prior_begin"),
    " AS prior_begin, (extract(epoch FROM ",
    finite!("next.due_at"),
    " - clock_timestamp()) * 1000000)::bigint AS next_in_micros
FROM (SELECT min(s.due_at) AS due_at FROM t_resource_schedule s JOIN known k ON k.name = s.name AND k.spec = s.spec AND k.zone = s.zone
      WHERE NOT s.paused AND NOT EXISTS (SELECT FROM claimed c WHERE c.name = s.name)) next
LEFT JOIN claimed t ON true"
);

/// Some of the schedules that are due: others than before, since those may be refused.
pub(super) const DUE: &str = "
SELECT name::text FROM t_resource_schedule
WHERE name = ANY ($1::text[]) AND NOT paused AND due_at <= clock_timestamp() ORDER BY random() LIMIT $2";

/// $3 the holder until the next takeover. A slot of a first attempt that was moved for the claim,
/// or is one of other times by now, is not that of the row before the claim.
pub(super) const PUT_BACK: &str = "
UPDATE t_resource_schedule s
SET (holder, begin_time, client_ip) = (
        SELECT CASE WHEN r.name IS NOT NULL THEN $3::uuid END, coalesce(r.begin_time, s.begin_time), coalesce(r.client_ip, s.client_ip)
        FROM (SELECT 1) one LEFT JOIN t_resource_schedule_run r
        ON r.name = s.name AND r.slot = s.run_slot AND r.attempt = s.attempt - 1 AND r.status = 'L'),
    attempt = attempt - 1, due_at = CASE WHEN attempt > 1 OR triggered_at IS NOT NULL THEN clock_timestamp() ELSE slot END
WHERE holder = $1 AND name = ANY ($2::text[])
  AND (attempt > 1 OR date_trunc('milliseconds', run_slot) <> run_slot OR (run_slot = slot AND missed = 0))";

/// $5 the limit, $6 whether it is extended although an operator has stopped the tick.
pub(super) const EXTEND: &str = concat!(
    "
WITH locked AS MATERIALIZED (
    SELECT name, NOT $6 AND EXISTS (SELECT FROM t_resource_order o WHERE o.what = 'stop' AND o.name = $1 AND o.until = run_slot) AS stopped
    FROM t_resource_schedule WHERE name = $1 AND holder = $2 AND token = $3 FOR UPDATE SKIP LOCKED
), extended AS (
    UPDATE t_resource_schedule t SET due_at = clock_timestamp() + $4::interval FROM locked l WHERE t.name = l.name AND NOT l.stopped AND ",
    in_time!("$5"),
    " RETURNING 1
)
SELECT EXISTS (SELECT FROM extended) AS done, coalesce((SELECT stopped FROM locked), false) AS stopped, clock_timestamp() AS now,
       (SELECT (extract(epoch FROM ",
    finite!("due_at"),
    " - clock_timestamp()) * 1000000)::bigint FROM t_resource_schedule WHERE name = $1 AND holder = $2 AND token = $3) AS left_micros"
);

/// Adds the run of a row to the history as lost. One that is there already stays. $1 the error, $2
/// the name.
macro_rules! record_lost {
    ($condition:literal) => {
        concat!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
             SELECT name, run_slot, attempt, token, client_ip, begin_time, clock_timestamp(), 'L', missed, $1
             FROM t_resource_schedule WHERE name = $2 AND ",
            $condition,
            " ON CONFLICT DO NOTHING"
        )
    };
}

pub(super) const RECORD_HANDED_BACK: &str = record_lost!("holder = $3 AND token = $4");

/// A run whose lease has ended.
pub(super) const LOSE: &str = record_lost!("holder IS NOT NULL AND due_at <= clock_timestamp() FOR UPDATE");

/// $4 the slot, $5 and $6 the times with which it was computed, $7 whether it is run, $8 missed, $9
/// skipped, $10 the slot before, $11 who has ordered to skip them, if anyone. A tick that an
/// operator has stopped is not moved, nor one for which the order to skip it was taken back, unless
/// this move was made before.
///
/// [`LOCK`] is sent before, so that orders are seen which were given until then.
pub(super) const PASS: &str = "
WITH moved AS (
    UPDATE t_resource_schedule
    SET slot = $4, run_slot = CASE WHEN $7 THEN $4 ELSE run_slot END, attempt = CASE WHEN $7 THEN 1 ELSE 0 END,
        missed = CASE WHEN $7 THEN $8 ELSE 0 END, holder = CASE WHEN $7 THEN holder END,
        due_at = CASE WHEN $7 THEN due_at WHEN triggered_at IS NOT NULL THEN clock_timestamp() ELSE $4 END
    WHERE name = $1 AND holder = $2 AND token = $3 AND slot = run_slot AND spec = $5 AND zone = $6
      AND NOT EXISTS (SELECT FROM t_resource_order o WHERE o.what = 'stop' AND o.name = $1 AND o.until = run_slot)
      AND ($11::text IS NULL OR run_slot = $4 OR EXISTS (
          SELECT FROM t_resource_order o WHERE o.what = 'skip' AND o.name = $1 AND run_slot BETWEEN o.since AND o.until))
    RETURNING name, token, client_ip, begin_time
), recorded AS (
    INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
    SELECT name, $10, 0, token, client_ip, begin_time, clock_timestamp(), 'M', $9, $11 FROM moved WHERE $9 > 0 ON CONFLICT DO NOTHING
)
SELECT EXISTS (SELECT FROM moved)";

pub(super) const LOCK: &str =
    "SELECT FROM t_resource_schedule WHERE name = $1 AND holder = $2 AND token = $3 FOR UPDATE";

/// $4 and $5 the times with which the next slot was computed, $6 the slot, NULL for another
/// attempt after $7; $8 to $12 the history's slot, attempt, status, missed and error; $13 the
/// output.
pub(super) const END: &str = "
WITH ended AS (
    UPDATE t_resource_schedule
    SET holder = NULL,
        due_at = CASE WHEN $6::timestamptz IS NULL THEN clock_timestamp() + $7::interval
                      WHEN triggered_at <> run_slot THEN clock_timestamp()
                      WHEN $6 IS NOT NULL AND slot = run_slot AND spec = $4 AND zone = $5 THEN $6 ELSE slot END,
        slot = CASE WHEN $6 IS NOT NULL AND slot = run_slot AND spec = $4 AND zone = $5 THEN $6 ELSE slot END,
        attempt = CASE WHEN $6 IS NULL THEN attempt ELSE 0 END,
        missed = CASE WHEN $6 IS NULL THEN missed ELSE 0 END,
        triggered_at = CASE WHEN triggered_at = run_slot AND $6 IS NOT NULL THEN NULL ELSE triggered_at END
    WHERE name = $1 AND holder = $2 AND token = $3
    RETURNING name, token, client_ip, begin_time
), recorded AS (
    INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed, error)
    SELECT name, $8, $9, token, client_ip, begin_time, clock_timestamp(), $10, $11, $12 FROM ended
), kept AS (
    INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, output) SELECT name, $8, $9, token, $13 FROM ended WHERE $13::bytea IS NOT NULL
    ON CONFLICT (name, slot, attempt) DO UPDATE SET output = excluded.output
)
SELECT EXISTS (SELECT FROM ended)";

pub(super) const PAUSE: &str = "
UPDATE t_resource_schedule SET due_at = CASE WHEN paused AND NOT $1 THEN greatest(due_at, clock_timestamp()) ELSE due_at END, paused = $2
WHERE name = $3 AND spec <> 'none' AND spec NOT LIKE 'renamed %'";

pub(super) const TRIGGER: &str = "
UPDATE t_resource_schedule
SET triggered_at = CASE WHEN triggered_at IS NULL OR (holder IS NOT NULL AND triggered_at = run_slot)
        THEN greatest(date_trunc('milliseconds', clock_timestamp()), run_slot) + interval '1 microsecond'
            * CASE WHEN extract(microseconds FROM run_slot)::bigint % 1000 = 999 THEN 2 ELSE 1 END ELSE triggered_at END,
    due_at = CASE WHEN holder IS NULL THEN least(due_at, clock_timestamp()) ELSE due_at END
WHERE name = $1 AND spec <> 'none' AND spec NOT LIKE 'renamed %'";

pub(super) const FORGET: &str = "
WITH old AS MATERIALIZED (
    SELECT r.name, r.slot, r.attempt FROM t_resource_schedule_run r
    WHERE r.end_time < clock_timestamp() - $1::interval
      AND NOT EXISTS (SELECT FROM t_resource_schedule s WHERE s.name = r.name AND (
          (s.attempt > 0 AND s.run_slot = r.slot)
          OR (r.status = 'S' AND NOT EXISTS (SELECT FROM t_resource_schedule_run x
                                             WHERE x.name = r.name AND x.status = 'S' AND x.slot > r.slot))))
    LIMIT $2 FOR UPDATE OF r SKIP LOCKED
), details AS (
    DELETE FROM t_resource_schedule_detail d USING old o WHERE (d.name, d.slot, d.attempt) = (o.name, o.slot, o.attempt)
)
DELETE FROM t_resource_schedule_run r USING old o WHERE (r.name, r.slot, r.attempt) = (o.name, o.slot, o.attempt)";
