//! Executes statements that write, and ends what a text that failed leaves open.
//!
//! The driver counts the numbers from ?1 on that a statement leaves out, over all statements of a
//! text. When they are more than the arguments, it binds no further ones.

use sqlx::{SqliteConnection, sqlite::SqliteRow};

use crate::store::{Reply, sqlite::row::Query};

/// Returns the row of a statement that writes. The statement has to be run to its end: only there
/// does SQLite commit, which may fail.
pub(super) async fn written(query: Query<'_>, conn: &mut SqliteConnection) -> Reply<Option<SqliteRow>> {
    Ok(query.fetch_all(conn).await?.pop())
}
