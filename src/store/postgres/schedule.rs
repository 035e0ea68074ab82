//! Schedules. A look and a claim are one statement: `FOR UPDATE SKIP LOCKED` gives each row to one
//! instance, and judges again what it has locked.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{PgConnection, Postgres, Row as _, postgres::PgRow};

use crate::{
    key::{Claim, Holder, Key, PreviousClaim, Token},
    store::{
        Outcome, Reply, TooLate, changed, is_undone,
        postgres::{
            row::{bind_claim, names, once_ended, sql, stored},
            schedule_sql::{
                CLAIM, DUE, END, EXTEND, FORGET, HISTORY, LAST_SUCCESSES, LATEST, LIST, LOCK, PASS, PAUSE, PUT_BACK,
                RECORD_HANDED_BACK, REGISTERED, SELECTED, TRIGGER,
            },
        },
        run_info::{RunInfo, RunOptions, run},
        schedule::{
            ClaimedRow, DueReply, DueRequest, End, Extended, Extension, HANDED_BACK, LOST, ListedSchedule, Pass, STEP,
            ScheduleStore, Times, listed, may_be_of_one, named, to_stored_count, unextended,
        },
        schedule_operations::schedule_operations,
        stored_row::StoredRow as _,
    },
};

/// How many of the schedules that are due are claimed one by one, if one of them is refused.
const APART: i64 = 20;

impl ScheduleStore for Postgres {
    schedule_operations!(PgConnection);

    async fn registered(conn: &mut PgConnection, keys: &[Key]) -> Reply<Vec<ListedSchedule>> {
        let rows = sqlx::query(REGISTERED).bind(names(keys)).fetch_all(conn).await?;
        rows.iter().map(listed).collect()
    }

    async fn claim_due(conn: &mut PgConnection, ask: &DueRequest<'_>) -> Reply<DueReply> {
        match claim_twice(conn, ask).await {
            // A trigger or a policy may refuse one of the rows, of which the error tells nothing.
            Err(refused) if ask.known.len() > 1 && may_be_of_one(&refused) => claim_apart(conn, ask, refused).await,
            reply => reply,
        }
    }

    async fn put_back(conn: &mut PgConnection, holder: Holder, vacant: Holder, keys: &[Key]) -> Reply<bool> {
        let query = sqlx::query(PUT_BACK).bind(holder.as_uuid()).bind(names(keys)).bind(vacant.as_uuid());
        Ok(query.execute(conn).await?.rows_affected() > 0)
    }

    async fn extend_run(conn: &mut PgConnection, claim: &Claim, extension: Extension) -> Reply<Extended> {
        let query = bind_claim(EXTEND, claim).bind(extension.lease).bind(extension.not_after);
        let row = query.bind(extension.is_stopped).fetch_one(conn).await?;
        if row.is("done")? {
            return Ok(Extended::Is(Outcome::Done));
        }
        let stands = row.number_or_null("left_micros")?.is_some();
        unextended(stands.then_some(&row), extension)
    }

    async fn skip_ticks(conn: &mut PgConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
        let query = bind_claim(PASS, claim).bind(pass.to).bind(&pass.times.spec).bind(&pass.times.zone).bind(pass.runs);
        let query = query.bind(to_stored_count(pass.missed)).bind(to_stored_count(pass.skipped)).bind(pass.from);
        let query = query.bind(pass.error);
        let lock_and_pass = async |conn: &mut PgConnection| {
            bind_claim(LOCK, claim).execute(&mut *conn).await?;
            query.fetch_one(conn).await?.try_get(0)
        };
        changed::<Self>(conn, lock_and_pass).await
    }

    async fn end_run(conn: &mut PgConnection, claim: &Claim, end: &End<'_>, _: bool) -> Reply<bool> {
        let query = bind_claim(END, claim).bind(&end.times.spec).bind(&end.times.zone).bind(end.next).bind(end.pause);
        let query =
            query.bind(end.slot).bind(to_stored_count(end.attempt)).bind(end.status).bind(to_stored_count(end.missed));
        query.bind(end.error).bind(end.output).fetch_one(conn).await?.try_get(0)
    }

    async fn forget_history(conn: &mut PgConnection, older_than: TimeDelta) -> Reply<u64> {
        Ok(sqlx::query(FORGET).bind(older_than).bind(STEP).execute(conn).await?.rows_affected())
    }
}

/// Claims what is due, once more if all of it has changed since the statement began.
async fn claim_twice(conn: &mut PgConnection, ask: &DueRequest<'_>) -> Reply<DueReply> {
    let (reply, is_overtaken) = claim_due(conn, ask).await?;
    if is_overtaken { Ok(claim_due(conn, ask).await?.0) } else { Ok(reply) }
}

/// Claims some of what is due one by one, after all of it was refused together.
async fn claim_apart(conn: &mut PgConnection, ask: &DueRequest<'_>, refused: sqlx::Error) -> Reply<DueReply> {
    let query = sqlx::query_scalar(DUE).bind(parts(ask, |times| times.name.as_str()));
    let due: Vec<String> = query.bind(APART).fetch_all(&mut *conn).await?;
    let mut claimed = Vec::new();
    for known in ask.known.iter().filter(|known| due.iter().any(|due| due == known.times.name.as_str())) {
        if claimed.len() >= ask.most as usize {
            break;
        }
        match claim_due(conn, &DueRequest { known: std::slice::from_ref(known), most: 1, ..*ask }).await {
            Ok((reply, _)) => claimed.extend(reply.claimed),
            Err(error) if is_undone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    if claimed.is_empty() {
        return Err(refused);
    }
    Ok(DueReply { claimed, next_in: Some(TimeDelta::zero()), refused: Some(refused), too_late: None })
}

/// Claims what is due. Returns whether nothing was claimed because all of it has changed since the
/// statement began, as by an order.
async fn claim_due(conn: &mut PgConnection, ask: &DueRequest<'_>) -> Reply<(DueReply, bool)> {
    let leases: Vec<TimeDelta> = ask.known.iter().map(|known| known.lease).collect();
    let query = sqlx::query(CLAIM).bind(parts(ask, |times| times.name.as_str())).bind(parts(ask, |times| &times.spec));
    let query = query.bind(parts(ask, |times| &times.zone)).bind(ask.holder.as_uuid()).bind(ask.label).bind(leases);
    let rows = query.bind(i64::from(ask.most)).bind(LOST).bind(ask.not_after).fetch_all(&mut *conn).await;
    let rows = once_ended(conn, rows).await?;
    let (mut reply, mut is_overtaken) = (DueReply::default(), false);
    for row in &rows {
        reply.next_in = row.number_or_null("next_in_micros")?.map(TimeDelta::microseconds);
        if row.try_get::<Option<&str>, _>("name")?.is_some() {
            reply.claimed.push(claimed(row, ask.holder)?);
        }
    }
    if let (true, [row, ..]) = (reply.claims_nothing(), &rows[..]) {
        reply.too_late = TooLate::at(row.try_get("clock")?, ask.not_after);
        is_overtaken = reply.too_late.is_none() && row.is("was_due")?;
    }
    Ok((reply, is_overtaken))
}

fn parts<'a>(ask: &DueRequest<'a>, part: fn(&'a Times) -> &'a str) -> Vec<&'a str> {
    ask.known.iter().map(|known| part(&known.times)).collect()
}

fn claimed(row: &PgRow, holder: Holder) -> Reply<ClaimedRow> {
    let lost = || -> Reply<PreviousClaim> {
        Ok(PreviousClaim { token: Token::new(row.number("prior_token")?), label: row.text("prior_label")? })
    };
    let is_lost = row.is("taken_over")?;
    Ok(ClaimedRow {
        claim: Claim { key: named(&row.text("name")?)?, holder, token: Token::new(row.number("token")?) },
        slot: row.time("run_slot")?,
        own: row.is("own")?,
        attempt: row.count("attempt")?,
        missed: row.count("missed")?,
        lost: is_lost.then(lost).transpose()?,
        lost_since: is_lost.then(|| row.time("prior_begin")).transpose()?,
        skip: Option::zip(row.time_or_null("skip_since")?, row.time_or_null("skip_until")?),
        stopped: row.is("stopped")?,
        now: row.time("now")?,
    })
}
