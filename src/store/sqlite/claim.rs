//! Claims of rows, and their creation. A claim of rows that are not free, or under further rules,
//! is one read of the rows, a judgement by the rules, and one compare-and-set of the rows that were
//! judged.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, Row as _, Sqlite, SqliteConnection, sqlite::SqliteRow};

use crate::{
    key::{Key, Token},
    rules::{Row, Terms, Verdict, judge},
    store::{
        ClaimReply, ClaimRequest, ClaimStore, Form, Reply,
        fault::{Fault, fault},
        hex, is_apart, limit_micros,
        sqlite::{
            free,
            row::{as_micros, is_listed, json, kept, keys, listed, micros, read_rows, sql},
        },
        stored_row::{StoredRow as _, by_key, previous, read, seen_each},
        unanswered,
    },
};

const CREATE: &str = sql!("
INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
SELECT CAST(unhex(value) AS TEXT), 'S', 0, " {kept!("begin_time", "0")} ", '', ?2, 0, 0 FROM json_each(?1) WHERE true
ON CONFLICT (key_resource) DO NOTHING");

/// How long a claim waits for another connection's write.
const TRY_MILLIS: i64 = 50;

/// ?1 lists what [`expected`] writes for each row. ?2 to ?4 are what the rows become, and ?5 is the
/// limit. `$begin` is the time of the claim in the form of the column.
macro_rules! take {
    ($begin:expr) => {
        sql!({listed!()} "
UPDATE t_resource_lock
SET lock_flag = 1, status = 'P', client_ip = ?2, holder = unhex(j.value ->> 1), end_time = NULL,
    begin_time = CASE WHEN j.value ->> 2 = 'same' THEN begin_time ELSE " {$begin} " END,
    claimed_at = CASE WHEN j.value ->> 2 = 'same' THEN begin_time ELSE " {$begin} " END,
    token = CASE WHEN j.value ->> 2 = 'same' THEN token ELSE max(token + 1, " now ") END,
    prior_token = CASE j.value ->> 2 WHEN 'same' THEN prior_token WHEN 'taken over' THEN ifnull(iif(holder = zeroblob(16) AND claimed_at = begin_time, prior_token, NULL), token) END,
    prior_client_ip = CASE WHEN j.value ->> 2 = 'same' THEN prior_client_ip ELSE client_ip END,
    prior_status = CASE WHEN j.value ->> 2 = 'same' THEN prior_status ELSE status END,
    prior_begin_time = CASE WHEN j.value ->> 2 = 'same' THEN prior_begin_time ELSE begin_time END,
    prior_end_time = CASE WHEN j.value ->> 2 = 'same' THEN prior_end_time ELSE end_time END,
    expires_at = max(CASE WHEN j.value ->> 2 = 'same' THEN ifnull(expires_at, 0) ELSE 0 END, " now " + ?3)
FROM j
WHERE " {is_listed!("j.value ->> 0")} " AND token = j.value ->> 3
  AND COALESCE(lock_flag = 1, 0) = j.value ->> 4 AND holder IS unhex(j.value ->> 5)
  AND status IS CAST(unhex(j.value ->> 6) AS TEXT) AND " {as_micros!("begin_time")} " IS j.value ->> 7
  AND " {as_micros!("claimed_at")} " IS j.value ->> 8 AND expires_at IS j.value ->> 9
  AND (end_time IS NOT NULL) = j.value ->> 10 AND " now " <= ?5
RETURNING key_resource, token, prior_token, prior_client_ip")
    };
}

const TAKE: &str = take!(kept!("begin_time", sql!(now " + ?4")));
/// The same for a table that keeps times as integers.
const TAKE_MICROS: &str = take!(sql!(now " + ?4"));

/// The statements of many keys.
#[cfg(test)]
pub(super) const TEXTS: [&str; 3] = [TAKE, TAKE_MICROS, read_rows!()];

impl ClaimStore for Sqlite {
    async fn create(conn: &mut SqliteConnection, new: &[Key], minutes: i32, _: Duration, _: Form) -> Reply<()> {
        sqlx::query(CREATE).bind(keys(new)).bind(minutes).execute(conn).await.map(drop)
    }

    /// Claims the rows that the rules grant, for a single holder all of them or none. `limit` is
    /// the time, in microseconds, after which none is granted. `in_micros`: the table keeps times
    /// as integers, and the file is in WAL mode.
    async fn claim(
        conn: &mut SqliteConnection,
        requests: &[ClaimRequest],
        terms: &Terms,
        not_after: Option<DateTime<Utc>>,
        form: Form,
    ) -> Reply<Vec<ClaimReply>> {
        let (limit, in_micros) = (limit_micros(not_after), form == Form::IntegerTimes);
        let replies = match in_micros && free::is_likely(requests, terms) {
            true => free::claim(conn, requests, terms, limit).await?,
            false => None,
        };
        // The rules may grant a row that is locked: its lease has ended, or it is this holder's.
        // Beside claims that were granted, and are committed, such a request is left to a statement
        // of its own.
        let is_grantable = |(request, reply): (&ClaimRequest, &ClaimReply)| match reply {
            ClaimReply::Seen { row: Some(row), now } => {
                !matches!(judge(Some(row), *now, request.holder, terms), Verdict::Refuse(..))
            }
            _ => false,
        };
        let is_granted = |reply: &ClaimReply| matches!(reply, ClaimReply::Granted { .. });
        let is_enough = |replies: &Vec<ClaimReply>| {
            replies.iter().any(is_granted) || !requests.iter().zip(replies).any(is_grantable)
        };
        match replies.filter(is_enough) {
            Some(replies) => Ok(replies),
            None => claim_judged(conn, requests, terms, limit, in_micros).await,
        }
    }

    async fn look(conn: &mut SqliteConnection, requests: &[ClaimRequest], terms: &Terms) -> Reply<Vec<ClaimReply>> {
        let keys = keys(requests.iter().map(|request| &request.key));
        seen_each(&sqlx::query(read_rows!()).bind(keys).fetch_all(conn).await?, requests, terms)
    }
}

/// A row that was read, as the rules judge it.
struct Found {
    row: Row,
    now: DateTime<Utc>,
    /// What the compare-and-set expects, if the rules grant the row.
    grant: Option<String>,
}

impl Found {
    fn read(found: &SqliteRow, request: &ClaimRequest, terms: &Terms) -> Reply<Self> {
        let row = read(found, terms.offset())?;
        let now = found.time("now")?;
        let verdict = match judge(Some(&row), now, request.holder, terms) {
            Verdict::Acquire => Some("acquired"),
            Verdict::Same => Some("same"),
            Verdict::TakeOver => Some("taken over"),
            Verdict::Create | Verdict::Refuse(..) => None,
        };
        let grant = verdict.map(|verdict| expected(found, &row, request, verdict)).transpose()?;
        Ok(Self { row, now, grant })
    }

    fn is_grantable(found: &Option<Self>) -> bool {
        found.as_ref().is_some_and(|found| found.grant.is_some())
    }

    fn seen(found: Option<Self>) -> ClaimReply {
        let now = found.as_ref().map_or(DateTime::UNIX_EPOCH, |found| found.now);
        ClaimReply::Seen { row: found.map(|found| found.row), now }
    }
}

/// Names the key, its holder and the verdict, and then what was seen of the row.
fn expected(found: &SqliteRow, row: &Row, request: &ClaimRequest, verdict: &str) -> Reply<String> {
    let text = |text: Option<String>| text.map_or_else(|| "null".to_owned(), |text| format!("\"{text}\""));
    let time = |name| -> Reply<String> {
        let micros: Option<i64> = found.try_get(name)?;
        Ok(micros.map_or_else(|| "null".to_owned(), |micros| micros.to_string()))
    };
    Ok(format!(
        r#"["{}","{}","{verdict}",{},{},{},{},{},{},{},{}]"#,
        hex(request.key.as_str()),
        request.holder.as_uuid().simple(),
        row.token,
        u8::from(row.locked),
        text(row.holder.map(|holder| holder.simple().to_string())),
        text(found.try_get::<Option<&str>, _>("status")?.map(hex)),
        time("begin_time")?,
        time("claimed_at")?,
        time("expires_at")?,
        u8::from(row.ended),
    ))
}

/// Reads the rows, judges them, and writes those that the rules grant, for a single holder all of
/// them or none. If nothing can be granted, nothing is written. `in_micros`: the table keeps times
/// as integers.
async fn claim_judged(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
    limit: i64,
    in_micros: bool,
) -> Reply<Vec<ClaimReply>> {
    let apart = is_apart(requests);
    let (busy_timeout, mut found) = find(conn, requests, terms).await?;
    let worth_it = if apart { found.iter().any(Found::is_grantable) } else { found.iter().all(Found::is_grantable) };
    if !worth_it {
        let refused = |found| if Found::is_grantable(&found) { ClaimReply::Withheld } else { Found::seen(found) };
        return Ok(found.into_iter().map(refused).collect());
    }
    let take = Take {
        grants: json(found.iter_mut().flatten().filter_map(|found| found.grant.take())),
        of_a_set: (!apart && requests.len() > 1).then_some(requests.len()),
        busy_timeout,
        sql: if in_micros { TAKE_MICROS } else { TAKE },
        terms,
        limit,
    };
    let taken = match take.execute(conn).await {
        // Another connection writes. Requests that are refused still get the reason.
        Err(error) if apart && fault(&error) == Fault::Contention => HashMap::new(),
        // It was too late, or the rows have changed since they were judged.
        Ok(taken) if taken.is_empty() => return Sqlite::look(conn, requests, terms).await,
        taken => taken?,
    };
    let is_kept = take.is_kept(&taken);
    let reply = |(request, found): (&ClaimRequest, _)| match taken.get(request.key.as_str()) {
        Some(granted) if is_kept => granted.clone(),
        Some(_) => ClaimReply::Withheld,
        None => Found::seen(found),
    };
    Ok(requests.iter().zip(found).map(reply).collect())
}

/// Reads and judges the rows of the requests. Returns the connection's busy timeout too.
async fn find(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
) -> Reply<(i64, Vec<Option<Found>>)> {
    let keys = keys(requests.iter().map(|request| &request.key));
    let mut rows = sqlx::query(sql!("PRAGMA busy_timeout;" {read_rows!()})).bind(keys).fetch_all(conn).await?;
    let busy_timeout = rows.remove(0).try_get(0)?;
    let by_key = by_key(&rows)?;
    let found = |request: &ClaimRequest| {
        by_key.get(request.key.as_str()).map(|row| Found::read(row, request, terms)).transpose()
    };
    Ok((busy_timeout, requests.iter().map(found).collect::<Reply<_>>()?))
}

/// A compare-and-set of the rows that may be claimed.
struct Take<'a> {
    grants: String,
    /// How many keys a single holder asks for, if there are several.
    of_a_set: Option<usize>,
    /// The connection's own, in milliseconds.
    busy_timeout: i64,
    sql: &'static str,
    terms: &'a Terms,
    limit: i64,
}

impl Take<'_> {
    /// Returns the claims by key.
    async fn execute(&self, conn: &mut SqliteConnection) -> Reply<HashMap<String, ClaimReply>> {
        let taken = match self.of_a_set {
            None => self.briefly(self.sql, conn).await,
            Some(_) => self.set(conn).await,
        };
        if taken.is_err() {
            // A pragma takes no parameters.
            let restore = format!("PRAGMA busy_timeout = {}", self.busy_timeout);
            sqlx::raw_sql(AssertSqlSafe(restore)).execute(conn).await?;
        }
        taken
    }

    /// Claims in a transaction, which is rolled back unless every key was claimed.
    async fn set(&self, conn: &mut SqliteConnection) -> Reply<HashMap<String, ClaimReply>> {
        self.briefly("BEGIN IMMEDIATE", conn).await?;
        let mut taken = self.briefly(self.sql, conn).await;
        if taken.as_ref().is_ok_and(|taken| self.is_kept(taken)) {
            match self.briefly("COMMIT", conn).await {
                Ok(_) => return taken,
                // A COMMIT that fails leaves the transaction open.
                Err(error) => taken = Err(error),
            }
        }
        sqlx::raw_sql("ROLLBACK").execute(conn).await.map_err(unanswered)?;
        taken
    }

    fn is_kept(&self, taken: &HashMap<String, ClaimReply>) -> bool {
        self.of_a_set.is_none_or(|count| taken.len() == count)
    }

    /// Executes the statement, which waits for another connection's write for [`TRY_MILLIS`] at
    /// most. All rows are fetched: only at its end does SQLite commit, which may fail.
    async fn briefly(&self, sql: &str, conn: &mut SqliteConnection) -> Reply<HashMap<String, ClaimReply>> {
        let own = self.busy_timeout;
        let sql = format!("PRAGMA busy_timeout = {}; {sql}; PRAGMA busy_timeout = {own}", own.min(TRY_MILLIS));
        let query = sqlx::query(AssertSqlSafe(sql)).bind(&self.grants).bind(&self.terms.label);
        let query = query.bind(micros(self.terms.lease)).bind(micros(self.terms.offset()));
        let rows = query.bind(self.limit).fetch_all(conn).await?;
        rows.iter().filter(|row| row.len() > 1).map(granted).collect()
    }
}

fn granted(row: &SqliteRow) -> Reply<(String, ClaimReply)> {
    let granted = ClaimReply::Granted { token: Token::new(row.number("token")?), prior: previous(row)? };
    Ok((row.text("key_resource")?, granted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        key::Holder,
        store::sqlite::for_tests::{execute, request, tables},
    };

    /// A takeover after each change that another statement may make after the row was judged.
    #[tokio::test]
    async fn a_row_that_has_changed_since_it_was_judged_is_not_claimed() {
        let changes = [
            ("", true),
            ("client_ip = 'another'", true),
            ("token = token + 1", false),
            ("lock_flag = 0", false),
            ("holder = NULL", false),
            ("status = 'F'", false),
            ("begin_time = begin_time + 1000000", false),
            ("claimed_at = NULL", false),
            ("expires_at = expires_at + 1", false),
            ("end_time = begin_time", false),
        ];
        let terms = Terms::default();
        let request = || [request("k", Holder::unique())];
        for (change, is_claimed) in changes {
            let mut conn = tables().await;
            let [ClaimRequest { key, .. }] = request();
            Sqlite::create(&mut conn, &[key], 0, Duration::ZERO, Form::Common).await.unwrap();
            Sqlite::claim(&mut conn, &request(), &terms, None, Form::Common).await.unwrap();
            execute(&mut conn, "UPDATE t_resource_lock SET expires_at = 1").await;
            let (busy_timeout, mut found) = find(&mut conn, &request(), &terms).await.unwrap();
            if !change.is_empty() {
                execute(&mut conn, &format!("UPDATE t_resource_lock SET {change}")).await;
            }
            let grants = json(found.iter_mut().flatten().filter_map(|found| found.grant.take()));
            assert_ne!(grants, "[]", "it may be taken over");
            let take = Take { grants, of_a_set: None, busy_timeout, sql: TAKE, terms: &terms, limit: i64::MAX };
            assert_eq!(take.execute(&mut conn).await.unwrap().contains_key("k"), is_claimed, "{change}");
        }
    }
}
