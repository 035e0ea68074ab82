//! Executes statements that write, and texts that are a transaction.
//!
//! The driver counts the numbers from ?1 on that a statement leaves out, over all statements of a
//! text. When they are more than the arguments, it binds no further ones.

use sqlx::{SqliteConnection, sqlite::SqliteRow};

use crate::store::{Reply, sqlite::row::Query, unanswered};

/// Returns the row of a statement that writes. The statement has to be run to its end: only there
/// does SQLite commit, which may fail.
pub(super) async fn written(query: Query<'_>, conn: &mut SqliteConnection) -> Reply<Option<SqliteRow>> {
    Ok(query.fetch_all(conn).await?.pop())
}

/// Executes a text that is a transaction, and returns whether its statement returned a row.
pub(super) async fn transaction(query: Query<'_>, conn: &mut SqliteConnection) -> Reply<bool> {
    match written(query, conn).await {
        Ok(row) => Ok(row.is_some()),
        Err(error) => {
            undo(conn).await?;
            Err(error)
        }
    }
}

/// Ends the transaction of a text that failed, unless its error has ended it.
pub(super) async fn undo(conn: &mut SqliteConnection) -> Reply<()> {
    let Err(error) = sqlx::raw_sql("ROLLBACK").execute(conn).await else { return Ok(()) };
    let said = error.as_database_error().map(|error| error.message()).unwrap_or_default();
    if said.contains("no transaction is active") { Ok(()) } else { Err(unanswered(error)) }
}
