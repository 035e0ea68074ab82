//! The databases: their URLs, a separate database for each run, and the counters of a server.

use std::{
    future::Future,
    path::Path,
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

use clap::ValueEnum;
use rowlock::Database;
use sqlx::{AssertSqlSafe, Connection, MySql, Pool, Postgres, Row as _, Sqlite, pool::PoolOptions};
use tempfile::TempDir;

use crate::error::Error;

/// How long contenders wait for a connection, a row or SQLite's one writer.
pub const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Sqlite,
    Postgres,
    Mysql,
    Mariadb,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Sqlite, Self::Postgres, Self::Mysql, Self::Mariadb];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::Mysql => "mysql",
            Self::Mariadb => "mariadb",
        }
    }

    /// The server's URL. A database without one is skipped, with a message.
    pub fn url(self) -> Option<String> {
        let variable = match self {
            Self::Sqlite => return Some(String::new()),
            Self::Postgres => "POSTGRES_URL",
            Self::Mysql => "MYSQL_URL",
            Self::Mariadb => "MARIADB_URL",
        };
        let url = std::env::var(variable).ok().filter(|url| !url.is_empty());
        if url.is_none() {
            println!("{}: skipped, {variable} is not set", self.name());
        }
        url
    }
}

/// Calls a function that is generic over the database with the given kind.
macro_rules! on {
    ($kind:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $kind {
            $crate::database::Kind::Sqlite => $function::<sqlx::Sqlite>($($argument),*).await,
            $crate::database::Kind::Postgres => $function::<sqlx::Postgres>($($argument),*).await,
            $crate::database::Kind::Mysql | $crate::database::Kind::Mariadb => $function::<sqlx::MySql>($($argument),*).await,
        }
    };
}
pub(crate) use on;

/// A database of one run.
pub struct Site {
    pub url: String,
    folder: Option<TempDir>,
}

impl Site {
    /// The folder of SQLite's file.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_ref().map(TempDir::path)
    }
}

/// Reads how many statements the server has counted, on a connection of its own.
pub struct Observer<DB: Bench> {
    pool: Pool<DB>,
    looks: AtomicI64,
}

impl<DB: Bench> Observer<DB> {
    pub async fn new(site: &Site) -> Result<Self, Error> {
        let pool = pool(&site.url, 1).await?;
        DB::prepare(&pool).await?;
        Ok(Self { pool, looks: AtomicI64::new(0) })
    }

    /// The statements so far, where the server counts them.
    pub async fn statements(&self) -> Result<Option<i64>, Error> {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed);
        Ok(DB::statements(&self.pool).await?.map(|count| count - looks))
    }

    /// The statements since the server had counted as many as `before`.
    pub async fn since(&self, before: Option<i64>) -> Result<Option<i64>, Error> {
        let since = self.statements().await?.zip(before).map(|(now, before)| now - before);
        // A count that fell was reset, or its oldest entries were evicted.
        Ok(since.filter(|count| *count >= 0))
    }
}

pub trait Bench: Database {
    /// How a connection waits for others, where the server does not decide that.
    fn patient(options: Options<Self>) -> Options<Self> {
        options
    }

    /// Creates an empty database.
    fn create_database(server: &str) -> impl Future<Output = Result<Site, Error>> + Send;

    fn drop_database(server: &str, site: Site) -> impl Future<Output = Result<(), Error>> + Send;

    /// Prepares what counting needs.
    fn prepare(_: &Pool<Self>) -> impl Future<Output = Result<(), Error>> + Send {
        async { Ok(()) }
    }

    /// The number of statements so far, which may include this one.
    fn statements(pool: &Pool<Self>) -> impl Future<Output = Result<Option<i64>, Error>> + Send;
}

pub type Options<DB> = <<DB as sqlx::Database>::Connection as Connection>::Options;

pub async fn pool<DB: Database>(url: &str, connections: u32) -> Result<Pool<DB>, sqlx::Error> {
    PoolOptions::new().max_connections(connections).test_before_acquire(false).connect(url).await
}

/// A pool for contenders: each waits up to the same long limit.
pub async fn patient_pool<DB: Bench>(url: &str, connections: u32) -> Result<Pool<DB>, sqlx::Error> {
    let options = PoolOptions::new().max_connections(connections).test_before_acquire(false).acquire_timeout(PATIENCE);
    options.connect_with(DB::patient(url.parse()?)).await
}

/// Runs `work` with a database of its own, and drops the database whether or not `work` fails.
pub async fn at_own_site<DB: Bench>(
    server: &str,
    work: impl AsyncFnOnce(&Site) -> Result<(), Error>,
) -> Result<(), Error> {
    let own = site::<DB>(server).await?;
    let done = work(&own).await;
    DB::drop_database(server, own).await?;
    done
}

/// Creates a database with the table in it.
async fn site<DB: Bench>(server: &str) -> Result<Site, Error> {
    let site = DB::create_database(server).await?;
    let pool = pool::<DB>(&site.url, 1).await?;
    rowlock::migrate(&pool).await?;
    pool.close().await;
    Ok(site)
}

fn unique_name() -> String {
    format!("rowlock_bench_{}", uuid::Uuid::new_v4().simple())
}

/// The same server, another database.
fn with_database(url: &str, database: &str) -> Result<String, Error> {
    let (address, options) = url.split_once('?').map_or((url, String::new()), |(url, rest)| (url, format!("?{rest}")));
    let (server, _) = address.rsplit_once('/').ok_or("a URL names a database")?;
    Ok(format!("{server}/{database}{options}"))
}

fn database_of(site: &Site) -> &str {
    let address = site.url.split('?').next().unwrap_or_default();
    address.rsplit('/').next().unwrap_or_default()
}

impl Bench for Sqlite {
    fn patient(options: Options<Self>) -> Options<Self> {
        options.busy_timeout(PATIENCE)
    }

    async fn create_database(_: &str) -> Result<Site, Error> {
        let folder = tempfile::tempdir()?;
        let url = format!("sqlite://{}?mode=rwc", folder.path().join("locks.db").display());
        let pool = pool::<Self>(&url, 1).await?;
        sqlx::raw_sql("PRAGMA journal_mode = WAL").execute(&pool).await?;
        pool.close().await;
        Ok(Site { url, folder: Some(folder) })
    }

    async fn drop_database(_: &str, site: Site) -> Result<(), Error> {
        site.folder.map(TempDir::close).transpose()?;
        Ok(())
    }

    async fn statements(_: &Pool<Self>) -> Result<Option<i64>, Error> {
        Ok(None)
    }
}

impl Bench for Postgres {
    async fn create_database(server: &str) -> Result<Site, Error> {
        let name = unique_name();
        let pool = pool::<Self>(server, 1).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&pool).await?;
        Ok(Site { url: with_database(server, &name)?, folder: None })
    }

    async fn drop_database(server: &str, site: Site) -> Result<(), Error> {
        let pool = pool::<Self>(server, 1).await?;
        let sql = format!("DROP DATABASE {} WITH (FORCE)", database_of(&site));
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await?;
        Ok(())
    }

    async fn prepare(pool: &Pool<Self>) -> Result<(), Error> {
        let loaded: String = sqlx::query_scalar("SHOW shared_preload_libraries").fetch_one(pool).await?;
        if loaded.contains("pg_stat_statements") {
            sqlx::raw_sql("CREATE EXTENSION IF NOT EXISTS pg_stat_statements").execute(pool).await?;
        }
        Ok(())
    }

    /// Counted by the statement statistics extension, if the server has loaded it.
    async fn statements(pool: &Pool<Self>) -> Result<Option<i64>, Error> {
        let counted = sqlx::query_scalar(
            "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
             WHERE d.datname = current_database()",
        );
        match counted.fetch_one(pool).await {
            Ok(count) => Ok(Some(count)),
            Err(sqlx::Error::Database(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Bench for MySql {
    async fn create_database(server: &str) -> Result<Site, Error> {
        let name = unique_name();
        let pool = pool::<Self>(server, 1).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&pool).await?;
        Ok(Site { url: with_database(server, &name)?, folder: None })
    }

    async fn drop_database(server: &str, site: Site) -> Result<(), Error> {
        let pool = pool::<Self>(server, 1).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("DROP DATABASE {}", database_of(&site)))).execute(&pool).await?;
        Ok(())
    }

    /// Counts the statements of all clients of the server.
    async fn statements(pool: &Pool<Self>) -> Result<Option<i64>, Error> {
        let row = sqlx::raw_sql("SHOW GLOBAL STATUS LIKE 'Questions'").fetch_one(pool).await?;
        Ok(Some(row.try_get::<String, _>(1)?.parse()?))
    }
}
