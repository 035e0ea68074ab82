//! Executes statements that write, and ends what a text that failed leaves open.
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

/// Ends the transaction of a text that failed, unless its error has ended it.
pub(super) async fn undo(conn: &mut SqliteConnection) -> Reply<()> {
    let Err(error) = sqlx::raw_sql("ROLLBACK").execute(conn).await else { return Ok(()) };
    let said = error.as_database_error().map(|error| error.message()).unwrap_or_default();
    if said.contains("no transaction is active") { Ok(()) } else { Err(unanswered(error)) }
}

/// Executes statements in a transaction of their own, which is undone if they change nothing.
#[cfg(feature = "schedule")]
pub(super) async fn begun(
    conn: &mut SqliteConnection,
    changes: impl AsyncFnOnce(&mut SqliteConnection) -> Reply<bool>,
) -> Reply<bool> {
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut *conn).await?;
    let changed = match changes(conn).await {
        Ok(true) => sqlx::raw_sql("COMMIT").execute(&mut *conn).await.map(|_| true),
        unchanged => unchanged,
    };
    if !matches!(changed, Ok(true)) {
        undo(conn).await?;
    }
    changed
}
