//! MySQL 8.0 and MariaDB 10.6, and later. Times are UTC whatever the session's time zone is.

use std::{
    collections::{HashMap, HashSet},
    sync::LazyLock,
    time::Duration,
};

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _, mysql::MySqlRow};
use uuid::Uuid;

use super::{
    Answer, Ask, Change, Confirmed, INTACT, Outcome, Reply, Sighting, Store, is_refused, put_back, to_utc, unanswered,
    unconfirmed, unmatched,
};
use crate::{
    fault::refuses_commit,
    key::{Claim, Key, Prior, Token},
    rules::{Row, Rules, Terms, Verdict, judge},
};

/// The clock for tokens: SYSDATE is read when the row is locked (UTC_TIMESTAMP is the statement's start), and is
/// brought from the session's time zone to UTC.
pub(super) const MICROS: &str =
    "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6)) + TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6))";

/// Set in the last insert id of a claim that took over: a look at the row then tells from whom.
const TOOK_OVER: u64 = 1 << 63;

/// The derived table locks and judges (the granting half of `rules.rs`), the update takes. Without LIMIT, MySQL would
/// merge the two, lock first and wait. The token travels in the reply, as the last insert id. Distances are never added
/// to the row's times, which may be any: an overflow would be an error here.
static CLAIM: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
UPDATE (
    SELECT c.key_resource, c.token, c.client_ip, c.prior_token, c.prior_client_ip, UTC_TIMESTAMP(6) AS now, {MICROS} AS micros,
        CASE WHEN c.lock_flag = 1 AND c.holder = ? AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN 'same'
             WHEN NOT ? AND UTC_TIMESTAMP(6) < c.queued_until THEN NULL
             WHEN c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN
                 CASE WHEN ? AND UTC_TIMESTAMP(6) >= c.expires_at THEN 'taken over' END
             WHEN c.lock_flag = 1 THEN
                 CASE WHEN ? AND TIMESTAMPDIFF(MICROSECOND, c.begin_time, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND) >= LEAST(c.time, 2147483647) * 60000000 THEN 'taken over' END
             WHEN (? OR CAST(c.status AS BINARY) = 'S') AND (c.begin_time IS NULL OR ? OR (CAST(c.status AS BINARY) = 'F' AND ?)
                 OR UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND - INTERVAL ? MICROSECOND >= c.begin_time) THEN 'acquired'
        END AS verdict
    FROM t_resource_lock c WHERE c.key_resource = ? LIMIT 1 FOR UPDATE SKIP LOCKED
) j STRAIGHT_JOIN t_resource_lock t ON t.key_resource = j.key_resource
SET t.lock_flag = 1, t.status = 'P', t.client_ip = ?, t.holder = ?, t.end_time = NULL,
    t.begin_time = IF(j.verdict = 'same', t.begin_time, j.now + INTERVAL ? MICROSECOND),
    t.claimed_at = IF(j.verdict = 'same', t.claimed_at, j.now + INTERVAL ? MICROSECOND),
    t.prior_token = CASE j.verdict WHEN 'same' THEN j.prior_token WHEN 'taken over' THEN j.token END,
    t.prior_client_ip = CASE j.verdict WHEN 'same' THEN j.prior_client_ip WHEN 'taken over' THEN LEFT(j.client_ip, 45) END,
    t.expires_at = j.now + INTERVAL ? MICROSECOND,
    t.token = LAST_INSERT_ID(
        IF(j.verdict = 'same', j.token, GREATEST(j.token + 1, j.micros))
        | IF(j.verdict = 'taken over' OR (j.verdict = 'same' AND j.prior_token IS NOT NULL), {TOOK_OVER}, 0)
    ) & {}
WHERE j.verdict IS NOT NULL",
        !TOOK_OVER
    )
});

/// A row as `rules::Row` has it, and the time. No zero dates, which the driver cannot read.
pub(super) const ROW: &str = "
CAST(COALESCE(lock_flag = 1, 0) AS SIGNED) AS locked, CONVERT(status USING utf8mb4) AS status, CAST(time AS SIGNED) AS minutes,
IF(begin_time >= '1000-01-01', begin_time, NULL) AS begin_time, IF(end_time >= '1000-01-01', end_time, NULL) AS end_time,
CONVERT(client_ip USING utf8mb4) AS client_ip, holder, token, expires_at, claimed_at, queued_until, end_time IS NOT NULL AS ended, UTC_TIMESTAMP(6) AS now";

static LOOK: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT {ROW}, prior_token, CONVERT(prior_client_ip USING utf8mb4) AS prior_client_ip FROM t_resource_lock WHERE key_resource = ?"
    )
});

/// Not INSERT IGNORE, which hides errors, and deadlocks.
fn create_statement(rows: usize) -> String {
    let rows = vec!["(?, 'S', 0, '1970-01-01', '', ?, 0, 0)"; rows].join(", ");
    format!(
        "INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
         VALUES {rows} ON DUPLICATE KEY UPDATE key_resource = key_resource"
    )
}

/// Claims a statement names, as (key, ...) and ((holder, token), ...): sizes are powers of two, the last claim
/// repeated, so that few statements are ever prepared.
struct Named<'a>(Vec<&'a Claim>);

impl<'a> Named<'a> {
    fn new(claims: &'a [Claim]) -> Self {
        let padding = claims.len().next_power_of_two() - claims.len();
        Self(claims.iter().chain(std::iter::repeat_n(claims.last(), padding).flatten()).collect())
    }

    fn keys(&self) -> String {
        let mut marks = "?, ".repeat(self.0.len());
        marks.truncate(marks.len().saturating_sub(2));
        marks
    }

    fn claims(&self) -> String {
        let mut marks = "(?, ?), ".repeat(self.0.len());
        marks.truncate(marks.len().saturating_sub(2));
        marks
    }
}

/// The lock waits for a transaction whose COMMIT was not answered. A change and no look: a node of a cluster that is behind would
/// show the row as it was before that COMMIT, but lets no change of such a row through.
const CONFIRMS: &str = "
UPDATE t_resource_lock SET confirms = LAST_INSERT_ID(confirms), expires_at = expires_at + INTERVAL 1 MICROSECOND
WHERE key_resource = ? AND holder = ? AND token = ? AND lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL";

type Query<'q> = sqlx::query::Query<'q, MySql, sqlx::mysql::MySqlArguments>;

/// Locks the rows of these claims that stand.
fn ours(named: &Named<'_>) -> String {
    let (keys, claims) = (named.keys(), named.claims());
    format!(
        "
    SELECT c.key_resource, c.token FROM t_resource_lock c FORCE INDEX (PRIMARY)
    WHERE c.key_resource IN ({keys}) AND (c.holder, c.token) IN ({claims}) AND c.lock_flag = 1 AND c.claimed_at = c.begin_time AND c.end_time IS NULL
    LIMIT 1000000 FOR UPDATE SKIP LOCKED"
    )
}

fn change_statement(named: &Named<'_>, set: &str) -> String {
    let ours = ours(named);
    format!("UPDATE ({ours}) j STRAIGHT_JOIN t_resource_lock t ON t.key_resource = j.key_resource SET {set}")
}

fn bind_keys<'q>(query: Query<'q>, named: &Named<'_>) -> Query<'q> {
    named.0.iter().fold(query, |query, claim| query.bind(claim.key.as_str().to_owned()))
}

fn bind_claims<'q>(query: Query<'q>, named: &Named<'_>) -> Query<'q> {
    let query = bind_keys(query, named);
    named.0.iter().fold(query, |query, claim| query.bind(*claim.holder.as_uuid()).bind(claim.token.get()))
}

impl Store for MySql {
    const OPEN: &'static str = "BEGIN; SAVEPOINT rowlock";

    /// The server ends a wait by itself, after `innodb_lock_wait_timeout`.
    async fn create(conn: &mut MySqlConnection, keys: &[Key], minutes: i32, _: Duration) -> Reply<()> {
        let query = sqlx::query(AssertSqlSafe(create_statement(keys.len())));
        let query = keys.iter().fold(query, |query, key| query.bind(key.as_str().to_owned()).bind(minutes));
        query.execute(conn).await.map(drop)
    }

    async fn claim(conn: &mut MySqlConnection, asks: &[Ask], terms: &Terms) -> Reply<Vec<Answer>> {
        match asks {
            [ask] if ask.waited => Ok(vec![look_and_claim(conn, ask, terms).await?]),
            [ask] => Ok(vec![claim_one(conn, ask, terms).await?]),
            _ => claim_together(conn, asks, terms).await,
        }
    }

    async fn confirm(conn: &mut MySqlConnection, claim: &Claim) -> Reply<Confirmed> {
        let named = Named::new(std::slice::from_ref(claim));
        // The count travels in the reply, as the last insert id.
        let sql = change_statement(&named, "t.confirms = LAST_INSERT_ID(t.confirms + 1)");
        let query = bind_claims(sqlx::query(AssertSqlSafe(sql)), &named);
        let reply = query.execute(&mut *conn).await?;
        if reply.rows_affected() > 0 {
            return Ok(Confirmed::Done(i64::try_from(reply.last_insert_id()).unwrap_or_default()));
        }
        let seen = sightings(conn, &named).await?;
        Ok(unconfirmed(claim, seen.get(claim.key.as_str()).copied()))
    }

    async fn intact(conn: &mut MySqlConnection) -> Reply<()> {
        sqlx::raw_sql(INTACT).execute(conn).await.map(drop)
    }

    async fn confirms(conn: &mut MySqlConnection, claim: &Claim) -> Reply<Option<i64>> {
        let query = sqlx::query(CONFIRMS).bind(claim.key.as_str());
        let reply = query.bind(*claim.holder.as_uuid()).bind(claim.token.get()).execute(conn).await?;
        Ok((reply.rows_affected() > 0).then(|| i64::try_from(reply.last_insert_id()).unwrap_or_default()))
    }

    async fn change(
        conn: &mut MySqlConnection,
        claims: &[Claim],
        change: Change,
        terms: &Terms,
    ) -> Reply<Vec<Outcome>> {
        // Its rows stay as they are for us to see.
        if claims.len() == 1 || matches!(change, Change::Renew(_)) {
            return change_at_once(conn, claims, change, terms).await;
        }
        sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
        match change_those_found(conn, claims, change, terms).await {
            Ok(outcomes) => commit(conn).await.map(|()| outcomes),
            Err(error) => {
                sqlx::raw_sql("ROLLBACK").execute(conn).await.map_err(unanswered)?;
                Err(error)
            }
        }
    }
}

/// One statement. It reports only how many rows there were: a look tells which, of rows that nobody can have taken meanwhile.
async fn change_at_once(
    conn: &mut MySqlConnection,
    claims: &[Claim],
    change: Change,
    terms: &Terms,
) -> Reply<Vec<Outcome>> {
    let named = Named::new(claims);
    let matched = send_change(conn, &named, change, terms).await?;
    if usize::try_from(matched).is_ok_and(|matched| matched == claims.len()) {
        return Ok(vec![Outcome::Done; claims.len()]);
    }
    let seen = sightings(conn, &named).await?;
    Ok(claims.iter().map(|claim| unmatched(change, claim, seen.get(claim.key.as_str()).copied())).collect())
}

/// What one statement frees somebody may take before a look: so the rows are locked and named first, and freed then.
async fn change_those_found(
    conn: &mut MySqlConnection,
    claims: &[Claim],
    change: Change,
    terms: &Terms,
) -> Reply<Vec<Outcome>> {
    let named = Named::new(claims);
    let sql = format!("SELECT CONVERT(f.key_resource USING utf8mb4), f.token FROM ({}) f", ours(&named));
    let found = bind_claims(sqlx::query(AssertSqlSafe(sql)), &named).fetch_all(&mut *conn).await?;
    let found =
        found.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Reply<HashSet<(String, i64)>>>()?;
    if !found.is_empty() {
        send_change(conn, &named, change, terms).await?;
    }
    let seen = if found.len() < claims.len() { sightings(conn, &named).await? } else { HashMap::new() };
    let outcome = |claim: &Claim| match (claim.key.as_str().to_owned(), claim.token.get()) {
        named if found.contains(&named) => Outcome::Done,
        (key, _) => unmatched(change, claim, seen.get(&key).copied()),
    };
    Ok(claims.iter().map(outcome).collect())
}

async fn send_change(conn: &mut MySqlConnection, named: &Named<'_>, change: Change, terms: &Terms) -> Reply<u64> {
    let sql = change_statement(
        named,
        match change {
            Change::Renew(_) => "t.expires_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND",
            Change::Release(_) => {
                "t.lock_flag = 0, t.status = ?, t.end_time = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, t.holder = NULL,
                     t.expires_at = NULL, t.claimed_at = NULL, t.prior_token = NULL, t.prior_client_ip = NULL"
            }
            Change::Abandon => "t.expires_at = LEAST(t.expires_at, UTC_TIMESTAMP(6))",
        },
    );
    let query = bind_claims(sqlx::query(AssertSqlSafe(sql)), named);
    let query = match change {
        Change::Renew(lease) => query.bind(micros(lease)),
        Change::Release(status) => query.bind(status.letter()).bind(micros(terms.offset())),
        Change::Abandon => query,
    };
    Ok(query.execute(conn).await?.rows_affected())
}

async fn commit(conn: &mut MySqlConnection) -> Reply<()> {
    let committed = sqlx::raw_sql("COMMIT").execute(conn).await;
    // After other errors it may be there: what was sent is asked for again.
    committed.map(drop).map_err(|error| if refuses_commit(&error) { error } else { unanswered(error) })
}

/// Whoever waits is refused most of the time, and a look alone tells why.
async fn look_and_claim(conn: &mut MySqlConnection, ask: &Ask, terms: &Terms) -> Reply<Answer> {
    if let Some(row) = sqlx::query(LOOK.as_str()).bind(ask.key.as_str()).fetch_optional(&mut *conn).await? {
        let (row, now) = read(&row, terms)?;
        if let Verdict::Refuse(..) | Verdict::Queue = judge(Some(&row), now, ask.holder, ask.in_turn, terms) {
            return Ok(Answer::Seen { row: Some(row), now });
        }
    }
    claim_one(conn, ask, terms).await
}

async fn claim_one(conn: &mut MySqlConnection, ask: &Ask, terms: &Terms) -> Reply<Answer> {
    let (key, holder) = (ask.key.as_str(), *ask.holder.as_uuid());
    let recover = terms.rules == Rules::Recover;
    let offset = micros(terms.offset());
    let reply = sqlx::query(CLAIM.as_str())
        .bind(holder)
        .bind(ask.in_turn)
        .bind(recover)
        .bind(recover && terms.article_clients.is_some())
        .bind(offset)
        .bind(recover)
        .bind(terms.once_per.is_zero())
        .bind(terms.retry_failed)
        .bind(offset)
        .bind(micros(terms.once_per))
        .bind(key)
        .bind(&terms.label)
        .bind(holder)
        .bind(offset)
        .bind(offset)
        .bind(micros(terms.lease))
        .execute(&mut *conn)
        .await?;
    let receipt = reply.last_insert_id();
    let granted = reply.rows_affected() > 0;
    let token = Token::new(i64::try_from(receipt & !TOOK_OVER).unwrap_or_default());
    if granted && receipt & TOOK_OVER == 0 {
        return Ok(Answer::Granted { token, prior: None });
    }
    let row = sqlx::query(LOOK.as_str()).bind(key).fetch_optional(conn).await;
    // Granted, and the look failed: reported as a lost reply, so that the same holder asks again.
    let row = if granted { row.map_err(unanswered)? } else { row? };
    if granted {
        let prior = row.map(|row| prior(&row, holder)).transpose()?.flatten();
        return Ok(Answer::Granted { token, prior });
    }
    let Some(row) = row else { return Ok(Answer::Seen { row: None, now: DateTime::UNIX_EPOCH }) };
    let (row, now) = read(&row, terms)?;
    Ok(Answer::Seen { row: Some(row), now })
}

/// All in one transaction, which is rolled back at the first that cannot be had. No claim waits for a row, so none deadlocks.
async fn claim_together(conn: &mut MySqlConnection, asks: &[Ask], terms: &Terms) -> Reply<Vec<Answer>> {
    sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
    let claimed = claim_each(conn, asks, terms).await;
    if claimed.as_ref().is_ok_and(|answers| !is_refused(answers)) {
        commit(conn).await?;
        return claimed;
    }
    sqlx::raw_sql("ROLLBACK").execute(conn).await.map_err(unanswered)?;
    claimed.map(|answers| put_back(answers, asks.len()))
}

/// Up to the first that is refused.
async fn claim_each(conn: &mut MySqlConnection, asks: &[Ask], terms: &Terms) -> Reply<Vec<Answer>> {
    let mut answers = Vec::with_capacity(asks.len());
    for ask in asks {
        answers.push(claim_one(conn, ask, terms).await?);
        if is_refused(&answers) {
            break;
        }
    }
    Ok(answers)
}

/// Whom the claim took over from, unless it is lost by now.
fn prior(row: &MySqlRow, holder: Uuid) -> Reply<Option<Prior>> {
    if row.try_get::<Option<Uuid>, _>("holder")? != Some(holder) {
        return Ok(None);
    }
    let token: Option<i64> = row.try_get("prior_token")?;
    let label: Option<String> = row.try_get("prior_client_ip")?;
    Ok(token.map(|token| Prior { token: Token::new(token), label: label.unwrap_or_default() }))
}

/// Reads the columns of `ROW`.
pub(super) fn read(row: &MySqlRow, terms: &Terms) -> Reply<(Row, DateTime<Utc>)> {
    let time = |name| -> Reply<Option<DateTime<Utc>>> {
        Ok(row.try_get::<Option<NaiveDateTime>, _>(name)?.map(|time| time.and_utc()))
    };
    let utc = |name| -> Reply<Option<DateTime<Utc>>> { Ok(time(name)?.map(|time| to_utc(time, terms.offset()))) };
    let read = Row {
        locked: row.try_get::<i64, _>("locked")? == 1,
        status: row.try_get::<Option<String>, _>("status")?.unwrap_or_default(),
        begin_time: utc("begin_time")?,
        minutes: row.try_get("minutes")?,
        client_ip: row.try_get::<Option<String>, _>("client_ip")?.unwrap_or_default(),
        holder: row.try_get("holder")?,
        token: row.try_get("token")?,
        expires_at: time("expires_at")?,
        claimed_at: utc("claimed_at")?,
        ended: row.try_get("ended")?,
        queued_until: time("queued_until")?,
        awaited: false,
    };
    Ok((read, time("now")?.unwrap_or_default()))
}

async fn sightings(conn: &mut MySqlConnection, named: &Named<'_>) -> Reply<HashMap<String, Sighting>> {
    let sql = format!(
        "SELECT CONVERT(key_resource USING utf8mb4) AS name, holder, token, CAST(COALESCE(lock_flag = 1, 0) AS SIGNED) AS locked,
                CAST(COALESCE(lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL, 0) AS SIGNED) AS stands,
                COALESCE(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at), 0) AS left_micros
         FROM t_resource_lock WHERE key_resource IN ({})",
        named.keys()
    );
    let rows = bind_keys(sqlx::query(AssertSqlSafe(sql)), named).fetch_all(conn).await?;
    let mut sightings = HashMap::with_capacity(rows.len());
    for row in &rows {
        let sighting = Sighting {
            holder: row.try_get("holder")?,
            token: row.try_get("token")?,
            locked: row.try_get::<i64, _>("locked")? == 1,
            stands: row.try_get::<i64, _>("stands")? == 1,
            left: TimeDelta::microseconds(row.try_get("left_micros")?),
        };
        sightings.insert(row.try_get::<String, _>("name")?, sighting);
    }
    Ok(sightings)
}

pub(super) fn micros(time: TimeDelta) -> i64 {
    time.num_microseconds().unwrap_or(i64::MAX)
}
