//! What the tests of SQLite's statements share.

use sqlx::{AssertSqlSafe, Connection as _, Sqlite, SqliteConnection};

use crate::{
    key::{Holder, Key},
    store::{
        ClaimRequest,
        schema::{Part, Schema, SchemaStore as _},
    },
};

/// Opens a database in memory that has all tables.
pub(super) async fn tables() -> SqliteConnection {
    let mut conn = SqliteConnection::connect("sqlite::memory:").await.unwrap();
    create_tables(&mut conn).await;
    conn
}

pub(super) async fn create_tables(conn: &mut SqliteConnection) {
    let parts = [
        Part::Locks,
        #[cfg(feature = "schedule")]
        Part::Schedules,
    ];
    for part in parts {
        Sqlite::alter(conn, &Sqlite::steps(&Schema::default(), part)).await.unwrap();
    }
}

pub(super) async fn execute(conn: &mut SqliteConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(conn).await.unwrap();
}

pub(super) fn request(key: &str, holder: Holder) -> ClaimRequest {
    ClaimRequest { key: Key::new(key).unwrap(), holder, waited: false }
}
