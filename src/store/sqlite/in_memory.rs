//! SQLite databases that live in memory: a connection is brought to rest where it cannot be closed.
//!
//! The driver runs each connection on a thread of its own, which brings every statement to its end, whether its future is dropped or not.

use sqlx::{AssertSqlSafe, Connection as _, Database, Sqlite, SqliteConnection};
use sqlx_core::transaction::TransactionManager as _;

use crate::store::Reply;

type Transactions = <Sqlite as Database>::TransactionManager;

const FILE: &str = "SELECT COALESCE(file, '') FROM pragma_database_list WHERE name = 'main'";

/// Waits for what is under way, and ends all that is open; `false` if the database is in a file.
///
/// A busy timeout that a dropped claim has shortened stays: nothing waits for a database that has one connection, or a shared cache.
pub async fn rest(conn: &mut SqliteConnection) -> Reply<bool> {
    // After a COMMIT or ROLLBACK whose answer was not awaited the driver leaves out the next rollback of this kind: it has to be this one.
    Transactions::start_rollback(conn);
    conn.ping().await?;
    end_transactions(conn).await?;
    let file: String = sqlx::query_scalar(FILE).fetch_one(conn).await?;
    Ok(file.is_empty())
}

/// Ends whatever transaction is open.
pub async fn end_transactions(conn: &mut SqliteConnection) -> Reply<()> {
    while let depth @ 1.. = Transactions::get_transaction_depth(conn) {
        if Transactions::rollback(conn).await.is_err() {
            // It was over, by a statement or an error that the driver does not know of: begun again at this depth, it ends.
            let begin = format!("SAVEPOINT _sqlx_savepoint_{}", depth - 1);
            sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut *conn).await?;
            Transactions::rollback(conn).await?;
        }
    }
    // A transaction that the driver did not begin; without one, this is an error.
    match sqlx::raw_sql("ROLLBACK").execute(conn).await {
        Ok(_) | Err(sqlx::Error::Database(_)) => Ok(()),
        Err(error) => Err(error),
    }
}
