//! Reads and changes of rows for operators, and what operators have changed.

use std::sync::LazyLock;

use chrono::TimeDelta;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _, mysql::MySqlRow};

use crate::{
    key::{Key, Token},
    rules::{Status, Terms},
    store::{
        Form, Reply,
        admin::{
            AdminStore, Change, ChangeInfo, Forced, Forgotten, KeyRange, Listed, Page, STEP, Seen, listed,
            listed_change, old_of, operations,
        },
        mysql::row::{JOINED, MICROS, Query, ROW, marks, micros, sql, stored},
        unanswered,
    },
};

static LIST: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
SELECT {ROW} FROM t_resource_lock
WHERE key_resource > ? AND LOCATE(?, key_resource) = 1 AND (lock_flag = 1 OR NOT ?)
ORDER BY t_resource_lock.key_resource LIMIT ?"
    )
});

static LOOK: LazyLock<String> = LazyLock::new(|| {
    format!("SELECT {ROW} FROM t_resource_lock WHERE key_resource BETWEEN ? AND ? AND (lock_flag = 1 OR ?)")
});

/// The same on MariaDB. A node of a Galera cluster first applies all that any node has committed.
static LOOK_CAUSAL: LazyLock<String> =
    LazyLock::new(|| format!("SET STATEMENT wsrep_sync_wait = 1 FOR {}", LOOK.as_str()));

/// Has the next statements of a session wait until this member of a group has applied all that the
/// group has committed. The variable is not one of those that a statement can set for itself.
const WAIT: &str = "
SET @rowlock_consistency = @@SESSION.group_replication_consistency, SESSION group_replication_consistency =
    IF(@@SESSION.group_replication_consistency = 'BEFORE_AND_AFTER', 'BEFORE_AND_AFTER', 'BEFORE')";
const WAIT_NO_MORE: &str = "SET SESSION group_replication_consistency = @rowlock_consistency";

/// Whether a row is as expected. Takes the token twice, the holder, begin_time and end_time.
const AS_EXPECTED: &str = "(? IS NULL OR (c.token = ? AND c.holder <=> ?
    AND IF(c.begin_time >= '1000-01-01', c.begin_time, NULL) <=> ?
    AND IF(c.end_time >= '1000-01-01', c.end_time, NULL) <=> ?))";

static FORCE: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
UPDATE (
    SELECT c.key_resource, c.token, {MICROS} AS micros FROM t_resource_lock c
    WHERE c.key_resource = ? AND {AS_EXPECTED} LIMIT 1 FOR UPDATE SKIP LOCKED
) j {JOINED}
SET t.lock_flag = 0, t.status = ?, t.end_time = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, t.holder = NULL,
    t.expires_at = NULL, t.claimed_at = NULL, t.prior_token = NULL, t.prior_client_ip = NULL,
    t.token = LAST_INSERT_ID(GREATEST(j.token + 1, j.micros))"
    )
});

static IS_AS_EXPECTED: LazyLock<String> =
    LazyLock::new(|| format!("SELECT {AS_EXPECTED} FROM t_resource_lock c WHERE c.key_resource = ?"));

/// Takes the other programs' offset, older_than, min_interval; the offset, older_than.
const FORGETTABLE: &str = "COALESCE(c.lock_flag, 0) = 0 AND CAST(c.status AS BINARY) = 'S'
      AND c.token < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
      AND (c.begin_time IS NULL OR c.begin_time < UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND
          - INTERVAL GREATEST(?, ?, LEAST(GREATEST(COALESCE(c.time, 0), 0), 500000000) * 60000000) MICROSECOND)
      AND (c.end_time IS NULL OR c.end_time < UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND - INTERVAL ? MICROSECOND)";

const CHANGES: &str = "
SELECT at, CONVERT(who USING utf8mb4) AS who, CONVERT(what USING utf8mb4) AS what, CONVERT(name USING utf8mb4) AS name,
       CONVERT(detail USING utf8mb4) AS detail FROM t_resource_change
WHERE ? IS NULL OR t_resource_change.name = ? ORDER BY id DESC LIMIT ?";

const FORGET_CHANGES: &str = "
DELETE FROM t_resource_change WHERE at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND ORDER BY id LIMIT ?";

impl AdminStore for MySql {
    operations!(MySqlConnection);

    async fn read_range(conn: &mut MySqlConnection, keys: &KeyRange, terms: &Terms, form: Form) -> Reply<Vec<Listed>> {
        let sql = if form == Form::Galera { LOOK_CAUSAL.as_str() } else { LOOK.as_str() };
        let query = sqlx::query(sql).bind(keys.first.as_str()).bind(keys.last.as_str()).bind(keys.is_one());
        let rows = if form == Form::Group { after_the_group(conn, query).await } else { query.fetch_all(conn).await };
        rows?.iter().map(|row| listed(row, terms)).collect()
    }

    async fn force(
        conn: &mut MySqlConnection,
        key: &Key,
        status: Status,
        expected: Option<&Seen>,
        terms: &Terms,
    ) -> Reply<Forced> {
        let as_expected = |query: Query<'static>| {
            let (token, holder) = (expected.map(|seen| seen.token), expected.and_then(|seen| seen.holder));
            let begun = expected.and_then(|seen| seen.begin_time).map(stored);
            let ended = expected.and_then(|seen| seen.end_time).map(stored);
            query.bind(token).bind(token).bind(holder).bind(begun).bind(ended)
        };
        let query = as_expected(sqlx::query(FORCE.as_str()).bind(key.as_str().to_owned())).bind(status.letter());
        let reply = query.bind(micros(terms.offset())).execute(&mut *conn).await?;
        if reply.rows_affected() > 0 {
            let token = match reply.last_insert_id() {
                // A trigger of the application that writes hides the id.
                0 => {
                    let query = sqlx::query_scalar("SELECT token FROM t_resource_lock WHERE key_resource = ?");
                    query.bind(key.as_str()).fetch_one(conn).await.map_err(unanswered)?
                }
                token => i64::try_from(token).unwrap_or_default(),
            };
            return Ok(Forced::Freed(Token::new(token)));
        }
        let query = as_expected(sqlx::query(IS_AS_EXPECTED.as_str())).bind(key.as_str().to_owned());
        let row = query.fetch_optional(conn).await?;
        Ok(Forced::not(row.map(|row| row.try_get::<i64, _>(0)).transpose()?.map(|is| is == 1)))
    }

    /// Reads a step's rows without a lock, then locks the old ones by their keys and checks them
    /// again: a locking scan would block every other transaction.
    async fn forget(conn: &mut MySqlConnection, older_than: TimeDelta, after: &str, terms: &Terms) -> Reply<Forgotten> {
        let bound = |query: Query<'static>| {
            let (offset, older_than) = (micros(terms.offset()), micros(older_than));
            query.bind(offset).bind(older_than).bind(micros(terms.min_interval)).bind(offset).bind(older_than)
        };
        let find = format!(
            "SELECT CONVERT(c.key_resource USING utf8mb4), CAST(COALESCE({FORGETTABLE}, 0) AS SIGNED)
             FROM t_resource_lock c WHERE c.key_resource > ? ORDER BY c.key_resource LIMIT {STEP}"
        );
        let query = bound(sqlx::query(AssertSqlSafe(find))).bind(after.to_owned());
        let rows = query.fetch_all(&mut *conn).await?;
        let (keys, after) = old_of(rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))))?;
        let Some(last) = keys.last() else { return Ok(Forgotten { rows: 0, after }) };
        let marks = marks("?", STEP);
        let delete = format!(
            "DELETE t FROM (
                 SELECT c.key_resource FROM t_resource_lock c FORCE INDEX (PRIMARY)
                 WHERE {FORGETTABLE} AND c.key_resource IN ({marks}) LIMIT {STEP} FOR UPDATE SKIP LOCKED
             ) j {JOINED}"
        );
        // Padded with the last key, so that only one statement is prepared.
        let padded = keys.iter().chain(std::iter::repeat(last)).take(STEP);
        let query = padded.fold(bound(sqlx::query(AssertSqlSafe(delete))), |query, key| query.bind(key.clone()));
        Ok(Forgotten { rows: query.execute(conn).await?.rows_affected(), after })
    }
}

/// Reads as the last of all transactions that the group has committed. A member that has been
/// expelled returns an error.
async fn after_the_group(conn: &mut MySqlConnection, query: Query<'_>) -> Reply<Vec<MySqlRow>> {
    sqlx::raw_sql(WAIT).execute(&mut *conn).await?;
    let rows = query.fetch_all(&mut *conn).await;
    // If the setting stayed, the next statements of the session would wait too: it is closed.
    sqlx::raw_sql(WAIT_NO_MORE).execute(conn).await.map_err(unanswered)?;
    rows
}
