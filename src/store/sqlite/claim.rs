//! Claims: a read, a judgement by the rules, and a compare-and-set of the row that was judged.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, Row as _, SqliteConnection, sqlite::SqliteRow};

use crate::{
    key::{Key, PreviousClaim, Token},
    rules::{Row, Terms, Verdict, judge},
    store::{
        ClaimReply, ClaimRequest, Reply,
        fault::{Fault, fault},
        is_apart, is_refused, put_back,
        sqlite::row::{as_micros, hex, json, kept, micros, now, read, read_row, read_rows, time, written},
        unanswered,
    },
};

/// How long a claim waits for another connection's write.
const TRY_MILLIS: i64 = 50;

const CREATE: &str = concat!(
    "
INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
SELECT CAST(unhex(value) AS TEXT), 'S', 0, ",
    kept!("begin_time", "0"),
    ", '', ?2, 0, 0 FROM json_each(?1) WHERE true
ON CONFLICT (key_resource) DO NOTHING"
);

/// ?2 is the holder. ?3 to ?6 are what the row becomes; from ?7 on, what was seen of it.
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

/// A row that may be claimed, as it was judged.
struct Free {
    found: SqliteRow,
    row: Row,
    now: DateTime<Utc>,
    verdict: &'static str,
}

impl Free {
    fn seen(self) -> ClaimReply {
        ClaimReply::Seen { row: Some(self.row), now: self.now }
    }
}

async fn claim_one(conn: &mut SqliteConnection, request: &ClaimRequest, terms: &Terms) -> Reply<ClaimReply> {
    match find(conn, request, terms).await? {
        Ok(free) => take(conn, request, terms, free).await,
        Err(answer) => Ok(answer),
    }
}

/// Reads and judges the row. A row that cannot be claimed gives the reply.
async fn find(conn: &mut SqliteConnection, request: &ClaimRequest, terms: &Terms) -> Reply<Result<Free, ClaimReply>> {
    let Some(found) = read_row(conn, &request.key).await? else {
        return Ok(Err(ClaimReply::Seen { row: None, now: DateTime::UNIX_EPOCH }));
    };
    let row = read(&found, terms)?;
    let now = time(&found, "now")?.unwrap_or_default();
    let verdict = match judge(Some(&row), now, request.holder, terms) {
        Verdict::Acquire => "acquired",
        Verdict::Same => "same",
        Verdict::TakeOver => "taken over",
        Verdict::Create | Verdict::Refuse(..) => return Ok(Err(ClaimReply::Seen { row: Some(row), now })),
    };
    Ok(Ok(Free { found, row, now, verdict }))
}

/// Reads the rows, and takes no lock.
pub(super) async fn look(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
) -> Reply<Vec<ClaimReply>> {
    let keys: Vec<&Key> = requests.iter().map(|request| &request.key).collect();
    let mut rows = HashMap::new();
    for found in read_rows(conn, &keys).await? {
        let now = time(&found, "now")?.unwrap_or_default();
        rows.insert(found.try_get::<String, _>("key_resource")?, (read(&found, terms)?, now));
    }
    let seen = |request: &ClaimRequest| match rows.remove(request.key.as_str()) {
        Some((row, now)) => ClaimReply::Seen { row: Some(row), now },
        None => ClaimReply::Seen { row: None, now: DateTime::UNIX_EPOCH },
    };
    Ok(requests.iter().map(seen).collect())
}

/// Claims in one transaction, which is rolled back if one key of a single holder is refused. If
/// nothing can be granted, no transaction is begun.
async fn claim_several(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
) -> Reply<Vec<ClaimReply>> {
    let apart = is_apart(requests);
    let mut found = Vec::with_capacity(requests.len());
    for request in requests {
        found.push(find(conn, request, terms).await?);
    }
    let hopeless = if apart { found.iter().all(Result::is_err) } else { found.iter().any(Result::is_err) };
    if hopeless {
        return Ok(found.into_iter().map(|found| found.err().unwrap_or(ClaimReply::Withheld)).collect());
    }
    match sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut *conn).await {
        // Another connection writes. Requests that are refused still get the reason.
        Err(error) if apart && fault(&error) == Fault::Contention => {
            return Ok(found.into_iter().map(|found| found.map_or_else(|answer| answer, Free::seen)).collect());
        }
        begun => begun?,
    };
    let mut claimed = take_each(conn, requests, terms, found).await;
    if claimed.as_ref().is_ok_and(|answers| apart || !is_refused(answers)) {
        match sqlx::raw_sql("COMMIT").execute(&mut *conn).await {
            Ok(_) => return claimed,
            // A COMMIT that fails leaves the transaction open.
            Err(error) => claimed = Err(error),
        }
    }
    sqlx::raw_sql("ROLLBACK").execute(conn).await.map_err(unanswered)?;
    claimed.map(|answers| put_back(answers, requests.len()))
}

/// Takes the rows; those of a single holder, up to the first refusal.
async fn take_each(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
    found: Vec<Result<Free, ClaimReply>>,
) -> Reply<Vec<ClaimReply>> {
    let apart = is_apart(requests);
    let mut answers = Vec::with_capacity(requests.len());
    for (request, found) in requests.iter().zip(found) {
        answers.push(match found {
            Ok(free) => take(conn, request, terms, free).await?,
            Err(answer) => answer,
        });
        if !apart && is_refused(&answers) {
            break;
        }
    }
    Ok(answers)
}

/// A pragma takes no parameters. The number is from SQLite, or a constant.
async fn set_busy_timeout(conn: &mut SqliteConnection, millis: i64) -> Reply<()> {
    sqlx::raw_sql(AssertSqlSafe(format!("PRAGMA busy_timeout = {millis}"))).execute(conn).await.map(drop)
}

/// Updates the row by compare-and-set. Nothing is granted if the row is no longer as it was judged.
async fn take(conn: &mut SqliteConnection, request: &ClaimRequest, terms: &Terms, free: Free) -> Reply<ClaimReply> {
    let Free { found, row, now, verdict } = free;
    let query = sqlx::query(TAKE)
        .bind(request.key.as_str())
        .bind(*request.holder.as_uuid())
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
    let Some(taken) = written(query, conn).await? else { return Ok(ClaimReply::Seen { row: Some(row), now }) };
    let prior: Option<i64> = taken.try_get("prior_token")?;
    let label: Option<String> = taken.try_get("prior_client_ip")?;
    Ok(ClaimReply::Granted {
        token: Token::new(taken.try_get("token")?),
        prior: prior.map(|token| PreviousClaim { token: Token::new(token), label: label.unwrap_or_default() }),
    })
}

pub(super) async fn create(conn: &mut SqliteConnection, keys: &[Key], minutes: i32) -> Reply<()> {
    let keys = json(keys.iter().map(|key| format!("\"{}\"", hex(key.as_str()))));
    sqlx::query(CREATE).bind(keys).bind(minutes).execute(conn).await.map(drop)
}

pub(super) async fn claim(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
) -> Reply<Vec<ClaimReply>> {
    let busy_timeout: i64 = sqlx::query("PRAGMA busy_timeout").fetch_one(&mut *conn).await?.try_get(0)?;
    set_busy_timeout(conn, busy_timeout.min(TRY_MILLIS)).await?;
    let answers = match requests {
        [request] => claim_one(conn, request, terms).await.map(|answer| vec![answer]),
        _ => claim_several(conn, requests, terms).await,
    };
    set_busy_timeout(conn, busy_timeout).await?;
    answers
}
