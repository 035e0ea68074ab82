//! Tickets of waiters, and notifications of releases.

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Row as _};

use crate::store::queue::{ALIVE_SECONDS, FRONT, QueueEntry, QueueStore, operations};
use crate::{
    key::Key,
    store::{
        Reply, Store as _, TooLate, limit_micros,
        mysql::row::{IN_TIME, NOW, Query, marks, padded},
    },
};

const LENGTHS: &str = "
SELECT CONVERT(key_resource USING utf8mb4), COUNT(*) FROM t_resource_lock_queue
WHERE alive_until > UTC_TIMESTAMP(6) GROUP BY key_resource";
const SWEEP: &str = "DELETE FROM t_resource_lock_queue WHERE alive_until < UTC_TIMESTAMP(6) - INTERVAL 1 HOUR";

impl QueueStore for MySql {
    type Notifications = ();

    operations!(MySqlConnection);

    /// The first row draws the number, which the other rows share.
    async fn join(
        conn: &mut MySqlConnection,
        keys: &[Key],
        not_after: Option<DateTime<Utc>>,
    ) -> Reply<Result<i64, TooLate>> {
        let Some((first, others)) = keys.split_first() else { return Ok(Ok(0)) };
        let limit = limit_micros(not_after);
        let alive = format!("{NOW} + INTERVAL {ALIVE_SECONDS} SECOND");
        let sql = format!(
            "INSERT INTO t_resource_lock_queue (key_resource, alive_until) SELECT ?, {alive} FROM DUAL WHERE {IN_TIME}"
        );
        let reply = sqlx::query(AssertSqlSafe(sql)).bind(first.as_str()).bind(limit).execute(&mut *conn).await?;
        let number = i64::try_from(reply.last_insert_id()).unwrap_or(i64::MAX);
        let mut added = reply.rows_affected();
        if added > 0 && !others.is_empty() {
            let row = format!("SELECT ?, ?, {alive} FROM DUAL WHERE {IN_TIME}");
            let rows = vec![row; others.len()].join(" UNION ALL ");
            let sql = format!("INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) {rows}");
            let bind = |query: Query<'static>, key: &Key| query.bind(key.as_str().to_owned()).bind(number).bind(limit);
            added +=
                others.iter().fold(sqlx::query(AssertSqlSafe(sql)), bind).execute(&mut *conn).await?.rows_affected();
        }
        if usize::try_from(added).is_ok_and(|added| added == keys.len()) {
            return Ok(Ok(number));
        }
        Ok(Err(TooLate { now: Self::now(conn).await? }))
    }

    async fn front(conn: &mut MySqlConnection, keys: &[Key], number: i64) -> Reply<Vec<QueueEntry>> {
        let sql = format!(
            "SELECT CONVERT(key_resource USING utf8mb4), ticket, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), alive_until)
             FROM t_resource_lock_queue WHERE key_resource = ? AND ticket <= ? ORDER BY ticket LIMIT {FRONT}"
        );
        let mut front = Vec::new();
        for key in keys {
            let query = sqlx::query(AssertSqlSafe(sql.clone())).bind(key.as_str()).bind(number);
            for row in query.fetch_all(&mut *conn).await? {
                front.push(QueueEntry { key: row.try_get(0)?, number: row.try_get(1)?, left_micros: row.try_get(2)? });
            }
        }
        Ok(front)
    }

    async fn heartbeat(conn: &mut MySqlConnection, numbers: &[i64]) -> Reply<()> {
        let set = format!("UPDATE t_resource_lock_queue SET alive_until = {NOW} + INTERVAL {ALIVE_SECONDS} SECOND");
        send(conn, &set, "", numbers).await
    }

    async fn leave(conn: &mut MySqlConnection, numbers: &[i64]) -> Reply<()> {
        send(conn, "DELETE FROM t_resource_lock_queue", "", numbers).await
    }

    async fn clear(conn: &mut MySqlConnection, numbers: &[i64]) -> Reply<()> {
        send(conn, "DELETE FROM t_resource_lock_queue", "AND alive_until <= UTC_TIMESTAMP(6)", numbers).await
    }
}

async fn send(conn: &mut MySqlConnection, what: &str, more: &str, numbers: &[i64]) -> Reply<()> {
    let numbers = padded(numbers);
    let sql = format!("{what} WHERE ticket IN ({}) {more}", marks("?", numbers.len()));
    let query = numbers.into_iter().fold(sqlx::query(AssertSqlSafe(sql)), |query, number| query.bind(*number));
    query.execute(conn).await.map(drop)
}
