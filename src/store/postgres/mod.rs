//! PostgreSQL 13 and later. Each operation is one statement. `begin_time` and `end_time` may be
//! timestamps with or without a zone.

mod admin;
mod change;
mod claim;
mod queue;
mod row;
#[cfg(feature = "schedule")]
mod schedule;
#[cfg(feature = "schedule")]
mod schedule_sql;
mod schema;
mod version;

use std::time::Duration;

use sqlx::{PgConnection, Postgres, Row as _, SqlSafeStr as _, postgres::PgTransactionManager};
use sqlx_core::transaction::TransactionManager as _;

use crate::store::{Change, ClaimReply, ClaimRequest, Confirmed, Form, INSIDE, Outcome, Reply, Store};
use crate::{
    key::{Claim, Key},
    rules::Terms,
};

/// In statements sent as one text, `statement_timestamp` is the time at which the text arrived, and
/// `now` that of the text that began the transaction. They differ exactly if the transaction was
/// begun before.
const ALONE: &str = "SELECT now() = statement_timestamp()";
/// Fails if BEGIN found a transaction that was already open.
const OPEN: &str = "BEGIN; SAVEPOINT rowlock; SELECT 1 / (now() = statement_timestamp())::int";
/// The errors of `OPEN` in another transaction: a division by zero, or any error in a transaction
/// that has already failed.
const IN_ANOTHER: [&str; 2] = ["22012", "25P02"];

impl Store for Postgres {
    const OWN_CONNECTIONS: bool = true;

    async fn leave_transaction(conn: &mut PgConnection) -> Reply<bool> {
        let alone: bool = sqlx::raw_sql(ALONE).fetch_one(&mut *conn).await?.try_get(0)?;
        if !alone {
            sqlx::raw_sql("ROLLBACK").execute(conn).await?;
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

    async fn create(conn: &mut PgConnection, keys: &[Key], minutes: i32, lock_timeout: Duration, _: Form) -> Reply<()> {
        claim::create(conn, keys, minutes, lock_timeout).await
    }

    async fn claim(
        conn: &mut PgConnection,
        requests: &[ClaimRequest],
        terms: &Terms,
        _: Form,
    ) -> Reply<Vec<ClaimReply>> {
        claim::claim(conn, requests, terms).await
    }

    async fn look(conn: &mut PgConnection, requests: &[ClaimRequest], terms: &Terms) -> Reply<Vec<ClaimReply>> {
        claim::look(conn, requests, terms).await
    }

    async fn confirm(conn: &mut PgConnection, claim: &Claim) -> Reply<Confirmed> {
        change::confirm(conn, claim).await
    }

    async fn in_transaction(conn: &mut PgConnection) -> Reply<()> {
        sqlx::raw_sql(INSIDE).execute(conn).await.map(drop)
    }

    async fn execute_text(conn: &mut PgConnection, sql: &'static str) -> Reply<()> {
        sqlx::raw_sql(sql).execute(conn).await.map(drop)
    }

    async fn commit(conn: &mut PgConnection) -> Reply<bool> {
        PgTransactionManager::commit(conn).await.map(|()| true)
    }

    async fn roll_back(conn: &mut PgConnection) -> Reply<bool> {
        PgTransactionManager::rollback(conn).await.map(|()| true)
    }

    async fn confirms(conn: &mut PgConnection, claim: &Claim) -> Reply<Option<i64>> {
        change::confirms(conn, claim).await
    }

    async fn change(conn: &mut PgConnection, claims: &[Claim], change: Change, _: Form) -> Reply<Vec<Outcome>> {
        change::change(conn, claims, change).await
    }
}
