//! Reads and changes of rows for operators, and what operators have changed.

use std::sync::LazyLock;

use chrono::TimeDelta;
use sqlx::{PgConnection, Postgres, Row as _};

use crate::{
    key::{Key, Token},
    rules::{Status, Terms},
    store::{
        Form, Reply,
        admin::{
            AdminStore, Change, ChangeInfo, Forced, Forgotten, KeyRange, Listed, Page, STEP, Seen, listed,
            listed_change, operations,
        },
        micros,
        postgres::{
            change::notified,
            row::{ROW, finite, sql},
        },
    },
};

static LIST: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
SELECT {ROW}, clock_timestamp() AS now FROM t_resource_lock
WHERE key_resource > $1 AND strpos(key_resource, $2) = 1 AND (lock_flag = 1 OR NOT $3)
ORDER BY t_resource_lock.key_resource LIMIT $4"
    )
});

/// The reads of one key, and of a range.
struct LookStatement {
    one: String,
    range: String,
}

impl LookStatement {
    fn new(with: &str, condition: &str) -> Self {
        let statement = |keys| {
            format!("{with} SELECT {ROW}, clock_timestamp() AS now FROM t_resource_lock WHERE {keys}{condition}")
        };
        Self {
            one: statement("key_resource = $1"),
            // The order of bytes, whatever the column's own collation is. The index may have
            // another one.
            range: statement("t_resource_lock.key_resource COLLATE \"C\" BETWEEN $1 AND $2 AND lock_flag = 1"),
        }
    }
}

static LOOK: LazyLock<LookStatement> = LazyLock::new(|| LookStatement::new("", ""));

/// The same, as the primary has it. A standby refuses. With synchronous replication the statement
/// is a commit, to which a primary that was replaced gets no reply from its standby: what it shows
/// is what was there when it was the primary. Without, no server can tell.
///
/// The condition on `as_primary` names no row, so it is evaluated even if there is none.
static LOOK_AT_PRIMARY: LazyLock<LookStatement> = LazyLock::new(|| {
    LookStatement::new(
        "WITH primary_only AS MATERIALIZED (
    SELECT CASE WHEN pg_is_in_recovery() THEN pg_current_xact_id()::text
                WHEN current_setting('synchronous_standby_names') <> ''
                THEN pg_logical_emit_message(true, 'rowlock', ''::text)::text END AS as_primary
)",
        " AND (SELECT as_primary FROM primary_only) IS DISTINCT FROM ''",
    )
});

/// Whether a row is as expected: $4 token, $5 holder, $6 begin_time, $7 end_time.
const AS_EXPECTED: &str = concat!(
    "($4::bigint IS NULL OR (token = $4 AND holder IS NOT DISTINCT FROM $5::uuid AND ",
    finite!("begin_time"),
    " IS NOT DISTINCT FROM $6::timestamptz AND ",
    finite!("end_time"),
    " IS NOT DISTINCT FROM $7::timestamptz))"
);

const NOTIFIED: &str = notified!("t");

static FORCE: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
WITH locked AS MATERIALIZED (
    SELECT key_resource FROM t_resource_lock WHERE key_resource = $1 AND {AS_EXPECTED} FOR UPDATE SKIP LOCKED
), freed AS (
    UPDATE t_resource_lock t
    SET lock_flag = 0, status = $2, end_time = clock_timestamp() + $3::interval, holder = NULL, expires_at = NULL,
        claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL,
        token = greatest(t.token + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
    FROM locked l WHERE t.key_resource = l.key_resource
    RETURNING t.token, {NOTIFIED}
)
SELECT (SELECT token FROM freed) AS token,
       (SELECT {AS_EXPECTED} FROM t_resource_lock WHERE key_resource = $1) AS as_expected"
    )
});

/// $1 older_than, $2 min_interval, $3 the other programs' offset.
const FORGETTABLE: &str =
    "coalesce(lock_flag, 0) = 0 AND status = 'S' AND token < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
      AND (begin_time IS NULL OR begin_time < clock_timestamp() + $3::interval
          - greatest($1::interval, $2::interval, make_interval(mins => least(greatest(time, 0), 2147483647)::int)))
      AND (end_time IS NULL OR end_time < clock_timestamp() + $3::interval - $1::interval)";

/// Reads a step's rows without a lock, then locks those that are old and checks them again. No
/// other row is locked.
static FORGET: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
WITH found AS MATERIALIZED (
    SELECT key_resource, {FORGETTABLE} AS is_old FROM t_resource_lock WHERE key_resource > $4
    ORDER BY t_resource_lock.key_resource LIMIT {STEP}
), locked AS MATERIALIZED (
    SELECT key_resource FROM t_resource_lock
    WHERE key_resource = ANY (ARRAY(SELECT key_resource FROM found WHERE is_old)) AND {FORGETTABLE} FOR UPDATE SKIP LOCKED
), forgotten AS (
    DELETE FROM t_resource_lock t USING locked l WHERE t.key_resource = l.key_resource RETURNING 1
)
SELECT (SELECT count(*) FROM forgotten) AS rows, (SELECT max(key_resource)::text COLLATE \"C\" FROM found) AS last"
    )
});

const CHANGES: &str = "
SELECT at, who::text AS who, what::text AS what, name::text AS name, detail FROM t_resource_change
WHERE $1::text IS NULL OR name = $2 ORDER BY id DESC LIMIT $3";

const FORGET_CHANGES: &str = "
DELETE FROM t_resource_change WHERE id = ANY (ARRAY(
    SELECT id FROM t_resource_change WHERE at < clock_timestamp() - $1::bigint * interval '1 microsecond'
    ORDER BY id LIMIT $2))";

impl AdminStore for Postgres {
    operations!(PgConnection);

    async fn read_range(conn: &mut PgConnection, keys: &KeyRange, terms: &Terms, form: Form) -> Reply<Vec<Listed>> {
        let look: &'static LookStatement = if form == Form::Postgres { &LOOK_AT_PRIMARY } else { &LOOK };
        let (first, last) = (keys.first.as_str(), keys.last.as_str());
        let query = match keys.is_one() {
            true => sqlx::query(look.one.as_str()).bind(first),
            false => sqlx::query(look.range.as_str()).bind(first).bind(last),
        };
        let rows = query.fetch_all(conn).await?;
        rows.iter().map(|row| listed(row, terms)).collect()
    }

    async fn force(
        conn: &mut PgConnection,
        key: &Key,
        status: Status,
        expected: Option<&Seen>,
        terms: &Terms,
    ) -> Reply<Forced> {
        let query = sqlx::query(FORCE.as_str()).bind(key.as_str()).bind(status.letter()).bind(terms.offset());
        let query = query.bind(expected.map(|seen| seen.token)).bind(expected.and_then(|seen| seen.holder));
        let query = query.bind(expected.and_then(|seen| seen.begin_time)).bind(expected.and_then(|seen| seen.end_time));
        let row = query.fetch_one(conn).await?;
        Ok(match row.try_get::<Option<i64>, _>("token")? {
            Some(token) => Forced::Freed(Token::new(token)),
            None => Forced::not(row.try_get("as_expected")?),
        })
    }

    async fn forget(conn: &mut PgConnection, older_than: TimeDelta, after: &str, terms: &Terms) -> Reply<Forgotten> {
        let query = sqlx::query(FORGET.as_str()).bind(older_than).bind(terms.min_interval).bind(terms.offset());
        let row = query.bind(after).fetch_one(conn).await?;
        let rows = u64::try_from(row.try_get::<i64, _>("rows")?).unwrap_or_default();
        Ok(Forgotten { rows, after: row.try_get("last")? })
    }
}
