//! Compare-and-set on MySQL and MariaDB.

use sqlx::{MySql, MySqlConnection, Row as _};

use crate::store::version::{
    Column, Holds, KeyValue, Seen, Value, VersionStore, Write, bind_key, exact, operations, whole,
};
use crate::{store::Reply, version::identifier::TableName};

/// Each table of `information_schema` has constants in its WHERE, as for the table of the locks. An
/// index on an expression has NULL in place of a column.
const TABLE_COLUMNS: &str = "
SELECT CONVERT(c.column_name USING utf8mb4) AS name, CONVERT(c.column_type USING utf8mb4) AS type,
       CONVERT(LOWER(c.data_type) USING utf8mb4) AS base, CAST(c.numeric_scale AS SIGNED) AS scale,
       CAST(COALESCE(c.character_maximum_length, 0) AS SIGNED) AS width,
       (SELECT CONVERT(COALESCE(engine, '') USING utf8mb4) FROM information_schema.tables
        WHERE table_schema = COALESCE(?, DATABASE()) AND table_name = ?) AS engine, CONVERT(@@sql_mode USING utf8mb4) AS mode,
       CAST(COALESCE(c.generation_expression, '') <> '' AS SIGNED) AS is_generated,
       CAST(EXISTS (SELECT 1 FROM information_schema.triggers
                    WHERE event_object_schema = COALESCE(?, DATABASE()) AND event_object_table = ?
                      AND event_manipulation = 'UPDATE' AND action_timing = 'BEFORE') AS SIGNED) AS has_triggers,
       CAST(COALESCE(c.column_name IN (SELECT MAX(column_name) FROM information_schema.statistics
                                       WHERE table_schema = COALESCE(?, DATABASE()) AND table_name = ? AND non_unique = 0
                                       GROUP BY index_name HAVING COUNT(*) = 1), 0) AS SIGNED) AS single
FROM information_schema.columns c WHERE c.table_schema = COALESCE(?, DATABASE()) AND c.table_name = ?";

impl VersionStore for MySql {
    const QUOTE: char = '`';
    const EXACT_NAMES: bool = false;
    const AS_IT_IS_NOW: &'static str = " FOR UPDATE";

    fn mark(_: usize) -> String {
        "?".into()
    }

    async fn table_columns(conn: &mut MySqlConnection, table: &TableName) -> Reply<Seen> {
        let schema = table.schema.as_ref().map(|schema| schema.as_str().to_owned());
        let query = sqlx::query(TABLE_COLUMNS);
        let query = (0..4).fold(query, |query, _| query.bind(schema.clone()).bind(table.table.as_str()));
        let rows = query.fetch_all(conn).await?;
        let mut seen = Seen::default();
        for row in rows {
            let (base, column_type): (String, String) = (row.try_get("base")?, row.try_get("type")?);
            let (engine, mode): (String, String) = (row.try_get("engine")?, row.try_get("mode")?);
            if !["innodb", "rocksdb"].contains(&engine.to_ascii_lowercase().as_str()) {
                seen.wrong = Some(format!("its engine ({engine}) has no transactions; use InnoDB"));
            }
            if !mode.contains("STRICT_") {
                seen.wrong =
                    Some("the session's sql_mode is not strict, so that numbers would be cut in silence; add STRICT_TRANS_TABLES".into());
            }
            let width: i64 = row.try_get("width")?;
            let holds = match base.as_str() {
                "char" | "varchar" | "varbinary" | "text" | "tinytext" => Holds::Text,
                "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => Holds::Integer,
                "binary" if width == 16 => Holds::Uuid,
                "uuid" => Holds::UuidAsText,
                _ => Holds::Other,
            };
            // A value beyond signed 64 bits is read as NULL, which is an error, and never as
            // another number. The error then has its text.
            let unsigned = holds == Holds::Integer && column_type.to_ascii_lowercase().contains("unsigned");
            seen.triggers = row.try_get::<i64, _>("has_triggers")? == 1;
            seen.columns.push(Column {
                name: row.try_get("name")?,
                generated: row.try_get::<i64, _>("is_generated")? == 1,
                text: (unsigned || base == "decimal").then_some("CAST({} AS CHAR)"),
                column_type,
                holds,
                unique: row.try_get::<i64, _>("single")? == 1,
                scale: row.try_get::<Option<i64>, _>("scale")?.and_then(|scale| scale.try_into().ok()),
                read: if unsigned { "IF({} <= 9223372036854775807, CAST({} AS SIGNED), NULL)" } else { "{}" },
                parameter: "{}",
            });
        }
        Ok(seen)
    }

    operations!(MySqlConnection);
}
