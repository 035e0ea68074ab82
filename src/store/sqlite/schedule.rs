//! Schedules. A claim is a look, and a compare-and-set of the whole of what was seen. A claim that
//! takes over, a move and an end are texts that are transactions: one hand-over each to the
//! connection's thread.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Row as _, Sqlite, SqliteConnection, sqlite::SqliteRow};

use crate::{
    key::{Claim, Holder, Key, Token},
    store::{
        Outcome, Reply, TooLate, hex, limit_micros, not_extended,
        schedule::{
            ClaimedRow, DueReply, DueRequest, End, Extended, Extension, HANDED_BACK, Known, LOST, ListedRun,
            ListedSchedule, LostRun, Pass, Registered, RunPage, STEP, ScheduleStore, Times, from_stored_count, named,
            to_stored_count,
        },
        sqlite::{
            row::{Query, json, keys, micros, read_now, time},
            schedule_sql::{
                CLAIM, END, END_WITHIN, EXTEND, FORGET, FORGET_DETAILS, HAND_BACK, HANDED_BACK_RUNS, HAS_ENDED, HELD,
                HISTORY, LAST_SUCCESSES, LATEST, LEFT, LIST, LOOK, LOST_RUN, PASS, PAUSE, PUT_BACK, REGISTERED,
                SELECTED, SINCE, TAKE_OVER, TRIGGER,
            },
            write::{begun, undo, written},
        },
    },
};

impl ScheduleStore for Sqlite {
    async fn registered(conn: &mut SqliteConnection, names: &[Key]) -> Reply<Registered> {
        let rows = sqlx::query(REGISTERED).bind(keys(names)).fetch_all(&mut *conn).await?;
        let rows = rows.iter().map(listed).collect::<Reply<Vec<_>>>()?;
        let now = match rows.first() {
            Some(row) => row.now,
            None => read_now(conn).await?,
        };
        Ok(Registered { rows, now })
    }

    async fn claim_due(conn: &mut SqliteConnection, ask: &DueRequest<'_>) -> Reply<DueReply> {
        let mut reply = DueReply::nothing();
        if ask.resent {
            reply.claimed = held(conn, ask).await?;
        }
        for row in look(conn, ask, reply.claimed.len()).await? {
            let seen = Seen::read(&row)?;
            let left = TimeDelta::microseconds(seen.due_at.saturating_sub(seen.now));
            if reply.has(&seen.times.name) {
                continue;
            }
            if !reply.wants(left, ask.most, 0) || !reply.add(left, take(conn, ask, &seen).await)? {
                break;
            }
        }
        if ask.not_after.is_some() && reply.claims_nothing() {
            reply.too_late = TooLate::at(read_now(conn).await?, ask.not_after);
        }
        Ok(reply)
    }

    async fn put_back(conn: &mut SqliteConnection, holder: Holder, vacant: Holder, names: &[Key]) -> Reply<()> {
        let query = sqlx::query(PUT_BACK).bind(*holder.as_uuid()).bind(keys(names)).bind(*vacant.as_uuid());
        query.execute(conn).await.map(drop)
    }

    async fn extend_run(
        conn: &mut SqliteConnection,
        claim: &Claim,
        Extension { lease, is_stopped, not_after }: Extension,
    ) -> Reply<Extended> {
        let query = bind_claim(EXTEND, claim).bind(micros(lease)).bind(limit_micros(not_after)).bind(is_stopped);
        let extended = query.execute(&mut *conn).await?;
        if extended.rows_affected() > 0 {
            return Ok(Extended::Is(Outcome::Done));
        }
        let Some(row) = bind_claim(LEFT, claim).fetch_optional(conn).await? else {
            return Ok(Extended::Is(Outcome::Lost));
        };
        if !is_stopped && row.try_get("stopped")? {
            return Ok(Extended::Stopped);
        }
        let now = time(&row, "now")?.unwrap_or_default();
        Ok(Extended::Is(not_extended(TimeDelta::microseconds(row.try_get(0)?), now, not_after)))
    }

    async fn hand_back(conn: &mut SqliteConnection, claim: &Claim, vacant: Holder) -> Reply<bool> {
        transaction(bind_claim(HAND_BACK, claim).bind(*vacant.as_uuid()).bind(HANDED_BACK), conn).await
    }

    async fn handed_back_runs(conn: &mut SqliteConnection, name: &Key, slot: DateTime<Utc>) -> Reply<i64> {
        let query = sqlx::query(HANDED_BACK_RUNS).bind(name.as_str()).bind(slot.timestamp_micros()).bind(HANDED_BACK);
        query.fetch_one(conn).await?.try_get(0)
    }

    async fn pass_over(conn: &mut SqliteConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
        let query = bind_claim(PASS, claim).bind(pass.to.timestamp_micros()).bind(&pass.times.spec);
        let query = query.bind(&pass.times.zone).bind(pass.runs).bind(to_stored_count(pass.missed));
        let query = query.bind(pass.from.timestamp_micros()).bind(to_stored_count(pass.skipped)).bind(pass.error);
        transaction(query, conn).await
    }

    async fn end_run(conn: &mut SqliteConnection, claim: &Claim, end: &End<'_>, within: bool) -> Reply<bool> {
        let query = bind_claim(if within { END_WITHIN } else { END }, claim);
        let query = query.bind(end.next.map(|next| next.timestamp_micros())).bind(&end.times.spec);
        let query = query.bind(&end.times.zone).bind(micros(end.pause)).bind(end.slot.timestamp_micros());
        let query =
            query.bind(to_stored_count(end.attempt)).bind(end.status).bind(to_stored_count(end.missed)).bind(end.error);
        let query = query.bind(end.output);
        if within { Ok(written(query, conn).await?.is_some()) } else { transaction(query, conn).await }
    }

    async fn has_ended(
        conn: &mut SqliteConnection,
        claim: &Claim,
        slot: DateTime<Utc>,
        attempt: u32,
        status: &'static str,
    ) -> Reply<bool> {
        let query = sqlx::query(HAS_ENDED).bind(claim.key.as_str()).bind(slot.timestamp_micros());
        let query = query.bind(to_stored_count(attempt)).bind(claim.token.get()).bind(status);
        Ok(query.fetch_optional(conn).await?.is_some())
    }

    async fn pause(conn: &mut SqliteConnection, name: &Key, paused: bool) -> Reply<bool> {
        Ok(sqlx::query(PAUSE).bind(name.as_str()).bind(paused).execute(conn).await?.rows_affected() > 0)
    }

    async fn trigger(conn: &mut SqliteConnection, name: &Key) -> Reply<bool> {
        Ok(sqlx::query(TRIGGER).bind(name.as_str()).execute(conn).await?.rows_affected() > 0)
    }

    async fn list_schedules(conn: &mut SqliteConnection, after: &str, limit: u32) -> Reply<Vec<ListedSchedule>> {
        let rows = sqlx::query(LIST).bind(after).bind(limit).fetch_all(conn).await?;
        rows.iter().map(listed).collect()
    }

    async fn history(conn: &mut SqliteConnection, name: &Key, limit: u32) -> Reply<Vec<ListedRun>> {
        let rows = sqlx::query(HISTORY).bind(name.as_str()).bind(limit).fetch_all(conn).await?;
        rows.iter().map(run).collect()
    }

    async fn latest_runs(conn: &mut SqliteConnection, each: u32) -> Reply<Vec<ListedRun>> {
        let mut rows = sqlx::query(LATEST).bind(each.saturating_sub(1)).fetch_all(&mut *conn).await?;
        rows.extend(sqlx::query(LAST_SUCCESSES).fetch_all(conn).await?);
        rows.iter().map(run).collect()
    }

    async fn runs_since(conn: &mut SqliteConnection, since: DateTime<Utc>, limit: u32) -> Reply<Vec<ListedRun>> {
        let rows = sqlx::query(SINCE).bind(since.timestamp_micros()).bind(limit).fetch_all(conn).await?;
        rows.iter().map(run).collect()
    }

    async fn runs(conn: &mut SqliteConnection, page: &RunPage) -> Reply<Vec<ListedRun>> {
        let query = sqlx::query(SELECTED).bind(page.name.as_ref().map(Key::as_str)).bind(page.unsuccessful);
        let rows = query.bind(page.within.map(micros)).bind(page.limit).fetch_all(conn).await?;
        rows.iter().map(run).collect()
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
        begun(conn, forget).await.map(|_| deleted)
    }
}

/// Executes a text that is a transaction, and returns whether its statement returned a row.
pub(super) async fn transaction(query: Query<'_>, conn: &mut SqliteConnection) -> Reply<bool> {
    match written(query, conn).await {
        Ok(row) => Ok(row.is_some()),
        Err(error) => {
            undo(conn).await?;
            Err(error)
        }
    }
}

fn bind_claim<'q>(sql: &'static str, claim: &'q Claim) -> Query<'q> {
    sqlx::query(sql).bind(claim.key.as_str()).bind(*claim.holder.as_uuid()).bind(claim.token.get())
}

/// A row as the look found it.
pub(super) struct Seen {
    times: Times,
    slot: i64,
    due_at: i64,
    triggered_at: Option<i64>,
    run_slot: Option<i64>,
    attempt: i32,
    missed: i32,
    running: bool,
    token: i64,
    label: String,
    begin_time: Option<i64>,
    skip: Option<(i64, i64)>,
    stop_slot: Option<i64>,
    now: i64,
}

impl Seen {
    pub fn read(row: &SqliteRow) -> Reply<Self> {
        Ok(Self {
            times: times(row)?,
            slot: row.try_get("slot")?,
            due_at: row.try_get("due_at")?,
            triggered_at: row.try_get("triggered_at")?,
            run_slot: row.try_get("run_slot")?,
            attempt: row.try_get("attempt")?,
            missed: row.try_get("missed")?,
            running: row.try_get("running")?,
            token: row.try_get("token")?,
            label: row.try_get("client_ip")?,
            begin_time: row.try_get("begin_time")?,
            skip: Option::zip(row.try_get("skip_since")?, row.try_get("skip_until")?),
            stop_slot: row.try_get("stop_slot")?,
            now: row.try_get("now")?,
        })
    }

    /// The slot of a claim: that of the attempts so far, or that of the next run.
    fn to_run(&self) -> i64 {
        let next = self.triggered_at.unwrap_or(self.slot);
        if self.attempt > 0 { self.run_slot.unwrap_or(next) } else { next }
    }

    fn is_stopped(&self) -> bool {
        self.stop_slot == Some(self.to_run())
    }
}

/// Reads the schedules that the holder has already.
async fn held(conn: &mut SqliteConnection, ask: &DueRequest<'_>) -> Reply<Vec<ClaimedRow>> {
    let names = keys(ask.known.iter().map(|known| &known.times.name));
    let mut claimed = Vec::new();
    for row in sqlx::query(HELD).bind(*ask.holder.as_uuid()).bind(names).fetch_all(&mut *conn).await? {
        let seen = Seen::read(&row)?;
        let query = sqlx::query(LOST_RUN).bind(seen.times.name.as_str()).bind(seen.run_slot).bind(seen.attempt - 1);
        let lost = match query.fetch_optional(&mut *conn).await? {
            Some(run) => Some(LostRun {
                token: Token::new(run.try_get("token")?),
                label: run.try_get("client_ip")?,
                begin_time: utc(run.try_get("begin_time")?),
            }),
            None => None,
        };
        claimed.push(ClaimedRow {
            token: Token::new(seen.token),
            slot: utc(seen.to_run()),
            own: seen.to_run() == seen.slot,
            attempt: from_stored_count(seen.attempt),
            missed: from_stored_count(seen.missed),
            lost,
            skip: seen.skip.map(|(since, until)| (utc(since), utc(until))),
            stopped: seen.is_stopped(),
            now: utc(seen.begin_time.unwrap_or(seen.now)),
            name: seen.times.name,
        });
    }
    Ok(claimed)
}

/// Reads the known schedules that are due first, `more` than are wanted, and the first one that is
/// not.
pub(super) async fn look(conn: &mut SqliteConnection, ask: &DueRequest<'_>, more: usize) -> Reply<Vec<SqliteRow>> {
    let known = json(ask.known.iter().map(|Known { times, .. }| {
        format!("[\"{}\",\"{}\",\"{}\"]", hex(times.name.as_str()), hex(&times.spec), hex(&times.zone))
    }));
    sqlx::query(LOOK).bind(known).bind(i64::from(ask.most) + 1 + more as i64).fetch_all(conn).await
}

/// Claims a row if it still is as it was seen. A run that was lost is recorded in the same
/// transaction.
pub(super) async fn take(conn: &mut SqliteConnection, ask: &DueRequest<'_>, seen: &Seen) -> Reply<Option<ClaimedRow>> {
    let token = seen.token.saturating_add(1).max(seen.now);
    let query = sqlx::query(if seen.running { TAKE_OVER } else { CLAIM });
    let query = query.bind(seen.times.name.as_str()).bind(&seen.times.spec).bind(&seen.times.zone);
    let query = query.bind(seen.token).bind(seen.slot).bind(seen.attempt).bind(seen.due_at);
    let query = query.bind(*ask.holder.as_uuid()).bind(token).bind(ask.label).bind(seen.to_run());
    // The run begins at the time by which it was decided.
    let query = query.bind(micros(ask.lease_of(&seen.times.name))).bind(seen.now).bind(limit_micros(ask.not_after));
    let begin_time = seen.begin_time.unwrap_or(seen.now);
    let taken = if seen.running {
        transaction(query.bind(&seen.label).bind(begin_time).bind(LOST), conn).await?
    } else {
        written(query, conn).await?.is_some()
    };
    let lost = || LostRun { token: Token::new(seen.token), label: seen.label.clone(), begin_time: utc(begin_time) };
    Ok(taken.then(|| ClaimedRow {
        name: seen.times.name.clone(),
        token: Token::new(token),
        slot: utc(seen.to_run()),
        own: seen.to_run() == seen.slot,
        attempt: from_stored_count(seen.attempt) + 1,
        missed: from_stored_count(seen.missed),
        lost: seen.running.then(lost),
        skip: seen.skip.map(|(since, until)| (utc(since), utc(until))),
        stopped: seen.is_stopped(),
        now: utc(seen.now),
    }))
}

fn utc(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or_default()
}

fn times(row: &SqliteRow) -> Reply<Times> {
    Ok(Times { name: named(row.try_get("name")?)?, spec: row.try_get("spec")?, zone: row.try_get("zone")? })
}

fn listed(row: &SqliteRow) -> Reply<ListedSchedule> {
    Ok(ListedSchedule {
        times: times(row)?,
        slot: time(row, "slot")?.unwrap_or_default(),
        due_at: time(row, "due_at")?.unwrap_or_default(),
        paused: row.try_get("paused")?,
        paused_until: time(row, "paused_until")?,
        skip_until: time(row, "skip_until")?,
        stopped: row.try_get::<i32, _>("attempt")? > 0 && time(row, "stop_slot")? == time(row, "run_slot")?,
        note: row.try_get("note")?,
        triggered_at: time(row, "triggered_at")?,
        run_slot: time(row, "run_slot")?,
        attempt: from_stored_count(row.try_get("attempt")?),
        missed: from_stored_count(row.try_get("missed")?),
        running: row.try_get("running")?,
        token: Token::new(row.try_get("token")?),
        label: row.try_get("client_ip")?,
        begin_time: time(row, "begin_time")?,
        now: time(row, "now")?.unwrap_or_default(),
    })
}

fn run(row: &SqliteRow) -> Reply<ListedRun> {
    Ok(ListedRun {
        name: row.try_get("name")?,
        slot: time(row, "slot")?.unwrap_or_default(),
        attempt: from_stored_count(row.try_get("attempt")?),
        token: Token::new(row.try_get("token")?),
        label: row.try_get("client_ip")?,
        begin_time: time(row, "begin_time")?.unwrap_or_default(),
        end_time: time(row, "end_time")?.unwrap_or_default(),
        status: row.try_get("status")?,
        missed: from_stored_count(row.try_get("missed")?),
        error: row.try_get("error")?,
    })
}
