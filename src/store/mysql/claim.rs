//! Claims: the granting half of the rules (`rules.rs`), as one statement; and the creation of the
//! rows of keys that come for the first time.

use std::{iter, sync::LazyLock, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _, SqlSafeStr as _, mysql::MySqlRow};
use uuid::Uuid;

use crate::store::mysql::row::{
    IN_TIME, JOINED, MICROS, NOW, NOWAIT, Query, execute_nowait_first, is_mariadb, marks, micros, padded, read,
};
use crate::{
    key::{Key, PreviousClaim, Token},
    rules::{Rules, Terms, Verdict, judge},
    store::{
        ClaimReply, ClaimRequest, ClaimStore, Form, Reply, hex, is_apart, limit_micros,
        stored_row::{StoredRow as _, by_key, previous, seen, seen_each},
        transaction, unanswered,
    },
};

/// The times that the row keeps in case the claim is put back. A zero date, which a strict server
/// does not write, is treated as NULL.
const BEGAN: &str = "IF(c.begin_time >= '1000-01-01', c.begin_time, NULL)";
const ENDED: &str = "IF(c.end_time >= '1000-01-01', c.end_time, NULL)";

/// The token of the claim that a takeover reports.
const PRIOR: &str =
    "COALESCE(IF(c.holder = REPEAT(x'00', 16) AND c.claimed_at = c.begin_time, c.prior_token, NULL), c.token)";

/// Builds the condition that an earlier request of `asker` was granted.
fn same(asker: &str) -> String {
    format!("c.lock_flag = 1 AND c.holder = {asker} AND c.claimed_at = c.begin_time AND c.end_time IS NULL")
}

/// Builds the granting half of the rules table (`rules.rs`), over a row `c` that `asker` requests;
/// [`bind_rules`] binds its parameters. Intervals are never added to the row's times, which may
/// have any value: an overflow would be an error here.
fn verdict(asker: &str) -> String {
    let same = same(asker);
    format!(
        "
        CASE WHEN {same} THEN 'same'
             WHEN c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN
                 CASE WHEN ? AND UTC_TIMESTAMP(6) >= c.expires_at THEN 'taken over' END
             WHEN c.lock_flag = 1 THEN
                 CASE WHEN ? AND TIMESTAMPDIFF(MICROSECOND, c.begin_time, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND) >= LEAST(c.time, 2147483647) * 60000000 THEN 'taken over' END
             WHEN (? OR CAST(c.status AS BINARY) = 'S') AND (c.begin_time IS NULL OR ? OR (CAST(c.status AS BINARY) = 'F' AND ?)
                 OR UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND - INTERVAL ? MICROSECOND >= c.begin_time) THEN 'acquired'
        END"
    )
}

/// Set in the last insert id of a claim that took over. A read of the row then shows the previous
/// claim.
const TOOK_OVER: u64 = 1 << 63;

/// Claims one key. The reply carries the token, as the last insert id. The derived table locks and
/// judges, the update takes. Without LIMIT, MySQL would merge the two, lock first and wait.
static CLAIM: LazyLock<String> = LazyLock::new(|| {
    let took_over = "j.verdict = 'taken over' OR (j.verdict = 'same' AND j.prior_token IS NOT NULL)";
    let token = token("j.verdict = 'same'", "j", "j.micros", took_over);
    format!(
        "
UPDATE (
    SELECT c.key_resource, c.token, {PRIOR} AS prior, c.status, {BEGAN} AS began, {ENDED} AS ended, c.client_ip, c.prior_token, c.prior_status,
           c.prior_begin_time, c.prior_end_time, c.prior_client_ip, UTC_TIMESTAMP(6) AS now, {MICROS} AS micros, {} AS verdict
    FROM t_resource_lock c WHERE c.key_resource = ? LIMIT 1 FOR UPDATE SKIP LOCKED
) j {JOINED}
SET t.lock_flag = 1, t.status = 'P', t.client_ip = ?, t.holder = ?, t.end_time = NULL,
    t.begin_time = IF(j.verdict = 'same', t.begin_time, j.now + INTERVAL ? MICROSECOND),
    t.claimed_at = IF(j.verdict = 'same', t.claimed_at, j.now + INTERVAL ? MICROSECOND),
    t.prior_token = CASE j.verdict WHEN 'same' THEN j.prior_token WHEN 'taken over' THEN j.prior END,
    t.prior_client_ip = IF(j.verdict = 'same', j.prior_client_ip, LEFT(j.client_ip, 45)),
    t.prior_status = IF(j.verdict = 'same', j.prior_status, j.status),
    t.prior_begin_time = IF(j.verdict = 'same', j.prior_begin_time, j.began),
    t.prior_end_time = IF(j.verdict = 'same', j.prior_end_time, j.ended),
    t.expires_at = GREATEST(IF(j.verdict = 'same', IFNULL(t.expires_at, j.now), j.now), {NOW} + INTERVAL ? MICROSECOND),
    t.token = {token}
WHERE j.verdict IS NOT NULL AND {IN_TIME}",
        verdict("?")
    )
});

/// The same on MariaDB. SIMULTANEOUS_ASSIGNMENT decides whether an assignment sees the values of
/// those before it; in this order, the result is the same.
static CLAIM_NOWAIT: LazyLock<String> = LazyLock::new(|| {
    let same = same("?");
    let took_over = format!("IF({same}, c.prior_token IS NOT NULL, c.lock_flag = 1)");
    let token = token(&same, "c", MICROS, &took_over);
    format!(
        "
{NOWAIT} UPDATE t_resource_lock c FORCE INDEX (PRIMARY)
SET c.prior_token = CASE WHEN {same} THEN c.prior_token WHEN c.lock_flag = 1 THEN {PRIOR} END,
    c.prior_client_ip = IF({same}, c.prior_client_ip, LEFT(c.client_ip, 45)),
    c.prior_status = IF({same}, c.prior_status, c.status),
    c.prior_begin_time = IF({same}, c.prior_begin_time, {BEGAN}),
    c.prior_end_time = IF({same}, c.prior_end_time, {ENDED}),
    c.token = {token},
    c.claimed_at = IF({same}, c.claimed_at, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND),
    c.begin_time = IF({same}, c.begin_time, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND),
    c.expires_at = GREATEST(IF({same}, IFNULL(c.expires_at, UTC_TIMESTAMP(6)), UTC_TIMESTAMP(6)), {NOW} + INTERVAL ? MICROSECOND),
    c.lock_flag = 1, c.status = 'P', c.client_ip = ?, c.holder = ?, c.end_time = NULL
WHERE c.key_resource = ? AND {} IS NOT NULL AND {IN_TIME}",
        verdict("?")
    )
});

/// Builds the token of a claim on the row, with [`TOOK_OVER`] in the reply.
fn token(same: &str, row: &str, micros: &str, took_over: &str) -> String {
    let token = format!("IF({same}, {row}.token, GREATEST({row}.token + 1, {micros}))");
    format!("LAST_INSERT_ID({token} | IF({took_over}, {TOOK_OVER}, 0)) & {}", !TOOK_OVER)
}

const BEGIN: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// Builds the claim of several keys, all different. It grants those that are free and whose tokens
/// are below the clock. The statement's start time is the token of all of them, and the reply
/// carries it. (The statement does not wait: between its start and its locks, no row ends one claim
/// and begins another.)
fn claim_several_statement(count: usize) -> String {
    let (asker, free) = (asker_of_several(count), free_of_several(count));
    let take = take_several("j.asker", ["j.was", "j.began", "j.ended", "j.label"]);
    format!(
        "
UPDATE (
    SELECT c.key_resource, {asker} AS asker, c.status AS was, {BEGAN} AS began, {ENDED} AS ended, c.client_ip AS label
    FROM t_resource_lock c FORCE INDEX (PRIMARY) WHERE {free} LIMIT 1000000 FOR UPDATE SKIP LOCKED
) j {JOINED} SET {take} WHERE {IN_TIME}"
    )
}

/// Builds the same claim for MariaDB. It grants nothing if one of the rows is locked.
fn claim_several_nowait_statement(count: usize) -> String {
    let before = ["c.status", BEGAN, ENDED, "c.client_ip"];
    let (free, take) = (free_of_several(count), take_several(&asker_of_several(count), before));
    format!("{NOWAIT} UPDATE t_resource_lock c FORCE INDEX (PRIMARY) SET {take} WHERE {free} AND {IN_TIME}")
}

fn asker_of_several(count: usize) -> String {
    let keys = marks("?", count);
    format!("UNHEX(ELT(FIELD(c.key_resource, {keys}), {keys}))")
}

fn free_of_several(count: usize) -> String {
    let (keys, verdict) = (marks("?", count), verdict("NULL"));
    format!("c.key_resource IN ({keys}) AND c.token < {BEGIN} AND {verdict} = 'acquired'")
}

/// The previous values are saved first: on MariaDB, an assignment may see the values of those
/// before it.
fn take_several(asker: &str, [status, begin_time, end_time, client_ip]: [&str; 4]) -> String {
    format!(
        "prior_token = NULL, prior_status = {status}, prior_begin_time = {begin_time}, prior_end_time = {end_time},
    prior_client_ip = LEFT({client_ip}, 45), lock_flag = 1, status = 'P', end_time = NULL, token = LAST_INSERT_ID({BEGIN}),
    client_ip = ?, begin_time = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, claimed_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND,
    expires_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, holder = {asker}"
    )
}

fn bind_rules<'q>(query: Query<'q>, terms: &Terms) -> Query<'q> {
    let (recover, offset) = (terms.rules == Rules::Recover, micros(terms.offset()));
    query
        .bind(recover)
        .bind(recover && terms.article_clients.is_some())
        .bind(offset)
        .bind(recover)
        .bind(terms.min_interval.is_zero())
        .bind(terms.retry_failed)
        .bind(offset)
        .bind(micros(terms.min_interval))
}

fn bind_times<'q>(query: Query<'q>, terms: &Terms) -> Query<'q> {
    let offset = micros(terms.offset());
    query.bind(offset).bind(offset).bind(micros(terms.lease))
}

/// What the statements of a claim share.
#[derive(Clone, Copy)]
struct Asked<'a> {
    terms: &'a Terms,
    /// The time after which nothing is granted.
    limit: i64,
    /// The server is MariaDB.
    nowait: bool,
}

fn bind_claim<'q>(request: &'q ClaimRequest, Asked { terms, limit, .. }: Asked<'q>) -> Query<'q> {
    let (key, holder) = (request.key.as_str(), *request.holder.as_uuid());
    let query = bind_rules(sqlx::query(CLAIM.as_str()).bind(holder), terms).bind(key);
    bind_times(query.bind(&terms.label).bind(holder), terms).bind(limit)
}

fn bind_claim_nowait<'q>(request: &'q ClaimRequest, Asked { terms, limit, .. }: Asked<'q>) -> Query<'q> {
    let (key, holder, offset) = (request.key.as_str(), *request.holder.as_uuid(), micros(terms.offset()));
    let query = (0..8).fold(sqlx::query(CLAIM_NOWAIT.as_str()), |query, _| query.bind(holder));
    let query = query.bind(offset).bind(holder).bind(offset).bind(holder).bind(micros(terms.lease));
    bind_rules(query.bind(&terms.label).bind(holder).bind(key).bind(holder), terms).bind(limit)
}

/// Claims one key. A request that has waited is refused most of the time, and a read alone gives
/// the reason.
async fn claim_one(conn: &mut MySqlConnection, request: &ClaimRequest, asked: Asked<'_>) -> Reply<ClaimReply> {
    if request.waited {
        let seen = look_at(conn, request, asked.terms).await?;
        if let ClaimReply::Seen { row: Some(row), now } = &seen
            && let Verdict::Refuse(..) = judge(Some(row), *now, request.holder, asked.terms)
        {
            return Ok(seen);
        }
    }
    match grant_one(conn, request, asked).await? {
        Some(granted) => Ok(granted),
        None => look_at(conn, request, asked.terms).await,
    }
}

/// Claims the key. Returns `None` if it was not granted.
async fn grant_one(conn: &mut MySqlConnection, request: &ClaimRequest, asked: Asked<'_>) -> Reply<Option<ClaimReply>> {
    let nowait = asked.nowait.then(|| bind_claim_nowait(request, asked));
    let reply = execute_nowait_first(conn, nowait, || bind_claim(request, asked)).await?;
    if reply.rows_affected() == 0 {
        return Ok(None);
    }
    let confirmation = reply.last_insert_id();
    // A trigger of the application that writes hides the id. The row holds the token too.
    let token = (confirmation != 0).then(|| Token::new(i64::try_from(confirmation & !TOOK_OVER).unwrap_or_default()));
    if let (0, Some(token)) = (confirmation & TOOK_OVER, token) {
        return Ok(Some(ClaimReply::Granted { token, prior: None }));
    }
    // If the read fails, the grant is reported as a lost reply, so that the same holder claims
    // again.
    let rows = read(conn, iter::once(&request.key), "").await.map_err(unanswered)?;
    let held = rows.first().map(|row| held(row, *request.holder.as_uuid())).transpose()?.flatten();
    // The claim may have been lost since, and its token is then unknown.
    let token = token.or(held.as_ref().map(|held| held.0)).ok_or_else(|| unanswered(sqlx::Error::RowNotFound))?;
    Ok(Some(ClaimReply::Granted { token, prior: held.and_then(|held| held.1) }))
}

/// Reads the reason why a key is not granted.
async fn look_at(conn: &mut MySqlConnection, request: &ClaimRequest, terms: &Terms) -> Reply<ClaimReply> {
    let rows = read(conn, iter::once(&request.key), "").await?;
    seen(rows.first(), terms)
}

/// Claims for independent holders: all keys that are free, in one statement. A takeover requires a
/// claim of its own. If not all were granted, a read shows which.
async fn claim_apart(
    conn: &mut MySqlConnection,
    requests: &[ClaimRequest],
    asked: Asked<'_>,
) -> Reply<Vec<ClaimReply>> {
    let named = padded(requests);
    let nowait = asked.nowait.then(|| bind_several_nowait(&named, asked));
    let reply = execute_nowait_first(conn, nowait, || bind_several(&named, asked)).await?;
    let rows = reply.rows_affected();
    // A trigger of the application that writes hides the id. The rows hold the token too.
    let token = i64::try_from(reply.last_insert_id()).ok().filter(|token| *token > 0);
    let all = usize::try_from(rows).is_ok_and(|rows| rows == requests.len());
    if let (true, Some(token)) = (all, token) {
        return Ok(vec![ClaimReply::Granted { token: Token::new(token), prior: None }; requests.len()]);
    }
    tell_apart(conn, requests, asked.terms, rows).await.map_err(unanswered)
}

fn bind_several<'q>(named: &[&ClaimRequest], Asked { terms, limit, .. }: Asked<'_>) -> Query<'q> {
    let query = sqlx::query(AssertSqlSafe(claim_several_statement(named.len())));
    let query = bind_rules(bind_keys(bind_holders(bind_keys(query, named), named), named), terms);
    bind_times(query.bind(terms.label.clone()), terms).bind(limit)
}

fn bind_several_nowait<'q>(named: &[&ClaimRequest], Asked { terms, limit, .. }: Asked<'_>) -> Query<'q> {
    let query = sqlx::query(AssertSqlSafe(claim_several_nowait_statement(named.len())));
    let query = bind_times(query.bind(terms.label.clone()), terms);
    bind_rules(bind_keys(bind_holders(bind_keys(query, named), named), named), terms).bind(limit)
}

fn bind_keys<'q>(query: Query<'q>, named: &[&ClaimRequest]) -> Query<'q> {
    named.iter().fold(query, |query, request| query.bind(request.key.as_str().to_owned()))
}

fn bind_holders<'q>(query: Query<'q>, named: &[&ClaimRequest]) -> Query<'q> {
    named.iter().fold(query, |query, request| query.bind(request.holder.as_uuid().simple().to_string()))
}

/// Determines the reply to each request, after `granted` of them were granted.
async fn tell_apart(
    conn: &mut MySqlConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
    granted: u64,
) -> Reply<Vec<ClaimReply>> {
    let rows = read(conn, requests.iter().map(|request| &request.key), "").await?;
    let by_key = by_key(&rows)?;
    let (mut answers, mut found) = (Vec::with_capacity(requests.len()), 0);
    for request in requests {
        let row = by_key.get(request.key.as_str()).copied();
        let mut answer = seen(row, terms)?;
        if let (Some(row), ClaimReply::Seen { row: read, now }) = (row, &answer)
            && judge(read.as_ref(), *now, request.holder, terms) == Verdict::Same
        {
            // The holder has sent no earlier request.
            found += 1;
            let (token, prior) = held(row, *request.holder.as_uuid())?.ok_or(sqlx::Error::RowNotFound)?;
            answer = ClaimReply::Granted { token, prior };
        }
        answers.push(answer);
    }
    // A claim has been lost since, or another server answered the read.
    if found == granted { Ok(answers) } else { Err(sqlx::Error::RowNotFound) }
}

/// Claims all keys in one transaction, which is rolled back at the first refusal. No claim waits
/// for a row, so none deadlocks.
///
/// The rows are read after the transaction: at SERIALIZABLE, a read within one locks the row, and
/// waits for it.
async fn claim_together(
    conn: &mut MySqlConnection,
    requests: &[ClaimRequest],
    asked: Asked<'_>,
) -> Reply<Vec<ClaimReply>> {
    // A statement that fails at a locked row may end the transaction (innodb_rollback_on_timeout).
    let asked = Asked { nowait: false, ..asked };
    let mut granted = Vec::with_capacity(requests.len());
    let grant = async |conn: &mut MySqlConnection| {
        for request in requests {
            let Some(reply) = grant_one(conn, request, asked).await? else { return Ok(None) };
            granted.push(reply);
        }
        Ok(Some(()))
    };
    if transaction::<MySql, _>(conn, grant).await?.is_some() {
        return Ok(granted);
    }
    let mut replies = MySql::look(conn, requests, asked.terms).await?;
    for (index, (request, reply)) in requests.iter().zip(&mut replies).enumerate() {
        let ClaimReply::Seen { row, now } = &*reply else { continue };
        // All rows that are missing are told of, so that they are created together.
        let verdict = judge(row.as_ref(), *now, request.holder, asked.terms);
        if index != granted.len() && !matches!(verdict, Verdict::Refuse(..) | Verdict::Create) {
            *reply = ClaimReply::Withheld;
        }
    }
    Ok(replies)
}

/// Returns the claim's token and the claim that it took over, unless the claim has been lost since.
fn held(row: &MySqlRow, holder: Uuid) -> Reply<Option<(Token, Option<PreviousClaim>)>> {
    if row.try_get::<Option<Uuid>, _>("holder")? != Some(holder) {
        return Ok(None);
    }
    Ok(Some((Token::new(row.number("token")?), previous(row)?)))
}

/// The unit of the servers' limits. MySQL has no shorter one.
const SECOND: Duration = Duration::from_secs(1);
/// On MariaDB, a statement with a shorter limit does not wait for a locked row.
const SHORTEST: Duration = Duration::from_millis(100);

/// Builds the statement that creates these rows. It is not INSERT IGNORE, which hides errors, and
/// deadlocks.
fn insert(rows: &str) -> String {
    format!(
        "INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
         VALUES {rows} ON DUPLICATE KEY UPDATE key_resource = key_resource"
    )
}

/// MySQL has no limit for a single statement. The session's own is set again, by the last statement
/// or after an error, which ends the others. A connection on which neither was carried out is
/// closed.
async fn create_within_a_second(conn: &mut MySqlConnection, keys: &[Key], minutes: i32) -> Reply<()> {
    const RESTORE: &str = "SET innodb_lock_wait_timeout = @rowlock_wait";
    let row = |key: &Key| format!("(x'{}', 'S', 0, '1970-01-01', '', {minutes}, 0, 0)", hex(key.as_str()));
    let insert = insert(&keys.iter().map(row).collect::<Vec<_>>().join(", "));
    let sql =
        format!("SET @rowlock_wait = @@innodb_lock_wait_timeout, innodb_lock_wait_timeout = 1; {insert}; {RESTORE}");
    let reply = sqlx::raw_sql(AssertSqlSafe(sql).into_sql_str()).execute(&mut *conn).await;
    if reply.as_ref().is_err_and(|error| error.as_database_error().is_some()) {
        sqlx::raw_sql(RESTORE).execute(conn).await.map_err(unanswered)?;
    }
    reply.map(drop)
}

impl ClaimStore for MySql {
    /// The servers' limits are whole seconds. A limit below a second becomes one second; on
    /// MariaDB, one below 100 ms becomes zero, and the statement fails at a locked row. A longer
    /// limit is the server's own, `innodb_lock_wait_timeout`.
    async fn create(
        conn: &mut MySqlConnection,
        keys: &[Key],
        minutes: i32,
        lock_timeout: Duration,
        form: Form,
    ) -> Reply<()> {
        if lock_timeout < SECOND && !is_mariadb(form) {
            return create_within_a_second(conn, keys, minutes).await;
        }
        let keys = padded(keys);
        let insert = insert(&marks("(?, 'S', 0, '1970-01-01', '', ?, 0, 0)", keys.len()));
        let sql = match lock_timeout {
            limit if limit < SHORTEST => format!("{NOWAIT} {insert}"),
            limit if limit < SECOND => format!("SET STATEMENT innodb_lock_wait_timeout = 1 FOR {insert}"),
            _ => insert,
        };
        let query = sqlx::query(AssertSqlSafe(sql));
        let query = keys.iter().fold(query, |query, key| query.bind(key.as_str()).bind(minutes));
        query.execute(conn).await.map(drop)
    }

    async fn claim(
        conn: &mut MySqlConnection,
        requests: &[ClaimRequest],
        terms: &Terms,
        not_after: Option<DateTime<Utc>>,
        form: Form,
    ) -> Reply<Vec<ClaimReply>> {
        let asked = Asked { terms, limit: limit_micros(not_after), nowait: is_mariadb(form) };
        match requests {
            [request] => Ok(vec![claim_one(conn, request, asked).await?]),
            _ if is_apart(requests) => claim_apart(conn, requests, asked).await,
            _ => claim_together(conn, requests, asked).await,
        }
    }

    async fn look(conn: &mut MySqlConnection, requests: &[ClaimRequest], terms: &Terms) -> Reply<Vec<ClaimReply>> {
        seen_each(&read(conn, requests.iter().map(|request| &request.key), "").await?, requests, terms)
    }
}
