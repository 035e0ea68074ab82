//! What an operator asks of a database: look at rows, free one, forget old ones.

use std::future::Future;

use chrono::{DateTime, TimeDelta, Utc};

use crate::store::{Reply, Store};
use crate::{
    key::{Key, Token},
    rules::{Row, Status, Terms},
};

/// A row with its key, whoever made it, and the database's time.
#[derive(Clone, Debug)]
pub struct Listed {
    pub key: String,
    pub row: Row,
    pub end_time: Option<DateTime<Utc>>,
    pub now: DateTime<Utc>,
}

/// Which rows to list.
#[derive(Clone, Debug)]
pub struct Page {
    pub after: String,
    pub prefix: String,
    pub locked_only: bool,
    pub limit: u32,
}

/// What became of a forced release.
#[derive(Clone, Copy, Debug)]
pub enum Forced {
    /// Free, under this new token.
    Freed(Token),
    NoRow,
    /// Somebody's transaction was at the row.
    Skipped,
}

/// How many rows one step of forgetting names.
pub const STEP: usize = 500;

/// A step of forgetting: how many rows went, and the key to go on behind, if there may be more.
#[derive(Clone, Debug)]
pub struct Forgotten {
    pub rows: u64,
    pub after: Option<String>,
}

/// The operators' side of a [`Store`].
pub trait AdminStore: Store {
    /// Reads rows in the order of their keys; locks nothing.
    fn list(conn: &mut Self::Connection, page: &Page, terms: &Terms)
    -> impl Future<Output = Reply<Vec<Listed>>> + Send;

    /// Reads one row; locks nothing.
    fn inspect(
        conn: &mut Self::Connection,
        key: &Key,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Option<Listed>>> + Send;

    /// Frees a row whoever holds it: locked first, then freed with a token that grows.
    fn force(
        conn: &mut Self::Connection,
        key: &Key,
        status: Status,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Forced>> + Send;

    /// Deletes rows that are free, `S`, out of their window (the row's `time` and the lock's `min_interval`), and
    /// have been left alone for so long: one step, behind the key `after`. Rows that another transaction has locked are passed over.
    fn forget(
        conn: &mut Self::Connection,
        older_than: TimeDelta,
        after: &str,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Forgotten>> + Send;
}
