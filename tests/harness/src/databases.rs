//! The databases of tests, used by one test after the other.
//!
//! Creating, migrating and dropping a database costs a server more than most tests do. So a test
//! that has passed leaves its database to a later one, without its rows, if nothing of the test is
//! left in it: no session has it open, so no statement can arrive late, and its tables, columns,
//! indexes, functions, rights and settings are those that `migrate` made. Every other database is
//! dropped. Behind a pooler, which keeps sessions open, and on SQLite, where a new file costs
//! little, each test has a new one.

use std::{
    future::Future,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sqlx::Pool;
use tempfile::TempDir;
use tokio::{runtime::Builder, time::sleep};

use crate::{Server, TestDatabase, direct_url, pool};

/// How long the sessions of a test may take to end.
const LEAVING: Duration = Duration::from_secs(5);

/// The table of sessions of MySQL and MariaDB. MySQL's information_schema fails while a statement
/// of any session has bytes that are no text.
pub const PROCESSES: &str = "/*M! information_schema. */ /*!80022 performance_schema. */ processlist";

/// A database with the tables in it, and nothing else.
pub(crate) struct Own {
    pub url: String,
    pub folder: Option<TempDir>,
    /// What `migrate` made. `None`: it is not used again.
    shape: Option<Vec<String>>,
}

/// A database that waits for its next test.
struct Idle {
    server: &'static str,
    own: Own,
    drop: Box<dyn FnOnce(&str) + Send>,
}

static IDLE: Mutex<Vec<Idle>> = Mutex::new(Vec::new());

/// Returns a database without rows for a test: one that an earlier test has left, or a new one.
pub(crate) async fn take<DB: TestDatabase>(server: &Server, url: &str) -> Own {
    let left = {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.iter().position(|idle| idle.server == server.name).map(|at| idle.swap_remove(at))
    };
    if let Some(Idle { own, .. }) = left {
        return own;
    }
    let (url, folder) = DB::create_database(server, url).await;
    let pool = pool::<DB>(&url, 1).await;
    rowlock::migrate(&pool).await.unwrap();
    let used_again = server.variable.is_some() && direct_url().is_none();
    let shape = if used_again { Some(DB::shape(&pool).await.unwrap()) } else { None };
    pool.close().await;
    Own { url, folder, shape }
}

/// Leaves the database to a later test, or drops it.
pub(crate) async fn leave<DB: TestDatabase>(server: &Server, url: &str, own: Own, passed: bool) {
    if !passed || !is_as_new::<DB>(&own).await {
        return DB::drop_database(url, &own.url).await;
    }
    let url = url.to_owned();
    let drop = Box::new(move |own: &str| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(DB::drop_database(&url, own));
    });
    IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(Idle { server: server.name, own, drop });
}

/// Drops the databases that no test needs any more.
pub(crate) fn drop_idle() {
    for Idle { own, drop, .. } in IDLE.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        drop(&own.url);
    }
}

/// Ends the sessions of a test, deletes the rows, and returns whether nothing else is left of it.
async fn is_as_new<DB: TestDatabase>(own: &Own) -> bool {
    let Some(shape) = &own.shape else { return false };
    let pool = pool::<DB>(&own.url, 1).await;
    let cleaned = async {
        Ok::<_, sqlx::Error>(
            no_session_is_left(&pool).await? && DB::shape(&pool).await? == *shape && {
                DB::delete_rows(&pool).await?;
                true
            },
        )
    };
    let cleaned = cleaned.await;
    pool.close().await;
    cleaned.unwrap_or(false)
}

async fn no_session_is_left<DB: TestDatabase>(pool: &Pool<DB>) -> Result<bool, sqlx::Error> {
    let limit = Instant::now() + LEAVING;
    while DB::end_other_sessions(pool).await? > 0 {
        if Instant::now() > limit {
            return Ok(false);
        }
        sleep(Duration::from_millis(2)).await;
    }
    Ok(true)
}

/// What the databases that are used again need besides [`TestDatabase`].
pub trait Reused: rowlock::Database + Sized {
    /// Ends the sessions that have this database open, and returns how many still do.
    fn end_other_sessions(_: &Pool<Self>) -> impl Future<Output = Result<usize, sqlx::Error>> + Send {
        async { Ok(0) }
    }
    /// Returns everything in the database but rows: what a test may have changed.
    fn shape(_: &Pool<Self>) -> impl Future<Output = Result<Vec<String>, sqlx::Error>> + Send {
        async { Ok(Vec::new()) }
    }
    /// Deletes all rows of the tables that `migrate` makes.
    fn delete_rows(_: &Pool<Self>) -> impl Future<Output = Result<(), sqlx::Error>> + Send {
        async { Ok(()) }
    }
}

impl Reused for sqlx::Sqlite {}

impl Reused for sqlx::Postgres {
    async fn end_other_sessions(pool: &Pool<Self>) -> Result<usize, sqlx::Error> {
        let ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                     WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        Ok(sqlx::query(ended).fetch_all(pool).await?.len())
    }
    async fn shape(pool: &Pool<Self>) -> Result<Vec<String>, sqlx::Error> {
        sqlx::query_scalar(
            "WITH own AS (SELECT oid, nspname, nspacl FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema)')
             SELECT line FROM (
                 SELECT concat_ws(' ', 'database', datacl, datconnlimit, datdba) FROM pg_database WHERE datname = current_database()
                 UNION ALL SELECT concat_ws(' ', 'setting', setrole, setconfig) FROM pg_db_role_setting s
                     JOIN pg_database d ON d.oid = s.setdatabase WHERE datname = current_database()
                 UNION ALL SELECT concat_ws(' ', 'schema', nspname, nspacl) FROM own
                 UNION ALL SELECT concat_ws(' ', 'relation', nspname, relname, relkind, relacl, reloptions, relowner, relrowsecurity)
                     FROM pg_class JOIN own ON own.oid = relnamespace
                 UNION ALL SELECT concat_ws(' ', 'column', nspname, relname, attname, attnum, format_type(atttypid, atttypmod),
                     attnotnull, attisdropped, attacl, attcollation, attidentity, attgenerated, pg_get_expr(adbin, adrelid))
                     FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid JOIN own ON own.oid = relnamespace
                     LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum WHERE attnum > 0
                 UNION ALL SELECT concat_ws(' ', 'constraint', conrelid, conname, pg_get_constraintdef(c.oid))
                     FROM pg_constraint c JOIN own ON own.oid = connamespace
                 UNION ALL SELECT concat_ws(' ', 'index', pg_get_indexdef(indexrelid), indisvalid)
                     FROM pg_index JOIN pg_class c ON c.oid = indexrelid JOIN own ON own.oid = relnamespace
                 UNION ALL SELECT concat_ws(' ', 'trigger', tgrelid, pg_get_triggerdef(oid), tgenabled) FROM pg_trigger
                 UNION ALL SELECT concat_ws(' ', 'rule', schemaname, tablename, definition) FROM pg_rules JOIN own ON nspname = schemaname
                 UNION ALL SELECT concat_ws(' ', 'policy', polrelid, polname) FROM pg_policy
                 UNION ALL SELECT concat_ws(' ', 'function', nspname, proname, proargtypes, md5(prosrc), proacl, proconfig)
                     FROM pg_proc JOIN own ON own.oid = pronamespace
                 UNION ALL SELECT concat_ws(' ', 'type', nspname, typname) FROM pg_type JOIN own ON own.oid = typnamespace
                 UNION ALL SELECT concat_ws(' ', 'extension', extname) FROM pg_extension
                 UNION ALL SELECT concat_ws(' ', 'event', evtname) FROM pg_event_trigger
                 UNION ALL SELECT concat_ws(' ', 'prepared', gid) FROM pg_prepared_xacts WHERE database = current_database()
             ) AS lines (line) ORDER BY line",
        )
        .fetch_all(pool)
        .await
    }
    async fn delete_rows(pool: &Pool<Self>) -> Result<(), sqlx::Error> {
        let delete = "SET lock_timeout = '2s';
                      DELETE FROM t_resource_lock; DELETE FROM t_resource_lock_queue;
                      DELETE FROM t_resource_schedule; DELETE FROM t_resource_schedule_run;
                      DELETE FROM t_resource_schedule_instance; DELETE FROM t_resource_schedule_times;
                      DELETE FROM t_resource_change; DELETE FROM t_resource_order; DELETE FROM t_resource_schedule_detail";
        sqlx::raw_sql(delete).execute(pool).await.map(drop)
    }
}

impl Reused for sqlx::MySql {
    async fn end_other_sessions(pool: &Pool<Self>) -> Result<usize, sqlx::Error> {
        let others =
            format!("SELECT CAST(id AS SIGNED) FROM {PROCESSES} WHERE db = DATABASE() AND id <> CONNECTION_ID()");
        let others = sqlx::AssertSqlSafe(others);
        let others: Vec<i64> = sqlx::query_scalar(others).fetch_all(pool).await?;
        for id in &others {
            // It may have ended by itself.
            sqlx::raw_sql(sqlx::AssertSqlSafe(format!("KILL {id}"))).execute(pool).await.ok();
        }
        Ok(others.len())
    }
    async fn shape(pool: &Pool<Self>) -> Result<Vec<String>, sqlx::Error> {
        let mut lines: Vec<String> = sqlx::query_scalar(
            "SELECT CONVERT(line USING utf8mb4) FROM (
                 SELECT CONCAT_WS(' ', 'database', default_character_set_name, default_collation_name) AS line
                     FROM information_schema.schemata WHERE schema_name = DATABASE()
                 UNION ALL SELECT CONCAT_WS(' ', 'table', table_name, table_type, engine, table_collation, create_options)
                     FROM information_schema.tables WHERE table_schema = DATABASE()
                 UNION ALL SELECT CONCAT_WS(' ', 'column', table_name, ordinal_position, column_name, column_type, is_nullable,
                     QUOTE(column_default), extra, collation_name, generation_expression)
                     FROM information_schema.columns WHERE table_schema = DATABASE()
                 UNION ALL SELECT CONCAT_WS(' ', 'index', table_name, index_name, seq_in_index, column_name, non_unique)
                     FROM information_schema.statistics WHERE table_schema = DATABASE()
                 UNION ALL SELECT CONCAT_WS(' ', 'constraint', table_name, constraint_name, constraint_type)
                     FROM information_schema.table_constraints WHERE table_schema = DATABASE()
                 UNION ALL SELECT CONCAT_WS(' ', 'trigger', event_object_table, trigger_name)
                     FROM information_schema.triggers WHERE trigger_schema = DATABASE()
                 UNION ALL SELECT CONCAT_WS(' ', 'routine', routine_name, routine_type, SHA2(routine_definition, 256))
                     FROM information_schema.routines WHERE routine_schema = DATABASE()
                 UNION ALL SELECT CONCAT_WS(' ', 'event', event_name)
                     FROM information_schema.events WHERE event_schema = DATABASE()
             ) AS line",
        )
        .fetch_all(pool)
        .await?;
        lines.sort();
        Ok(lines)
    }
    async fn delete_rows(pool: &Pool<Self>) -> Result<(), sqlx::Error> {
        let delete = "SET SESSION innodb_lock_wait_timeout = 2, lock_wait_timeout = 2;
                      DELETE FROM t_resource_lock; DELETE FROM t_resource_lock_queue;
                      DELETE FROM t_resource_schedule; DELETE FROM t_resource_schedule_run;
                      DELETE FROM t_resource_schedule_instance; DELETE FROM t_resource_schedule_times;
                      DELETE FROM t_resource_change; DELETE FROM t_resource_order; DELETE FROM t_resource_schedule_detail";
        sqlx::raw_sql(delete).execute(pool).await.map(drop)
    }
}
