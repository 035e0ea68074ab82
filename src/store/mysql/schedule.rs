//! Schedules.

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _};

use crate::{
    key::{Claim, Holder, Key},
    store::{
        Outcome, Reply, changed, limit_micros,
        mysql::{
            row::{Query, marks, micros, stored},
            schedule_sql::{
                END, EXTEND, HAND_BACK, HANDED_BACK_RUNS, HAS_ENDED, HISTORY, KEEP, LAST_SUCCESSES, LATEST, LEFT, LIST,
                MAY_BE_HELD, OLD, PASS, PAUSE, PUT_BACK, RECORD_ENDED, RECORD_HANDED_BACK, RECORD_PASSED, REGISTERED,
                SELECTED, SINCE, TRIGGER, WAS_HANDED_BACK, forget_statement,
            },
        },
        run_info::{RunInfo, RunOptions},
        schedule::{
            DueReply, DueRequest, End, Extended, Extension, HANDED_BACK, ListedSchedule, Pass, STEP, ScheduleStore,
            operations, to_stored_count,
        },
        schedule_row::{listed, run, unextended},
        schedule_seen::claim_due,
        transaction,
    },
};

impl ScheduleStore for MySql {
    operations!(MySqlConnection);

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
        let query = sqlx::query_as(AssertSqlSafe(format!("{MAY_BE_HELD} ({})", marks("?", names.len().max(1)))));
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

    async fn hand_back(conn: &mut MySqlConnection, claim: &Claim, vacant: Holder) -> Reply<bool> {
        changed::<Self>(conn, async |conn| hand_back(conn, claim, vacant).await).await
    }

    async fn skip_ticks(conn: &mut MySqlConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
        changed::<Self>(conn, async |conn| skip_ticks(conn, claim, pass).await).await
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

fn bind_claim<'q>(query: Query<'q>, claim: &'q Claim) -> Query<'q> {
    query.bind(claim.key.as_str()).bind(*claim.holder.as_uuid()).bind(claim.token.get())
}

async fn hand_back(conn: &mut MySqlConnection, claim: &Claim, vacant: Holder) -> Reply<bool> {
    let query = sqlx::query(HAND_BACK).bind(*vacant.as_uuid());
    if bind_claim(query, claim).execute(&mut *conn).await?.rows_affected() == 0 {
        let query = sqlx::query(WAS_HANDED_BACK).bind(claim.key.as_str()).bind(claim.token.get()).bind(HANDED_BACK);
        return Ok(query.fetch_optional(conn).await?.is_some());
    }
    let vacated = Claim { holder: vacant, ..claim.clone() };
    bind_claim(sqlx::query(RECORD_HANDED_BACK).bind(HANDED_BACK), &vacated).execute(conn).await?;
    Ok(true)
}

async fn skip_ticks(conn: &mut MySqlConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
    let (spec, zone, to) = (&pass.times.spec, &pass.times.zone, stored(pass.to));
    let query = sqlx::query(PASS).bind(pass.runs).bind(to).bind(to).bind(pass.runs).bind(to).bind(pass.runs);
    let query = query.bind(pass.runs).bind(to_stored_count(pass.missed)).bind(pass.runs);
    let query = bind_claim(query, claim).bind(spec).bind(zone);
    if query.execute(&mut *conn).await?.rows_affected() == 0 {
        return Ok(false);
    }
    if pass.skipped > 0 {
        let query = sqlx::query(RECORD_PASSED).bind(stored(pass.from)).bind(0).bind("M");
        let query = query.bind(to_stored_count(pass.skipped)).bind(pass.error);
        query.bind(claim.key.as_str()).bind(claim.token.get()).execute(conn).await?;
    }
    Ok(true)
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
