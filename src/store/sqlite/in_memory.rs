//! SQLite databases in memory: a connection that must not be closed is made idle.
//!
//! The driver runs each connection on a thread of its own, which completes every statement, whether
//! its future is dropped or not.

use sqlx::{AssertSqlSafe, Connection as _, Database, Sqlite, SqliteConnection};
use sqlx_core::transaction::TransactionManager as _;

use crate::store::Reply;

type Transactions = <Sqlite as Database>::TransactionManager;

const FILE: &str = "SELECT COALESCE(file, '') FROM pragma_database_list WHERE name = 'main'";

/// Waits for the statement in flight, and ends every open transaction. Returns `false` if the
/// database is in a file.
///
/// A busy timeout that a dropped claim has shortened stays: no statement waits for a database that
/// has one connection, or a shared cache.
pub async fn make_idle(conn: &mut SqliteConnection) -> Reply<bool> {
    // After a COMMIT or ROLLBACK whose reply was not awaited, the driver skips the next rollback of
    // this kind. This call is the one to be skipped.
    Transactions::start_rollback(conn);
    conn.ping().await?;
    end_transactions(conn).await?;
    let file: String = sqlx::query_scalar(FILE).fetch_one(conn).await?;
    Ok(file.is_empty())
}

/// Ends any open transaction.
pub async fn end_transactions(conn: &mut SqliteConnection) -> Reply<()> {
    while let depth @ 1.. = Transactions::get_transaction_depth(conn) {
        if Transactions::rollback(conn).await.is_err() {
            // The transaction had ended, by a statement or an error unknown to the driver. It is
            // begun again at this depth, and rolled back.
            let begin = format!("SAVEPOINT _sqlx_savepoint_{}", depth - 1);
            sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut *conn).await?;
            Transactions::rollback(conn).await?;
        }
    }
    // Ends a transaction that the driver did not begin. Without one, this is an error.
    match sqlx::raw_sql("ROLLBACK").execute(conn).await {
        Ok(_) | Err(sqlx::Error::Database(_)) => Ok(()),
        Err(error) => Err(error),
    }
}
