//! The statement that claims keys.

use std::{sync::LazyLock, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Postgres, Row as _, postgres::PgRow};
use uuid::Uuid;

use crate::{
    key::{Key, Token},
    rules::{Rules, Terms},
    store::{
        ClaimReply, ClaimRequest, ClaimStore, Form, Reply, is_apart,
        postgres::row::{FEW, Query, ROW, in_time, names, once_ended},
        stored_row::{previous, seen, seen_each},
    },
};

/// A backend that waits does not notice that its client is gone: `lock_timeout`, for this statement
/// alone, ends its wait. Nothing is lost with a free row, so its commit does not wait for the disk.
const CREATE: &str = "
WITH settings AS MATERIALIZED (SELECT set_config('lock_timeout', $3, true), set_config('synchronous_commit', 'off', true))
INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
SELECT key, 'S', 0, 'epoch', '', $2, 0, 0 FROM settings, unnest($1::text[]) AS key ORDER BY key
ON CONFLICT (key_resource) DO NOTHING";

/// The parameters of one request, or of many. For one there is no list whose length the planner
/// would have to estimate.
const ONE_REQUEST: &str =
    "NOT MATERIALIZED (SELECT $1::text AS key, $2::uuid AS asker, $10::bool AS waited, 1 AS place)";
const MANY_REQUESTS: &str =
    "(SELECT * FROM unnest($1::text[], $2::uuid[], $10::bool[]) WITH ORDINALITY AS r (key, asker, waited, place))";

/// The granting half of the rules table (`rules.rs`), over a row `c` that `r` requests at `n.now`:
/// $3 min_interval, $5 the other programs' offset, $6 Recover, $7 retry_failed, $8 article_clients.
const GRANTS: &str = "
CASE WHEN c.lock_flag = 1 AND c.holder = r.asker AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN 'same'
     WHEN c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN
         CASE WHEN $6 AND n.now >= c.expires_at THEN 'taken over' END
     WHEN c.lock_flag = 1 THEN
         CASE WHEN $6 AND $8 AND n.now + $5::interval - make_interval(mins => least(c.time, 2147483647)::int) >= c.begin_time THEN 'taken over' END
     WHEN ($6 OR c.status = 'S') AND (c.begin_time IS NULL OR $3 = interval '0' OR n.now + $5::interval - $3::interval >= c.begin_time
         OR (c.status = 'F' AND $7)) THEN 'acquired'
END";

/// The assignments to a row `t` that is granted according to `j`.
const TAKE: &str = "
lock_flag = 1, status = 'P', client_ip = $9, holder = j.asker, end_time = NULL,
begin_time = CASE j.verdict WHEN 'same' THEN t.begin_time ELSE j.now + $5::interval END,
claimed_at = CASE j.verdict WHEN 'same' THEN t.begin_time ELSE j.now + $5::interval END,
token = CASE j.verdict WHEN 'same' THEN t.token ELSE greatest(t.token + 1, (extract(epoch FROM j.now) * 1000000)::bigint) END,
prior_token = CASE j.verdict WHEN 'same' THEN t.prior_token WHEN 'taken over' THEN coalesce(CASE WHEN t.holder = '00000000-0000-0000-0000-000000000000' AND t.claimed_at = t.begin_time THEN t.prior_token END, t.token) END,
prior_client_ip = CASE j.verdict WHEN 'same' THEN t.prior_client_ip ELSE left(t.client_ip, 45) END,
prior_status = CASE j.verdict WHEN 'same' THEN t.prior_status ELSE t.status END,
prior_begin_time = CASE j.verdict WHEN 'same' THEN t.prior_begin_time ELSE t.begin_time END,
prior_end_time = CASE j.verdict WHEN 'same' THEN t.prior_end_time ELSE t.end_time END,
expires_at = greatest(CASE j.verdict WHEN 'same' THEN t.expires_at END, j.now + $4::interval), awaited = t.awaited AND (j.verdict = 'same' OR j.waited)";

/// $11 is the limit.
const IN_TIME: &str = in_time!("$11");

/// Builds the statement that claims each key independently. A row that is not granted is not
/// locked: a refusal writes nothing, not even to the WAL. The clock is read just before the lock,
/// which never waits; an earlier time grants no more than a later one.
fn claim_statement(asked: &str) -> String {
    format!(
        "
WITH asked AS {asked},
taken AS (
    UPDATE t_resource_lock t SET {TAKE}
    FROM (SELECT c.key_resource, r.asker, r.waited, n.now, {GRANTS} AS verdict
          FROM {FEW} r JOIN t_resource_lock c ON c.key_resource = r.key CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
          WHERE {GRANTS} IS NOT NULL FOR UPDATE OF c SKIP LOCKED) j
    WHERE t.key_resource = j.key_resource AND {IN_TIME}
    RETURNING t.key_resource, t.token, t.prior_token, t.prior_client_ip
)
SELECT m.*, n.token AS new_token, n.prior_token, n.prior_client_ip::text, clock_timestamp() AS clock
FROM asked r LEFT JOIN taken n ON n.key_resource = r.key
LEFT JOIN LATERAL (SELECT {ROW}, clock_timestamp() AS now FROM t_resource_lock c WHERE c.key_resource = r.key AND n.token IS NULL) m ON true
ORDER BY r.place"
    )
}

static CLAIM: LazyLock<String> = LazyLock::new(|| claim_statement(ONE_REQUEST));
static CLAIM_APART: LazyLock<String> = LazyLock::new(|| claim_statement(MANY_REQUESTS));

/// Claims all keys or none: reads, locks, judges again, and takes the rows if every key is granted.
static CLAIM_TOGETHER: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
WITH asked AS {MANY_REQUESTS},
seen AS MATERIALIZED (
    SELECT c.*, n.now FROM {FEW} r JOIN t_resource_lock c ON c.key_resource = r.key
    CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
), locked AS MATERIALIZED (
    SELECT * FROM t_resource_lock
    WHERE key_resource = ANY (ARRAY(SELECT key FROM asked))
      AND (SELECT bool_and({GRANTS} IS NOT NULL) FROM asked r LEFT JOIN seen c ON c.key_resource = r.key CROSS JOIN LATERAL (SELECT c.now) n)
    FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
    SELECT c.*, r.asker, r.waited, n.now, {GRANTS} AS verdict, n.now <= coalesce($11::timestamptz, 'infinity') AS is_in_time
    FROM asked r JOIN locked c ON c.key_resource = r.key CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
), taken AS (
    UPDATE t_resource_lock t SET {TAKE}
    FROM judged j
    WHERE t.key_resource = j.key_resource
      AND (SELECT bool_and(g.verdict IS NOT NULL AND g.is_in_time) FROM asked r LEFT JOIN judged g ON g.key_resource = r.key)
    RETURNING t.key_resource, t.token, t.prior_token, t.prior_client_ip
), met AS (
    SELECT {ROW}, now, verdict IS NOT NULL AND is_in_time AS withheld FROM judged
    UNION ALL
    SELECT {ROW}, now, false FROM seen s WHERE NOT EXISTS (SELECT FROM judged j WHERE j.key_resource = s.key_resource)
)
SELECT m.*, n.token AS new_token, n.prior_token, n.prior_client_ip::text, clock_timestamp() AS clock
FROM asked r LEFT JOIN met m ON m.key_resource = r.key LEFT JOIN taken n ON n.key_resource = r.key
ORDER BY r.place"
    )
});

static LOOK: LazyLock<String> = LazyLock::new(|| {
    format!("SELECT {ROW}, clock_timestamp() AS now FROM t_resource_lock WHERE key_resource = ANY ($1::text[])")
});

fn bind_terms<'q>(query: Query<'q>, terms: &'q Terms) -> Query<'q> {
    query
        .bind(terms.min_interval)
        .bind(terms.lease)
        .bind(terms.offset())
        .bind(terms.rules == Rules::Recover)
        .bind(terms.retry_failed)
        .bind(terms.article_clients.is_some())
        .bind(&terms.label)
}

fn answer(row: &PgRow, terms: &Terms) -> Reply<ClaimReply> {
    if let Some(token) = row.try_get::<Option<i64>, _>("new_token")? {
        return Ok(ClaimReply::Granted { token: Token::new(token), prior: previous(row)? });
    }
    if row.try_get::<Option<&str>, _>("key_resource")?.is_none() {
        return Ok(ClaimReply::Seen { row: None, now: row.try_get("clock")? });
    }
    seen(Some(row), terms)
}

/// A row that could have been granted by itself was not the reason to refuse the set.
fn answer_of_set(row: &PgRow, terms: &Terms) -> Reply<ClaimReply> {
    match answer(row, terms)? {
        ClaimReply::Seen { row: Some(_), .. } if row.try_get("withheld")? => Ok(ClaimReply::Withheld),
        answer => Ok(answer),
    }
}

fn bind_requests<'q>(sql: &'static str, requests: &'q [ClaimRequest], terms: &'q Terms) -> Query<'q> {
    let keys: Vec<&str> = requests.iter().map(|request| request.key.as_str()).collect();
    let holders: Vec<Uuid> = requests.iter().map(|request| *request.holder.as_uuid()).collect();
    let waited: Vec<bool> = requests.iter().map(|request| request.waited).collect();
    bind_terms(sqlx::query(sql).bind(keys).bind(holders), terms).bind(waited)
}

impl ClaimStore for Postgres {
    async fn create(conn: &mut PgConnection, keys: &[Key], minutes: i32, lock_timeout: Duration, _: Form) -> Reply<()> {
        let lock_timeout = format!("{}ms", lock_timeout.as_millis().max(1));
        sqlx::query(CREATE).bind(names(keys)).bind(minutes).bind(lock_timeout).execute(conn).await.map(drop)
    }

    async fn claim(
        conn: &mut PgConnection,
        requests: &[ClaimRequest],
        terms: &Terms,
        not_after: Option<DateTime<Utc>>,
        _: Form,
    ) -> Reply<Vec<ClaimReply>> {
        let query = match requests {
            [ClaimRequest { key, holder, waited }] => {
                let query = sqlx::query(CLAIM.as_str()).bind(key.as_str()).bind(holder.as_uuid());
                bind_terms(query, terms).bind(waited)
            }
            _ => {
                let sql = if is_apart(requests) { CLAIM_APART.as_str() } else { CLAIM_TOGETHER.as_str() };
                bind_requests(sql, requests, terms)
            }
        };
        let rows = query.bind(not_after).fetch_all(&mut *conn).await;
        let rows = once_ended(conn, rows).await?;
        if requests.len() == 1 || is_apart(requests) {
            return rows.iter().map(|row| answer(row, terms)).collect();
        }
        rows.iter().map(|row| answer_of_set(row, terms)).collect()
    }

    async fn look(conn: &mut PgConnection, requests: &[ClaimRequest], terms: &Terms) -> Reply<Vec<ClaimReply>> {
        let keys: Vec<&str> = requests.iter().map(|request| request.key.as_str()).collect();
        let rows = sqlx::query(LOOK.as_str()).bind(keys).fetch_all(conn).await?;
        seen_each(&rows, requests, terms)
    }
}
