//! The tables as the database describes them, and their creation.

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Postgres, Row as _};

use crate::store::migration::{
    Part, SchemaStore, Step, additions, creations, files, read_use, removal, until_locked, without_end,
};
use crate::store::schema::{Column, FUNCTIONS, Installed, MARKER, NO_KEY, Schema, TABLES, unfit};
use crate::store::{Form, Reply};

files!("postgres");
const FUNCTIONS_FILE: &str = include_str!("../../../functions/postgres/20261202000000_functions.sql");

const INDEXES: [&str; 4] = [
    "t_resource_lock_queue_ticket",
    "t_resource_change_name",
    "t_resource_schedule_due",
    "t_resource_schedule_run_end",
];

/// The columns that a table of another program lacks.
const ADDED: [(&str, &str); 11] = [
    ("holder", "uuid"),
    ("token", "bigint NOT NULL DEFAULT 0"),
    ("expires_at", "timestamptz"),
    ("claimed_at", "{begin}"),
    ("confirms", "bigint NOT NULL DEFAULT 0"),
    ("prior_token", "bigint"),
    ("prior_client_ip", "varchar(45)"),
    ("prior_status", "text"),
    ("prior_begin_time", "{begin}"),
    ("prior_end_time", "{end}"),
    ("awaited", "boolean NOT NULL DEFAULT false"),
];

const ADDING: &str = "ACCESS EXCLUSIVE on t_resource_lock for a moment, after each transaction that has used it; no \
                      row is rewritten";

/// The setting is that of the transaction which the texts are together.
const LOCK_LIMIT: &str = "SET LOCAL lock_timeout = '1s';";

const BLOCKER: &str = r"
SELECT format('process %s of user %s, %s, in a transaction since %s UTC, last statement: %s', a.pid, a.usename, a.state,
              date_trunc('seconds', a.xact_start AT TIME ZONE 'UTC'), left(regexp_replace(a.query, '\s+', ' ', 'g'), 80))
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.granted AND l.pid <> pg_backend_pid() AND l.relation IN (SELECT to_regclass(r) FROM unnest($1::text[]) AS r)
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY a.xact_start LIMIT 1";

/// The server replies also without a table. What the `search_path` finds in another schema than the
/// table is another program's. What is the same for each column is found once.
const SCHEMA: &str = "
WITH found AS MATERIALIZED (
    SELECT r, o.oid AS space, o.nspname FROM unnest($1::text[]) AS r JOIN pg_class f ON f.oid = to_regclass(r) JOIN pg_namespace o ON o.oid = f.relnamespace),
own AS MATERIALIZED (
    SELECT c.oid AS id, s.zone, s.banner, c.relkind IN ('r', 'p') AS is_table, c.relpersistence = 'p' AS is_kept,
           ARRAY(SELECT r FROM found WHERE space = coalesce(c.relnamespace, to_regnamespace(s.first))) AS relations,
           (SELECT min(quote_ident(o.nspname) || '.' || r) FROM found o JOIN pg_namespace own ON own.oid = c.relnamespace
            WHERE array_position(current_schemas(true), o.nspname) < array_position(current_schemas(true), own.nspname)) AS apart,
           nullif(c.relnamespace::regnamespace::text, s.first) AS moved
    FROM (SELECT current_setting('TimeZone') AS zone, version() AS banner, quote_ident(current_schema()) AS first) s
    LEFT JOIN pg_class c ON c.oid = to_regclass('t_resource_lock'))
SELECT own.*, a.attname::text AS name, a.atttypmod - 4 AS width,
       format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull AND a.attname = 'end_time' THEN ' NOT NULL' ELSE '' END AS type,
       coalesce(l.collisdeterministic, true) AS exact,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid AND i.indimmediate
                 AND i.indpred IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum) AS is_key
FROM own
LEFT JOIN pg_attribute a ON a.attrelid = own.id AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_collation l ON l.oid = a.attcollation";

const INSTALLED: &str = "
SELECT p.proname::text, p.oid::regprocedure::text, substring(p.prosrc FROM '[0-9]+$')::bigint FROM pg_proc p WHERE p.proname = ANY ($1::text[]) AND p.pronamespace = coalesce(
    (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('t_resource_lock')), to_regnamespace(quote_ident(current_schema())))";

const STANDING: &str = "
SELECT key_resource::text, coalesce(client_ip::text, '') FROM t_resource_lock WHERE lock_flag = 1 AND holder IS NOT NULL AND claimed_at = begin_time AND end_time IS NULL ORDER BY key_resource LIMIT 1";

const RUNNING: &str = "SELECT name::text, client_ip::text FROM t_resource_schedule WHERE holder IS NOT NULL AND due_at > clock_timestamp() LIMIT 1";

const ALIVE: &str = "
SELECT '', label::text FROM t_resource_schedule_instance WHERE beat_at + lives * interval '1 microsecond' > clock_timestamp() LIMIT 1";

/// The limits are those of the transaction which the texts are together.
const AHEAD: &str = "SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = '2s';
SELECT key_resource::text FROM t_resource_lock WHERE begin_time > clock_timestamp() + interval '5 minutes'";

impl SchemaStore for Postgres {
    const CHANGES_ATOMICALLY: bool = true;

    fn around(_: Part) -> (&'static str, &'static str) {
        ("BEGIN;\nSET LOCAL lock_timeout = '1s';\n", "COMMIT;\n")
    }

    async fn schema(conn: &mut PgConnection) -> Reply<Schema> {
        let relations: Vec<_> = tables().chain(INDEXES).collect();
        let rows = sqlx::query(SCHEMA).bind(relations).fetch_all(conn).await?;
        let mut schema = Schema { ours: &ADDED, hides_columns: true, ..Schema::default() };
        for row in rows {
            schema.judge_server(row.try_get("banner")?);
            (schema.relations, schema.place) = (row.try_get("relations")?, row.try_get("moved")?);
            let Some(name) = row.try_get::<Option<String>, _>("name")? else { break };
            if schema.untried.is_none() {
                schema.form = Form::Postgres;
            }
            if !row.try_get::<bool, _>("is_table")? {
                schema.wrong = Some("it is not a table; rowlock writes rows of its own there".to_owned());
            }
            if !row.try_get::<bool, _>("is_kept")? {
                schema.wrong = Some("it is UNLOGGED or TEMPORARY, so that it can lose its rows; use ALTER TABLE t_resource_lock SET LOGGED".to_owned());
            }
            if let (Some(place), Some(apart)) = (&schema.place, row.try_get::<Option<String>, _>("apart")?) {
                schema.apart = Some(elsewhere(place, &apart));
            }
            let column_type: String = row.try_get("type")?;
            let width = usize::try_from(row.try_get::<i32, _>("width")?).ok().filter(|width| *width > 0);
            if name == "client_ip" {
                schema.label_chars = width;
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
                schema.key_limit.chars = width;
                schema.key_type = column_type.clone();
            } else if let Some(wrong) = misfit(&name, &column_type, row.try_get("zone")?) {
                schema.wrong = Some(wrong);
            }
            schema.columns.push(Column { name, kind: column_type });
        }
        // By itself, the server would convert by the session's time zone.
        let has_zone = |name| schema.column(name).is_some_and(|column| column.kind.contains("with time zone"));
        let converted =
            if has_zone("claimed_at") == has_zone("begin_time") { "" } else { " USING claimed_at AT TIME ZONE 'UTC'" };
        schema.judge_copy(&format!("ALTER COLUMN claimed_at TYPE {{begin}}{converted}"));
        Ok(schema)
    }

    fn steps(schema: &Schema, part: Part) -> Vec<Step> {
        let mut steps = match part {
            Part::Locks => creations(schema, &LOCKS),
            #[cfg(feature = "schedule")]
            Part::Schedules => creations(schema, &SCHEDULES),
            Part::Removal => {
                removal(schema, true, "FUNCTION", ("LOCK TABLE ", ", ", " IN ACCESS EXCLUSIVE MODE"), None)
            }
            Part::Functions => vec![Step { sql: without_end(FUNCTIONS_FILE), locks: "none: callers go on" }],
        };
        let added = additions(schema, "timestamptz");
        if part == Part::Locks && !added.is_empty() {
            let added = added.join(",\n    ADD COLUMN IF NOT EXISTS ");
            let sql = format!("ALTER TABLE t_resource_lock\n    ADD COLUMN IF NOT EXISTS {added}");
            steps.push(Step { sql, locks: ADDING });
        }
        let place = schema.place.as_ref().filter(|_| part != Part::Functions && !steps.is_empty());
        let path = place.map(|place| Step { sql: format!("SET LOCAL search_path = {place}"), locks: "none" });
        path.into_iter().chain(steps).collect()
    }

    async fn alter(conn: &mut PgConnection, steps: &[Step]) -> Reply<()> {
        let steps = steps.iter().map(|step| step.sql.as_str()).collect::<Vec<_>>().join(";\n");
        sqlx::raw_sql(AssertSqlSafe(format!("{LOCK_LIMIT} {steps}"))).execute(conn).await.map(drop)
    }

    async fn blocker(conn: &mut PgConnection) -> Reply<Option<String>> {
        sqlx::query_scalar(BLOCKER).bind(tables().collect::<Vec<_>>()).fetch_optional(conn).await
    }

    async fn ahead(conn: &mut PgConnection, offset: i64) -> Reply<Option<String>> {
        let sql = format!("{AHEAD} + interval '{offset} seconds' LIMIT 1");
        let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(conn).await?;
        row.map(|row| row.try_get(0)).transpose()
    }

    async fn remove(conn: &mut PgConnection, schema: &Schema, steps: &[Step]) -> Reply<Option<String>> {
        let (lock, rest) = steps.split_at(until_locked(steps));
        let mut tx = conn.begin().await?;
        Self::alter(&mut tx, lock).await?;
        let used = read_use!(tx, schema);
        if used.is_some() {
            return tx.rollback().await.map(|()| used);
        }
        Self::alter(&mut tx, rest).await?;
        tx.commit().await.map(|()| None)
    }

    /// The version is read, and not asked for: a function that is called runs as this user.
    async fn functions(conn: &mut PgConnection, _: bool) -> Reply<Option<Installed>> {
        let found: Vec<(String, String, Option<i64>)> =
            sqlx::query_as(INSTALLED).bind(&FUNCTIONS[..]).fetch_all(conn).await?;
        let mut installed = Installed::default();
        for (name, routine, number) in found {
            if name == MARKER {
                installed.version = number;
            }
            installed.names.push(name);
            installed.routines.push(routine);
        }
        Ok(Some(installed))
    }
}

fn tables() -> impl Iterator<Item = &'static str> {
    TABLES.into_iter().chain(["t_resource_lock"])
}

/// Describes what the search_path finds before the table's own schema: the statements would use it,
/// and connections with another search_path what is beside the table.
fn elsewhere(place: &str, apart: &str) -> String {
    format!(
        "it is {place}.t_resource_lock, and the search_path leads to {apart}; name one schema in the search_path, or drop \
         what is not used"
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
