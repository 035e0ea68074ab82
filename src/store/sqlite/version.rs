//! Compare-and-set on SQLite.

use sqlx::{Row as _, Sqlite, SqliteConnection};

use crate::store::version::{
    Column, Holds, KeyValue, Seen, Value, VersionStore, Write, bind_key, exact, operations, whole,
};
use crate::{
    store::{Reply, sqlite::schema::wide},
    version::identifier::TableName,
};

const TABLE_COLUMNS: &str = "
SELECT c.name, upper(c.type) AS type, c.hidden IN (2, 3) AS generated,
       (c.pk = 1 AND (SELECT count(*) FROM pragma_table_info(?1, ?2) k WHERE k.pk > 0) = 1)
       OR EXISTS (SELECT 1 FROM pragma_index_list(?1, ?2) i
                  WHERE i.[unique] = 1 AND i.partial = 0
                    AND (SELECT count(*) = 1 AND max(k.name) = c.name FROM pragma_index_info(i.name, ?2) k)) AS single
FROM pragma_table_xinfo(?1, ?2) c";

/// No pragma tells on which changes a trigger runs.
const TRIGGERS: &str = "
SELECT EXISTS (SELECT 1 FROM `{}`.sqlite_master WHERE type = 'trigger' AND tbl_name = ?1 COLLATE NOCASE
               UNION ALL
               SELECT 1 FROM sqlite_temp_master WHERE type = 'trigger' AND tbl_name = ?1 COLLATE NOCASE)";

impl VersionStore for Sqlite {
    const QUOTE: char = '`';
    const EXACT_NAMES: bool = false;

    fn mark(index: usize) -> String {
        format!("?{index}")
    }

    async fn table_columns(conn: &mut SqliteConnection, table: &TableName) -> Reply<Seen> {
        let schema = table.schema.as_ref().map_or("main", |schema| schema.as_str());
        let rows = match sqlx::query(TABLE_COLUMNS).bind(table.table.as_str()).bind(schema).fetch_all(&mut *conn).await
        {
            Err(sqlx::Error::Database(error)) if error.message().starts_with("unknown database") => vec![],
            reply => reply?,
        };
        let mut seen = Seen { wrong: wide(&mut *conn).await?, ..Seen::default() };
        if !rows.is_empty() {
            let sql = TRIGGERS.replace("{}", schema);
            seen.triggers =
                sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).bind(table.table.as_str()).fetch_one(conn).await?;
        }
        for row in rows {
            let column_type: String = row.try_get("type")?;
            let is = |kind| column_type.contains(kind);
            let holds = if is("INT") {
                Holds::Integer
            } else if is("CHAR") || is("TEXT") || is("CLOB") {
                Holds::Text
            } else if is("BLOB") || is("UUID") {
                Holds::Uuid
            } else {
                Holds::Other
            };
            seen.columns.push(Column {
                name: row.try_get("name")?,
                generated: row.try_get("generated")?,
                text: None,
                column_type,
                holds,
                unique: row.try_get("single")?,
                scale: None,
                read: "{}",
                parameter: "{}",
            });
        }
        Ok(seen)
    }

    operations!(SqliteConnection);
}
