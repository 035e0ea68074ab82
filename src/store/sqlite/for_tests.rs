//! What the tests of SQLite's statements share.

use std::{slice::from_ref, time::Duration};

use sqlx::{AssertSqlSafe, Connection as _, Sqlite, SqliteConnection};

use crate::{
    key::{Claim, Holder, Key, PreviousClaim},
    rules::Terms,
    store::{
        ClaimReply, ClaimRequest, ClaimStore as _, Form,
        migration::{Part, SchemaStore as _},
        schema::Schema,
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

/// Inserts rows as another program does.
pub(super) async fn free(conn: &mut SqliteConnection, keys: &[&str]) {
    for key in keys {
        execute(conn, &format!("INSERT INTO t_resource_lock (key_resource) VALUES ('{key}')")).await;
    }
}

pub(super) async fn granted(
    conn: &mut SqliteConnection,
    request: &ClaimRequest,
    terms: &Terms,
    form: Form,
) -> (Claim, Option<PreviousClaim>) {
    let reply = Sqlite::claim(conn, from_ref(request), terms, None, form).await.unwrap().remove(0);
    let ClaimReply::Granted { token, prior } = reply else { panic!("{reply:?}") };
    (Claim { key: request.key.clone(), holder: request.holder, token }, prior)
}

/// Grants the key, whose row is created if there is none, to a holder of its own.
pub(super) async fn claimed(conn: &mut SqliteConnection, key: &str, form: Form) -> Claim {
    let request = request(key, Holder::unique());
    Sqlite::create(conn, from_ref(&request.key), 60, Duration::from_secs(1), Form::Common).await.unwrap();
    granted(conn, &request, &Terms::default(), form).await.0
}
