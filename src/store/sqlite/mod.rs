//! SQLite, embedded. Times are microseconds since 1970, UTC; its clock ticks in milliseconds.
//!
//! Other programs keep `begin_time` and `end_time` as text, `YYYY-MM-DD HH:MM:SS`. Each row is read as what it is; what
//! is written is what the column's declared type calls for. `claimed_at` repeats `begin_time` as it stands there.
//!
//! Nothing travels here, so the claim is a look, a judgement by `rules.rs`, and a compare-and-set of the
//! row that was judged: a refusal takes no write lock, and the rules are not repeated in SQL.

mod admin;
mod change;
mod claim;
mod in_memory;
mod queue;
mod row;
mod schema;
mod version;

use std::time::Duration;

use sqlx::{
    SqlSafeStr as _, Sqlite, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteTransactionManager},
};
use sqlx_core::transaction::TransactionManager as _;

use crate::store::{Change, ClaimReply, ClaimRequest, Confirmed, INTACT, Outcome, Reply, Store};
use crate::{
    key::{Claim, Key},
    rules::Terms,
};

impl Store for Sqlite {
    /// A database in memory has one connection, and a file one that writes.
    const OWN_CONNECTIONS: bool = false;

    async fn leave_transaction(conn: &mut SqliteConnection) -> Reply<bool> {
        in_memory::end_transactions(conn).await.map(|()| true)
    }

    async fn open(conn: &mut SqliteConnection) -> Reply<bool> {
        Self::leave_transaction(conn).await?;
        let begin = "BEGIN IMMEDIATE; SAVEPOINT rowlock".into_sql_str();
        SqliteTransactionManager::begin(conn, Some(begin)).await.map(|()| true)
    }

    fn may_be_in_memory(options: &SqliteConnectOptions) -> bool {
        !options.get_filename().exists()
    }

    async fn rest(conn: &mut SqliteConnection) -> bool {
        in_memory::rest(conn).await.unwrap_or(false)
    }

    /// The connection's own busy timeout ends a wait.
    async fn create(conn: &mut SqliteConnection, keys: &[Key], minutes: i32, _: Duration) -> Reply<()> {
        claim::create(conn, keys, minutes).await
    }

    /// A try waits for another's write no longer than for a row on a server; the connection's own patience is put back.
    async fn claim(
        conn: &mut SqliteConnection,
        asks: &[ClaimRequest],
        terms: &Terms,
        _: bool,
    ) -> Reply<Vec<ClaimReply>> {
        claim::claim(conn, asks, terms).await
    }

    async fn confirm(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Confirmed> {
        change::confirm(conn, claim).await
    }

    async fn intact(conn: &mut SqliteConnection) -> Reply<()> {
        sqlx::raw_sql(INTACT).execute(conn).await.map(drop)
    }

    async fn confirms(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Option<i64>> {
        change::confirms(conn, claim).await
    }

    async fn change(
        conn: &mut SqliteConnection,
        claims: &[Claim],
        change: Change,
        terms: &Terms,
        _: bool,
    ) -> Reply<Vec<Outcome>> {
        change::change(conn, claims, change, terms).await
    }
}
