//! SQLite, embedded. Times are microseconds since 1970, UTC; its clock has a resolution of
//! milliseconds.
//!
//! Other programs keep `begin_time` and `end_time` as text, `YYYY-MM-DD HH:MM:SS`. Each value is
//! read in the form in which it is stored, and written in the form that the column's declared type
//! requires. `claimed_at` repeats `begin_time` as it is stored.
//!
//! A claim of a row that is free or missing is one text (`free.rs`). Any other claim reads the row,
//! judges it by `rules.rs`, and updates the row that was judged by compare-and-set: the rules are
//! not repeated in SQL.

mod admin;
mod change;
mod claim;
#[cfg(test)]
mod for_tests;
mod free;
#[cfg(test)]
mod free_tests;
#[cfg(feature = "schedule")]
mod instances;
#[cfg(test)]
#[cfg(feature = "schedule")]
mod late_tests;
#[cfg(test)]
mod lock_tests;
mod queue;
mod row;
#[cfg(feature = "schedule")]
mod schedule;
#[cfg(feature = "schedule")]
mod schedule_sql;
#[cfg(test)]
#[cfg(feature = "schedule")]
mod schedule_tests;
mod schema;
mod version;
mod watch;

use chrono::{DateTime, Utc};
use sqlx::{
    AssertSqlSafe, Connection as _, Pool, SqlSafeStr as _, Sqlite, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteTransactionManager},
};
use sqlx_core::transaction::TransactionManager as _;

use crate::store::{Reply, Store, stored_row::StoredRow as _, unanswered};

const FILE: &str = "SELECT COALESCE(file, '') FROM pragma_database_list WHERE name = 'main'";
const MODES: &str = "SELECT journal_mode, locking_mode FROM pragma_journal_mode, pragma_locking_mode";

impl Store for Sqlite {
    const BEGIN_TEXT: &'static str = "BEGIN IMMEDIATE";
    const ONE_WRITER: bool = true;

    /// A database in memory has one connection. An application whose pool has one connection may
    /// rely on it that no other one writes.
    fn has_own_sessions(pool: &Pool<Self>) -> bool {
        pool.options().get_max_connections() > 1 && !Self::may_be_in_memory(&pool.connect_options())
    }

    /// Without a write-ahead log, readers would wait for it. Under an exclusive lock it could not
    /// read.
    async fn begin_session(conn: &mut SqliteConnection) -> Reply<Option<DateTime<Utc>>> {
        Self::leave_transaction(conn).await?;
        let (journal, locking): (String, String) = sqlx::query_as(MODES).fetch_one(conn).await?;
        Ok((journal == "wal" && locking == "normal").then(Utc::now))
    }

    async fn now(conn: &mut SqliteConnection) -> Reply<DateTime<Utc>> {
        sqlx::query(row::sql!("SELECT " now " AS now")).fetch_one(conn).await?.time("now")
    }

    async fn leave_transaction(conn: &mut SqliteConnection) -> Reply<bool> {
        while let depth @ 1.. = SqliteTransactionManager::get_transaction_depth(conn) {
            if SqliteTransactionManager::rollback(conn).await.is_err() {
                // The transaction had ended, by a statement or an error unknown to the driver. It
                // is begun again at this depth, and rolled back.
                let begin = format!("SAVEPOINT _sqlx_savepoint_{}", depth - 1);
                sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut *conn).await?;
                SqliteTransactionManager::rollback(conn).await?;
            }
        }
        // Ends a transaction that the driver did not begin. Without one, this is an error.
        match sqlx::raw_sql("ROLLBACK").execute(conn).await {
            Ok(_) | Err(sqlx::Error::Database(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    async fn open(conn: &mut SqliteConnection) -> Reply<bool> {
        Self::leave_transaction(conn).await?;
        let begin = "BEGIN IMMEDIATE; SAVEPOINT rowlock".into_sql_str();
        SqliteTransactionManager::begin(conn, Some(begin)).await.map(|()| true)
    }

    fn may_be_in_memory(options: &SqliteConnectOptions) -> bool {
        !options.get_filename().exists()
    }

    /// The driver runs each connection on a thread of its own, which completes every statement,
    /// whether its future is dropped or not.
    ///
    /// A busy timeout that a dropped claim has shortened stays: no statement waits for a database
    /// that has one connection, or a shared cache.
    async fn make_idle(conn: &mut SqliteConnection) -> Reply<bool> {
        // After a COMMIT or ROLLBACK whose reply was not awaited, the driver skips the next
        // rollback of this kind. This call is the one to be skipped.
        SqliteTransactionManager::start_rollback(conn);
        conn.ping().await?;
        Self::leave_transaction(conn).await?;
        let file: String = sqlx::query_scalar(FILE).fetch_one(conn).await?;
        Ok(file.is_empty())
    }

    /// In a transaction, BEGIN fails. If it does not, the text goes on, ends what it has begun, and
    /// fails because there is nothing more to end.
    async fn in_transaction(conn: &mut SqliteConnection) -> Reply<()> {
        match sqlx::raw_sql("BEGIN; ROLLBACK; ROLLBACK").execute(conn).await {
            Err(sqlx::Error::Database(error)) if error.message().contains("within a transaction") => Ok(()),
            reply => reply.map(drop),
        }
    }

    async fn execute_text(conn: &mut SqliteConnection, sql: &'static str) -> Reply<()> {
        sqlx::raw_sql(sql).execute(conn).await.map(drop)
    }

    async fn undo(conn: &mut SqliteConnection) -> Reply<()> {
        let Err(error) = sqlx::raw_sql("ROLLBACK").execute(conn).await else { return Ok(()) };
        let said = error.as_database_error().map(|error| error.message()).unwrap_or_default();
        if said.contains("no transaction is active") { Ok(()) } else { Err(unanswered(error)) }
    }
}
