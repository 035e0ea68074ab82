//! The tables as the database describes them, and their creation.

use sqlx::{MySql, MySqlConnection, Row as _};

use crate::store::schema::{Freshness, Schema, SchemaStore, unfit};
use crate::store::{Form, Reply};

const INSTALL: &str = include_str!("../../../migrations/mysql/20260101000000_rowlock.sql");

/// A statement waits for a metadata lock for a year by default, also when its client is gone.
const LOCK_LIMIT: &str = "SET @rowlock_lock_wait = @@lock_wait_timeout, lock_wait_timeout = 1";
const RESTORE: &str = "SET lock_wait_timeout = @rowlock_lock_wait";

/// The first one needs a table that MariaDB does not fill.
const BLOCKERS: [&str; 2] = [
    "
SELECT CONVERT(CONCAT('connection ', t.processlist_id, ' of user ', COALESCE(t.processlist_user, '?'), ', ', LOWER(t.processlist_command), ' for ',
           t.processlist_time, ' s, last statement: ', COALESCE(LEFT(s.sql_text, 80), '?')) USING utf8mb4)
FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.thread_id = m.owner_thread_id
LEFT JOIN performance_schema.events_statements_current s ON s.thread_id = t.thread_id AND s.nesting_event_level = 0
WHERE m.object_schema = DATABASE() AND m.object_name = 't_resource_lock' AND m.lock_status = 'GRANTED' AND t.processlist_id <> CONNECTION_ID()
ORDER BY t.processlist_time DESC LIMIT 1",
    "
SELECT CONVERT(CONCAT('connection ', p.id, ' of user ', p.user, ', in a transaction since ', t.trx_started, ' (the oldest one), ',
           LOWER(p.command), ' for ', p.time, ' s') USING utf8mb4)
FROM information_schema.innodb_trx t JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE p.id <> CONNECTION_ID() ORDER BY t.trx_started LIMIT 1",
];

const FUNCTIONS: &str = include_str!("../../../functions/mysql/20261127000000_functions.sql");

const SCHEMA: &str = "
SELECT CONVERT(LOWER(column_name) USING utf8mb4) AS name, CONVERT(column_type USING utf8mb4) AS type,
       CONVERT(data_type USING utf8mb4) AS data_type, CONVERT(COALESCE(collation_name, 'binary') USING utf8mb4) AS collation,
       CAST(COALESCE(character_maximum_length, 0) AS SIGNED) AS width, CAST(@@autocommit AS SIGNED) AS autocommit,
       CAST(banner.version LIKE '%MariaDB%' AS SIGNED) AS mariadb,
       (SELECT CAST(COUNT(*) AS SIGNED) FROM information_schema.plugins WHERE plugin_name = 'group_replication' AND plugin_status = 'ACTIVE') AS member,
       (SELECT CAST(COUNT(*) AS SIGNED) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 't_resource_lock_queue') AS queue,
       (SELECT CONVERT(COALESCE(GROUP_CONCAT(LOWER(column_name) ORDER BY seq_in_index), '') USING utf8mb4) FROM information_schema.statistics
        WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND index_name = 'PRIMARY') AS primary_key,
       CONVERT(CONCAT(IF(is_nullable = 'NO' AND column_name = 'end_time', ' NOT NULL', ''), IF(extra LIKE '%on update%', ' ON UPDATE', ''))
           USING utf8mb4) AS more, CONVERT(CONCAT(banner.version, ' ', @@version_comment) USING utf8mb4) AS banner
FROM (SELECT VERSION() AS version) banner
LEFT JOIN information_schema.columns ON table_schema = DATABASE() AND table_name = 't_resource_lock'";

impl SchemaStore for MySql {
    async fn schema(conn: &mut MySqlConnection) -> Reply<Schema> {
        let rows = sqlx::query(SCHEMA).fetch_all(conn).await?;
        let mut schema = Schema::empty();
        for row in rows {
            schema.judge_server(row.try_get("banner")?);
            // The server returns its version even without a table.
            let Some(name) = row.try_get::<Option<String>, _>("name")? else { break };
            if row.try_get::<i64, _>("autocommit")? == 0 {
                schema.wrong = Some(
                    "the connection's autocommit is off, so that a claim would not be committed; switch it on".into(),
                );
            }
            let is_mariadb = row.try_get::<i64, _>("mariadb")? == 1;
            schema.form = if is_mariadb { Form::NoWait } else { Form::Common };
            schema.freshness = match row.try_get::<i64, _>("member")? {
                0 if is_mariadb => Freshness::SyncWait,
                0 => Freshness::Plain,
                _ => Freshness::Before,
            };
            schema.queue = row.try_get::<i64, _>("queue")? > 0;
            // A statement that found its rows by another index would lock rows of other keys too.
            if row.try_get::<String, _>("primary_key")? != "key_resource" {
                schema.wrong = Some("its primary key is not the column key_resource alone; make it that".into());
            }
            let column_type: String = row.try_get("type")?;
            let data_type: String = row.try_get("data_type")?;
            let more: String = row.try_get("more")?;
            let width = usize::try_from(row.try_get::<i64, _>("width")?).unwrap_or_default();
            if let Some(fit) = misfit(&name, &data_type, &more) {
                schema.wrong = Some(unfit(&name, &format!("{column_type}{more}"), fit));
            }
            if name == "client_ip" {
                schema.label_chars = width;
            }
            if name == "key_resource" {
                judge_key(&mut schema, &column_type, &data_type, row.try_get("collation")?, width);
            }
            schema.columns.push(name);
        }
        Ok(schema)
    }

    async fn install(conn: &mut MySqlConnection) -> Reply<()> {
        sqlx::raw_sql(LOCK_LIMIT).execute(&mut *conn).await?;
        let installed = sqlx::raw_sql(INSTALL).execute(&mut *conn).await;
        let restored = sqlx::raw_sql(RESTORE).execute(conn).await;
        installed.and(restored).map(drop)
    }

    async fn blocker(conn: &mut MySqlConnection) -> Reply<Option<String>> {
        for sql in BLOCKERS {
            if let Ok(Some(blocker)) = sqlx::query_scalar(sql).fetch_optional(&mut *conn).await {
                return Ok(Some(blocker));
            }
        }
        Ok(None)
    }

    async fn install_functions(conn: &mut MySqlConnection) -> Reply<bool> {
        sqlx::raw_sql(FUNCTIONS).execute(conn).await.map(|_| true)
    }
}

/// Returns a type that fits, if a column that another program may have created has one that does
/// not. `more` is what its definition has beside the type.
fn misfit(column: &str, data_type: &str, more: &str) -> Option<&'static str> {
    match column {
        // A TIMESTAMP cannot hold the epoch, and a time that changes with each update would make
        // every renewal a loss.
        "begin_time" | "end_time" if data_type != "datetime" || !more.is_empty() => Some("DATETIME(6) NULL"),
        "lock_flag" | "time" if !data_type.ends_with("int") => Some("INT"),
        _ => None,
    }
}

/// Records which keys their column holds, or that it does not compare byte by byte.
fn judge_key(schema: &mut Schema, column_type: &str, data_type: &str, collation: &str, width: usize) {
    schema.key_type = format!("{column_type} {collation}");
    match data_type {
        "varbinary" => schema.key_limit.bytes = width,
        "varchar" if collation.starts_with("utf8") && collation.ends_with("_bin") => {
            schema.key_limit.chars = width;
            schema.key_limit.three_byte_chars = !collation.starts_with("utf8mb4");
        }
        _ => {
            schema.wrong = Some(format!(
                "its column key_resource ({}) does not compare byte by byte; use VARBINARY(255)",
                schema.key_type
            ));
        }
    }
}
