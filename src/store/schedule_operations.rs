//! The operations of schedules that are the same on every database except for the types of its
//! driver, and for statements that stand beside them as constants. The others are written once,
//! with the macro `sql!` of each database.

use crate::store::{
    Reply,
    instances::{Given, InstanceStore, OF_SCHEDULES, Order, What},
};

/// The columns of a schedule `s`, with the orders that a claim obeys.
macro_rules! columns {
    () => {
        sql!((text "s.name") " AS name, " (text "spec") " AS spec, " (text "zone") " AS zone, " (time "slot") " AS slot, "
             (time "due_at") " AS due_at, " (flag "paused") " AS paused, " (time "triggered_at") " AS triggered_at, "
             (time "run_slot") " AS run_slot, attempt, missed, " (flag "holder IS NOT NULL") " AS running, token, "
             (text "client_ip") " AS client_ip, " (time "begin_time") " AS begin_time, " now " AS now,
             (SELECT o.since FROM t_resource_order o WHERE o.what = 'skip' AND o.name = s.name) AS skip_since,
             (SELECT o.until FROM t_resource_order o WHERE o.what = 'skip' AND o.name = s.name) AS skip_until,
             (SELECT o.until FROM t_resource_order o WHERE o.what = 'stop' AND o.name = s.name) AS stop_slot")
    };
}

/// The schedules with these names, with what is displayed besides.
macro_rules! select_schedules {
    ($($names:tt)+) => {
        sql!("SELECT " {$crate::store::schedule_operations::columns!()} ", " (text "p.known") " AS known, p.times_at, p.gone_at,
             (SELECT o.until FROM t_resource_order o WHERE o.what = 'pause' AND o.name = s.name) AS paused_until,
             coalesce((SELECT " (text "d.note") " FROM t_resource_schedule_detail d
                       WHERE d.name = s.name AND d.slot = s.run_slot AND d.attempt = s.attempt AND d.token = s.token), '') AS note
             FROM t_resource_schedule s LEFT JOIN t_resource_schedule_times p ON p.name = s.name
             WHERE s.name " $($names)+)
    };
}

/// The runs `r` of the history.
macro_rules! select_runs {
    ($($of:tt)+) => {
        sql!("SELECT " (text "r.name") " AS name, " (time "r.slot") " AS slot, r.attempt, r.token, " (text "r.client_ip") " AS client_ip, "
             (time "r.begin_time") " AS begin_time, " (time "r.end_time") " AS end_time, " (text "r.status") " AS status, r.missed, "
             (text "r.error") " AS error FROM " $($of)+)
    };
}

/// The reads of [`schedule_operations`].
macro_rules! reads {
    () => {
        pub(super) const LIST: &str = select_schedules!("> " [1] " ORDER BY s.name LIMIT " [2]);

        pub(super) const HISTORY: &str = select_runs!(
            "t_resource_schedule_run r WHERE r.name = " [1] " ORDER BY r.slot DESC, r.attempt DESC LIMIT " [2]
        );

        pub(super) const LATEST: &str = select_runs!(
            "t_resource_schedule s JOIN t_resource_schedule_run r ON r.name = s.name
             WHERE r.slot >= coalesce((SELECT x.slot FROM t_resource_schedule_run x WHERE x.name = s.name
                                       ORDER BY x.slot DESC, x.attempt DESC LIMIT 1 OFFSET " [1] "), " earliest ")"
        );

        pub(super) const LAST_SUCCESSES: &str = select_runs!(
            "t_resource_schedule s JOIN t_resource_schedule_run r ON r.name = s.name
             WHERE r.status = 'S' AND r.slot = (SELECT x.slot FROM t_resource_schedule_run x
                                                WHERE x.name = s.name AND x.status = 'S' ORDER BY x.slot DESC LIMIT 1)"
        );

        pub(super) const SELECTED: &str = select_runs!(
            "t_resource_schedule_run r
             WHERE (" [1] " IS NULL OR r.name = " [2] ") AND (NOT " [3] " OR r.status <> 'S')
               AND r.end_time >= coalesce(" (ago [4]) ", " earliest ")
             ORDER BY r.end_time DESC LIMIT " [5]
        );
    };
}

/// Implements those operations that are the same on every database except for the types of its
/// driver, and for statements that are constants beside them.
macro_rules! schedule_operations {
    ($connection:ty) => {
        async fn handed_back_runs(conn: &mut $connection, name: &Key, slot: DateTime<Utc>) -> Reply<i64> {
            const COUNT: &str = sql!(
                "SELECT count(*) FROM t_resource_schedule_run"
                " WHERE name = " [1] " AND slot = " [2] " AND status = 'L' AND error = " [3]
            );
            let query = sqlx::query(COUNT).bind(name.as_str()).bind(stored(slot)).bind(HANDED_BACK);
            query.fetch_one(conn).await?.try_get(0)
        }

        async fn hand_back(conn: &mut $connection, claim: &Claim, vacant: Holder) -> Reply<bool> {
            const FREE: &str = sql!(
                "UPDATE t_resource_schedule SET due_at = " now ", holder = " [1]
                " WHERE name = " [2] " AND holder = " [3] " AND token = " [4]
            );
            const WAS_RECORDED: &str = sql!(
                "SELECT 1 FROM t_resource_schedule_run"
                " WHERE name = " [1] " AND token = " [2] " AND status = 'L' AND error = " [3] " LIMIT 1"
            );
            let (name, vacant, token) = (claim.key.as_str(), *vacant.as_uuid(), claim.token.get());
            crate::store::changed::<Self>(conn, async |conn: &mut $connection| {
                let query = sqlx::query(FREE).bind(vacant).bind(name).bind(*claim.holder.as_uuid()).bind(token);
                if query.execute(&mut *conn).await?.rows_affected() == 0 {
                    let query = sqlx::query(WAS_RECORDED).bind(name).bind(token).bind(HANDED_BACK);
                    return Ok(query.fetch_optional(conn).await?.is_some());
                }
                let query = sqlx::query(RECORD_HANDED_BACK).bind(HANDED_BACK).bind(name).bind(vacant).bind(token);
                query.execute(conn).await.map(|_| true)
            })
            .await
        }

        async fn has_ended(
            conn: &mut $connection,
            claim: &Claim,
            slot: DateTime<Utc>,
            attempt: u32,
            status: &'static str,
        ) -> Reply<bool> {
            const FIND: &str = sql!(
                "SELECT 1 FROM t_resource_schedule_run"
                " WHERE name = " [1] " AND slot = " [2] " AND attempt = " [3] " AND token = " [4] " AND status = " [5]
            );
            let query = sqlx::query(FIND).bind(claim.key.as_str()).bind(stored(slot));
            let query = query.bind(to_stored_count(attempt)).bind(claim.token.get()).bind(status);
            Ok(query.fetch_optional(conn).await?.is_some())
        }

        async fn pause(conn: &mut $connection, name: &Key, paused: bool) -> Reply<bool> {
            let query = sqlx::query(PAUSE).bind(paused).bind(paused).bind(name.as_str());
            Ok(query.execute(conn).await?.rows_affected() > 0)
        }

        async fn trigger(conn: &mut $connection, name: &Key) -> Reply<bool> {
            Ok(sqlx::query(TRIGGER).bind(name.as_str()).execute(conn).await?.rows_affected() > 0)
        }

        async fn list_schedules(conn: &mut $connection, after: &str, limit: u32) -> Reply<Vec<ListedSchedule>> {
            let rows = sqlx::query(LIST).bind(after).bind(i64::from(limit)).fetch_all(conn).await?;
            rows.iter().map(listed).collect()
        }

        async fn history(conn: &mut $connection, name: &Key, limit: u32) -> Reply<Vec<RunInfo>> {
            let rows = sqlx::query(HISTORY).bind(name.as_str()).bind(i64::from(limit)).fetch_all(conn).await?;
            rows.iter().map(run).collect()
        }

        async fn latest_runs(conn: &mut $connection, each: u32) -> Reply<Vec<RunInfo>> {
            let mut rows = sqlx::query(LATEST).bind(i64::from(each.saturating_sub(1))).fetch_all(&mut *conn).await?;
            rows.extend(sqlx::query(LAST_SUCCESSES).fetch_all(conn).await?);
            rows.iter().map(run).collect()
        }

        async fn runs(conn: &mut $connection, options: &RunOptions) -> Reply<Vec<RunInfo>> {
            let (name, within) = (options.name.as_ref().map(Key::as_str), options.within.map($crate::store::micros));
            let query = sqlx::query(SELECTED).bind(name).bind(name).bind(options.unsuccessful).bind(within);
            let rows = query.bind(i64::from(options.limit)).fetch_all(conn).await?;
            rows.iter().map(run).collect()
        }
    };
}

/// Implements those operations that are the same on every database except for the types of its
/// driver, and for statements that are constants beside them. `change_row` stands beside them too.
macro_rules! instance_operations {
    ($connection:ty) => {
        async fn change_within(conn: &mut $connection, change: &TimesChange) -> Reply<bool> {
            /// The parameters are whether the last run is forgotten, and the name.
            const AFRESH: &str = sql!(
                "UPDATE t_resource_schedule AS s
                 SET holder = NULL, attempt = 0, missed = 0, triggered_at = NULL, due_at = slot,
                     run_slot = CASE WHEN " [1] " THEN NULL ELSE run_slot END
                 WHERE name = " [2] " AND (holder IS NULL OR EXISTS (
                     SELECT 1 FROM t_resource_schedule_run r
                     WHERE r.name = s.name AND r.slot = s.run_slot AND r.attempt = s.attempt))"
            );
            const FORGET_DETAILS: &str =
                sql!("DELETE FROM t_resource_schedule_detail WHERE name = " [1] " AND slot > " [2]);
            const FORGET_STOPS: &str =
                sql!("DELETE FROM t_resource_order WHERE what = 'stop' AND name = " [1] " AND until > " [2]);
            const FORGET_SKIPS: &str =
                sql!("DELETE FROM t_resource_order WHERE what = 'skip' AND name = " [1] " AND since > " [2]);
            const FORGET_RUNS: &str =
                sql!("DELETE FROM t_resource_schedule_run WHERE name = " [1] " AND slot > " [2]);
            let name = change.times.name.as_str();
            if change.afresh {
                sqlx::query(LOSE).bind(LOST).bind(name).execute(&mut *conn).await?;
            }
            if !change_row(conn, change).await? {
                return Ok(false);
            }
            let query = sqlx::query(REMEMBER).bind(name).bind(&change.known).bind(change.new_times);
            query.execute(&mut *conn).await?;
            if change.afresh {
                sqlx::query(AFRESH).bind(change.run_ahead).bind(name).execute(&mut *conn).await?;
            }
            // The run that was lost may be one of them.
            if let Some(time) = change.forgets_after {
                for sql in [FORGET_DETAILS, FORGET_STOPS, FORGET_RUNS] {
                    sqlx::query(sql).bind(name).bind(stored(time)).execute(&mut *conn).await?;
                }
                // The next tick may be skipped.
                sqlx::query(FORGET_SKIPS).bind(name).bind(stored(change.slot)).execute(&mut *conn).await?;
            }
            Ok(true)
        }

        async fn rename(conn: &mut $connection, old: &TimesChange, new: &TimesChange) -> Reply<bool> {
            const EMPTY: &str = sql!(
                "UPDATE t_resource_schedule
                 SET paused = false, holder = NULL, attempt = 0, missed = 0, triggered_at = NULL, due_at = slot
                 WHERE name = "[1]
            );
            let (from, to) = (old.times.name.as_str(), new.times.name.as_str());
            crate::store::changed::<Self>(conn, async |conn| {
                for change in [old, new] {
                    if !Self::change_within(conn, change).await? {
                        return Ok(false);
                    }
                }
                for name in [from, to] {
                    sqlx::query(LOSE).bind(LOST).bind(name).execute(&mut *conn).await?;
                }
                // Both rows are locked. An operator may have paused one of them since.
                let names = [old.times.name.clone(), new.times.name.clone()];
                let has_no_end = |row: &ListedSchedule| row.paused && row.paused_until.is_none();
                let is_endless = Self::registered(conn, &names).await?.iter().any(has_no_end);
                sqlx::query(INHERIT).bind(from).bind(to).execute(&mut *conn).await?;
                crate::store::schedule_operations::pass_orders::<Self>(conn, from, to, is_endless).await?;
                sqlx::query(EMPTY).bind(from).execute(conn).await.map(|_| true)
            })
            .await
        }

        async fn announce(conn: &mut $connection, instance: &Announcement) -> Reply<()> {
            let query = sqlx::query(ANNOUNCE).bind(instance.id).bind(&instance.label).bind(&instance.build);
            let query = query.bind(instance.calls).bind(crate::store::micros(instance.lives));
            query.bind(instance.declares_id).bind(&instance.declares).execute(conn).await.map(drop)
        }

        async fn end_instance(conn: &mut $connection, instance: Uuid) -> Reply<bool> {
            const LEAVE: &str = sql!("DELETE FROM t_resource_schedule_instance WHERE id = "[1]);
            Ok(sqlx::query(LEAVE).bind(instance).execute(conn).await?.rows_affected() > 0)
        }

        async fn forget_instances(conn: &mut $connection) -> Reply<()> {
            sqlx::query(FORGET).execute(conn).await.map(drop)
        }

        async fn instances(conn: &mut $connection) -> Reply<Vec<(i64, InstanceInfo)>> {
            let rows = sqlx::query(LIST).fetch_all(conn).await?;
            rows.iter().map(instance).collect()
        }

        async fn remove_schedule(conn: &mut $connection, name: &Key) -> Reply<bool> {
            const REMOVE: &str = sql!(
                "DELETE FROM t_resource_schedule WHERE name = " [1] " AND (holder IS NULL OR due_at < " now ")"
            );
            const REMOVE_PAST: &str = sql!("DELETE FROM t_resource_schedule_times WHERE name = "[1]);
            if sqlx::query(REMOVE).bind(name.as_str()).execute(&mut *conn).await?.rows_affected() == 0 {
                return Ok(false);
            }
            sqlx::query(REMOVE_PAST).bind(name.as_str()).execute(conn).await.map(|_| true)
        }

        async fn order(conn: &mut $connection, order: &Order<'_>) -> Reply<()> {
            let query = sqlx::query(ORDER).bind(order.what.name()).bind(order.name);
            let query = query.bind(stored(order.since)).bind(stored(order.until));
            query.bind(order.who).execute(conn).await.map(drop)
        }

        async fn ordered(conn: &mut $connection, what: What, name: &str) -> Reply<Option<Given>> {
            let row = sqlx::query(ORDERED).bind(what.name()).bind(name).fetch_optional(conn).await?;
            row.as_ref().map(given).transpose()
        }

        async fn cancel(conn: &mut $connection, what: What, name: &str, by: Option<DateTime<Utc>>) -> Reply<bool> {
            const CANCEL: &str = sql!(
                "DELETE FROM t_resource_order WHERE what = " [1] " AND name = " [2] " AND until <= coalesce(" [3] ", until)"
            );
            let query = sqlx::query(CANCEL).bind(what.name()).bind(name).bind(by.map(stored));
            Ok(query.execute(conn).await?.rows_affected() > 0)
        }

        async fn latch(conn: &mut $connection, seen: &ListedSchedule) -> Reply<bool> {
            let query = sqlx::query(LATCH).bind(seen.times.name.as_str()).bind(stored(seen.slot));
            let query = query.bind(to_stored_count(seen.attempt)).bind(seen.run_slot.map(stored));
            Ok(query.execute(conn).await?.rows_affected() > 0)
        }

        async fn wake(conn: &mut $connection, name: &Key) -> Reply<()> {
            const WAKE: &str = sql!(
                "UPDATE t_resource_schedule SET due_at = " now
                " WHERE name = " [1] " AND holder IS NULL AND attempt > 0 AND due_at > " now
            );
            sqlx::query(WAKE).bind(name.as_str()).execute(conn).await.map(drop)
        }

        async fn set_note(conn: &mut $connection, claim: &Claim, note: &str) -> Reply<()> {
            let query = sqlx::query(NOTE).bind(note).bind(claim.key.as_str()).bind(*claim.holder.as_uuid());
            query.bind(claim.token.get()).execute(conn).await.map(drop)
        }

        async fn output(
            conn: &mut $connection,
            name: &Key,
            slot: DateTime<Utc>,
            attempt: u32,
        ) -> Reply<Option<Vec<u8>>> {
            const OUTPUT: &str = sql!(
                "SELECT output FROM t_resource_schedule_detail WHERE name = " [1] " AND slot = " [2] " AND attempt = " [3]
            );
            let query = sqlx::query_scalar(OUTPUT).bind(name.as_str()).bind(stored(slot));
            Ok(query.bind(to_stored_count(attempt)).fetch_optional(conn).await?.flatten())
        }
    };
}

/// Declares the statements that PostgreSQL and SQLite share.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
macro_rules! statements_with_on_conflict {
    ($connection:ty) => {
        const REMEMBER: &str = sql!(
            "INSERT INTO t_resource_schedule_times AS p (name, known, times_at) VALUES (" [1] ", " [2] ", " now ")
             ON CONFLICT (name) DO UPDATE
             SET known = excluded.known, times_at = CASE WHEN " [3] " THEN excluded.times_at ELSE p.times_at END, gone_at = NULL"
        );
        const ORDER: &str = sql!(
            "INSERT INTO t_resource_order (what, name, since, until, who)
             VALUES (" [1] ", " [2] ", " [3] ", " [4] ", " [5] ")
             ON CONFLICT (what, name) DO UPDATE SET since = excluded.since, until = excluded.until, who = excluded.who"
        );
        const NOTE: &str = sql!(
            "INSERT INTO t_resource_schedule_detail (name, slot, attempt, token, note)
             SELECT name, run_slot, attempt, token, " [1] " FROM t_resource_schedule
             WHERE name = " [2] " AND holder = " [3] " AND token = " [4] "
             ON CONFLICT (name, slot, attempt) DO UPDATE SET note = excluded.note, token = excluded.token"
        );

        async fn change_row(conn: &mut $connection, change: &TimesChange) -> Reply<bool> {
            const CREATE: &str = sql!(
                "INSERT INTO t_resource_schedule (name, spec, zone, slot, due_at)
                 VALUES (" [1] ", " [2] ", " [3] ", " [4] ", " [4] ") ON CONFLICT (name) DO NOTHING"
            );
            let times = &change.times;
            let sql = if change.seen.is_some() { CHANGE } else { CREATE };
            let query = sqlx::query(sql).bind(times.name.as_str()).bind(&times.spec).bind(&times.zone);
            let query = query.bind(stored(change.slot));
            let query = match &change.seen {
                None => query,
                Some(seen) => {
                    let query = query.bind(&seen.times.spec).bind(&seen.times.zone).bind(seen.run_slot.map(stored));
                    query.bind(to_stored_count(seen.attempt)).bind(stored(seen.slot)).bind(change.run_ahead)
                }
            };
            Ok(query.execute(conn).await?.rows_affected() > 0)
        }
    };
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(super) use statements_with_on_conflict;
pub(super) use {columns, instance_operations, reads, schedule_operations, select_runs, select_schedules};

/// Gives the orders for a schedule to another one, within a transaction. Of two pauses, the one
/// that ends later counts, unless one has no end.
pub async fn pass_orders<DB: InstanceStore>(
    conn: &mut DB::Connection,
    from: &str,
    to: &str,
    is_endless: bool,
) -> Reply<()> {
    for what in OF_SCHEDULES {
        if let Some(Given { since, until, who }) = DB::ordered(conn, what, from).await? {
            let its = DB::ordered(conn, what, to).await?.filter(|its| what == What::Pause && its.until > until);
            if its.is_none() {
                DB::order(conn, &Order { what, name: to, since, until, who: &who }).await?;
            }
            DB::cancel(conn, what, from, None).await?;
        }
    }
    if is_endless {
        DB::cancel(conn, What::Pause, to, None).await?;
    }
    Ok(())
}
