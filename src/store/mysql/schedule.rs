//! Schedules. A claim is a look, and a compare-and-set of the whole of what was seen.

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _, mysql::MySqlRow};
use uuid::Uuid;

use crate::{
    key::{Claim, Holder, Key, Token},
    store::{
        Outcome, Reply, TooLate, limit_micros,
        mysql::{
            row::{Query, commit, marks, micros},
            schedule_sql::{
                CLAIM, COLUMNS, END, EXTEND, HAND_BACK, HANDED_BACK_RUNS, HAS_ENDED, HISTORY, KEEP, LAST_SUCCESSES,
                LATEST, LEFT, LIST, LOOK, LOST_RUN, MAY_BE_HELD, MORE, OLD, PASS, PAUSE, PUT_BACK, RECORD_ENDED,
                RECORD_HANDED_BACK, RECORD_LOST, RECORD_PASSED, SELECTED, SINCE, TRIGGER, WAS_HANDED_BACK,
                forget_statement,
            },
        },
        not_extended,
        schedule::{
            ClaimedRow, DueReply, DueRequest, End, Extended, Extension, HANDED_BACK, Known, LOST, ListedRun,
            ListedSchedule, LostRun, Pass, Registered, RunPage, STEP, ScheduleStore, Times, from_stored_count, named,
            to_stored_count,
        },
        unanswered,
    },
};

impl ScheduleStore for MySql {
    async fn registered(conn: &mut MySqlConnection, names: &[Key]) -> Reply<Registered> {
        let sql = format!(
            "SELECT {COLUMNS}, {MORE} FROM t_resource_schedule s WHERE name IN ({})",
            marks("?", names.len().max(1))
        );
        let first = names.first().map(Key::as_str).unwrap_or_default();
        let names = names.iter().map(Key::as_str).chain(names.is_empty().then_some(first));
        let query = names.fold(sqlx::query(AssertSqlSafe(sql)), |query, name| query.bind(name.to_owned()));
        let rows = query.fetch_all(&mut *conn).await?;
        let rows = rows.iter().map(listed).collect::<Reply<Vec<_>>>()?;
        let now = match rows.first() {
            Some(row) => row.now,
            None => NaiveDateTime::and_utc(&sqlx::query_scalar("SELECT UTC_TIMESTAMP(6)").fetch_one(conn).await?),
        };
        Ok(Registered { rows, now })
    }

    async fn claim_due(conn: &mut MySqlConnection, ask: &DueRequest<'_>) -> Reply<DueReply> {
        let mut reply = DueReply::nothing();
        if ask.resent {
            reply.claimed = held(conn, ask).await?;
        }
        for row in look(conn, ask, reply.claimed.len()).await? {
            let seen = Seen::read(&row)?;
            let left = seen.due_at - seen.now;
            if reply.has(&seen.times.name) {
                continue;
            }
            if !reply.wants(left, ask.most) || !reply.add(left, take(conn, ask, &seen).await)? {
                break;
            }
        }
        if ask.not_after.is_some() && reply.claims_nothing() {
            let now: NaiveDateTime = sqlx::query_scalar("SELECT UTC_TIMESTAMP(6)").fetch_one(conn).await?;
            reply.too_late = TooLate::at(now.and_utc(), ask.not_after);
        }
        Ok(reply)
    }

    async fn put_back(conn: &mut MySqlConnection, holder: Holder, vacant: Holder, names: &[Key]) -> Reply<()> {
        let query = sqlx::query_as(AssertSqlSafe(format!("{MAY_BE_HELD} ({})", marks("?", names.len().max(1)))));
        let query = names.iter().fold(query.bind(*holder.as_uuid()), |query, name| query.bind(name.as_str()));
        let held: Vec<(Vec<u8>,)> = query.fetch_all(&mut *conn).await?;
        // An UPDATE locks the rows of all names that it is given, and waits for those of other
        // runs.
        if held.is_empty() {
            return Ok(());
        }
        let query = sqlx::query(AssertSqlSafe(format!("{PUT_BACK} ({})", marks("?", held.len()))));
        let query = query.bind(*vacant.as_uuid()).bind(*holder.as_uuid());
        let query = held.into_iter().fold(query, |query, (name,)| query.bind(name));
        query.execute(conn).await.map(drop)
    }

    async fn extend_run(
        conn: &mut MySqlConnection,
        claim: &Claim,
        Extension { lease, is_stopped, not_after }: Extension,
    ) -> Reply<Extended> {
        let query = bind_claim(sqlx::query(EXTEND.as_str()), claim).bind(micros(lease)).bind(limit_micros(not_after));
        if query.bind(is_stopped).execute(&mut *conn).await?.rows_affected() > 0 {
            return Ok(Extended::Is(Outcome::Done));
        }
        let Some(row) = bind_claim(sqlx::query(LEFT), claim).fetch_optional(conn).await? else {
            return Ok(Extended::Is(Outcome::Lost));
        };
        if !is_stopped && row.try_get::<i64, _>(2)? == 1 {
            return Ok(Extended::Stopped);
        }
        let now: NaiveDateTime = row.try_get(1)?;
        Ok(Extended::Is(not_extended(TimeDelta::microseconds(row.try_get(0)?), now.and_utc(), not_after)))
    }

    async fn hand_back(conn: &mut MySqlConnection, claim: &Claim, vacant: Holder) -> Reply<bool> {
        sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
        let handed = hand_back(conn, claim, vacant).await;
        settle(conn, handed).await
    }

    async fn handed_back_runs(conn: &mut MySqlConnection, name: &Key, slot: DateTime<Utc>) -> Reply<i64> {
        let query = sqlx::query(HANDED_BACK_RUNS).bind(name.as_str()).bind(slot.naive_utc()).bind(HANDED_BACK);
        query.fetch_one(conn).await?.try_get(0)
    }

    async fn pass_over(conn: &mut MySqlConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
        sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
        let passed = pass_over(conn, claim, pass).await;
        settle(conn, passed).await
    }

    async fn end_run(conn: &mut MySqlConnection, claim: &Claim, end: &End<'_>, within: bool) -> Reply<bool> {
        if within {
            return end_run(conn, claim, end).await;
        }
        sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
        let ended = end_run(conn, claim, end).await;
        settle(conn, ended).await
    }

    async fn has_ended(
        conn: &mut MySqlConnection,
        claim: &Claim,
        slot: DateTime<Utc>,
        attempt: u32,
        status: &'static str,
    ) -> Reply<bool> {
        let query =
            sqlx::query(HAS_ENDED).bind(claim.key.as_str()).bind(slot.naive_utc()).bind(to_stored_count(attempt));
        let ended = query.bind(claim.token.get()).bind(status).fetch_optional(conn).await?;
        Ok(ended.is_some())
    }

    async fn pause(conn: &mut MySqlConnection, name: &Key, paused: bool) -> Reply<bool> {
        let query = sqlx::query(PAUSE).bind(paused).bind(paused);
        Ok(query.bind(name.as_str()).execute(conn).await?.rows_affected() > 0)
    }

    async fn trigger(conn: &mut MySqlConnection, name: &Key) -> Reply<bool> {
        Ok(sqlx::query(TRIGGER).bind(name.as_str()).execute(conn).await?.rows_affected() > 0)
    }

    async fn list_schedules(conn: &mut MySqlConnection, after: &str, limit: u32) -> Reply<Vec<ListedSchedule>> {
        let rows = sqlx::query(LIST.as_str()).bind(after).bind(limit).fetch_all(conn).await?;
        rows.iter().map(listed).collect()
    }

    async fn history(conn: &mut MySqlConnection, name: &Key, limit: u32) -> Reply<Vec<ListedRun>> {
        let rows = sqlx::query(HISTORY).bind(name.as_str()).bind(limit).fetch_all(conn).await?;
        rows.iter().map(run).collect()
    }

    async fn latest_runs(conn: &mut MySqlConnection, each: u32) -> Reply<Vec<ListedRun>> {
        let mut rows = sqlx::query(LATEST).bind(each.saturating_sub(1)).fetch_all(&mut *conn).await?;
        rows.extend(sqlx::query(LAST_SUCCESSES).fetch_all(conn).await?);
        rows.iter().map(run).collect()
    }

    async fn runs_since(conn: &mut MySqlConnection, since: DateTime<Utc>, limit: u32) -> Reply<Vec<ListedRun>> {
        let rows = sqlx::query(SINCE).bind(since.naive_utc()).bind(limit).fetch_all(conn).await?;
        rows.iter().map(run).collect()
    }

    async fn runs(conn: &mut MySqlConnection, page: &RunPage) -> Reply<Vec<ListedRun>> {
        let (name, within) = (page.name.as_ref().map(Key::as_str), page.within.map(micros));
        let query = sqlx::query(SELECTED).bind(name).bind(name).bind(page.unsuccessful).bind(within).bind(within);
        let rows = query.bind(page.limit).fetch_all(conn).await?;
        rows.iter().map(run).collect()
    }

    async fn forget_history(conn: &mut MySqlConnection, older_than: TimeDelta) -> Reply<u64> {
        let old = sqlx::query_as::<_, (Vec<u8>, NaiveDateTime, i32)>(OLD).bind(micros(older_than)).bind(STEP);
        let old = old.fetch_all(&mut *conn).await?;
        if old.is_empty() {
            return Ok(0);
        }
        sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
        let forgotten = forget(conn, &old).await;
        settle(conn, forgotten).await
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

/// Commits, or rolls back after an error.
pub(super) async fn settle<T>(conn: &mut MySqlConnection, done: Reply<T>) -> Reply<T> {
    match done {
        Ok(value) => commit(conn).await.map(|()| value),
        Err(error) => {
            roll_back(conn).await?;
            Err(error)
        }
    }
}

pub(super) async fn roll_back(conn: &mut MySqlConnection) -> Reply<()> {
    sqlx::raw_sql(rollback!()).execute(conn).await.map(drop).map_err(unanswered)
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

/// Claims a row if it still is as it was seen. A run that was lost is recorded in the same
/// transaction.
async fn take(conn: &mut MySqlConnection, ask: &DueRequest<'_>, seen: &Seen) -> Reply<Option<ClaimedRow>> {
    let token = seen.token.saturating_add(1).max(seen.now.and_utc().timestamp_micros());
    let taken = if seen.running {
        sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
        let taken = take_over(conn, ask, seen, token).await;
        settle(conn, taken).await?
    } else {
        take_row(conn, ask, seen, token).await?
    };
    let begin_time = seen.begin_time.unwrap_or(seen.now).and_utc();
    let lost = || LostRun { token: Token::new(seen.token), label: seen.label.clone(), begin_time };
    Ok(taken.then(|| ClaimedRow {
        name: seen.times.name.clone(),
        token: Token::new(token),
        slot: seen.to_run().and_utc(),
        own: seen.to_run() == seen.slot,
        attempt: from_stored_count(seen.attempt) + 1,
        missed: from_stored_count(seen.missed),
        lost: seen.running.then(lost),
        skip: seen.skip.map(|(since, until)| (since.and_utc(), until.and_utc())),
        stopped: seen.is_stopped(),
        now: seen.now.and_utc(),
    }))
}

async fn take_row(conn: &mut MySqlConnection, ask: &DueRequest<'_>, seen: &Seen, token: i64) -> Reply<bool> {
    let query = sqlx::query(CLAIM.as_str()).bind(seen.times.name.as_str()).bind(&seen.times.spec);
    let query = query.bind(&seen.times.zone).bind(seen.token).bind(seen.slot).bind(seen.attempt).bind(seen.due_at);
    let holder: Uuid = *ask.holder.as_uuid();
    let query = query.bind(holder).bind(token).bind(ask.label).bind(seen.to_run()).bind(seen.attempt + 1);
    // The run begins at the time by which it was decided.
    let query = query.bind(seen.now).bind(micros(ask.lease_of(&seen.times.name))).bind(limit_micros(ask.not_after));
    Ok(query.execute(conn).await?.rows_affected() > 0)
}

async fn take_over(conn: &mut MySqlConnection, ask: &DueRequest<'_>, seen: &Seen, token: i64) -> Reply<bool> {
    if !take_row(conn, ask, seen, token).await? {
        return Ok(false);
    }
    let begin_time = seen.begin_time.unwrap_or(seen.now);
    let query = sqlx::query(RECORD_LOST).bind(seen.times.name.as_str()).bind(seen.to_run()).bind(seen.attempt);
    let query = query.bind(seen.token).bind(&seen.label).bind(begin_time).bind(seen.missed).bind(LOST);
    query.execute(conn).await?;
    Ok(true)
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

async fn pass_over(conn: &mut MySqlConnection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
    let (spec, zone, to) = (&pass.times.spec, &pass.times.zone, pass.to.naive_utc());
    let query = sqlx::query(PASS).bind(pass.runs).bind(to).bind(to).bind(pass.runs).bind(to).bind(pass.runs);
    let query = query.bind(pass.runs).bind(to_stored_count(pass.missed)).bind(pass.runs);
    let query = bind_claim(query, claim).bind(spec).bind(zone);
    if query.execute(&mut *conn).await?.rows_affected() == 0 {
        return Ok(false);
    }
    if pass.skipped > 0 {
        let query = sqlx::query(RECORD_PASSED).bind(pass.from.naive_utc()).bind(0).bind("M");
        let query = query.bind(to_stored_count(pass.skipped)).bind(pass.error);
        query.bind(claim.key.as_str()).bind(claim.token.get()).execute(conn).await?;
    }
    Ok(true)
}

async fn end_run(conn: &mut MySqlConnection, claim: &Claim, end: &End<'_>) -> Reply<bool> {
    let (spec, zone, slot) = (&end.times.spec, &end.times.zone, end.slot.naive_utc());
    let next = end.next.map(|next| next.naive_utc());
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

fn times(row: &MySqlRow) -> Reply<Times> {
    Ok(Times { name: named(row.try_get("name")?)?, spec: row.try_get("spec")?, zone: row.try_get("zone")? })
}

pub(super) fn utc(row: &MySqlRow, name: &str) -> Reply<Option<DateTime<Utc>>> {
    Ok(row.try_get::<Option<NaiveDateTime>, _>(name)?.map(|time| time.and_utc()))
}

fn listed(row: &MySqlRow) -> Reply<ListedSchedule> {
    Ok(ListedSchedule {
        times: times(row)?,
        slot: utc(row, "slot")?.unwrap_or_default(),
        due_at: utc(row, "due_at")?.unwrap_or_default(),
        paused: row.try_get::<i64, _>("paused")? == 1,
        paused_until: utc(row, "paused_until")?,
        skip_until: utc(row, "skip_until")?,
        stopped: row.try_get::<i32, _>("attempt")? > 0 && utc(row, "stop_slot")? == utc(row, "run_slot")?,
        note: row.try_get("note")?,
        triggered_at: utc(row, "triggered_at")?,
        run_slot: utc(row, "run_slot")?,
        attempt: from_stored_count(row.try_get("attempt")?),
        missed: from_stored_count(row.try_get("missed")?),
        running: row.try_get::<i64, _>("running")? == 1,
        token: Token::new(row.try_get("token")?),
        label: row.try_get("client_ip")?,
        begin_time: utc(row, "begin_time")?,
        now: utc(row, "now")?.unwrap_or_default(),
    })
}

fn run(row: &MySqlRow) -> Reply<ListedRun> {
    Ok(ListedRun {
        name: row.try_get("name")?,
        slot: utc(row, "slot")?.unwrap_or_default(),
        attempt: from_stored_count(row.try_get("attempt")?),
        token: Token::new(row.try_get("token")?),
        label: row.try_get("client_ip")?,
        begin_time: utc(row, "begin_time")?.unwrap_or_default(),
        end_time: utc(row, "end_time")?.unwrap_or_default(),
        status: row.try_get("status")?,
        missed: from_stored_count(row.try_get("missed")?),
        error: row.try_get("error")?,
    })
}
