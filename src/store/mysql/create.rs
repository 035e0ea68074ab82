//! Creates the rows of keys that come for the first time.

use std::time::Duration;

use sqlx::{AssertSqlSafe, MySqlConnection, SqlSafeStr as _};

use crate::{
    key::Key,
    store::{
        Reply, hex,
        mysql::row::{NOWAIT, marks, padded},
        unanswered,
    },
};

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

/// The servers' limits are whole seconds. A limit below a second becomes one second; on MariaDB,
/// one below 100 ms becomes zero, and the statement fails at a locked row. A longer limit is the
/// server's own, `innodb_lock_wait_timeout`.
pub(super) async fn create(
    conn: &mut MySqlConnection,
    keys: &[Key],
    minutes: i32,
    lock_timeout: Duration,
    nowait: bool,
) -> Reply<()> {
    if lock_timeout < SECOND && !nowait {
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
