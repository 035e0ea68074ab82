//! The tables as the database describes them, and their creation.

use sqlx::{AssertSqlSafe, PgConnection, Postgres, Row as _};

use crate::store::Reply;
use crate::store::schema::{Freshness, NO_KEY, Schema, SchemaStore, unfit};

const INSTALL: &str = include_str!("../../../migrations/postgres/20260101000000_rowlock.sql");

/// The setting is that of the transaction which the texts are together.
const LOCK_LIMIT: &str = "SET LOCAL lock_timeout = '1s';";

const BLOCKER: &str = r"
SELECT format('process %s of user %s, %s, in a transaction since %s UTC, last statement: %s', a.pid, a.usename, a.state,
              date_trunc('seconds', a.xact_start AT TIME ZONE 'UTC'), left(regexp_replace(a.query, '\s+', ' ', 'g'), 80))
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.granted AND l.pid <> pg_backend_pid() AND l.relation IN (to_regclass('t_resource_lock'), to_regclass('t_resource_lock_queue'))
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY a.xact_start LIMIT 1";

const FUNCTIONS: &str = include_str!("../../../functions/postgres/20261127000000_functions.sql");

const SCHEMA: &str = "
SELECT a.attname::text AS name, a.atttypmod - 4 AS width,
       format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull AND a.attname = 'end_time' THEN ' NOT NULL' ELSE '' END AS type,
       coalesce(l.collisdeterministic, true) AS exact, current_setting('TimeZone') AS zone, version() AS banner,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid AND i.indimmediate
                 AND i.indpred IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum) AS is_key,
       c.relnamespace::regnamespace::text AS place, q.relnamespace::regnamespace::text AS queue_place
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_class q ON q.oid = to_regclass('t_resource_lock_queue')
LEFT JOIN pg_collation l ON l.oid = a.attcollation
WHERE a.attrelid = to_regclass('t_resource_lock') AND a.attnum > 0 AND NOT a.attisdropped";

impl SchemaStore for Postgres {
    const INSTALLS_ATOMICALLY: bool = true;

    async fn schema(conn: &mut PgConnection) -> Reply<Schema> {
        let rows = sqlx::query(SCHEMA).fetch_all(conn).await?;
        let mut schema = Schema::empty();
        for row in rows {
            schema.own_column = Some("awaited");
            schema.judge_server(row.try_get("banner")?);
            if schema.untried.is_none() {
                schema.freshness = Freshness::Primary;
            }
            let place: String = row.try_get("place")?;
            let queue: Option<String> = row.try_get("queue_place")?;
            schema.queue = queue.is_some();
            if let Some(queue) = queue.filter(|queue| *queue != place) {
                schema.wrong = Some(elsewhere(&place, &queue));
            }
            let name: String = row.try_get("name")?;
            let column_type: String = row.try_get("type")?;
            let width = usize::try_from(row.try_get::<i32, _>("width")?).ok().filter(|width| *width > 0);
            if name == "client_ip" {
                schema.label_chars = width.unwrap_or(usize::MAX);
            }
            if name == "key_resource" {
                let text = column_type.starts_with("character varying") || column_type == "text";
                if !text || !row.try_get::<bool, _>("exact")? {
                    schema.wrong = Some(format!(
                        "its column key_resource ({column_type}) does not compare byte by byte; use varchar(255) COLLATE \"C\""
                    ));
                }
                if !row.try_get::<bool, _>("is_key")? {
                    schema.wrong = Some(NO_KEY.to_owned());
                }
                schema.key_limit.chars = width.unwrap_or(usize::MAX);
                schema.key_type = column_type;
            } else if let Some(wrong) = misfit(&name, &column_type, row.try_get("zone")?) {
                schema.wrong = Some(wrong);
            }
            schema.columns.push(name);
        }
        Ok(schema)
    }

    async fn install(conn: &mut PgConnection) -> Reply<()> {
        sqlx::raw_sql(AssertSqlSafe(format!("{LOCK_LIMIT} {INSTALL}"))).execute(conn).await.map(drop)
    }

    async fn blocker(conn: &mut PgConnection) -> Reply<Option<String>> {
        sqlx::query_scalar(BLOCKER).fetch_optional(conn).await
    }

    async fn install_functions(conn: &mut PgConnection) -> Reply<bool> {
        sqlx::raw_sql(FUNCTIONS).execute(conn).await.map(|_| true)
    }
}

/// Describes a queue in another schema: the statements would use this queue, and connections with
/// another search_path the one beside the table.
fn elsewhere(place: &str, queue: &str) -> String {
    format!(
        "it is {place}.t_resource_lock, and the search_path leads to {queue}.t_resource_lock_queue; name one schema in \
         the search_path, or drop what is not used"
    )
}

/// Describes what is wrong with a column that another program may have created.
fn misfit(column: &str, column_type: &str, zone: &str) -> Option<String> {
    let fits = match column {
        "begin_time" | "end_time" => column_type.starts_with("timestamp") && column_type.ends_with("time zone"),
        "lock_flag" | "time" => ["smallint", "integer", "bigint"].contains(&column_type),
        _ => return None,
    };
    if !fits {
        let fit = if column.ends_with("_time") { "timestamptz, NULL allowed" } else { "int" };
        return Some(unfit(column, column_type, fit));
    }
    // The server converts a time for such a column by the session's time zone. sqlx sets UTC unless
    // configured otherwise.
    let utc = ["UTC", "Etc/UTC", "GMT", "Etc/GMT", "UCT", "Zulu"].contains(&zone);
    (column_type.ends_with("without time zone") && !utc).then(|| {
        format!("its column {column} has no time zone, and the connection's is {zone}; leave that at UTC, or use timestamptz")
    })
}
