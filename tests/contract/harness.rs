//! A separate database for each test, and plain SQL that reads and changes it without the lock.

use std::{fmt::Debug, future::Future, time::Duration};

use libtest_mimic::{Failed, Trial};
use rowlock::{Attempt, Lease, LeaseLock, Value};
use sqlx::{AssertSqlSafe, Pool, pool::PoolOptions};

use crate::article::Table;
/// How long a test waits for an event that must happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A database that the contract runs on.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    pub name: &'static str,
    /// The environment variable with its URL. SQLite needs none.
    variable: Option<&'static str>,
}

impl Server {
    pub fn all() -> [Self; 4] {
        [
            Self { name: "sqlite", variable: None },
            Self { name: "postgres", variable: Some("POSTGRES_URL") },
            Self { name: "mysql", variable: Some("MYSQL_URL") },
            Self { name: "mariadb", variable: Some("MARIADB_URL") },
        ]
    }

    fn url(&self) -> Option<String> {
        self.variable.map_or(Some("sqlite:".into()), |name| std::env::var(name).ok().filter(|url| !url.is_empty()))
    }
}

/// As a bound of [`TestDatabase`], `DB: Holds<T, Is: Value<DB>>` holds wherever `DB: TestDatabase`
/// does. In contrast, `where T: Value<DB>` would have to be repeated in every test.
pub trait Holds<T>: Named<T, Is = T> {}
pub trait Named<T> {
    type Is;
}
impl<DB, T> Named<T> for DB {
    type Is = T;
}
impl<DB, T> Holds<T> for DB {}

/// What a test needs of a database besides the lock.
pub trait TestDatabase:
    rowlock::Database + Sized + Holds<i64, Is: Value<Self>> + Holds<bool, Is: Value<Self>> + Holds<String, Is: Value<Self>>
{
    /// Returns SQL for the database's time this many milliseconds ago (ahead, if negative), in the
    /// format of `begin_time`.
    fn ago(millis: i64) -> String;
    /// The same, in the format of `begin_time` in this table.
    fn begun(_: Table, millis: i64) -> String {
        Self::ago(millis)
    }
    fn uuid(hex: &str) -> String;
    /// Returns a URL of the same database for connections with another default schema. SQLite has
    /// no such schemas.
    fn from_elsewhere(url: &str) -> String {
        url.to_owned()
    }
    async fn create_database(server: &Server, url: &str) -> (String, Option<tempfile::TempDir>);
    async fn drop_database(url: &str, database: &str);
    async fn execute(pool: &Pool<Self>, sql: &str) -> Result<u64, sqlx::Error>;
    fn execute_on(conn: &mut Self::Connection, sql: &str) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;
    async fn number(pool: &Pool<Self>, sql: &str) -> Option<i64>;
    fn text_on(
        conn: &mut Self::Connection,
        sql: &str,
    ) -> impl Future<Output = Result<Option<String>, sqlx::Error>> + Send;
    async fn text(pool: &Pool<Self>, sql: &str) -> Option<String>;
    /// Returns how many statements the pool's only connection has sent so far, where the database
    /// counts them. Statements that check a connection of a shared pool are left out.
    async fn statements(pool: &Pool<Self>) -> Option<i64>;
    /// Locks the row (on SQLite: the database) in a transaction.
    const LOCK_ROW: &'static str;
    const BEGIN: &'static str = "BEGIN";
    /// Returns SQL that counts open transactions. On PostgreSQL and MySQL, any connection sees
    /// those of the whole database that are idle at the moment. On MariaDB, a connection sees its
    /// own.
    fn open_transactions(server: &Server) -> &'static str;
    /// How many statements the counting itself adds to the count.
    const COUNTING: i64 = 0;
}

/// The database of one test, with the table in it.
pub struct TestDb<DB: TestDatabase> {
    pub server: Server,
    pub pool: Pool<DB>,
    pub url: String,
    _folder: Option<tempfile::TempDir>,
}

impl<DB: TestDatabase> TestDb<DB> {
    pub fn lock(&self) -> LeaseLock<DB> {
        LeaseLock::new(self.pool.clone())
    }

    pub fn lock_for(&self, lease: Duration) -> LeaseLock<DB> {
        self.lock().lease(lease).unwrap()
    }

    /// Returns the same database, accessed through another pool.
    pub fn over(&self, pool: Pool<DB>) -> Self {
        Self { server: self.server, pool, url: self.url.clone(), _folder: None }
    }

    /// Returns a separate pool on the same database.
    pub async fn pool_of(&self, connections: u32) -> Pool<DB> {
        pool(&self.url, connections).await
    }

    pub async fn execute(&self, sql: &str) -> u64 {
        DB::execute(&self.pool, sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    pub async fn number(&self, sql: &str) -> Option<i64> {
        DB::number(&self.pool, sql).await
    }

    pub async fn text(&self, sql: &str) -> Option<String> {
        DB::text(&self.pool, sql).await
    }

    /// Returns the value of an expression in a table's rows, as text.
    pub async fn cell(&self, expression: &str, rest: &str) -> Option<String> {
        let text = self.text(&format!("SELECT CAST({expression} AS char(80)) FROM {rest}")).await;
        text.map(|text| text.trim().to_owned())
    }

    /// Returns one column of a key's row.
    pub async fn column(&self, key: &str, column: &str) -> Option<String> {
        self.text(&format!("SELECT {column} FROM t_resource_lock WHERE key_resource = '{key}'")).await
    }

    /// Sets columns of a key's row.
    pub async fn set(&self, key: &str, set: &str) {
        let rows = self.execute(&format!("UPDATE t_resource_lock SET {set} WHERE key_resource = '{key}'")).await;
        assert_eq!(rows, 1, "{key} has one row");
    }

    /// Changes the row as if another instance had taken the key over: a new holder, a higher token.
    pub async fn take_from(&self, key: &str) {
        let holder = DB::uuid("0123456789abcdef0123456789abcdef");
        self.set(key, &format!("holder = {holder}, token = token + 1, client_ip = 'thief'")).await;
    }
}

pub async fn pool<DB: TestDatabase>(url: &str, connections: u32) -> Pool<DB> {
    let options = PoolOptions::new().max_connections(connections).test_before_acquire(false);
    options.connect(url).await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// Returns the lease. Panics if there is none.
#[track_caller]
pub fn acquired<DB: TestDatabase, E: Debug>(attempt: Result<Attempt<Lease<DB>>, E>) -> Lease<DB> {
    match attempt {
        Ok(Attempt::Acquired(lease)) => lease,
        other => panic!("not acquired: {other:?}"),
    }
}

#[track_caller]
pub fn refused<DB: TestDatabase, E: Debug>(attempt: Result<Attempt<Lease<DB>>, E>) -> rowlock::Refusal {
    match attempt {
        Ok(Attempt::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// Waits for a condition, not for a fixed time. Panics if it does not hold within 20 s.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let started = tokio::time::Instant::now();
    while !holds().await {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}: not within 20 s");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs a future to completion within a call that cannot be awaited.
pub fn between<T>(work: impl Future<Output = T>) -> T {
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(work))
}

/// Returns the URL of the server itself if `POSTGRES_URL` connects to a pooler in transaction mode.
pub fn direct_url() -> Option<String> {
    std::env::var("POSTGRES_DIRECT_URL").ok().filter(|url| !url.is_empty())
}

fn is_pooled() -> bool {
    direct_url().is_some()
}

/// Returns whether a test depends on what a pooler in transaction mode hides: notifications of
/// releases, settings and locks of a session, the user of a session, the number of connections, the
/// number of statements (the pooler sends some of its own), a request that arrives after its sender
/// has gone.
fn wants_the_server_itself(module: &str, name: &str) -> bool {
    match module {
        "listening" => !name.starts_with("behind_a_pooler"),
        "trips" | "rights" | "durability" | "schemas" | "servers" => true,
        "connections" => [
            "settings_of_a_session_do_not_reach_a_lock",
            "locks_of_one_pool_share_connections",
            "a_shutdown_closes_the_connections_that_are_idle",
            "the_connections_of_a_lock_are_closed_with_the_pool",
        ]
        .contains(&name),
        "forgetting" => name == "keys_of_other_steps_can_be_acquired_between_steps",
        "versioned_in" => name == "a_row_in_another_transactions_hands_is_a_conflict",
        "program_input" => name == "a_password_is_not_repeated",
        "versioned_limits" => name == "a_write_that_is_not_answered_within_the_limit_is_unknown_and_not_sent_again",
        "versioned_lost" => name == "a_write_that_is_answered_too_late_is_unknown_and_not_tried_again",
        "replies" => {
            ["a_claim_that_arrives_too_late_is_unknown", "a_create_that_is_too_late_leaves_a_free_row"].contains(&name)
        }
        "commits" => name == "a_commit_that_may_still_arrive_is_unknown",
        "undone" => name.contains("_whose_connection_the_server_ends_"),
        _ => false,
    }
}

/// Returns a test as a trial of the harness. The trial creates a database for the test and drops it
/// afterwards.
pub fn trial<DB: TestDatabase, F>(server: Server, module: &str, name: &str, test: fn(TestDb<DB>) -> F) -> Trial
where
    F: Future<Output = ()> + 'static,
{
    let url = server.url();
    let needs = match server.variable {
        Some(variable) if url.is_none() => Some(variable),
        _ if name.starts_with("sqlx_cli") && std::env::var_os("SQLX_CLI").is_none() => Some("SQLX_CLI"),
        _ if server.name == "postgres" && is_pooled() && wants_the_server_itself(module, name) => {
            Some("a direct connection")
        }
        _ if name.starts_with("behind_a_pooler") && !is_pooled() => Some("POSTGRES_DIRECT_URL"),
        #[cfg(feature = "cli")]
        _ if name.starts_with("as_pid_1") && !crate::program_end::has_process_namespaces() => {
            Some("unshare -pf --mount-proc")
        }
        _ if ["examples", "schedules"].contains(&module) && !crate::examples::are_built() => {
            Some("cargo build --examples")
        }
        _ => None,
    };
    let name = format!("{}::{module}::{name}", server.name);
    let run = move || -> Result<(), Failed> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let url = url.ok_or("no URL")?;
        let (own, folder) = runtime.block_on(DB::create_database(&server, &url));
        // A failed test leaves no database behind.
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime.block_on(async {
                let pool = pool(&own, 10).await;
                rowlock::migrate(&pool).await.unwrap();
                test(TestDb { server, pool: pool.clone(), url: own.clone(), _folder: folder }).await;
                tokio::time::timeout(Duration::from_secs(5), pool.close()).await.ok();
            });
        }));
        runtime.block_on(DB::drop_database(&url, &own));
        passed.map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default().into()
        })
    };
    let trial = Trial::test(name.clone(), move || crate::alone::run(&name, run)).with_ignored_flag(needs.is_some());
    trial.with_kind(needs.map(|what| format!("needs {what}")).unwrap_or_default())
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
fn unique_name() -> String {
    format!("rowlock_{}", uuid::Uuid::new_v4().simple())
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
/// Returns the same URL with another database.
pub fn with_database(url: &str, database: &str) -> String {
    let (url, options) = url.split_once('?').map_or((url, None), |(url, options)| (url, Some(options)));
    let (server, _) = url.rsplit_once('/').expect("a URL with a database");
    options.map_or(format!("{server}/{database}"), |options| format!("{server}/{database}?{options}"))
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
pub fn database_of(url: &str) -> &str {
    let url = url.split('?').next().unwrap_or(url);
    url.rsplit('/').next().unwrap_or(url)
}

macro_rules! plain_sql {
    ($number:literal) => {
        async fn execute(pool: &Pool<Self>, sql: &str) -> Result<u64, sqlx::Error> {
            Ok(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await?.rows_affected())
        }
        async fn execute_on(conn: &mut Self::Connection, sql: &str) -> Result<u64, sqlx::Error> {
            Ok(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(conn).await?.rows_affected())
        }
        async fn text_on(conn: &mut Self::Connection, sql: &str) -> Result<Option<String>, sqlx::Error> {
            sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_optional(conn).await
        }
        async fn number(pool: &Pool<Self>, sql: &str) -> Option<i64> {
            sqlx::query_scalar(AssertSqlSafe(format!($number, sql)))
                .fetch_one(pool)
                .await
                .unwrap_or_else(|error| panic!("{sql}: {error}"))
        }
        async fn text(pool: &Pool<Self>, sql: &str) -> Option<String> {
            sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
                .fetch_one(pool)
                .await
                .unwrap_or_else(|error| panic!("{sql}: {error}"))
        }
    };
}

#[cfg(feature = "sqlite")]
impl TestDatabase for sqlx::Sqlite {
    plain_sql!("{}");
    const LOCK_ROW: &'static str = "UPDATE t_resource_lock SET status = status WHERE key_resource = 'k'";
    const BEGIN: &'static str = "BEGIN IMMEDIATE";

    fn ago(millis: i64) -> String {
        format!("(CAST(unixepoch('subsec') * 1000 AS INTEGER) * 1000 - {millis} * 1000)")
    }
    fn begun(table: Table, millis: i64) -> String {
        let micros = Self::ago(millis);
        if table == Table::Ours { micros } else { format!("datetime({micros} / 1000000, 'unixepoch')") }
    }
    fn uuid(hex: &str) -> String {
        format!("x'{hex}'")
    }
    fn open_transactions(_: &Server) -> &'static str {
        "SELECT 0" // BEGIN fails on a connection with an open transaction
    }
    async fn create_database(_: &Server, _: &str) -> (String, Option<tempfile::TempDir>) {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}?mode=rwc", folder.path().join("locks.db").display());
        let pool = pool::<Self>(&url, 1).await;
        Self::execute(&pool, "PRAGMA journal_mode = WAL").await.unwrap();
        (url, Some(folder))
    }
    async fn drop_database(_: &str, _: &str) {}
    async fn statements(_: &Pool<Self>) -> Option<i64> {
        None
    }
}

#[cfg(feature = "postgres")]
impl TestDatabase for sqlx::Postgres {
    plain_sql!("SELECT number::bigint FROM ({}) AS one (number)");
    const LOCK_ROW: &'static str = "SELECT 1 FROM t_resource_lock WHERE key_resource = 'k' FOR UPDATE";

    fn ago(millis: i64) -> String {
        format!("(clock_timestamp() - interval '1 millisecond' * ({millis}))")
    }
    fn uuid(hex: &str) -> String {
        format!("'{hex}'::uuid")
    }
    fn open_transactions(_: &Server) -> &'static str {
        "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
    }
    async fn create_database(_: &Server, url: &str) -> (String, Option<tempfile::TempDir>) {
        let name = unique_name();
        let pool = pool::<Self>(url, 1).await;
        Self::execute(&pool, &format!("CREATE DATABASE {name}")).await.unwrap();
        (with_database(url, &name), None)
    }
    async fn drop_database(url: &str, own: &str) {
        let pool = pool::<Self>(url, 1).await;
        Self::execute(&pool, &format!("DROP DATABASE {} WITH (FORCE)", database_of(own))).await.unwrap();
    }
    async fn statements(pool: &Pool<Self>) -> Option<i64> {
        Self::execute(pool, "CREATE EXTENSION IF NOT EXISTS pg_stat_statements").await.unwrap();
        let loaded = Self::text(pool, "SHOW shared_preload_libraries").await.unwrap_or_default();
        assert!(
            loaded.contains("pg_stat_statements"),
            "the server needs shared_preload_libraries = pg_stat_statements to count"
        );
        Self::number(
            pool,
            "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
             WHERE d.datname = current_database() AND query NOT LIKE '%pg_stat_statements%'
             AND query NOT LIKE '%statement_timestamp()%'",
        )
        .await
    }
}

#[cfg(feature = "mysql")]
impl TestDatabase for sqlx::MySql {
    plain_sql!("{}");
    const COUNTING: i64 = 1;
    const LOCK_ROW: &'static str = "SELECT 1 FROM t_resource_lock WHERE key_resource = 'k' FOR UPDATE";

    fn ago(millis: i64) -> String {
        format!("(UTC_TIMESTAMP(6) - INTERVAL {millis} * 1000 MICROSECOND)")
    }
    fn uuid(hex: &str) -> String {
        format!("UNHEX('{hex}')")
    }
    fn open_transactions(server: &Server) -> &'static str {
        if server.name == "mariadb" {
            return "SELECT CAST(@@in_transaction AS SIGNED)"; // reading innodb_trx delays its refresh
        }
        // On MySQL, reading `innodb_trx` fails while any statement runs that contains bytes which
        // are not text.
        "SELECT COUNT(*) FROM performance_schema.events_transactions_current x JOIN performance_schema.threads p USING (thread_id)
         WHERE x.state = 'ACTIVE' AND p.processlist_db = DATABASE() AND p.processlist_command = 'Sleep'"
    }
    async fn create_database(_: &Server, url: &str) -> (String, Option<tempfile::TempDir>) {
        let name = unique_name();
        let pool = pool::<Self>(url, 1).await;
        Self::execute(&pool, &format!("CREATE DATABASE {name}")).await.unwrap();
        (with_database(url, &name), None)
    }
    async fn drop_database(url: &str, own: &str) {
        let pool = pool::<Self>(url, 1).await;
        Self::execute(&pool, &format!("DROP DATABASE {}", database_of(own))).await.unwrap();
    }
    fn from_elsewhere(url: &str) -> String {
        with_database(url, "information_schema")
    }
    async fn statements(pool: &Pool<Self>) -> Option<i64> {
        use sqlx::Row as _;
        // The check of a shared connection is a `ROLLBACK` and a query, sent together.
        let mut count = 0;
        let status = "SHOW SESSION STATUS WHERE Variable_name IN ('Questions', 'Com_rollback')";
        for row in sqlx::raw_sql(status).fetch_all(pool).await.unwrap() {
            let value: i64 = row.get::<String, _>(1).parse().unwrap();
            count += if row.get::<String, _>(0) == "Questions" { value } else { -2 * value };
        }
        Some(count)
    }
}
