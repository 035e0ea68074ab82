//! What operators have changed.

use chrono::TimeDelta;
use sqlx::{PgConnection, Postgres};

use crate::store::{
    Reply,
    changes::{Change, ChangeInfo, ChangeStore, listed_change},
};

const RECORD: &str =
    "INSERT INTO t_resource_change (at, who, what, name, detail) VALUES (clock_timestamp(), $1, $2, $3, $4)";

const LIST: &str = "
SELECT at, who::text AS who, what::text AS what, name::text AS name, detail FROM t_resource_change
WHERE $1::text IS NULL OR name = $1 ORDER BY id DESC LIMIT $2";

const FORGET: &str = "DELETE FROM t_resource_change WHERE at < clock_timestamp() - $1::interval";

impl ChangeStore for Postgres {
    async fn record(conn: &mut PgConnection, change: &Change<'_>, detail: &str) -> Reply<()> {
        let query = sqlx::query(RECORD).bind(change.who).bind(change.what).bind(change.name);
        query.bind(detail).execute(conn).await.map(drop)
    }

    async fn changes(conn: &mut PgConnection, name: Option<&str>, limit: u32) -> Reply<Vec<ChangeInfo>> {
        let rows = sqlx::query(LIST).bind(name).bind(i64::from(limit)).fetch_all(conn).await?;
        rows.iter().map(listed_change).collect()
    }

    async fn forget_changes(conn: &mut PgConnection, older_than: TimeDelta) -> Reply<u64> {
        Ok(sqlx::query(FORGET).bind(older_than).execute(conn).await?.rows_affected())
    }
}
