//! The tables as the database describes them, and their creation.

use sqlx::{AssertSqlSafe, Row as _, Sqlite, SqliteConnection};

use crate::store::schema::{NO_KEY, Schema, SchemaStore, unfit};
use crate::store::{Form, Reply};

const INSTALL: &str = include_str!("../../../migrations/sqlite/20260101000000_rowlock.sql");

/// The columns that a table of another program lacks: SQLite has no ADD COLUMN IF NOT EXISTS.
/// `claimed_at` and `prior_begin_time` repeat `begin_time`, and `prior_end_time` repeats
/// `end_time`, whatever the types of these.
const ADDED: [(&str, &str); 10] = [
    ("holder", "holder BLOB"),
    ("token", "token INTEGER NOT NULL DEFAULT 0"),
    ("expires_at", "expires_at INTEGER"),
    ("claimed_at", "claimed_at ANY"),
    ("confirms", "confirms INTEGER NOT NULL DEFAULT 0"),
    ("prior_token", "prior_token INTEGER"),
    ("prior_client_ip", "prior_client_ip TEXT"),
    ("prior_status", "prior_status TEXT"),
    ("prior_begin_time", "prior_begin_time ANY"),
    ("prior_end_time", "prior_end_time ANY"),
];

const SCHEMA: &str = "
SELECT lower(c.name) AS name, upper(c.type) || CASE WHEN c.[notnull] AND c.name = 'end_time' COLLATE NOCASE THEN ' NOT NULL' ELSE '' END AS type,
    (SELECT sql FROM main.sqlite_schema WHERE lower(name) = 't_resource_lock') AS definition,
    EXISTS (SELECT 1 FROM main.sqlite_schema WHERE lower(name) = 't_resource_lock_queue') AS queue,
    EXISTS (SELECT 1 FROM pragma_index_list('t_resource_lock', 'main') i WHERE i.[unique] AND NOT i.partial
            AND (SELECT group_concat(lower(k.name)) FROM pragma_index_info(i.name, 'main') k) = 'key_resource') AS has_key
FROM pragma_table_info('t_resource_lock', 'main') c";

/// The driver decodes any text as UTF-8, so SQLite itself compares the two here.
const IS_WIDE: &str = "SELECT encoding <> 'UTF-8' FROM pragma_encoding";

/// Returns a description of the problem if the database stores text in UTF-16.
pub async fn wide(conn: &mut SqliteConnection) -> Reply<Option<String>> {
    let wide: bool = sqlx::query_scalar(IS_WIDE).fetch_one(conn).await?;
    Ok(wide.then(|| {
        "the database is in UTF-16, from which the driver reads no text; use one in UTF-8 (PRAGMA encoding)".into()
    }))
}

impl SchemaStore for Sqlite {
    async fn schema(conn: &mut SqliteConnection) -> Reply<Schema> {
        let mut schema = Schema::empty();
        schema.refused = wide(conn).await?;
        if schema.refused.is_some() {
            return Ok(schema);
        }
        let journal: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *conn).await?;
        let mut in_micros = journal == "wal";
        for row in sqlx::query(SCHEMA).fetch_all(conn).await? {
            schema.queue = row.try_get("queue")?;
            let name: String = row.try_get("name")?;
            let column_type: String = row.try_get("type")?;
            if let Some(fit) = misfit(&name, &column_type) {
                schema.wrong = Some(unfit(&name, &column_type, fit));
            }
            if name == "begin_time" || name == "end_time" {
                in_micros &= column_type.contains("INT");
            }
            if name == "key_resource" {
                schema.key_type = column_type;
                if !row.try_get::<bool, _>("has_key")? {
                    schema.wrong = Some(NO_KEY.to_owned());
                }
                let definition: String = row.try_get("definition")?;
                if !["TEXT", "CHAR"].iter().any(|text| schema.key_type.to_ascii_uppercase().contains(text)) {
                    schema.wrong = Some(format!("its column key_resource ({}) is not text; use TEXT", schema.key_type));
                }
                if definition.to_ascii_uppercase().contains("COLLATE") {
                    schema.wrong = Some("its column key_resource has a COLLATE clause and may not compare byte by byte; use TEXT without one".into());
                }
            }
            schema.columns.push(name);
        }
        schema.form = if in_micros { Form::IntegerTimes } else { Form::Common };
        Ok(schema)
    }

    async fn install(conn: &mut SqliteConnection) -> Reply<()> {
        sqlx::raw_sql(INSTALL).execute(&mut *conn).await?;
        let schema = Self::schema(conn).await?;
        for (_, definition) in ADDED.iter().filter(|(name, _)| schema.missing().contains(name)) {
            let sql = format!("ALTER TABLE t_resource_lock ADD COLUMN {definition}");
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *conn).await?;
        }
        Ok(())
    }

    async fn blocker(_: &mut SqliteConnection) -> Reply<Option<String>> {
        Ok(None)
    }

    async fn install_functions(_: &mut SqliteConnection) -> Reply<bool> {
        Ok(false)
    }
}

/// Returns a type that fits, if a column that another program may have created has one that does
/// not.
fn misfit(column: &str, column_type: &str) -> Option<&'static str> {
    let is = |kind| column_type.contains(kind);
    let text = (is("CHAR") || is("TEXT")) && !is("INT");
    let (fits, fit) = match column {
        "key_resource" => (text, "TEXT"),
        "begin_time" | "end_time" => {
            let time = text || is("INT") || column_type.starts_with("DATETIME") || column_type.starts_with("TIMESTAMP");
            (time && !is("NOT NULL"), "INTEGER or DATETIME, NULL allowed")
        }
        "lock_flag" | "time" => (is("INT") || is("NUM") || is("BOOL"), "INTEGER"),
        _ => (true, ""),
    };
    (!fits).then_some(fit)
}
