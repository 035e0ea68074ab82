//! The tables as the database describes them, and their creation.

use sqlx::{AssertSqlSafe, Connection as _, Row as _, Sqlite, SqliteConnection};

use crate::store::migration::{Part, SchemaStore, Step, additions, creations, files, read_use, removal};
use crate::store::schema::{Column, Installed, NO_KEY, Schema, unfit};
use crate::store::{Form, Reply, sqlite::row::sql};

files!("sqlite");

/// The columns that a table of another program lacks: SQLite has no ADD COLUMN IF NOT EXISTS.
/// `claimed_at` and `prior_begin_time` repeat `begin_time`, and `prior_end_time` repeats
/// `end_time`, whatever the types of these.
const ADDED: [(&str, &str); 10] = [
    ("holder", "BLOB"),
    ("token", "INTEGER NOT NULL DEFAULT 0"),
    ("expires_at", "INTEGER"),
    ("claimed_at", "ANY"),
    ("confirms", "INTEGER NOT NULL DEFAULT 0"),
    ("prior_token", "INTEGER"),
    ("prior_client_ip", "TEXT"),
    ("prior_status", "TEXT"),
    ("prior_begin_time", "ANY"),
    ("prior_end_time", "ANY"),
];
const ADDING: &str = "the file's, against other writers, for a moment; no row is rewritten";

const SCHEMA: &str = "
SELECT lower(c.name) AS name, upper(c.type) || CASE WHEN c.[notnull] AND c.name = 'end_time' COLLATE NOCASE THEN ' NOT NULL' ELSE '' END AS type,
    s.relations, (SELECT sql FROM main.sqlite_schema WHERE lower(name) = 't_resource_lock') AS definition,
    (SELECT upper(min(k.coll)) FROM pragma_index_list('t_resource_lock', 'main') i, pragma_index_xinfo(i.name, 'main') k
     WHERE i.[unique] AND NOT i.partial AND k.[key] GROUP BY i.name
     HAVING count(*) = 1 AND lower(min(k.name)) = 'key_resource' ORDER BY upper(min(k.coll)) = 'BINARY' LIMIT 1) AS key_collation
FROM (SELECT coalesce(group_concat(lower(name)), '') AS relations FROM main.sqlite_schema WHERE name LIKE 't\\_resource\\_%' ESCAPE '\\') s
LEFT JOIN pragma_table_info('t_resource_lock', 'main') c";

/// Returns the collation in the definition of the key's column, unless it is that of bytes. An
/// index may have another one, which comparisons do not use.
fn collation_of(definition: &str) -> Option<String> {
    let definition = definition.to_ascii_uppercase();
    let column = definition.split_once("KEY_RESOURCE")?.1.split(',').next()?;
    let quotes = |c: char| c.is_whitespace() || "\"'`[".contains(c);
    let collation = column.split_once("COLLATE")?.1.trim_start_matches(quotes);
    let end = collation.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(collation.len());
    (&collation[..end] != "BINARY").then(|| collation[..end].to_owned())
}

/// The driver decodes any text as UTF-8, so SQLite itself compares the two here.
const IS_WIDE: &str = "SELECT encoding <> 'UTF-8' FROM pragma_encoding";

/// Returns a description of the problem if the database stores text in UTF-16.
pub async fn wide(conn: &mut SqliteConnection) -> Reply<Option<String>> {
    let wide: bool = sqlx::query_scalar(IS_WIDE).fetch_one(conn).await?;
    Ok(wide.then(|| {
        "the database is in UTF-16, from which the driver reads no text; use one in UTF-8 (PRAGMA encoding)".into()
    }))
}

const STANDING: &str = "
SELECT key_resource, coalesce(client_ip, '') FROM t_resource_lock WHERE lock_flag = 1 AND holder IS NOT NULL AND claimed_at = begin_time AND end_time IS NULL ORDER BY key_resource LIMIT 1";

/// Other programs keep their times as text.
const AHEAD: &str = "
SELECT key_resource FROM t_resource_lock
WHERE CASE typeof(begin_time) WHEN 'text' THEN unixepoch(begin_time) ELSE begin_time / 1000000 END > unixepoch() + 300 + ?1 LIMIT 1";

const RUNNING: &str =
    sql!("SELECT name, client_ip FROM t_resource_schedule WHERE holder IS NOT NULL AND due_at > " now " LIMIT 1");

const ALIVE: &str = sql!("SELECT '', label FROM t_resource_schedule_instance WHERE beat_at + lives > " now " LIMIT 1");

impl SchemaStore for Sqlite {
    async fn schema(conn: &mut SqliteConnection) -> Reply<Schema> {
        let mut schema = Schema { ours: &ADDED, refused: wide(conn).await?, ..Schema::default() };
        if schema.refused.is_some() {
            return Ok(schema);
        }
        let journal: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *conn).await?;
        let mut in_micros = journal == "wal";
        for row in sqlx::query(SCHEMA).fetch_all(conn).await? {
            schema.relations = row.try_get::<String, _>("relations")?.split(',').map(str::to_owned).collect();
            let Some(name) = row.try_get::<Option<String>, _>("name")? else { break };
            let column_type: String = row.try_get("type")?;
            if name == "begin_time" || name == "end_time" {
                in_micros &= column_type.contains("INT");
            }
            if name == "key_resource" {
                schema.key_type = column_type.clone();
                let own = collation_of(row.try_get("definition")?);
                match own.as_deref().or(row.try_get("key_collation")?) {
                    None => schema.wrong = Some(NO_KEY.to_owned()),
                    Some("BINARY") => {}
                    Some(collation) => {
                        schema.wrong = Some(format!(
                            "its column key_resource has the collation {collation} and may not compare byte by byte; use TEXT without COLLATE"
                        ))
                    }
                }
            }
            if let Some(fit) = misfit(&name, &column_type) {
                schema.wrong = Some(unfit(&name, &column_type, fit));
            }
            schema.columns.push(Column { name, kind: column_type });
        }
        schema.form = if in_micros { Form::IntegerTimes } else { Form::Common };
        Ok(schema)
    }

    fn around(part: Part) -> (&'static str, &'static str) {
        if part == Part::Removal { ("BEGIN IMMEDIATE;\n", "COMMIT;\n") } else { ("", "") }
    }

    fn steps(schema: &Schema, part: Part) -> Vec<Step> {
        let mut steps = match part {
            Part::Locks => creations(schema, &LOCKS),
            #[cfg(feature = "schedule")]
            Part::Schedules => creations(schema, &SCHEDULES),
            Part::Functions => Vec::new(),
            Part::Removal => return removal(schema, false, "", ("", "", ""), None),
        };
        if part == Part::Locks && !schema.columns.is_empty() {
            let added = additions(schema, "ANY").into_iter();
            steps.extend(
                added.map(|column| Step {
                    sql: format!("ALTER TABLE t_resource_lock ADD COLUMN {column}"),
                    locks: ADDING,
                }),
            );
        }
        steps
    }

    async fn alter(conn: &mut SqliteConnection, steps: &[Step]) -> Reply<()> {
        for step in steps {
            sqlx::raw_sql(AssertSqlSafe(step.sql.as_str())).execute(&mut *conn).await?;
        }
        Ok(())
    }

    async fn blocker(_: &mut SqliteConnection) -> Reply<Option<String>> {
        Ok(None)
    }

    async fn ahead(conn: &mut SqliteConnection, offset: i64) -> Reply<Option<String>> {
        sqlx::query_scalar(AHEAD).bind(offset).fetch_optional(conn).await
    }

    async fn remove(conn: &mut SqliteConnection, schema: &Schema, steps: &[Step]) -> Reply<Option<String>> {
        let mut tx = conn.begin_with("BEGIN IMMEDIATE").await?;
        let used = read_use!(tx, schema);
        if used.is_some() {
            return tx.rollback().await.map(|()| used);
        }
        Self::alter(&mut tx, steps).await?;
        tx.commit().await.map(|()| None)
    }

    async fn functions(_: &mut SqliteConnection, _: bool) -> Reply<Option<Installed>> {
        Ok(None)
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
