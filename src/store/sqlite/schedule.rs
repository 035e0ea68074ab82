//! Schedules. A claim is a read, and a compare-and-set of the whole of what was seen. A move and an
//! end are texts that are transactions: one hand-over each to the connection's thread.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Row as _, Sqlite, SqliteConnection, sqlite::SqliteRow};

use crate::{
    key::{Claim, Holder, Key},
    store::{
        Outcome, Reply, Store as _, changed, hex, limit_micros,
        run_info::{RunInfo, RunOptions, run},
        schedule::{
            DueReply, DueRequest, End, Extended, Extension, HANDED_BACK, Known, LOST, ListedSchedule, Pass, STEP,
            ScheduleStore, listed, to_stored_count, unextended,
        },
        schedule_operations::schedule_operations,
        schedule_seen::{SEEN, Seen, SeenStore, claim_due},
        sqlite::{
            row::{Query, bind_claim, json, keys, micros, sql, stored, written},
            schedule_sql::{
                CLAIM, END, END_WITHIN, EXTEND, FORGET, FORGET_DETAILS, HISTORY, LAST_SUCCESSES, LATEST, LEFT, LIST,
                LOOK, PASS, PAUSE, PUT_BACK, RECORD_HANDED_BACK, RECORD_LOST, REGISTERED, SELECTED, TRIGGER,
            },
        },
        stored_row::StoredRow as _,
    },
};

impl ScheduleStore for Sqlite {
    schedule_operations!(SqliteConnection);

    async fn registered(conn: &mut SqliteConnection, names: &[Key]) -> Reply<Vec<ListedSchedule>> {
        let rows = sqlx::query(REGISTERED).bind(keys(names)).fetch_all(conn).await?;
        rows.iter().map(listed).collect()
    }

    async fn claim_due(conn: &mut SqliteConnection, ask: &DueRequest<'_>) -> Reply<DueReply> {
        claim_due::<Self>(conn, ask).await
    }

    async fn put_back(conn: &mut SqliteConnection, holder: Holder, vacant: Holder, names: &[Key]) -> Reply<bool> {
        let query = sqlx::query(PUT_BACK).bind(*holder.as_uuid()).bind(keys(names)).bind(*vacant.as_uuid());
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn extend_run(conn: &mut SqliteConnection, claim: &Claim, extension: Extension) -> Reply<Extended> {
        let query = bind_claim(EXTEND, claim).bind(micros(extension.lease)).bind(limit_micros(extension.not_after));
        if query.bind(extension.is_stopped).execute(&mut *conn).await?.rows_affected() > 0 {
            return Ok(Extended::Is(Outcome::Done));
        }
        unextended(bind_claim(LEFT, claim).fetch_optional(conn).await?.as_ref(), extension)
    }

    async fn skip_ticks(conn: &mut SqliteConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
        let query = bind_claim(PASS, claim).bind(stored(pass.to)).bind(&pass.times.spec);
        let query = query.bind(&pass.times.zone).bind(pass.runs).bind(to_stored_count(pass.missed));
        let query = query.bind(stored(pass.from)).bind(to_stored_count(pass.skipped)).bind(pass.error);
        transaction(query, conn).await
    }

    async fn end_run(conn: &mut SqliteConnection, claim: &Claim, end: &End<'_>, within: bool) -> Reply<bool> {
        let query = bind_claim(if within { END_WITHIN } else { END }, claim);
        let query = query.bind(end.next.map(stored)).bind(&end.times.spec);
        let query = query.bind(&end.times.zone).bind(micros(end.pause)).bind(stored(end.slot));
        let query =
            query.bind(to_stored_count(end.attempt)).bind(end.status).bind(to_stored_count(end.missed)).bind(end.error);
        let query = query.bind(end.output);
        if within { Ok(written(query, conn).await?.is_some()) } else { transaction(query, conn).await }
    }

    async fn forget_history(conn: &mut SqliteConnection, older_than: TimeDelta) -> Reply<u64> {
        let mut deleted = 0;
        let forget = async |conn: &mut SqliteConnection| {
            let runs = sqlx::query(FORGET).bind(micros(older_than)).bind(STEP).fetch_all(&mut *conn).await?;
            let run = |row: &SqliteRow| {
                let (name, slot, attempt): (String, i64, i32) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
                Ok(format!("[\"{}\",{slot},{attempt}]", hex(&name)))
            };
            let runs = runs.iter().map(run).collect::<Reply<Vec<_>>>()?;
            deleted = runs.len() as u64;
            sqlx::query(FORGET_DETAILS).bind(json(runs.into_iter())).execute(conn).await?;
            Ok(deleted > 0)
        };
        changed::<Self>(conn, forget).await.map(|_| deleted)
    }
}

/// Executes a text that is a transaction, and returns whether its statement returned a row.
pub(super) async fn transaction(query: Query<'_>, conn: &mut SqliteConnection) -> Reply<bool> {
    match written(query, conn).await {
        Ok(row) => Ok(row.is_some()),
        Err(error) => {
            Sqlite::undo(conn).await?;
            Err(error)
        }
    }
}

impl SeenStore for Sqlite {
    async fn look_for_due(conn: &mut SqliteConnection, ask: &DueRequest<'_>) -> Reply<Vec<Seen>> {
        let known = json(ask.known.iter().map(|Known { times, .. }| {
            format!("[\"{}\",\"{}\",\"{}\"]", hex(times.name.as_str()), hex(&times.spec), hex(&times.zone))
        }));
        let rows = sqlx::query(LOOK).bind(known).bind(SEEN).fetch_all(conn).await?;
        rows.iter().map(Seen::read).collect()
    }

    async fn take_free(
        conn: &mut SqliteConnection,
        ask: &DueRequest<'_>,
        rows: &[&Seen],
        lease: TimeDelta,
    ) -> Reply<Vec<bool>> {
        // The runs begin at the time by which they were decided.
        let Some(now) = rows.first().map(|seen| seen.now) else { return Ok(Vec::new()) };
        let claims = json(rows.iter().map(|seen| {
            let Seen { times, token, slot, attempt, due_at, .. } = seen;
            let [name, spec, zone] = [times.name.as_str(), &times.spec, &times.zone].map(hex);
            let [slot, due_at, to_run] = [*slot, *due_at, seen.to_run()].map(stored);
            let next = seen.next_token();
            format!(r#"["{name}","{spec}","{zone}",{token},{slot},{attempt},{due_at},{next},{to_run}]"#)
        }));
        let query = sqlx::query(CLAIM).bind(claims).bind(*ask.holder.as_uuid()).bind(ask.label);
        let query = query.bind(micros(lease)).bind(stored(now)).bind(limit_micros(ask.not_after));
        let taken = query.fetch_all(conn).await?;
        let taken = taken.iter().map(|row| row.text("name")).collect::<Reply<Vec<_>>>()?;
        Ok(rows.iter().map(|seen| taken.iter().any(|name| name == seen.times.name.as_str())).collect())
    }

    async fn record_lost(conn: &mut SqliteConnection, seen: &Seen) -> Reply<()> {
        let query = sqlx::query(RECORD_LOST).bind(seen.times.name.as_str()).bind(stored(seen.to_run()));
        let query = query.bind(to_stored_count(seen.attempt)).bind(seen.token).bind(&seen.label);
        let query = query.bind(stored(seen.began())).bind(to_stored_count(seen.missed)).bind(LOST);
        query.execute(conn).await.map(drop)
    }
}
