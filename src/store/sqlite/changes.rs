//! What operators have changed.

use chrono::TimeDelta;
use sqlx::{Sqlite, SqliteConnection};

use crate::store::{
    Reply,
    changes::{Change, ChangeInfo, ChangeStore, listed_change},
    sqlite::row::{micros, sql},
};

const RECORD: &str =
    sql!("INSERT INTO t_resource_change (at, who, what, name, detail) VALUES (" now ", ?1, ?2, ?3, ?4)");

const LIST: &str = "
SELECT at, who, what, name, detail FROM t_resource_change WHERE ?1 IS NULL OR name = ?1 ORDER BY id DESC LIMIT ?2";

const FORGET: &str = sql!("DELETE FROM t_resource_change WHERE at < " now " - ?1");

impl ChangeStore for Sqlite {
    async fn record(conn: &mut SqliteConnection, change: &Change<'_>, detail: &str) -> Reply<()> {
        let query = sqlx::query(RECORD).bind(change.who).bind(change.what).bind(change.name);
        query.bind(detail).execute(conn).await.map(drop)
    }

    async fn changes(conn: &mut SqliteConnection, name: Option<&str>, limit: u32) -> Reply<Vec<ChangeInfo>> {
        let rows = sqlx::query(LIST).bind(name).bind(limit).fetch_all(conn).await?;
        rows.iter().map(listed_change).collect()
    }

    async fn forget_changes(conn: &mut SqliteConnection, older_than: TimeDelta) -> Reply<u64> {
        Ok(sqlx::query(FORGET).bind(micros(older_than)).execute(conn).await?.rows_affected())
    }
}
