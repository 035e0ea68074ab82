//! Schedules. A claim of what is due is a read, and a compare-and-set of all that was seen.

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _};
use uuid::Uuid;

use crate::{
    key::{Claim, Holder, Key},
    store::{
        Outcome, Reply, changed, limit_micros,
        mysql::{
            row::{Query, bind_claim, marks, micros, padded, sql, stored},
            schedule_sql::{
                COLUMNS, END, EXTEND, HISTORY, KEEP, LAST_SUCCESSES, LATEST, LEFT, LIST, LOOK, MAY_BE_HELD, OLD, PASS,
                PAUSE, PUT_BACK, RECORD_ENDED, RECORD_HANDED_BACK, RECORD_LOST, RECORD_PASSED, REGISTERED, SELECTED,
                TRIGGER, claim_statement, forget_statement,
            },
        },
        run_info::{RunInfo, RunOptions, run},
        schedule::{
            DueReply, DueRequest, End, Extended, Extension, HANDED_BACK, Known, LOST, ListedSchedule, Pass, STEP,
            ScheduleStore, listed, to_stored_count, unextended,
        },
        schedule_operations::schedule_operations,
        schedule_seen::{SEEN, Seen, SeenStore, claim_due},
        transaction, unanswered,
    },
};

impl ScheduleStore for MySql {
    schedule_operations!(MySqlConnection);

    async fn registered(conn: &mut MySqlConnection, names: &[Key]) -> Reply<Vec<ListedSchedule>> {
        let query = sqlx::query(AssertSqlSafe(format!("{REGISTERED} ({})", marks("?", names.len().max(1)))));
        let names = names.iter().map(Key::as_str).chain(names.is_empty().then_some(""));
        let rows = names.fold(query, |query, name| query.bind(name)).fetch_all(conn).await?;
        rows.iter().map(listed).collect()
    }

    async fn claim_due(conn: &mut MySqlConnection, ask: &DueRequest<'_>) -> Reply<DueReply> {
        claim_due::<Self>(conn, ask).await
    }

    async fn put_back(conn: &mut MySqlConnection, holder: Holder, vacant: Holder, names: &[Key]) -> Reply<bool> {
        let query = sqlx::query_as(AssertSqlSafe(format!("{MAY_BE_HELD} ({})", marks("?", names.len()))));
        let query = names.iter().fold(query.bind(*holder.as_uuid()), |query, name| query.bind(name.as_str()));
        let held: Vec<(Vec<u8>,)> = query.fetch_all(&mut *conn).await?;
        // An UPDATE locks the rows of all names that it is given, and waits for those of other
        // runs.
        if held.is_empty() {
            return Ok(false);
        }
        let query = sqlx::query(AssertSqlSafe(format!("{PUT_BACK} ({})", marks("?", held.len()))));
        let query = query.bind(*vacant.as_uuid()).bind(*holder.as_uuid());
        let query = held.into_iter().fold(query, |query, (name,)| query.bind(name));
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn extend_run(conn: &mut MySqlConnection, claim: &Claim, extension: Extension) -> Reply<Extended> {
        let query = bind_claim(sqlx::query(EXTEND.as_str()), claim).bind(micros(extension.lease));
        let query = query.bind(limit_micros(extension.not_after)).bind(extension.is_stopped);
        if query.execute(&mut *conn).await?.rows_affected() > 0 {
            return Ok(Extended::Is(Outcome::Done));
        }
        let row = bind_claim(sqlx::query(LEFT), claim).fetch_optional(conn).await?;
        unextended(row.as_ref(), extension)
    }

    async fn skip_ticks(conn: &mut MySqlConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
        changed::<Self>(conn, async |conn: &mut MySqlConnection| {
            let (spec, zone, to) = (&pass.times.spec, &pass.times.zone, stored(pass.to));
            let query = sqlx::query(PASS).bind(pass.runs).bind(to).bind(to).bind(pass.runs).bind(to).bind(pass.runs);
            let query = query.bind(pass.runs).bind(to_stored_count(pass.missed)).bind(pass.runs);
            let query = bind_claim(query, claim).bind(spec).bind(zone).bind(pass.error).bind(to);
            if query.execute(&mut *conn).await?.rows_affected() == 0 {
                return Ok(false);
            }
            if pass.skipped > 0 {
                let query = sqlx::query(RECORD_PASSED).bind(stored(pass.from)).bind(0).bind("M");
                let query = query.bind(to_stored_count(pass.skipped)).bind(pass.error);
                query.bind(claim.key.as_str()).bind(claim.token.get()).execute(conn).await?;
            }
            Ok(true)
        })
        .await
    }

    async fn end_run(conn: &mut MySqlConnection, claim: &Claim, end: &End<'_>, within: bool) -> Reply<bool> {
        if within {
            return end_run(conn, claim, end).await;
        }
        changed::<Self>(conn, async |conn| end_run(conn, claim, end).await).await
    }

    async fn forget_history(conn: &mut MySqlConnection, older_than: TimeDelta) -> Reply<u64> {
        let old = sqlx::query_as::<_, (Vec<u8>, NaiveDateTime, i32)>(OLD).bind(micros(older_than)).bind(STEP);
        let old = old.fetch_all(&mut *conn).await?;
        if old.is_empty() {
            return Ok(0);
        }
        let forgotten = transaction::<Self, _>(conn, async |conn| forget(conn, &old).await.map(Some)).await?;
        Ok(forgotten.unwrap_or_default())
    }
}

impl SeenStore for MySql {
    async fn look_for_due(conn: &mut MySqlConnection, ask: &DueRequest<'_>) -> Reply<Vec<Seen>> {
        let known = marks("(?, ?, ?)", ask.known.len());
        let query = sqlx::query(AssertSqlSafe(format!("SELECT {COLUMNS} {LOOK} ({known}) ORDER BY due_at LIMIT ?")));
        let bind = |query: Query<'static>, Known { times, .. }: &Known| {
            query.bind(times.name.as_str().to_owned()).bind(times.spec.clone()).bind(times.zone.clone())
        };
        let rows = ask.known.iter().fold(query, bind).bind(SEEN).fetch_all(conn).await?;
        rows.iter().map(Seen::read).collect()
    }

    async fn take_free(
        conn: &mut MySqlConnection,
        ask: &DueRequest<'_>,
        rows: &[&Seen],
        lease: TimeDelta,
    ) -> Reply<Vec<bool>> {
        // The runs begin at the time by which they were decided.
        let Some(now) = rows.first().map(|seen| seen.now) else { return Ok(Vec::new()) };
        let named = padded(rows);
        let mut query = sqlx::query(AssertSqlSafe(claim_statement(named.len())));
        for seen in named {
            query = query.bind(seen.times.name.as_str()).bind(&seen.times.spec).bind(&seen.times.zone);
            query = query.bind(seen.token).bind(stored(seen.slot)).bind(to_stored_count(seen.attempt));
            query = query.bind(stored(seen.due_at)).bind(seen.triggered_at.map(stored));
        }
        let holder: Uuid = *ask.holder.as_uuid();
        let query = query.bind(holder).bind(ask.label).bind(stored(now)).bind(now.timestamp_micros());
        let query = query.bind(micros(lease)).bind(limit_micros(ask.not_after));
        let taken = query.execute(&mut *conn).await?.rows_affected();
        if taken == 0 || taken == rows.len() as u64 {
            return Ok(vec![taken > 0; rows.len()]);
        }
        let names = marks("?", rows.len());
        let sql = format!("SELECT name, token FROM t_resource_schedule WHERE holder = ? AND name IN ({names})");
        let query = sqlx::query_as(AssertSqlSafe(sql)).bind(holder);
        let query = rows.iter().fold(query, |query, seen| query.bind(seen.times.name.as_str()));
        // Without the names, nothing is known of what was claimed.
        let held: Vec<(Vec<u8>, i64)> = query.fetch_all(conn).await.map_err(unanswered)?;
        let is_held = |seen: &&Seen| held.contains(&(seen.times.name.as_str().into(), seen.next_token()));
        Ok(rows.iter().map(is_held).collect())
    }

    async fn record_lost(conn: &mut MySqlConnection, seen: &Seen) -> Reply<()> {
        let query = sqlx::query(RECORD_LOST).bind(seen.times.name.as_str()).bind(stored(seen.to_run()));
        let query = query.bind(to_stored_count(seen.attempt)).bind(seen.token).bind(&seen.label);
        let query = query.bind(stored(seen.began())).bind(to_stored_count(seen.missed)).bind(LOST);
        query.execute(conn).await.map(drop)
    }
}

/// Deletes these runs and their details. Returns the number of runs.
async fn forget(conn: &mut MySqlConnection, runs: &[(Vec<u8>, NaiveDateTime, i32)]) -> Reply<u64> {
    let mut deleted = 0;
    for table in ["t_resource_schedule_detail", "t_resource_schedule_run"] {
        let query = sqlx::query(AssertSqlSafe(forget_statement(table, runs.len()))).persistent(false);
        let bind = |query: Query<'static>, (name, slot, attempt): &(Vec<u8>, NaiveDateTime, i32)| {
            query.bind(name.clone()).bind(*slot).bind(*attempt)
        };
        deleted = runs.iter().fold(query, bind).execute(&mut *conn).await?.rows_affected();
    }
    Ok(deleted)
}

async fn end_run(conn: &mut MySqlConnection, claim: &Claim, end: &End<'_>) -> Reply<bool> {
    let (spec, zone, slot) = (&end.times.spec, &end.times.zone, stored(end.slot));
    let next = end.next.map(stored);
    let query = sqlx::query(END.as_str()).bind(next).bind(micros(end.pause));
    let query = query.bind(next).bind(spec).bind(zone).bind(next).bind(next).bind(next).bind(next);
    let query = query.bind(next).bind(spec).bind(zone).bind(next);
    if bind_claim(query, claim).execute(&mut *conn).await?.rows_affected() == 0 {
        return Ok(false);
    }
    let query = sqlx::query(RECORD_ENDED).bind(slot).bind(to_stored_count(end.attempt)).bind(end.status);
    let query = query.bind(to_stored_count(end.missed)).bind(end.error);
    query.bind(claim.key.as_str()).bind(claim.token.get()).execute(&mut *conn).await?;
    if let Some(output) = end.output {
        let query = sqlx::query(KEEP).bind(claim.key.as_str()).bind(slot).bind(to_stored_count(end.attempt));
        query.bind(claim.token.get()).bind(output).execute(conn).await?;
    }
    Ok(true)
}
