//! The operators' operations on a database: list rows, free a row, delete old rows.

use std::future::Future;

use chrono::{DateTime, TimeDelta, Utc};

use crate::store::{Reply, Store};
use crate::{
    key::{Key, Token},
    rules::{Row, Status, Terms},
};

/// A row with its key, whichever program created it, and the database's time.
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

/// The outcome of a forced release.
#[derive(Clone, Copy, Debug)]
pub enum Forced {
    /// Free, under this new token.
    Freed(Token),
    NoRow,
    /// Another transaction had locked the row.
    Skipped,
}

/// The most rows that one step of deletion names.
pub const STEP: usize = 500;

/// A step of deletion: how many rows were deleted, and the key after which to continue, if there
/// may be more.
#[derive(Clone, Debug)]
pub struct Forgotten {
    pub rows: u64,
    pub after: Option<String>,
}

/// The operators' operations of a [`Store`].
pub trait AdminStore: Store {
    /// Reads rows in the order of their keys. Locks nothing.
    fn list(conn: &mut Self::Connection, page: &Page, terms: &Terms)
    -> impl Future<Output = Reply<Vec<Listed>>> + Send;

    /// Reads one row. Locks nothing.
    fn inspect(
        conn: &mut Self::Connection,
        key: &Key,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Option<Listed>>> + Send;

    /// Frees a row, whichever holder has it. The row is locked first, then freed with a higher
    /// token.
    fn force(
        conn: &mut Self::Connection,
        key: &Key,
        status: Status,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Forced>> + Send;

    /// Deletes rows that are free, `S`, past their minimum interval (the row's `time` and the
    /// lock's `min_interval`), and unused for `older_than`: one step, after the key `after`. Rows
    /// that another transaction has locked are skipped.
    fn forget(
        conn: &mut Self::Connection,
        older_than: TimeDelta,
        after: &str,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Forgotten>> + Send;
}
