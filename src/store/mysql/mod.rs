//! MySQL 8.0 and MariaDB 10.6, and later. Times are UTC whatever the session's time zone is.

/// The end of a transaction, whatever the session's `completion_type` is. Under `CHAIN` a plain one
/// begins the next transaction, and under `RELEASE` it ends the session.
macro_rules! commit {
    () => {
        "COMMIT AND NO CHAIN NO RELEASE"
    };
}
macro_rules! rollback {
    () => {
        "ROLLBACK AND NO CHAIN NO RELEASE"
    };
}

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

use chrono::{DateTime, NaiveDateTime, Utc};
use sqlx::{
    MySql, MySqlConnection, Row as _, SqlSafeStr as _,
    mysql::{MySqlDatabaseError, MySqlTransactionManager},
};
use sqlx_core::transaction::TransactionManager as _;

use crate::store::{Reply, Store};

/// Begins a transaction after which the session neither commits by itself nor writes: its
/// statements fall into transactions that the last ROLLBACK undoes, and those that begin after a
/// commit, or after a ROLLBACK of the work's own, are read-only. After a deadlock the server keeps
/// the access mode of the transaction that it has rolled back.
///
/// A plain COMMIT of the work begins no transaction that writes, as it would under a
/// `completion_type` of `CHAIN`.
///
/// 2 is no value of `autocommit`: the text fails if the application's session commits nothing by
/// itself, or is read-only.
const OPEN: &str = concat!(
    rollback!(),
    "; SET autocommit = IF(@@autocommit AND NOT /*!80000 @@transaction_read_only */ /*M! @@tx_read_only */, 0, 2);
    SET @rowlock_completion = @@completion_type, completion_type = NO_CHAIN;
    START TRANSACTION; SET SESSION TRANSACTION READ ONLY; SAVEPOINT rowlock"
);
const WRONG_VALUE: u16 = 1231;

/// Restores what `OPEN` has set, after the end of a transaction, except for a `completion_type`
/// with which the connection is closed.
macro_rules! restore {
    () => {
        "; SET SESSION TRANSACTION READ WRITE; SET autocommit = 1;
        SELECT CAST(COALESCE(@rowlock_completion = 'NO_CHAIN', 0) AND @@completion_type = 'NO_CHAIN' AS SIGNED)"
    };
}

/// Ends a transaction of `OPEN`. The driver counts down only with a plain ROLLBACK of its own, sent
/// with the next statement. Unless the session's `completion_type` makes that harmless, the
/// connection has to be closed.
async fn end(conn: &mut MySqlConnection, sql: &'static str) -> Reply<bool> {
    let rows = sqlx::raw_sql(sql).fetch_all(&mut *conn).await?;
    let harmless = rows.first().map(|row| row.try_get::<i64, _>(0)).transpose()? == Some(1);
    if harmless {
        MySqlTransactionManager::start_rollback(conn);
    }
    Ok(harmless)
}

/// The state of an own session. A statement waits for a metadata lock for a year by default, also
/// when its client is gone. The server ends a session whose client stands still in a transaction,
/// and with it the locks on rows: after `wait_timeout`, which is longer than a session is kept
/// without a use, on MariaDB sooner. At READ COMMITTED, a binary log of statements cannot be
/// written.
const BEGIN_SESSION: &str = concat!(
    rollback!(),
    // Short: a hook may have set a time limit.
    "; SET SESSION /*M! max_statement_time = 0, idle_transaction_timeout = 10, */ autocommit = 1;
       SET SESSION completion_type = NO_CHAIN, time_zone = '+00:00', timestamp = DEFAULT,
        sql_mode = 'STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,PIPES_AS_CONCAT',
        sql_safe_updates = 0, sql_big_selects = 1, sql_auto_is_null = 0, sql_select_limit = DEFAULT,
        group_concat_max_len = 1048576, wait_timeout = 60, lock_wait_timeout = 10,
        /*!80000 max_execution_time = 0, transaction_isolation */
        /*M! tx_isolation */
            = IF(@@binlog_format = 'STATEMENT', 'REPEATABLE-READ', 'READ-COMMITTED')"
);

impl Store for MySql {
    const COMMIT_TEXT: &'static str = commit!();
    const ROLLBACK_TEXT: &'static str = rollback!();
    const SETTINGS_STAND: Option<&'static str> = Some(
        "SET autocommit = IF(NOT @@autocommit AND @@completion_type = 'NO_CHAIN'
                             AND /*!80000 @@transaction_read_only */ /*M! @@tx_read_only */, 0, 2)",
    );

    async fn begin_session(conn: &mut MySqlConnection) -> Reply<Option<DateTime<Utc>>> {
        sqlx::raw_sql(BEGIN_SESSION).execute(&mut *conn).await?;
        let now: NaiveDateTime = sqlx::query_scalar("SELECT SYSDATE(6)").fetch_one(conn).await?;
        Ok(Some(now.and_utc()))
    }

    async fn now(conn: &mut MySqlConnection) -> Reply<DateTime<Utc>> {
        let now: NaiveDateTime = sqlx::query_scalar("SELECT UTC_TIMESTAMP(6)").fetch_one(conn).await?;
        Ok(now.and_utc())
    }

    /// The server does not report whether ROLLBACK undid a transaction. Without autocommit, the
    /// next transaction would begin at once.
    async fn leave_transaction(conn: &mut MySqlConnection) -> Reply<bool> {
        let rows = sqlx::raw_sql(concat!(rollback!(), "; SELECT CAST(@@autocommit AS SIGNED)")).fetch_all(conn).await?;
        match rows.first().map(|row| row.try_get::<i64, _>(0)).transpose()? {
            Some(0) => Err(sqlx::Error::Configuration(
                "the connection's autocommit is off, so that nothing would be committed; switch it on".into(),
            )),
            _ => Ok(true),
        }
    }

    async fn open(conn: &mut MySqlConnection) -> Reply<bool> {
        match MySqlTransactionManager::begin(conn, Some(OPEN.into_sql_str())).await {
            Err(sqlx::Error::InvalidSavePointStatement) => Ok(false),
            Err(sqlx::Error::Database(error))
                if error
                    .try_downcast_ref::<MySqlDatabaseError>()
                    .is_some_and(|error| error.number() == WRONG_VALUE) =>
            {
                Err(sqlx::Error::Configuration(
                    "the connection's autocommit is off, or its transactions are read-only; see its hooks".into(),
                ))
            }
            begun => begun.map(|()| true),
        }
    }

    async fn execute_text(conn: &mut MySqlConnection, sql: &'static str) -> Reply<()> {
        sqlx::raw_sql(sql).execute(conn).await.map(drop)
    }

    async fn commit(conn: &mut MySqlConnection) -> Reply<bool> {
        end(conn, concat!(commit!(), restore!())).await
    }

    async fn roll_back(conn: &mut MySqlConnection) -> Reply<bool> {
        end(conn, concat!(rollback!(), restore!())).await
    }
}
