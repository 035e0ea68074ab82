//! PostgreSQL 13 and later. Each operation is one statement. `begin_time` and `end_time` may be timestamps with or without a zone.

mod admin;
mod queue;
mod schema;
mod version;

use std::{sync::LazyLock, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{
    PgConnection, Postgres, Row as _, SqlSafeStr as _,
    postgres::{PgArguments, PgRow, PgTransactionManager},
};
use sqlx_core::transaction::TransactionManager as _;
use uuid::Uuid;

use crate::store::{
    Answer, Ask, Change, Confirmed, INTACT, Outcome, Reply, Sighting, Store, is_apart, to_utc, unconfirmed, unmatched,
};
use crate::{
    key::{Claim, Key, Prior, Token},
    rules::{Row, Rules, Terms},
};

/// A backend that waits does not see its client go: `lock_timeout`, for this statement alone, ends its wait.
const CREATE: &str = "
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', $3, true))
INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
SELECT key, 'S', 0, 'epoch', '', $2, 0, 0 FROM patience, unnest($1::text[]) AS key ORDER BY key
ON CONFLICT (key_resource) DO NOTHING";

/// One request's parameters, or those of many. One has no list that a planner would have to guess the length of.
const ONE_ASK: &str = "NOT MATERIALIZED (SELECT $1::text AS key, $2::uuid AS asker, $10::bool AS waited, 1 AS place)";
const MANY_ASKS: &str =
    "(SELECT * FROM unnest($1::text[], $2::uuid[], $10::bool[]) WITH ORDINALITY AS r (key, asker, waited, place))";
const ONE_CLAIM: &str =
    "NOT MATERIALIZED (SELECT $1::text AS key, $2::uuid AS holder, $3::bigint AS token, 1 AS place)";
const MANY_CLAIMS: &str =
    "(SELECT * FROM unnest($1::text[], $2::uuid[], $3::bigint[]) WITH ORDINALITY AS r (key, holder, token, place))";

/// The granting half of the rules table (`rules.rs`), over a row `c` that is asked for by `r` at `n.now`:
/// $3 once_per, $5 the other programs' offset, $6 Recover, $7 retry_failed, $8 article_clients.
const GRANTS: &str = "
CASE WHEN c.lock_flag = 1 AND c.holder = r.asker AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN 'same'
     WHEN c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN
         CASE WHEN $6 AND n.now >= c.expires_at THEN 'taken over' END
     WHEN c.lock_flag = 1 THEN
         CASE WHEN $6 AND $8 AND n.now + $5::interval - make_interval(mins => least(c.time, 2147483647)::int) >= c.begin_time THEN 'taken over' END
     WHEN ($6 OR c.status = 'S') AND (c.begin_time IS NULL OR $3 = interval '0' OR n.now + $5::interval - $3::interval >= c.begin_time
         OR (c.status = 'F' AND $7)) THEN 'acquired'
END";

/// What becomes of a row `t` that is granted as `j` says.
const TAKE: &str = "
lock_flag = 1, status = 'P', client_ip = $9, holder = j.asker, end_time = NULL,
begin_time = CASE j.verdict WHEN 'same' THEN t.begin_time ELSE j.now + $5::interval END,
claimed_at = CASE j.verdict WHEN 'same' THEN t.begin_time ELSE j.now + $5::interval END,
token = CASE j.verdict WHEN 'same' THEN t.token ELSE greatest(t.token + 1, (extract(epoch FROM j.now) * 1000000)::bigint) END,
prior_token = CASE j.verdict WHEN 'same' THEN t.prior_token WHEN 'taken over' THEN t.token END,
prior_client_ip = CASE j.verdict WHEN 'same' THEN t.prior_client_ip ELSE left(t.client_ip, 45) END,
prior_status = CASE j.verdict WHEN 'same' THEN t.prior_status ELSE t.status END,
prior_begin_time = CASE j.verdict WHEN 'same' THEN t.prior_begin_time ELSE t.begin_time END,
prior_end_time = CASE j.verdict WHEN 'same' THEN t.prior_end_time ELSE t.end_time END,
expires_at = j.now + $4::interval, awaited = t.awaited AND (j.verdict = 'same' OR j.waited)";

/// Each for itself. What is not granted is not locked: a refusal writes nothing, not even to the WAL. The clock is read just
/// before the lock, which waits for nobody; an earlier time grants no more than a later one.
fn claim_statement(asked: &str) -> String {
    format!(
        "
WITH asked AS {asked},
taken AS (
    UPDATE t_resource_lock t SET {TAKE}
    FROM (SELECT c.key_resource, r.asker, r.waited, n.now, {GRANTS} AS verdict
          FROM asked r JOIN t_resource_lock c ON c.key_resource = r.key CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
          WHERE {GRANTS} IS NOT NULL FOR UPDATE OF c SKIP LOCKED) j
    WHERE t.key_resource = j.key_resource
    RETURNING t.key_resource, t.token, t.prior_token, t.prior_client_ip
)
SELECT m.*, n.token AS new_token, n.prior_token, n.prior_client_ip::text, clock_timestamp() AS clock
FROM asked r LEFT JOIN taken n ON n.key_resource = r.key
LEFT JOIN LATERAL (SELECT {ROW}, clock_timestamp() AS now FROM t_resource_lock c WHERE c.key_resource = r.key AND n.token IS NULL) m ON true
ORDER BY r.place"
    )
}

static CLAIM: LazyLock<String> = LazyLock::new(|| claim_statement(ONE_ASK));
static CLAIM_APART: LazyLock<String> = LazyLock::new(|| claim_statement(MANY_ASKS));

/// All or none: looks, locks, judges again, and takes what there is all of.
static CLAIM_TOGETHER: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
WITH asked AS {MANY_ASKS},
seen AS MATERIALIZED (
    SELECT c.*, n.now FROM asked r JOIN t_resource_lock c ON c.key_resource = r.key
    CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
), locked AS MATERIALIZED (
    SELECT * FROM t_resource_lock
    WHERE key_resource = ANY (ARRAY(SELECT key FROM asked))
      AND (SELECT bool_and({GRANTS} IS NOT NULL) FROM asked r LEFT JOIN seen c ON c.key_resource = r.key CROSS JOIN LATERAL (SELECT c.now) n)
    FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
    SELECT c.*, r.asker, r.waited, n.now, {GRANTS} AS verdict
    FROM asked r JOIN locked c ON c.key_resource = r.key CROSS JOIN LATERAL (SELECT clock_timestamp() AS now, c.token) n
), taken AS (
    UPDATE t_resource_lock t SET {TAKE}
    FROM judged j
    WHERE t.key_resource = j.key_resource
      AND (SELECT bool_and(g.verdict IS NOT NULL) FROM asked r LEFT JOIN judged g ON g.key_resource = r.key)
    RETURNING t.key_resource, t.token, t.prior_token, t.prior_client_ip
), met AS (
    SELECT {ROW}, now FROM judged
    UNION ALL
    SELECT {ROW}, now FROM seen s WHERE NOT EXISTS (SELECT FROM judged j WHERE j.key_resource = s.key_resource)
)
SELECT m.*, n.token AS new_token, n.prior_token, n.prior_client_ip::text, clock_timestamp() AS clock
FROM asked r LEFT JOIN met m ON m.key_resource = r.key LEFT JOIN taken n ON n.key_resource = r.key
ORDER BY r.place"
    )
});

/// An infinite time, which another program may write, becomes a far one. (`least` alone would make a time of NULL.)
macro_rules! finite {
    ($column:literal) => {
        concat!(
            "CASE WHEN ",
            $column,
            " IS NOT NULL THEN greatest(least(",
            $column,
            "::timestamptz, '9999-12-31Z'), '0001-01-01Z') END"
        )
    };
}

/// A row as `rules::Row` has it, in types that are the same whatever the table's are.
pub(super) const ROW: &str = concat!(
    "key_resource::text COLLATE \"C\" AS key_resource, lock_flag = 1 AS locked, status::text, time::bigint AS minutes,
    client_ip::text, holder, token, end_time IS NOT NULL AS ended, awaited, ",
    finite!("begin_time"),
    " AS begin_time, ",
    finite!("claimed_at"),
    " AS claimed_at, ",
    finite!("expires_at"),
    " AS expires_at, ",
    finite!("end_time"),
    " AS end_time"
);

const EXPIRES_AT: &str = finite!("t.expires_at");

/// As one value: the planner would take each condition for a rare one, and go through what is done once for every claim.
const OURS: &str = "
CASE WHEN t.lock_flag = 1 AND t.holder = r.holder AND t.token = r.token AND t.claimed_at = t.begin_time AND t.end_time IS NULL THEN 1 END IS NOT NULL";

/// Tells those who wait that the row is free: NOTIFY takes a lock on the whole server when it commits, so nobody is told where nobody waits.
const TOLD: &str = ", CASE WHEN d.awaited THEN pg_notify('rowlock', d.key_resource) END IS NULL AS told";

/// A kind of change, to one claim or to many.
struct ChangeStatement {
    one: String,
    many: String,
}

impl ChangeStatement {
    fn new(set: &str, told: &str) -> Self {
        Self { one: change_statement(ONE_CLAIM, set, told), many: change_statement(MANY_CLAIMS, set, told) }
    }
}

fn change_statement(asked: &str, set: &str, told: &str) -> String {
    format!(
        "
WITH asked AS {asked},
done AS (
    UPDATE t_resource_lock t SET {set}
    FROM (SELECT t.key_resource, r.place FROM asked r JOIN t_resource_lock t ON t.key_resource = r.key WHERE {OURS} FOR UPDATE OF t SKIP LOCKED) l
    WHERE t.key_resource = l.key_resource RETURNING l.place, t.key_resource, t.confirms, t.awaited
)
SELECT d.place IS NOT NULL AS done, d.confirms, s.*, current_setting('transaction_isolation') <> 'read committed' AS snapshot{told}
FROM asked r LEFT JOIN done d ON d.place = r.place LEFT JOIN LATERAL (
    SELECT true AS seen, t.holder, t.token, t.lock_flag = 1 AS locked,
           coalesce(t.lock_flag = 1 AND t.claimed_at = t.begin_time AND t.end_time IS NULL, false) AS stands,
           coalesce((extract(epoch FROM {EXPIRES_AT} - clock_timestamp()) * 1000000)::bigint, 0) AS left_micros
    FROM t_resource_lock t WHERE t.key_resource = r.key AND d.place IS NULL) s ON true
ORDER BY r.place"
    )
}

static RENEW: LazyLock<ChangeStatement> =
    LazyLock::new(|| ChangeStatement::new("expires_at = clock_timestamp() + $4::interval", ""));
static RELEASE: LazyLock<ChangeStatement> = LazyLock::new(|| {
    ChangeStatement::new(
        "lock_flag = 0, status = $4, end_time = clock_timestamp() + $5::interval, holder = NULL, expires_at = NULL,
        claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL",
        &format!("{TOLD}, {}", at_ease("$6")),
    )
});
static ABANDON: LazyLock<ChangeStatement> = LazyLock::new(|| {
    let told = format!("{TOLD}, {}", at_ease("true"));
    ChangeStatement::new("expires_at = least(t.expires_at, clock_timestamp())", &told)
});

static PUT_BACK: LazyLock<ChangeStatement> = LazyLock::new(|| {
    ChangeStatement::new(
        "lock_flag = 0, status = t.prior_status, begin_time = t.prior_begin_time, end_time = t.prior_end_time,
        client_ip = t.prior_client_ip, holder = NULL, expires_at = NULL, claimed_at = NULL, prior_client_ip = NULL",
        TOLD,
    )
});

/// Does not wait for the disk. Should the server crash in that moment, the claim may stand again, with nobody to renew it, and end with
/// its lease; the next claim's commit makes both of them last.
fn at_ease(when: &str) -> String {
    format!("CASE WHEN {when} THEN set_config('synchronous_commit', 'off', true) END IS NULL AS strict")
}

static CONFIRM: LazyLock<String> = LazyLock::new(|| change_statement(ONE_CLAIM, "confirms = t.confirms + 1", ""));

/// The lock waits for a transaction whose COMMIT was not answered; the condition is then judged anew.
static CONFIRMS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
SELECT t.confirms FROM t_resource_lock t, (SELECT $2::uuid AS holder, $3::bigint AS token) r
WHERE t.key_resource = $1 AND {OURS} FOR UPDATE OF t"
    )
});

/// Sent as one text, a statement has the time at which the text arrived, and a transaction that of the
/// text that began it: they differ exactly if the transaction was begun before.
const ALONE: &str = "SELECT now() = statement_timestamp()";
/// Fails where BEGIN found a transaction that was open already.
const OPEN: &str = "BEGIN; SAVEPOINT rowlock; SELECT 1 / (now() = statement_timestamp())::int";
/// What it fails with: a division by zero, or anything at all in a transaction that has failed already.
const IN_ANOTHER: [&str; 2] = ["22012", "25P02"];

type Query<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

impl Store for Postgres {
    const OWN_CONNECTIONS: bool = true;

    async fn leave_transaction(conn: &mut PgConnection) -> Reply<bool> {
        sqlx::raw_sql(ALONE).fetch_one(conn).await?.try_get(0)
    }

    async fn open(conn: &mut PgConnection) -> Reply<bool> {
        match PgTransactionManager::begin(conn, Some(OPEN.into_sql_str())).await {
            Err(sqlx::Error::Database(error)) if IN_ANOTHER.contains(&error.code().as_deref().unwrap_or_default()) => {
                Ok(false)
            }
            Err(sqlx::Error::InvalidSavePointStatement) => Ok(false),
            begun => begun.map(|()| true),
        }
    }

    async fn create(conn: &mut PgConnection, keys: &[Key], minutes: i32, patience: Duration) -> Reply<()> {
        let keys: Vec<&str> = keys.iter().map(Key::as_str).collect();
        let patience = format!("{}ms", patience.as_millis().max(1));
        sqlx::query(CREATE).bind(keys).bind(minutes).bind(patience).execute(conn).await.map(drop)
    }

    async fn claim(conn: &mut PgConnection, asks: &[Ask], terms: &Terms, _: bool) -> Reply<Vec<Answer>> {
        let query = match asks {
            [Ask { key, holder, waited }] => {
                let query = sqlx::query(CLAIM.as_str()).bind(key.as_str()).bind(holder.as_uuid());
                bind_terms(query, terms).bind(waited)
            }
            _ => {
                let sql = if is_apart(asks) { CLAIM_APART.as_str() } else { CLAIM_TOGETHER.as_str() };
                let keys: Vec<&str> = asks.iter().map(|ask| ask.key.as_str()).collect();
                let holders: Vec<Uuid> = asks.iter().map(|ask| *ask.holder.as_uuid()).collect();
                let waited: Vec<bool> = asks.iter().map(|ask| ask.waited).collect();
                bind_terms(sqlx::query(sql).bind(keys).bind(holders), terms).bind(waited)
            }
        };
        let rows = query.fetch_all(conn).await?;
        rows.iter().map(|row| answer(row, terms)).collect()
    }

    async fn confirm(conn: &mut PgConnection, claim: &Claim) -> Reply<Confirmed> {
        let row = sqlx::query(CONFIRM.as_str())
            .bind(claim.key.as_str())
            .bind(claim.holder.as_uuid())
            .bind(claim.token.get())
            .fetch_one(conn)
            .await?;
        Ok(match row.try_get("confirms")? {
            Some(count) => Confirmed::Done(count),
            None => match sighting(&row)? {
                // A snapshot of its own may be older than the row.
                None if row.try_get("snapshot")? => Confirmed::TooOld,
                seen => unconfirmed(claim, seen),
            },
        })
    }

    async fn intact(conn: &mut PgConnection) -> Reply<()> {
        sqlx::raw_sql(INTACT).execute(conn).await.map(drop)
    }

    async fn confirms(conn: &mut PgConnection, claim: &Claim) -> Reply<Option<i64>> {
        let query = sqlx::query_scalar(CONFIRMS.as_str()).bind(claim.key.as_str());
        query.bind(claim.holder.as_uuid()).bind(claim.token.get()).fetch_optional(conn).await
    }

    async fn change(
        conn: &mut PgConnection,
        claims: &[Claim],
        change: Change,
        terms: &Terms,
        _: bool,
    ) -> Reply<Vec<Outcome>> {
        let ChangeStatement { one, many }: &'static ChangeStatement = match change {
            Change::Renew(_) => &RENEW,
            Change::Release(_) => &RELEASE,
            Change::Abandon => &ABANDON,
            Change::PutBack => &PUT_BACK,
        };
        let query = match claims {
            [Claim { key, holder, token }] => {
                sqlx::query(one.as_str()).bind(key.as_str()).bind(holder.as_uuid()).bind(token.get())
            }
            _ => {
                let keys: Vec<&str> = claims.iter().map(|claim| claim.key.as_str()).collect();
                let holders: Vec<Uuid> = claims.iter().map(|claim| *claim.holder.as_uuid()).collect();
                let tokens: Vec<i64> = claims.iter().map(|claim| claim.token.get()).collect();
                sqlx::query(many.as_str()).bind(keys).bind(holders).bind(tokens)
            }
        };
        let query = match change {
            Change::Renew(lease) => query.bind(lease),
            // A run that is over is not to be run again within its window, and stays over for those who know no lease.
            Change::Release(status) => {
                let ours_alone = terms.rules == Rules::Recover && terms.article_clients.is_none();
                let again = terms.once_per.is_zero() && ours_alone;
                query.bind(status.letter()).bind(terms.offset()).bind(again)
            }
            Change::Abandon | Change::PutBack => query,
        };
        let rows = query.fetch_all(conn).await?;
        rows.iter()
            .zip(claims)
            .map(|(row, claim)| {
                if row.try_get("done")? {
                    return Ok(Outcome::Done);
                }
                Ok(unmatched(change, claim, sighting(row)?))
            })
            .collect()
    }
}

fn bind_terms<'q>(query: Query<'q>, terms: &'q Terms) -> Query<'q> {
    query
        .bind(terms.once_per)
        .bind(terms.lease)
        .bind(terms.offset())
        .bind(terms.rules == Rules::Recover)
        .bind(terms.retry_failed)
        .bind(terms.article_clients.is_some())
        .bind(&terms.label)
}

fn answer(row: &PgRow, terms: &Terms) -> Reply<Answer> {
    if let Some(token) = row.try_get::<Option<i64>, _>("new_token")? {
        let prior: Option<i64> = row.try_get("prior_token")?;
        let label: Option<String> = row.try_get("prior_client_ip")?;
        let prior = prior.map(|token| Prior { token: Token::new(token), label: label.unwrap_or_default() });
        return Ok(Answer::Granted { token: Token::new(token), prior });
    }
    if row.try_get::<Option<&str>, _>("key_resource")?.is_none() {
        return Ok(Answer::Seen { row: None, now: row.try_get("clock")? });
    }
    Ok(Answer::Seen { row: Some(read(row, terms)?), now: row.try_get("now")? })
}

/// Reads the columns of `ROW`.
pub(super) fn read(row: &PgRow, terms: &Terms) -> Reply<Row> {
    let utc = |name| -> Reply<Option<DateTime<Utc>>> {
        let time: Option<DateTime<Utc>> = row.try_get(name)?;
        Ok(time.map(|time| to_utc(time, terms.offset())))
    };
    Ok(Row {
        locked: row.try_get::<Option<bool>, _>("locked")?.unwrap_or_default(),
        status: row.try_get::<Option<String>, _>("status")?.unwrap_or_default(),
        begin_time: utc("begin_time")?,
        minutes: row.try_get("minutes")?,
        client_ip: row.try_get::<Option<String>, _>("client_ip")?.unwrap_or_default(),
        holder: row.try_get("holder")?,
        token: row.try_get("token")?,
        expires_at: row.try_get("expires_at")?,
        claimed_at: utc("claimed_at")?,
        ended: row.try_get("ended")?,
        awaited: row.try_get("awaited")?,
    })
}

fn sighting(row: &PgRow) -> Reply<Option<Sighting>> {
    if row.try_get::<Option<bool>, _>("seen")?.is_none() {
        return Ok(None);
    }
    Ok(Some(Sighting {
        holder: row.try_get("holder")?,
        token: row.try_get("token")?,
        locked: row.try_get::<Option<bool>, _>("locked")?.unwrap_or_default(),
        stands: row.try_get("stands")?,
        left: TimeDelta::microseconds(row.try_get("left_micros")?),
    }))
}
