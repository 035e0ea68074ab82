//! The claim of what is due: a look, and a compare-and-set of the whole of what was seen.

use std::collections::BTreeMap;

use chrono::{NaiveDateTime, TimeDelta};
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _, mysql::MySqlRow};
use uuid::Uuid;

use crate::{
    key::Token,
    store::{
        Reply, TooLate, is_undone, limit_micros,
        mysql::{
            row::{Query, marks, micros, padded, settle},
            schedule_row::{times, utc},
            schedule_sql::{COLUMNS, LOOK, LOST_RUN, RECORD_LOST, claim_statement},
        },
        schedule::{ClaimedRow, DueReply, DueRequest, Known, LOST, LostRun, Times, from_stored_count},
        unanswered,
    },
};

/// Claims the earliest of what is due, up to as many as are asked for.
pub(super) async fn claim_due(conn: &mut MySqlConnection, ask: &DueRequest<'_>) -> Reply<DueReply> {
    let mut reply = DueReply::nothing();
    if ask.resent {
        reply.claimed = held(conn, ask).await?;
    }
    let mut free = Vec::new();
    for row in look(conn, ask, reply.claimed.len()).await? {
        let seen = Seen::read(&row)?;
        if reply.has(&seen.times.name) {
            continue;
        }
        if !reply.wants(seen.left(), ask.most, free.len()) {
            break;
        }
        if !seen.running {
            free.push(seen);
        } else if !reply.add(seen.left(), take_over(conn, ask, &seen).await)? {
            return Ok(reply);
        }
    }
    take_free(conn, ask, &free, &mut reply).await?;
    if ask.not_after.is_some() && reply.claims_nothing() {
        let now: NaiveDateTime = sqlx::query_scalar("SELECT UTC_TIMESTAMP(6)").fetch_one(conn).await?;
        reply.too_late = TooLate::at(now.and_utc(), ask.not_after);
    }
    Ok(reply)
}

/// A row as the look found it.
struct Seen {
    times: Times,
    slot: NaiveDateTime,
    due_at: NaiveDateTime,
    triggered_at: Option<NaiveDateTime>,
    run_slot: Option<NaiveDateTime>,
    attempt: i32,
    missed: i32,
    running: bool,
    token: i64,
    label: String,
    begin_time: Option<NaiveDateTime>,
    skip: Option<(NaiveDateTime, NaiveDateTime)>,
    stop_slot: Option<NaiveDateTime>,
    now: NaiveDateTime,
}

impl Seen {
    fn read(row: &MySqlRow) -> Reply<Self> {
        Ok(Self {
            times: times(row)?,
            slot: row.try_get("slot")?,
            due_at: row.try_get("due_at")?,
            triggered_at: row.try_get("triggered_at")?,
            run_slot: row.try_get("run_slot")?,
            attempt: row.try_get("attempt")?,
            missed: row.try_get("missed")?,
            running: row.try_get::<i64, _>("running")? == 1,
            token: row.try_get("token")?,
            label: row.try_get("client_ip")?,
            begin_time: row.try_get("begin_time")?,
            skip: Option::zip(row.try_get("skip_since")?, row.try_get("skip_until")?),
            stop_slot: row.try_get("stop_slot")?,
            now: row.try_get("now")?,
        })
    }

    /// The slot of a claim: that of the attempts so far, or that of the next run.
    fn to_run(&self) -> NaiveDateTime {
        let next = self.triggered_at.unwrap_or(self.slot);
        if self.attempt > 0 { self.run_slot.unwrap_or(next) } else { next }
    }

    fn is_stopped(&self) -> bool {
        self.stop_slot == Some(self.to_run())
    }

    /// How long from now until the row is due.
    fn left(&self) -> TimeDelta {
        self.due_at - self.now
    }

    /// The token of a claim.
    fn next_token(&self) -> i64 {
        self.token.saturating_add(1).max(self.now.and_utc().timestamp_micros())
    }

    /// The row as a claim leaves it.
    fn claimed(&self) -> ClaimedRow {
        let begin_time = self.begin_time.unwrap_or(self.now).and_utc();
        let lost = || LostRun { token: Token::new(self.token), label: self.label.clone(), begin_time };
        ClaimedRow {
            name: self.times.name.clone(),
            token: Token::new(self.next_token()),
            slot: self.to_run().and_utc(),
            own: self.to_run() == self.slot,
            attempt: from_stored_count(self.attempt) + 1,
            missed: from_stored_count(self.missed),
            lost: self.running.then(lost),
            skip: self.skip.map(|(since, until)| (since.and_utc(), until.and_utc())),
            stopped: self.is_stopped(),
            now: self.now.and_utc(),
        }
    }
}

/// Reads the schedules that the holder has already.
async fn held(conn: &mut MySqlConnection, ask: &DueRequest<'_>) -> Reply<Vec<ClaimedRow>> {
    if ask.known.is_empty() {
        return Ok(Vec::new());
    }
    let names = marks("?", ask.known.len());
    let sql = format!("SELECT {COLUMNS} FROM t_resource_schedule s WHERE holder = ? AND name IN ({names})");
    let query = sqlx::query(AssertSqlSafe(sql)).bind(*ask.holder.as_uuid());
    let query = ask.known.iter().fold(query, |query, known| query.bind(known.times.name.as_str()));
    let mut claimed = Vec::new();
    for row in query.fetch_all(&mut *conn).await? {
        let seen = Seen::read(&row)?;
        let query = sqlx::query(LOST_RUN).bind(seen.times.name.as_str()).bind(seen.run_slot).bind(seen.attempt - 1);
        let lost = match query.fetch_optional(&mut *conn).await? {
            Some(run) => Some(LostRun {
                token: Token::new(run.try_get("token")?),
                label: run.try_get("client_ip")?,
                begin_time: utc(&run, "begin_time")?.unwrap_or_default(),
            }),
            None => None,
        };
        claimed.push(ClaimedRow {
            token: Token::new(seen.token),
            slot: seen.to_run().and_utc(),
            own: seen.to_run() == seen.slot,
            attempt: from_stored_count(seen.attempt),
            missed: from_stored_count(seen.missed),
            lost,
            skip: seen.skip.map(|(since, until)| (since.and_utc(), until.and_utc())),
            stopped: seen.is_stopped(),
            now: seen.begin_time.unwrap_or(seen.now).and_utc(),
            name: seen.times.name,
        });
    }
    Ok(claimed)
}

/// Reads the known schedules that are due first, `more` than are wanted, and the first one that is
/// not.
async fn look(conn: &mut MySqlConnection, ask: &DueRequest<'_>, more: usize) -> Reply<Vec<MySqlRow>> {
    if ask.known.is_empty() {
        return Ok(Vec::new());
    }
    let known = marks("(?, ?, ?)", ask.known.len());
    let limit = u64::from(ask.most) + 1 + more as u64;
    let query = sqlx::query(AssertSqlSafe(format!("SELECT {COLUMNS} {LOOK} ({known}) ORDER BY due_at LIMIT ?")));
    let bind = |query: Query<'static>, Known { times, .. }: &Known| {
        query.bind(times.name.as_str().to_owned()).bind(times.spec.clone()).bind(times.zone.clone())
    };
    ask.known.iter().fold(query, bind).bind(limit).fetch_all(conn).await
}

/// Claims rows under which nothing runs, those with one lease in one statement.
async fn take_free(conn: &mut MySqlConnection, ask: &DueRequest<'_>, free: &[Seen], reply: &mut DueReply) -> Reply<()> {
    let mut by_lease: BTreeMap<TimeDelta, Vec<&Seen>> = BTreeMap::new();
    for seen in free {
        by_lease.entry(ask.lease_of(&seen.times.name)).or_default().push(seen);
    }
    for (lease, rows) in by_lease {
        match take_rows(conn, ask, &rows, lease).await {
            Ok(taken) => {
                for (seen, taken) in rows.iter().zip(taken) {
                    reply.add(seen.left(), Ok(taken.then(|| seen.claimed())))?;
                }
            }
            // A trigger may refuse one of them.
            Err(error) if rows.len() > 1 && is_undone(&error) => {
                for seen in rows {
                    let taken = take_rows(conn, ask, &[seen], lease).await;
                    if !reply.add(seen.left(), taken.map(|taken| (taken == [true]).then(|| seen.claimed())))? {
                        return Ok(());
                    }
                }
            }
            Err(error) => {
                let left = rows.first().map_or(TimeDelta::zero(), |seen| seen.left());
                if !reply.add(left, Err(error))? {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// Claims the rows that still are as they were seen. Returns for each whether it was claimed.
async fn take_rows(
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
        query = query.bind(seen.token).bind(seen.slot).bind(seen.attempt).bind(seen.due_at);
    }
    let holder: Uuid = *ask.holder.as_uuid();
    let query = query.bind(holder).bind(ask.label).bind(now).bind(now.and_utc().timestamp_micros());
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

/// Claims a row whose run was lost, and records that in the same transaction.
async fn take_over(conn: &mut MySqlConnection, ask: &DueRequest<'_>, seen: &Seen) -> Reply<Option<ClaimedRow>> {
    sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
    let taken = take_lost(conn, ask, seen).await;
    Ok(settle(conn, taken).await?.then(|| seen.claimed()))
}

async fn take_lost(conn: &mut MySqlConnection, ask: &DueRequest<'_>, seen: &Seen) -> Reply<bool> {
    if take_rows(conn, ask, &[seen], ask.lease_of(&seen.times.name)).await? != [true] {
        return Ok(false);
    }
    let begin_time = seen.begin_time.unwrap_or(seen.now);
    let query = sqlx::query(RECORD_LOST).bind(seen.times.name.as_str()).bind(seen.to_run()).bind(seen.attempt);
    let query = query.bind(seen.token).bind(&seen.label).bind(begin_time).bind(seen.missed).bind(LOST);
    query.execute(conn).await?;
    Ok(true)
}
