//! What a test needs of a database besides the lock, for each database.

use std::future::Future;

use rowlock::balances::Value;
use sqlx::{AssertSqlSafe, Pool};

use crate::{
    Reused, Server, pool,
    server::{database_of, direct_url, unique_name, with_database},
};

/// Who created the table that a test uses: this crate or the article.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    Ours,
    Articles,
}

impl Table {
    pub const BOTH: [Self; 2] = [Self::Ours, Self::Articles];
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
    Reused
    + Holds<i64, Is: Value<Self>>
    + Holds<f64, Is: Value<Self>>
    + Holds<bool, Is: Value<Self>>
    + Holds<String, Is: Value<Self>>
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
    fn execute(pool: &Pool<Self>, sql: &str) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;
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
    // A pooler may keep a connection to the database, or end other sessions when it is dropped.
    async fn create_database(_: &Server, url: &str) -> (String, Option<tempfile::TempDir>) {
        let name = unique_name();
        let pool = pool::<Self>(&direct_url().unwrap_or_else(|| url.into()), 1).await;
        Self::execute(&pool, &format!("CREATE DATABASE {name}")).await.unwrap();
        (with_database(url, &name), None)
    }
    async fn drop_database(url: &str, own: &str) {
        let pool = pool::<Self>(&direct_url().unwrap_or_else(|| url.into()), 1).await;
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
