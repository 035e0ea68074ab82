//! What a database says of itself. Each text is sent by the simple protocol, which every pooler
//! passes on.

use std::time::Duration;

use rowlock::Database;
use sqlx::{
    MySql, MySqlConnection, PgConnection, Pool, Postgres, Row as _, SqlSafeStr, Sqlite, SqliteConnection,
    error::DatabaseError, mysql::MySqlDatabaseError, postgres::PgListener,
};
use tokio::time::timeout;

use crate::database::{said, within_second};

/// How long a notification may take.
const NOTIFIED: Duration = Duration::from_secs(5);

/// Whether notifications arrive, and what stands in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notifications {
    /// The database has none.
    None,
    Arrive,
    /// A pooler shares sessions.
    Pooled,
    Missing(String),
}

/// A database that can be examined.
pub trait Server: Database {
    /// Reads the server's name and version.
    const VERSION: &'static str;
    /// Reads the schema in which the tables are; NULL if there is none.
    const PLACE: &'static str;
    /// Reads the time in microseconds since 1970; `None` where it is this machine's.
    const NOW: Option<&'static str>;
    /// Reads a pooler's version. A server that is not behind one refuses the statement.
    const POOLER: Option<&'static str> = None;

    /// Reads the user of the connection as GRANT takes it; `None` where there are no users.
    const USER: Option<&'static str>;

    /// The rights that a run of a schedule needs on the history.
    const RECORDS_RUNS: &'static [&'static str] = &["SELECT", "INSERT"];

    /// Returns the first column of the first row.
    async fn text(conn: &mut Self::Connection, sql: impl SqlSafeStr) -> Result<Option<String>, sqlx::Error>;
    /// Returns whether the user lacks a right, or the database takes no writes.
    fn is_denied(error: &dyn DatabaseError) -> bool;
    async fn notifications(_: &Pool<Self>) -> Notifications {
        Notifications::None
    }
    /// Returns the settings of the database that concern locks, by name.
    async fn settings(_: &mut Self::Connection) -> Result<Vec<(String, String)>, sqlx::Error> {
        Ok(Vec::new())
    }
}

impl Server for Postgres {
    const VERSION: &'static str = "SELECT version()";
    const PLACE: &'static str = "SELECT 'schema ' || coalesce((SELECT relnamespace::regnamespace::text FROM pg_class
        WHERE oid = to_regclass('t_resource_lock')), current_schema()::text)";
    const NOW: Option<&'static str> = Some("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text");
    const POOLER: Option<&'static str> = Some("SHOW pool_version");
    const USER: Option<&'static str> = Some("SELECT quote_ident(current_user)");

    async fn text(conn: &mut PgConnection, sql: impl SqlSafeStr) -> Result<Option<String>, sqlx::Error> {
        sqlx::raw_sql(sql).fetch_optional(conn).await?.map(|row| row.try_get(0)).transpose()
    }

    fn is_denied(error: &dyn DatabaseError) -> bool {
        // A standby reports a read-only transaction.
        error.code().is_some_and(|code| ["42501", "25006"].contains(&&*code))
    }

    /// A session of one's own keeps a setting that was asked for at its start. A pooler refuses it
    /// or leaves it out. Nothing is listened for behind one, since the session that listens would
    /// be another client's next.
    async fn notifications(pool: &Pool<Self>) -> Notifications {
        const OWN: &str = "SELECT coalesce(current_setting('rowlock.own_session', true), '')";
        let options = (*pool.connect_options()).clone().options([("rowlock.own_session", "on")]);
        let own = match sqlx::pool::PoolOptions::new().max_connections(2).connect_with(options).await {
            Ok(own) => own,
            Err(error) if refuses_settings(&error) => return Notifications::Pooled,
            Err(error) => return Notifications::Missing(said(&error)),
        };
        let found = async {
            let mut conn = own.acquire().await?;
            if Self::text(&mut conn, OWN).await?.as_deref() != Some("on") {
                return Ok(Notifications::Pooled);
            }
            let mut listener = PgListener::connect_with(&own).await?;
            listener.listen("rowlock_doctor").await?;
            Self::text(&mut conn, "SELECT pg_notify('rowlock_doctor', '')::text").await?;
            Ok::<_, sqlx::Error>(match timeout(NOTIFIED, listener.recv()).await {
                Ok(received) => received.map(|_| Notifications::Arrive)?,
                Err(_) => Notifications::Missing(format!("no notification within {NOTIFIED:?}")),
            })
        };
        let found = found.await.unwrap_or_else(|error| Notifications::Missing(said(&error)));
        within_second(own.close()).await;
        found
    }
}

/// Returns whether a pooler has refused a setting of the session, as the library judges it.
fn refuses_settings(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("08P01"))
}

impl Server for MySql {
    const VERSION: &'static str = "SELECT CONVERT(CONCAT(
        IF(VERSION() LIKE '%MariaDB%', '', 'MySQL '), VERSION(), ' ', @@version_comment) USING utf8mb4)";
    const PLACE: &'static str = "SELECT CONVERT(CONCAT('database ', DATABASE()) USING utf8mb4)";
    const NOW: Option<&'static str> =
        Some("SELECT CONVERT(CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED) USING utf8mb4)");

    const USER: Option<&'static str> = Some(
        "SELECT CONVERT(CONCAT(
             '`', REPLACE(LEFT(CURRENT_USER(), CHAR_LENGTH(CURRENT_USER()) - CHAR_LENGTH(SUBSTRING_INDEX(CURRENT_USER(), '@', -1)) - 1),
                          '`', '``'),
             '`@`', SUBSTRING_INDEX(CURRENT_USER(), '@', -1), '`') USING utf8mb4)",
    );

    const RECORDS_RUNS: &'static [&'static str] = &["SELECT", "INSERT", "UPDATE"];

    async fn text(conn: &mut MySqlConnection, sql: impl SqlSafeStr) -> Result<Option<String>, sqlx::Error> {
        sqlx::raw_sql(sql).fetch_optional(conn).await?.map(|row| row.try_get(0)).transpose()
    }

    fn is_denied(error: &dyn DatabaseError) -> bool {
        // A right on the table or a column; a server, or a session, that only reads.
        let number = error.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number);
        number.is_some_and(|number| [1142, 1143, 1044, 1290, 1792, 1836].contains(&number))
    }

    async fn settings(conn: &mut MySqlConnection) -> Result<Vec<(String, String)>, sqlx::Error> {
        const SETTINGS: &str = "SHOW VARIABLES WHERE Variable_name IN
            ('log_bin', 'binlog_format', 'transaction_isolation', 'tx_isolation', 'wsrep_on')";
        // An option of the server that is no variable.
        const SYSDATE: &str = "SELECT CONVERT('sysdate_is_now' USING utf8mb4),
            CONVERT(IF(SLEEP(0.01) = 0 AND SYSDATE(6) = NOW(6), 'ON', 'OFF') USING utf8mb4)";
        let mut rows = sqlx::raw_sql(SETTINGS).fetch_all(&mut *conn).await?;
        rows.extend(sqlx::raw_sql(SYSDATE).fetch_all(conn).await?);
        rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
    }
}

impl Server for Sqlite {
    const VERSION: &'static str = "SELECT 'SQLite ' || sqlite_version()";
    const PLACE: &'static str =
        "SELECT CASE file WHEN '' THEN 'memory' ELSE 'file ' || file END FROM pragma_database_list WHERE name = 'main'";
    const NOW: Option<&'static str> = None;
    const USER: Option<&'static str> = None;

    async fn text(conn: &mut SqliteConnection, sql: impl SqlSafeStr) -> Result<Option<String>, sqlx::Error> {
        sqlx::raw_sql(sql).fetch_optional(conn).await?.map(|row| row.try_get(0)).transpose()
    }

    fn is_denied(error: &dyn DatabaseError) -> bool {
        // SQLITE_READONLY and its variants; SQLITE_PERM, SQLITE_AUTH.
        let code = error.code().and_then(|code| code.parse::<u32>().ok());
        code.is_some_and(|code| [8, 3, 23].contains(&(code & 0xff)))
    }

    async fn settings(conn: &mut SqliteConnection) -> Result<Vec<(String, String)>, sqlx::Error> {
        let mode = Self::text(conn, "PRAGMA journal_mode").await?;
        Ok(mode.map(|mode| ("journal_mode".to_owned(), mode)).into_iter().collect())
    }
}
