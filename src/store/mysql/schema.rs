//! The tables as the database describes them, and their creation.

use sqlx::mysql::MySqlDatabaseError;
use sqlx::{AssertSqlSafe, Executor as _, MySql, MySqlConnection, Row as _, SqlSafeStr as _};

use crate::store::migration::{
    Part, SchemaStore, Step, additions, creations, files, read_use, removal, until_locked, without_end,
};
use crate::store::schema::{Column, Installed, MARKER, Schema, unfit};
use crate::store::{Form, Reply};

files!("mysql");
const FUNCTIONS_FILE: &str = include_str!("../../../functions/mysql/20261202000000_functions.sql");

/// The columns that a table of another program lacks. The default character set of such a table may
/// hold less than a label or a status has.
const ADDED: [(&str, &str); 10] = [
    ("holder", "BINARY(16) NULL"),
    ("token", "BIGINT NOT NULL DEFAULT 0"),
    ("expires_at", "DATETIME(6) NULL"),
    ("claimed_at", "{begin} NULL"),
    ("confirms", "BIGINT NOT NULL DEFAULT 0"),
    ("prior_token", "BIGINT NULL"),
    ("prior_client_ip", "VARCHAR(45) CHARACTER SET utf8mb4 NULL"),
    ("prior_status", "VARCHAR(255) CHARACTER SET utf8mb4 NULL"),
    ("prior_begin_time", "{begin} NULL"),
    ("prior_end_time", "{end} NULL"),
];

const ADDING: &str = "exclusive metadata lock on t_resource_lock for a moment, after each transaction that has used \
                      it; only the definition is changed";
const COPYING: &str = "exclusive metadata lock on t_resource_lock for a moment, twice; in between the table is copied, while \
                       clients read and write";
const REPLACING: &str = "none; on MySQL a procedure that is replaced does not exist for a moment";
const AT_ONCE: &str = "ALGORITHM = INSTANT";
const ONLINE: &str = "ALGORITHM = INPLACE, LOCK = NONE";

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
WHERE m.object_schema = DATABASE() AND LEFT(m.object_name, 11) = 't_resource_' AND m.lock_status = 'GRANTED' AND t.processlist_id <> CONNECTION_ID()
ORDER BY t.processlist_time DESC LIMIT 1",
    "
SELECT CONVERT(CONCAT('connection ', p.id, ' of user ', p.user, ', in a transaction since ', t.trx_started, ' (the oldest one), ',
           LOWER(p.command), ' for ', p.time, ' s') USING utf8mb4)
FROM information_schema.innodb_trx t JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE p.id <> CONNECTION_ID() ORDER BY t.trx_started LIMIT 1",
];

/// MariaDB looks up a table of `information_schema` by constants of its own WHERE. For any other
/// condition it opens the tables of all databases, and waits for those that are being created or
/// changed. Without LIMIT, the derived table would become a part of the join.
const SCHEMA: &str = "
SELECT CONVERT(LOWER(column_name) USING utf8mb4) AS name, CONVERT(column_type USING utf8mb4) AS type,
       CONVERT(data_type USING utf8mb4) AS data_type, CONVERT(COALESCE(collation_name, 'binary') USING utf8mb4) AS collation,
       CAST(COALESCE(character_maximum_length, 0) AS SIGNED) AS width, CAST(@@autocommit AS SIGNED) AS autocommit,
       CAST(banner.version LIKE '%MariaDB%' AS SIGNED) AS mariadb,
       (SELECT CAST(COUNT(*) AS SIGNED) FROM information_schema.plugins WHERE plugin_status = 'ACTIVE'
        AND plugin_name = IF(banner.version LIKE '%MariaDB%', 'wsrep', 'group_replication')) AS clustered,
       (SELECT CONVERT(COALESCE(GROUP_CONCAT(LOWER(table_name)), '') USING utf8mb4) FROM information_schema.tables
        WHERE table_schema = DATABASE() AND table_name IN (
            't_resource_lock', 't_resource_lock_queue', 't_resource_change', 't_resource_schedule', 't_resource_schedule_run',
            't_resource_schedule_instance', 't_resource_schedule_times', 't_resource_order', 't_resource_schedule_detail')) AS relations,
       (SELECT CONVERT(COALESCE(CONCAT(engine, ' ', row_format), 'none') USING utf8mb4) FROM information_schema.tables
        WHERE table_schema = DATABASE() AND table_name = 't_resource_lock') AS engine,
       (SELECT CONVERT(COALESCE(GROUP_CONCAT(LOWER(column_name), IF(sub_part IS NULL, '', ' in part') ORDER BY seq_in_index), '')
            USING utf8mb4) FROM information_schema.statistics
        WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND index_name = 'PRIMARY') AS primary_key,
       CONVERT(CONCAT(IF(is_nullable = 'NO' AND column_name = 'end_time', ' NOT NULL', ''), IF(extra LIKE '%on update%', ' ON UPDATE', ''))
           USING utf8mb4) AS more, CONVERT(CONCAT(banner.version, ' ', @@version_comment) USING utf8mb4) AS banner
FROM (SELECT VERSION() AS version) banner
LEFT JOIN (
    SELECT * FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' LIMIT 1000000
) c ON TRUE";

/// The last one is left behind by an installation that was refused.
const INSTALLED: &str = "
SELECT CONVERT(LOWER(routine_name) USING utf8mb4) FROM information_schema.routines
WHERE routine_schema = DATABASE() AND routine_type = 'PROCEDURE' AND LOWER(routine_name) IN (
    'rowlock_try_acquire', 'rowlock_unmatched', 'rowlock_renew', 'rowlock_release', 'rowlock_abandon', 'rowlock_put_back', 'rowlock_confirm',
    'rowlock_list', 'rowlock_version', 'rowlock_check')";

const STANDING: &str = "
SELECT CONVERT(key_resource USING utf8mb4), CONVERT(COALESCE(client_ip, '') USING utf8mb4) FROM t_resource_lock
WHERE lock_flag = 1 AND holder IS NOT NULL AND claimed_at = begin_time AND end_time IS NULL ORDER BY t_resource_lock.key_resource LIMIT 1";

const AHEAD: &str = "
SELECT CONVERT(key_resource USING utf8mb4) FROM t_resource_lock WHERE begin_time > UTC_TIMESTAMP(6) + INTERVAL 300 + ? SECOND LIMIT 1";

const RUNNING: &str = "SELECT CONVERT(name USING utf8mb4), CONVERT(client_ip USING utf8mb4) FROM t_resource_schedule WHERE holder IS NOT NULL AND due_at > UTC_TIMESTAMP(6) LIMIT 1";

const ALIVE: &str = "
SELECT '', CONVERT(label USING utf8mb4) FROM t_resource_schedule_instance WHERE beat_at + INTERVAL lives MICROSECOND > UTC_TIMESTAMP(6) LIMIT 1";

impl SchemaStore for MySql {
    fn around(part: Part) -> (&'static str, &'static str) {
        match part {
            Part::Functions => ("SET lock_wait_timeout = 1;\nDELIMITER //\n", "//\nDELIMITER ;\n"),
            _ => ("SET lock_wait_timeout = 1;\n", ""),
        }
    }

    async fn schema(conn: &mut MySqlConnection) -> Reply<Schema> {
        let rows = sqlx::query(SCHEMA).fetch_all(conn).await?;
        let mut schema = Schema { ours: &ADDED, ..Schema::default() };
        for row in rows {
            let banner: String = row.try_get("banner")?;
            schema.judge_server(banner.clone());
            schema.relations = row.try_get::<String, _>("relations")?.split(',').map(str::to_owned).collect();
            let is_mariadb = row.try_get::<i64, _>("mariadb")? == 1;
            schema.hides_columns = is_mariadb || version(&banner) >= (8, 0, 23);
            if row.try_get::<i64, _>("autocommit")? == 0 {
                schema.wrong = Some(
                    "the connection's autocommit is off, so that a claim would not be committed; switch it on".into(),
                );
            }
            // The server returns its version even without a table.
            let Some(name) = row.try_get::<Option<String>, _>("name")? else { break };
            // MariaDB is also built without clusters, and lacks their variables then.
            schema.form = match (is_mariadb, row.try_get::<i64, _>("clustered")?) {
                (true, 0) => Form::MariaDb,
                (true, _) => Form::Galera,
                (false, 0) => Form::Common,
                (false, _) => Form::Group,
            };
            let engine: String = row.try_get("engine")?;
            if !engine.starts_with("InnoDB") {
                schema.wrong = Some(format!("its engine ({engine}) keeps no row locks; use InnoDB"));
            }
            schema.copies_to_add = !is_mariadb && engine.ends_with("Compressed");
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
                schema.label_chars = Some(width);
            }
            if name == "key_resource" {
                judge_key(&mut schema, &column_type, &data_type, row.try_get("collation")?, width);
            }
            schema.columns.push(Column { name, kind: column_type });
        }
        let hidden = if schema.hides_columns { " INVISIBLE" } else { "" };
        schema.judge_copy(&format!("MODIFY claimed_at {{begin}} NULL{hidden}"));
        Ok(schema)
    }

    fn steps(schema: &Schema, part: Part) -> Vec<Step> {
        let mut steps = match part {
            Part::Locks => creations(schema, &LOCKS),
            #[cfg(feature = "schedule")]
            Part::Schedules => creations(schema, &SCHEDULES),
            Part::Removal => {
                let end = Step { sql: "UNLOCK TABLES".to_owned(), locks: "none" };
                return removal(schema, true, "PROCEDURE", ("LOCK TABLES ", " WRITE, ", " WRITE"), Some(end));
            }
            Part::Functions => vec![Step { sql: without_end(FUNCTIONS_FILE), locks: REPLACING }],
        };
        let added = additions(schema, "datetime(6)");
        if part == Part::Locks && !added.is_empty() {
            let hidden = if schema.hides_columns { " INVISIBLE" } else { "" };
            let added: String = added.iter().map(|column| format!("\n    ADD COLUMN {column}{hidden},")).collect();
            let (algorithm, locks) = if schema.copies_to_add { (ONLINE, COPYING) } else { (AT_ONCE, ADDING) };
            steps.push(Step { sql: format!("ALTER TABLE t_resource_lock{added}\n    {algorithm}"), locks });
        }
        steps
    }

    async fn alter(conn: &mut MySqlConnection, steps: &[Step]) -> Reply<()> {
        limited(conn, async |conn| {
            if let [functions @ Step { locks: REPLACING, .. }] = steps {
                return replace(conn, functions).await;
            }
            for step in steps {
                let changed = sqlx::raw_sql(AssertSqlSafe(step.sql.as_str())).execute(&mut *conn).await;
                if changed.as_ref().is_err_and(is_not_instant) {
                    tracing::warn!(
                        "the server adds no columns to this table at once: it copies the table, while clients go on"
                    );
                    let sql = step.sql.replace(AT_ONCE, ONLINE);
                    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *conn).await?;
                } else {
                    changed?;
                }
            }
            Ok(())
        })
        .await
    }

    /// The server refuses to prepare the creation of a table that the user may not create. An
    /// ALTER without a change needs the right, and waits for no transaction.
    async fn check_rights(conn: &mut MySqlConnection, steps: &[Step]) -> Reply<()> {
        for step in steps {
            if let Some(name) = step.sql.strip_prefix("DROP PROCEDURE ") {
                let same = format!("ALTER PROCEDURE {name} SQL SECURITY INVOKER");
                limited(conn, async |conn| sqlx::raw_sql(AssertSqlSafe(same)).execute(conn).await.map(drop)).await?;
            }
            if step.sql.starts_with("CREATE TABLE") {
                conn.prepare(AssertSqlSafe(step.sql.clone()).into_sql_str()).await?;
            }
        }
        if !steps.iter().any(|step| step.sql.starts_with("ALTER TABLE")) {
            return Ok(());
        }
        let same = "ALTER TABLE t_resource_lock";
        let altered = limited(conn, async |conn| sqlx::raw_sql(same).execute(conn).await.map(drop)).await;
        // A user who has the right is told that the table does not exist yet.
        altered.or_else(|error| if number(&error) == Some(1146) { Ok(()) } else { Err(error) })
    }

    async fn blocker(conn: &mut MySqlConnection) -> Reply<Option<String>> {
        for sql in BLOCKERS {
            if let Ok(Some(blocker)) = sqlx::query_scalar(sql).fetch_optional(&mut *conn).await {
                return Ok(Some(blocker));
            }
        }
        Ok(None)
    }

    async fn ahead(conn: &mut MySqlConnection, offset: i64) -> Reply<Option<String>> {
        limited(conn, async |conn| sqlx::query_scalar(AHEAD).bind(offset).fetch_optional(conn).await).await
    }

    /// Each statement commits. The tables stay locked in between, so that no claim comes before
    /// the columns are gone.
    async fn remove(conn: &mut MySqlConnection, schema: &Schema, steps: &[Step]) -> Reply<Option<String>> {
        let (lock, rest) = steps.split_at(until_locked(steps));
        Self::alter(conn, lock).await?;
        let removed = remove_unless_used(conn, schema, rest).await;
        let unlocked = sqlx::raw_sql("UNLOCK TABLES").execute(conn).await;
        let standing = removed?;
        unlocked.map(|_| standing)
    }

    async fn functions(conn: &mut MySqlConnection, with_version: bool) -> Reply<Option<Installed>> {
        let names: Vec<String> = sqlx::query_scalar(INSTALLED).fetch_all(&mut *conn).await?;
        let version = match with_version && names.iter().any(|name| name == MARKER) {
            true => sqlx::query_scalar("CALL rowlock_version()").fetch_optional(conn).await,
            false => Ok(None),
        };
        // The procedure may have been dropped since.
        let version = version.or_else(|error| if number(&error) == Some(1305) { Ok(None) } else { Err(error) })?;
        Ok(Some(Installed { routines: names.clone(), names, version }))
    }
}

async fn remove_unless_used(conn: &mut MySqlConnection, schema: &Schema, steps: &[Step]) -> Reply<Option<String>> {
    let used = read_use!(conn, schema);
    if used.is_none() {
        MySql::alter(conn, steps).await?;
    }
    Ok(used)
}

/// Executes statements that wait for a lock for a second at most.
async fn limited<T>(conn: &mut MySqlConnection, send: impl AsyncFnOnce(&mut MySqlConnection) -> Reply<T>) -> Reply<T> {
    sqlx::raw_sql(LOCK_LIMIT).execute(&mut *conn).await?;
    let reply = send(conn).await;
    let restored = sqlx::raw_sql(RESTORE).execute(conn).await;
    let reply = reply?;
    restored.map(|_| reply)
}

/// Instances that start together replace the functions once, one after the other. Some nodes of
/// Galera have no such locks: there the functions may be replaced more than once.
async fn replace(conn: &mut MySqlConnection, functions: &Step) -> Reply<()> {
    let _ = sqlx::raw_sql("DO GET_LOCK(CONCAT('rowlock ', LEFT(DATABASE(), 50)), 30)").execute(&mut *conn).await;
    let replaced = match MySql::functions(conn, true).await {
        Ok(found) if found.as_ref().is_some_and(Installed::is_enough) => Ok(()),
        Ok(_) => sqlx::raw_sql(AssertSqlSafe(functions.sql.as_str())).execute(&mut *conn).await.map(drop),
        Err(error) => Err(error),
    };
    let _ = sqlx::raw_sql("DO RELEASE_LOCK(CONCAT('rowlock ', LEFT(DATABASE(), 50)))").execute(conn).await;
    replaced
}

/// Returns whether the server refuses to change the definition alone: of this row format, after as
/// many changes, or at all.
fn is_not_instant(error: &sqlx::Error) -> bool {
    number(error).is_some_and(|number| [1845, 1846, 4092].contains(&number))
}

fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?;
    Some(error.number())
}

/// Reads the version at the beginning of a banner.
fn version(banner: &str) -> (u32, u32, u32) {
    let mut numbers = banner.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or_default());
    let mut next = || numbers.next().unwrap_or_default();
    (next(), next(), next())
}

/// Returns a type that fits, if a column that another program may have created has one that does
/// not. `more` is what its definition has beside the type.
fn misfit(column: &str, data_type: &str, more: &str) -> Option<&'static str> {
    match column {
        // A TIMESTAMP cannot hold the epoch, and a time that changes with each update would make
        // every renewal a loss.
        "begin_time" | "end_time" if data_type != "datetime" || !more.is_empty() => {
            Some("DATETIME(6) NULL, without ON UPDATE")
        }
        "lock_flag" | "time" if !data_type.ends_with("int") => Some("INT"),
        _ => None,
    }
}

/// Records which keys their column holds, or that it does not compare byte by byte.
fn judge_key(schema: &mut Schema, column_type: &str, data_type: &str, collation: &str, width: usize) {
    schema.key_type = format!("{column_type} {collation}");
    match data_type {
        "varbinary" => schema.key_limit.bytes = Some(width),
        "varchar" if collation.starts_with("utf8") && collation.ends_with("_bin") => {
            schema.key_limit.chars = Some(width);
            schema.key_limit.three_byte_chars = !collation.starts_with("utf8mb4");
        }
        _ => {
            schema.wrong = Some(format!(
                "its column key_resource ({}) does not compare byte by byte; use VARBINARY(255), or a collation such as utf8mb4_bin",
                schema.key_type
            ));
        }
    }
}
