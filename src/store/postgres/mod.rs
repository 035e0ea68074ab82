//! PostgreSQL 13 and later. Nearly every operation is one statement. `begin_time` and `end_time`
//! may be timestamps with or without a zone.

mod admin;
mod change;
mod claim;
#[cfg(feature = "schedule")]
mod instances;
mod queue;
mod row;
#[cfg(feature = "schedule")]
mod schedule;
#[cfg(feature = "schedule")]
mod schedule_sql;
mod schema;
mod version;

use chrono::{DateTime, Utc};
use sqlx::{
    ConnectOptions as _, PgConnection, Postgres, Row as _, SqlSafeStr as _,
    postgres::{PgConnectOptions, PgTransactionManager},
};
use sqlx_core::transaction::TransactionManager as _;

use crate::store::{Reply, Store};

/// A setting that marks a session that no other client uses. A pooler that shares sessions rejects
/// or omits it. There nothing is set that lasts, and nothing listens.
const OWN_SESSION: (&str, &str) = ("rowlock.own_session", "on");

/// In statements sent as one text, `statement_timestamp` is the time at which the text arrived, and
/// `now` that of the text that began the transaction. They differ exactly if the transaction was
/// begun before.
const ALONE: &str = "SELECT now() = statement_timestamp()";
const LEAVE: &str = "ROLLBACK";
/// Settings that the start of a session cannot set: names that not all supported servers have,
/// those that a hook of the pool has set since, and a value to keep unless it lets the server
/// forget a commit. Behind a pooler that shares sessions nothing is set. At SERIALIZABLE, the
/// statements of locks and schedules would conflict with transactions of the application.
const BEGIN_SESSION: &str = "
ROLLBACK; SELECT set_config(name, value, false) FROM (VALUES
        ('statement_timeout', '0'), ('lock_timeout', '10s'), ('idle_in_transaction_session_timeout', '10s'),
        ('idle_session_timeout', '0'), ('transaction_timeout', '0'), ('jit', 'off'), ('client_min_messages', 'error'),
        ('default_transaction_isolation', 'read committed')
    ) AS settings (name, value)
    WHERE current_setting('rowlock.own_session', true) = 'on' AND current_setting(name, true) IS NOT NULL;
    SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('rowlock.own_session', true) = 'on' AND current_setting('synchronous_commit') = 'off'";
/// Settings of an own session, which travel with its start and stay whatever the defaults of the
/// database and the role are. The server ends a session whose client stands still in a transaction,
/// and with it the locks on rows.
const SETTINGS: [(&str, &str); 7] = [
    OWN_SESSION,
    ("lock_timeout", "10s"),
    ("statement_timeout", "0"),
    ("idle_in_transaction_session_timeout", "10s"),
    ("jit", "off"),
    ("client_min_messages", "error"),
    ("default_transaction_deferrable", "off"),
];
/// Fails if BEGIN found a transaction that was already open.
const OPEN: &str = "BEGIN; SAVEPOINT rowlock; SELECT 1 / (now() = statement_timestamp())::int";
/// The errors of `OPEN` in another transaction: a division by zero, or any error in a transaction
/// that has already failed.
const IN_ANOTHER: [&str; 2] = ["22012", "25P02"];

impl Store for Postgres {
    fn own_session(options: PgConnectOptions) -> PgConnectOptions {
        let options = options.options(SETTINGS).disable_statement_logging();
        if options.get_application_name().is_some() { options } else { options.application_name("rowlock") }
    }

    /// PgBouncer answers with a violation of the protocol, RDS Proxy with a feature that it lacks.
    /// The server itself accepts the setting.
    fn refuses_own_session(error: &sqlx::Error) -> bool {
        let code = error.as_database_error().and_then(|error| error.code());
        matches!(code.as_deref(), Some("08P01" | "0A000"))
    }

    async fn begin_session(conn: &mut PgConnection) -> Reply<Option<DateTime<Utc>>> {
        sqlx::raw_sql(BEGIN_SESSION).execute(&mut *conn).await?;
        Self::now(conn).await.map(Some)
    }

    async fn now(conn: &mut PgConnection) -> Reply<DateTime<Utc>> {
        sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(conn).await
    }

    async fn leave_transaction(conn: &mut PgConnection) -> Reply<bool> {
        let alone: bool = sqlx::raw_sql(ALONE).fetch_one(&mut *conn).await?.try_get(0)?;
        if !alone {
            sqlx::raw_sql(LEAVE).execute(conn).await?;
        }
        Ok(alone)
    }

    async fn open(conn: &mut PgConnection) -> Reply<bool> {
        match PgTransactionManager::begin(conn, Some(OPEN.into_sql_str())).await {
            Err(sqlx::Error::Database(error)) if IN_ANOTHER.contains(&error.code().as_deref().unwrap_or_default()) => {
                Ok(false)
            }
            Err(sqlx::Error::InvalidSavePointStatement) => Ok(false),
            begun => begun.map(|()| true),
        }
    }

    async fn execute_text(conn: &mut PgConnection, sql: &'static str) -> Reply<()> {
        sqlx::raw_sql(sql).execute(conn).await.map(drop)
    }
}
