//! What operators have changed.

use chrono::TimeDelta;
use sqlx::{MySql, MySqlConnection};

use crate::store::{
    Reply,
    changes::{Change, ChangeInfo, ChangeStore, listed_change},
    mysql::row::micros,
};

const RECORD: &str =
    "INSERT INTO t_resource_change (at, who, what, name, detail) VALUES (UTC_TIMESTAMP(6), ?, ?, ?, ?)";

const LIST: &str = "
SELECT at, CONVERT(who USING utf8mb4) AS who, CONVERT(what USING utf8mb4) AS what, CONVERT(name USING utf8mb4) AS name,
       CONVERT(detail USING utf8mb4) AS detail FROM t_resource_change
WHERE ? IS NULL OR t_resource_change.name = ? ORDER BY id DESC LIMIT ?";

const FORGET: &str = "DELETE FROM t_resource_change WHERE at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND";

impl ChangeStore for MySql {
    async fn record(conn: &mut MySqlConnection, change: &Change<'_>, detail: &str) -> Reply<()> {
        let query = sqlx::query(RECORD).bind(change.who).bind(change.what).bind(change.name);
        query.bind(detail).execute(conn).await.map(drop)
    }

    async fn changes(conn: &mut MySqlConnection, name: Option<&str>, limit: u32) -> Reply<Vec<ChangeInfo>> {
        let rows = sqlx::query(LIST).bind(name).bind(name).bind(limit).fetch_all(conn).await?;
        rows.iter().map(listed_change).collect()
    }

    async fn forget_changes(conn: &mut MySqlConnection, older_than: TimeDelta) -> Reply<u64> {
        Ok(sqlx::query(FORGET).bind(micros(older_than)).execute(conn).await?.rows_affected())
    }
}
