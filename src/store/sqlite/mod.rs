//! SQLite, embedded. Times are microseconds since 1970, UTC; its clock ticks in milliseconds.
//!
//! Other programs keep `begin_time` and `end_time` as text, `YYYY-MM-DD HH:MM:SS`. Each row is read as what it is; what
//! is written is what the column's declared type calls for. `claimed_at` repeats `begin_time` as it stands there.
//!
//! Nothing travels here, so the claim is a look, a judgement by `rules.rs`, and a compare-and-set of the
//! row that was judged: a refusal takes no write lock, and the rules are not repeated in SQL.

mod admin;
mod in_memory;
mod queue;
mod schema;
mod version;

use std::{collections::HashSet, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{
    AssertSqlSafe, Row as _, SqlSafeStr as _, Sqlite, SqliteConnection,
    sqlite::{SqliteArguments, SqliteConnectOptions, SqliteRow, SqliteTransactionManager},
};
use sqlx_core::transaction::TransactionManager as _;
use uuid::Uuid;

use crate::store::{
    Answer, Ask, Change, Confirmed, INTACT, Outcome, Reply, Sighting, Store, is_apart, is_refused, put_back, to_utc,
    unanswered, unconfirmed, unmatched,
};
use crate::{
    key::{Claim, Key, Prior, Token},
    rules::{Row, Terms, Verdict, judge},
    store::fault::{Fault, fault},
};

/// How long a claim waits for another's write.
const TRY_MILLIS: i64 = 50;

/// The database's clock.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER) * 1000"
    };
}

/// A time of the column in microseconds; a text that is none stays one, and is an error to whoever reads it.
macro_rules! as_micros {
    ($column:literal) => {
        concat!(
            "COALESCE(CAST(round(unixepoch(CASE typeof(",
            $column,
            ") WHEN 'text' THEN ",
            $column,
            " END, 'subsec') * 1000) AS INTEGER) * 1000, ",
            $column,
            ")"
        )
    };
}

/// A time in microseconds as the column keeps it; whole seconds are cut, so that no time lies ahead.
macro_rules! kept {
    ($column:literal, $($micros:expr),+) => {
        concat!(
            "(SELECT CASE WHEN type LIKE '%INT%' THEN ",
            $($micros,)+
            " ELSE strftime('%Y-%m-%d %H:%M:%S', (",
            $($micros,)+
            ") / 1000000, 'unixepoch') END FROM pragma_table_info('t_resource_lock') WHERE name = '",
            $column,
            "' COLLATE NOCASE)"
        )
    };
}

pub(super) use {as_micros, kept, now};

const CREATE: &str = concat!(
    "
INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
SELECT CAST(unhex(value) AS TEXT), 'S', 0, ",
    kept!("begin_time", "0"),
    ", '', ?2, 0, 0 FROM json_each(?1) WHERE true
ON CONFLICT (key_resource) DO NOTHING"
);

const LOOK: &str = concat!(
    "
SELECT key_resource, COALESCE(lock_flag = 1, 0) AS locked, status, time, client_ip, holder, token, expires_at, prior_token, prior_client_ip,
       end_time IS NOT NULL AS ended, COALESCE(lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL, 0) AS stands, ",
    as_micros!("begin_time"),
    " AS begin_time, ",
    as_micros!("claimed_at"),
    " AS claimed_at, COALESCE(expires_at - ",
    now!(),
    ", 0) AS left_micros, ",
    now!(),
    " AS now
FROM t_resource_lock WHERE key_resource = ?1"
);

/// ?2 is the holder, ?3 to ?6 what the row becomes, ?7 and on what was seen of it.
const TAKE: &str = concat!(
    "
UPDATE t_resource_lock
SET lock_flag = 1, status = 'P', client_ip = ?3, holder = ?2, end_time = NULL,
    begin_time = CASE WHEN ?6 = 'same' THEN begin_time ELSE ",
    kept!("begin_time", now!(), " + ?5"),
    " END,
    claimed_at = CASE WHEN ?6 = 'same' THEN begin_time ELSE ",
    kept!("begin_time", now!(), " + ?5"),
    " END,
    token = CASE WHEN ?6 = 'same' THEN token ELSE max(token + 1, ",
    now!(),
    ") END,
    prior_token = CASE ?6 WHEN 'same' THEN prior_token WHEN 'taken over' THEN token END,
    prior_client_ip = CASE WHEN ?6 = 'same' THEN prior_client_ip ELSE client_ip END,
    prior_status = CASE WHEN ?6 = 'same' THEN prior_status ELSE status END,
    prior_begin_time = CASE WHEN ?6 = 'same' THEN prior_begin_time ELSE begin_time END,
    prior_end_time = CASE WHEN ?6 = 'same' THEN prior_end_time ELSE end_time END,
    expires_at = ",
    now!(),
    " + ?4
WHERE key_resource = ?1 AND token = ?7 AND COALESCE(lock_flag = 1, 0) = ?8 AND holder IS ?9 AND status IS ?10
  AND ",
    as_micros!("begin_time"),
    " IS ?11 AND ",
    as_micros!("claimed_at"),
    " IS ?12 AND expires_at IS ?13 AND (end_time IS NOT NULL) = ?14
RETURNING token, prior_token, prior_client_ip"
);

/// ?1 is [[key in hex, holder in hex, token], ...].
macro_rules! change {
    ($set:expr) => {
        concat!(
            "UPDATE t_resource_lock AS t SET ",
            $set,
            " FROM json_each(?1) AS j
            WHERE t.key_resource = CAST(unhex(j.value ->> 0) AS TEXT) AND t.holder = unhex(j.value ->> 1) AND t.token = j.value ->> 2
              AND t.lock_flag = 1 AND t.claimed_at = t.begin_time AND t.end_time IS NULL
            RETURNING key_resource, token"
        )
    };
}

const RENEW: &str = change!(concat!("expires_at = ", now!(), " + ?2"));
const RELEASE: &str = change!(concat!(
    "lock_flag = 0, status = ?2, end_time = ",
    kept!("end_time", now!(), " + ?3"),
    ", holder = NULL, expires_at = NULL, claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL"
));
const ABANDON: &str = change!(concat!("expires_at = min(expires_at, ", now!(), ")"));

const PUT_BACK: &str = change!(
    "lock_flag = 0, status = prior_status, begin_time = prior_begin_time, end_time = prior_end_time,
    client_ip = prior_client_ip, holder = NULL, expires_at = NULL, claimed_at = NULL, prior_client_ip = NULL"
);

/// What is set decides whether it counts one more, or only waits until no other transaction writes.
macro_rules! confirms {
    ($set:literal) => {
        concat!(
            "UPDATE t_resource_lock SET confirms = ",
            $set,
            " WHERE key_resource = ?1 AND holder = ?2 AND token = ?3 AND lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL
            RETURNING confirms"
        )
    };
}

type Query<'q> = sqlx::query::Query<'q, Sqlite, SqliteArguments>;

impl Store for Sqlite {
    /// A database in memory has one connection, and a file one that writes.
    const OWN_CONNECTIONS: bool = false;

    async fn leave_transaction(conn: &mut SqliteConnection) -> Reply<bool> {
        in_memory::end_transactions(conn).await.map(|()| true)
    }

    async fn open(conn: &mut SqliteConnection) -> Reply<bool> {
        Self::leave_transaction(conn).await?;
        let begin = "BEGIN IMMEDIATE; SAVEPOINT rowlock".into_sql_str();
        SqliteTransactionManager::begin(conn, Some(begin)).await.map(|()| true)
    }

    fn may_be_in_memory(options: &SqliteConnectOptions) -> bool {
        !options.get_filename().exists()
    }

    async fn rest(conn: &mut SqliteConnection) -> bool {
        in_memory::rest(conn).await.unwrap_or(false)
    }

    /// The connection's own busy timeout ends a wait.
    async fn create(conn: &mut SqliteConnection, keys: &[Key], minutes: i32, _: Duration) -> Reply<()> {
        let keys = json(keys.iter().map(|key| format!("\"{}\"", hex(key.as_str()))));
        sqlx::query(CREATE).bind(keys).bind(minutes).execute(conn).await.map(drop)
    }

    /// A try waits for another's write no longer than for a row on a server; the connection's own patience is put back.
    async fn claim(conn: &mut SqliteConnection, asks: &[Ask], terms: &Terms, _: bool) -> Reply<Vec<Answer>> {
        let patience: i64 = sqlx::query("PRAGMA busy_timeout").fetch_one(&mut *conn).await?.try_get(0)?;
        set_busy_timeout(conn, patience.min(TRY_MILLIS)).await?;
        let answers = match asks {
            [ask] => claim_one(conn, ask, terms).await.map(|answer| vec![answer]),
            _ => claim_several(conn, asks, terms).await,
        };
        set_busy_timeout(conn, patience).await?;
        answers
    }

    async fn confirm(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Confirmed> {
        Ok(match confirms(conn, confirms!("confirms + 1"), claim).await? {
            Some(count) => Confirmed::Done(count),
            None => unconfirmed(claim, look_at(conn, claim).await?),
        })
    }

    async fn intact(conn: &mut SqliteConnection) -> Reply<()> {
        sqlx::raw_sql(INTACT).execute(conn).await.map(drop)
    }

    async fn confirms(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Option<i64>> {
        confirms(conn, confirms!("confirms"), claim).await
    }

    async fn change(
        conn: &mut SqliteConnection,
        claims: &[Claim],
        change: Change,
        terms: &Terms,
        _: bool,
    ) -> Reply<Vec<Outcome>> {
        let named = json(claims.iter().map(|claim| {
            format!("[\"{}\",\"{}\",{}]", hex(claim.key.as_str()), claim.holder.as_uuid().simple(), claim.token)
        }));
        let query = match change {
            Change::Renew(lease) => sqlx::query(RENEW).bind(named).bind(micros(lease)),
            Change::Release(status) => {
                sqlx::query(RELEASE).bind(named).bind(status.letter()).bind(micros(terms.offset()))
            }
            Change::Abandon => sqlx::query(ABANDON).bind(named),
            Change::PutBack => sqlx::query(PUT_BACK).bind(named),
        };
        let done = query.fetch_all(&mut *conn).await?;
        let done = done.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
        let done = done.collect::<Reply<HashSet<(String, i64)>>>()?;
        let mut outcomes = Vec::with_capacity(claims.len());
        for claim in claims {
            outcomes.push(if done.contains(&(claim.key.as_str().to_owned(), claim.token.get())) {
                Outcome::Done
            } else {
                // What was done is committed: nobody is to take this for its being undone.
                let seen = look_at(conn, claim).await;
                unmatched(change, claim, if done.is_empty() { seen? } else { seen.map_err(unanswered)? })
            });
        }
        Ok(outcomes)
    }
}

async fn look(conn: &mut SqliteConnection, key: &Key) -> Reply<Option<SqliteRow>> {
    sqlx::query(LOOK).bind(key.as_str()).fetch_optional(conn).await
}

/// A row that may be taken, as it was judged.
struct Free {
    found: SqliteRow,
    row: Row,
    now: DateTime<Utc>,
    verdict: &'static str,
}

impl Free {
    fn seen(self) -> Answer {
        Answer::Seen { row: Some(self.row), now: self.now }
    }
}

async fn claim_one(conn: &mut SqliteConnection, ask: &Ask, terms: &Terms) -> Reply<Answer> {
    match find(conn, ask, terms).await? {
        Ok(free) => take(conn, ask, terms, free).await,
        Err(answer) => Ok(answer),
    }
}

/// Looks and judges; what cannot be had is answered.
async fn find(conn: &mut SqliteConnection, ask: &Ask, terms: &Terms) -> Reply<Result<Free, Answer>> {
    let Some(found) = look(conn, &ask.key).await? else {
        return Ok(Err(Answer::Seen { row: None, now: DateTime::UNIX_EPOCH }));
    };
    let row = read(&found, terms)?;
    let now = time(&found, "now")?.unwrap_or_default();
    let verdict = match judge(Some(&row), now, ask.holder, terms) {
        Verdict::Acquire => "acquired",
        Verdict::Same => "same",
        Verdict::TakeOver => "taken over",
        Verdict::Create | Verdict::Refuse(..) => return Ok(Err(Answer::Seen { row: Some(row), now })),
    };
    Ok(Ok(Free { found, row, now, verdict }))
}

/// In one transaction, which is rolled back at the first that its holder cannot have with the others. Where nothing is
/// to be had, there is none.
async fn claim_several(conn: &mut SqliteConnection, asks: &[Ask], terms: &Terms) -> Reply<Vec<Answer>> {
    let apart = is_apart(asks);
    let mut found = Vec::with_capacity(asks.len());
    for ask in asks {
        found.push(find(conn, ask, terms).await?);
    }
    let hopeless = if apart { found.iter().all(Result::is_err) } else { found.iter().any(Result::is_err) };
    if hopeless {
        return Ok(found.into_iter().map(|found| found.err().unwrap_or(Answer::Withheld)).collect());
    }
    match sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut *conn).await {
        // Somebody writes; those who cannot have theirs hear why all the same.
        Err(error) if apart && fault(&error) == Fault::Contention => {
            return Ok(found.into_iter().map(|found| found.map_or_else(|answer| answer, Free::seen)).collect());
        }
        begun => begun?,
    };
    let mut claimed = take_each(conn, asks, terms, found).await;
    if claimed.as_ref().is_ok_and(|answers| apart || !is_refused(answers)) {
        match sqlx::raw_sql("COMMIT").execute(&mut *conn).await {
            Ok(_) => return claimed,
            // It leaves the transaction open.
            Err(error) => claimed = Err(error),
        }
    }
    sqlx::raw_sql("ROLLBACK").execute(conn).await.map_err(unanswered)?;
    claimed.map(|answers| put_back(answers, asks.len()))
}

/// Of one holder's, up to the first that is refused.
async fn take_each(
    conn: &mut SqliteConnection,
    asks: &[Ask],
    terms: &Terms,
    found: Vec<Result<Free, Answer>>,
) -> Reply<Vec<Answer>> {
    let apart = is_apart(asks);
    let mut answers = Vec::with_capacity(asks.len());
    for (ask, found) in asks.iter().zip(found) {
        answers.push(match found {
            Ok(free) => take(conn, ask, terms, free).await?,
            Err(answer) => answer,
        });
        if !apart && is_refused(&answers) {
            break;
        }
    }
    Ok(answers)
}

/// A pragma takes no parameters; the number is one that SQLite gave, or ours.
async fn set_busy_timeout(conn: &mut SqliteConnection, millis: i64) -> Reply<()> {
    sqlx::raw_sql(AssertSqlSafe(format!("PRAGMA busy_timeout = {millis}"))).execute(conn).await.map(drop)
}

/// The compare-and-set: it fails, if the row is not as it was judged any more.
async fn take(conn: &mut SqliteConnection, ask: &Ask, terms: &Terms, free: Free) -> Reply<Answer> {
    let Free { found, row, now, verdict } = free;
    let query = sqlx::query(TAKE)
        .bind(ask.key.as_str())
        .bind(*ask.holder.as_uuid())
        .bind(&terms.label)
        .bind(micros(terms.lease))
        .bind(micros(terms.offset()))
        .bind(verdict)
        .bind(row.token)
        .bind(row.locked)
        .bind(row.holder)
        .bind(found.try_get::<Option<String>, _>("status")?)
        .bind(found.try_get::<Option<i64>, _>("begin_time")?)
        .bind(found.try_get::<Option<i64>, _>("claimed_at")?)
        .bind(found.try_get::<Option<i64>, _>("expires_at")?)
        .bind(row.ended);
    let Some(taken) = written(query, conn).await? else { return Ok(Answer::Seen { row: Some(row), now }) };
    let prior: Option<i64> = taken.try_get("prior_token")?;
    let label: Option<String> = taken.try_get("prior_client_ip")?;
    Ok(Answer::Granted {
        token: Token::new(taken.try_get("token")?),
        prior: prior.map(|token| Prior { token: Token::new(token), label: label.unwrap_or_default() }),
    })
}

/// The row of a statement that writes, which has to be run to its end: only there does SQLite commit, and may fail to.
pub(super) async fn written(query: Query<'_>, conn: &mut SqliteConnection) -> Reply<Option<SqliteRow>> {
    Ok(query.fetch_all(conn).await?.pop())
}

async fn confirms(conn: &mut SqliteConnection, sql: &'static str, claim: &Claim) -> Reply<Option<i64>> {
    let query = sqlx::query_scalar(sql).bind(claim.key.as_str());
    query.bind(*claim.holder.as_uuid()).bind(claim.token.get()).fetch_optional(conn).await
}

pub(super) fn read(row: &SqliteRow, terms: &Terms) -> Reply<Row> {
    let utc = |name| -> Reply<Option<DateTime<Utc>>> { Ok(time(row, name)?.map(|time| to_utc(time, terms.offset()))) };
    Ok(Row {
        locked: row.try_get("locked")?,
        status: row.try_get::<Option<String>, _>("status")?.unwrap_or_default(),
        begin_time: utc("begin_time")?,
        minutes: row.try_get("time")?,
        client_ip: row.try_get::<Option<String>, _>("client_ip")?.unwrap_or_default(),
        holder: row.try_get("holder")?,
        token: row.try_get("token")?,
        expires_at: time(row, "expires_at")?,
        claimed_at: utc("claimed_at")?,
        ended: row.try_get("ended")?,
        awaited: false,
    })
}

async fn look_at(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Option<Sighting>> {
    let Some(row) = look(conn, &claim.key).await? else { return Ok(None) };
    Ok(Some(Sighting {
        holder: row.try_get::<Option<Uuid>, _>("holder")?,
        token: row.try_get("token")?,
        locked: row.try_get("locked")?,
        stands: row.try_get("stands")?,
        left: TimeDelta::microseconds(row.try_get("left_micros")?),
    }))
}

pub(super) fn time(row: &SqliteRow, name: &str) -> Reply<Option<DateTime<Utc>>> {
    let beyond = |micros: i64| if micros > 0 { DateTime::<Utc>::MAX_UTC } else { DateTime::<Utc>::MIN_UTC };
    let micros: Option<i64> = row.try_get(name)?;
    Ok(micros.map(|micros| DateTime::from_timestamp_micros(micros).unwrap_or_else(|| beyond(micros))))
}

pub(super) fn micros(time: TimeDelta) -> i64 {
    time.num_microseconds().unwrap_or(i64::MAX)
}

/// As a JSON array; keys and ids go in as hex, so that nothing in them needs escaping.
pub(super) fn json(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(","))
}

pub(super) fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}
