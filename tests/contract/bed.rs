//! A database of its own for each test, and plain SQL to look at it behind the lock's back.

use std::{fmt::Debug, future::Future, time::Duration};

use libtest_mimic::{Failed, Trial};
use rowlock::{Attempt, Lease, LeaseLock, Value};
use sqlx::{AssertSqlSafe, Pool, pool::PoolOptions};

use crate::article::Table;
/// How long a test waits for what has to come.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A database that the contract is run on.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    pub name: &'static str,
    /// The variable with its URL; SQLite needs none.
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

/// `DB: Holds<T, Is: Value<DB>>` as a bound of [`Bed`] holds wherever that does; `where T: Value<DB>` would have to be said in every test.
pub trait Holds<T>: Named<T, Is = T> {}
pub trait Named<T> {
    type Is;
}
impl<DB, T> Named<T> for DB {
    type Is = T;
}
impl<DB, T> Holds<T> for DB {}

/// What a test needs of a database beside the lock.
pub trait Bed:
    rowlock::Database + Sized + Holds<i64, Is: Value<Self>> + Holds<bool, Is: Value<Self>> + Holds<String, Is: Value<Self>>
{
    /// The database's clock, so many milliseconds ago (or ahead, if negative), as it stands in begin_time.
    fn ago(millis: i64) -> String;
    /// The same as it stands there in a table of this make.
    fn begun(_: Table, millis: i64) -> String {
        Self::ago(millis)
    }
    fn uuid(hex: &str) -> String;
    /// The same database, over a connection whose own schema is another; SQLite has no such thing.
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
    /// How many statements the pool's only connection has sent so far, where the database counts them:
    /// those that check a connection of a shared pool left out.
    async fn statements(pool: &Pool<Self>) -> Option<i64>;
    /// A transaction that sits on the row (on SQLite: on the database).
    const LOCK_ROW: &'static str;
    const BEGIN: &'static str = "BEGIN";
    /// Counts open transactions: PostgreSQL and MySQL tell any connection of those of the whole database that do nothing
    /// at the moment, MariaDB tells a connection of its own.
    fn open_transactions(server: &Server) -> &'static str;
    /// How many statements it takes to count statements, counted too.
    const COUNTING: i64 = 0;
}

/// One test's database, with the table in it.
pub struct Site<DB: Bed> {
    pub server: Server,
    pub pool: Pool<DB>,
    pub url: String,
    _folder: Option<tempfile::TempDir>,
}

impl<DB: Bed> Site<DB> {
    pub fn lock(&self) -> LeaseLock<DB> {
        LeaseLock::new(self.pool.clone())
    }

    pub fn lock_for(&self, lease: Duration) -> LeaseLock<DB> {
        self.lock().lease(lease).unwrap()
    }

    /// The same database, looked at through another pool.
    pub fn over(&self, pool: Pool<DB>) -> Self {
        Self { server: self.server, pool, url: self.url.clone(), _folder: None }
    }

    /// A pool of its own on the same database.
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

    /// Whatever an expression comes to in a table's rows, as text.
    pub async fn cell(&self, expression: &str, rest: &str) -> Option<String> {
        let text = self.text(&format!("SELECT CAST({expression} AS char(80)) FROM {rest}")).await;
        text.map(|text| text.trim().to_owned())
    }

    /// One column of a key's row.
    pub async fn column(&self, key: &str, column: &str) -> Option<String> {
        self.text(&format!("SELECT {column} FROM t_resource_lock WHERE key_resource = '{key}'")).await
    }

    /// Sets columns of a key's row.
    pub async fn set(&self, key: &str, set: &str) {
        let rows = self.execute(&format!("UPDATE t_resource_lock SET {set} WHERE key_resource = '{key}'")).await;
        assert_eq!(rows, 1, "{key} has one row");
    }

    /// As if another instance had taken the key over: a new holder, a higher token.
    pub async fn take_from(&self, key: &str) {
        let holder = DB::uuid("0123456789abcdef0123456789abcdef");
        self.set(key, &format!("holder = {holder}, token = token + 1, client_ip = 'thief'")).await;
    }
}

pub async fn pool<DB: Bed>(url: &str, connections: u32) -> Pool<DB> {
    let options = PoolOptions::new().max_connections(connections).test_before_acquire(false);
    options.connect(url).await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// The lease, or the refusal as a panic.
#[track_caller]
pub fn acquired<DB: Bed, E: Debug>(attempt: Result<Attempt<Lease<DB>>, E>) -> Lease<DB> {
    match attempt {
        Ok(Attempt::Acquired(lease)) => lease,
        other => panic!("not acquired: {other:?}"),
    }
}

#[track_caller]
pub fn refused<DB: Bed, E: Debug>(attempt: Result<Attempt<Lease<DB>>, E>) -> rowlock::Refusal {
    match attempt {
        Ok(Attempt::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// Waits for a condition, not for a time: panics if it does not come within 20 s.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let started = tokio::time::Instant::now();
    while !holds().await {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}: not within 20 s");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits for something from within a call that cannot be awaited.
pub fn meanwhile<T>(work: impl Future<Output = T>) -> T {
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(work))
}

/// `POSTGRES_URL` leads to a pooler in transaction mode, and this to the server behind it.
pub fn direct_url() -> Option<String> {
    std::env::var("POSTGRES_DIRECT_URL").ok().filter(|url| !url.is_empty())
}

fn is_pooled() -> bool {
    direct_url().is_some()
}

/// Whether a test is about what a pooler in transaction mode keeps to itself: word of releases, settings and locks of a session, who a user is,
/// how many connections there are, how many statements there were (it sends some of its own), a request that arrives after its sender has gone.
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
        "forgetting" => name == "keys_of_other_steps_can_be_had_meanwhile",
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

/// A test as a trial of the harness: on a database of its own, which goes away with it.
pub fn trial<DB: Bed, F>(server: Server, module: &str, name: &str, test: fn(Site<DB>) -> F) -> Trial
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
        // A test that fails leaves no database behind.
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime.block_on(async {
                let pool = pool(&own, 10).await;
                rowlock::migrate(&pool).await.unwrap();
                test(Site { server, pool: pool.clone(), url: own.clone(), _folder: folder }).await;
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
/// The same URL with another database.
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
impl Bed for sqlx::Sqlite {
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
        "SELECT 0" // a BEGIN fails on a connection that has one open
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
impl Bed for sqlx::Postgres {
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
impl Bed for sqlx::MySql {
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
            return "SELECT CAST(@@in_transaction AS SIGNED)"; // its innodb_trx is a copy, renewed when nobody looks
        }
        // Its innodb_trx is an error while any statement runs with bytes in it that are no text.
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
        // The check of a shared connection is a ROLLBACK and a look, sent together.
        let mut count = 0;
        let status = "SHOW SESSION STATUS WHERE Variable_name IN ('Questions', 'Com_rollback')";
        for row in sqlx::raw_sql(status).fetch_all(pool).await.unwrap() {
            let value: i64 = row.get::<String, _>(1).parse().unwrap();
            count += if row.get::<String, _>(0) == "Questions" { value } else { -2 * value };
        }
        Some(count)
    }
}
