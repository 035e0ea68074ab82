//! The tables of the lock: what they are like on this database, and how they are made.

use std::future::Future;

use crate::key::Key;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::store::servers::{Support, refusal, support};
use crate::store::{Reply, Store};

/// What the table on this database is like.
#[derive(Clone, Debug)]
pub struct Schema {
    /// Empty if there is no table.
    pub columns: Vec<String>,
    /// A column that only some databases need.
    pub own_column: Option<&'static str>,
    /// Whether the table of those who wait is there.
    pub queue: bool,
    /// The key column's type, in the database's words.
    pub key_type: String,
    pub key_limit: KeyLimit,
    /// How many characters the column `client_ip` holds.
    pub label_chars: usize,
    /// Whether a statement can be told not to wait for a locked row (MariaDB).
    pub nowait: bool,
    /// What makes the table or the connection unusable.
    pub wrong: Option<String>,
    /// What makes the database unusable, whatever the table is like.
    pub refused: Option<String>,
    /// A server on which nothing has been tried: its name and version banner.
    pub untried: Option<(&'static str, String)>,
}

/// How much the key column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyLimit {
    pub bytes: usize,
    pub chars: usize,
    /// No characters of four bytes (MySQL's utf8mb3).
    pub three_byte_chars: bool,
}

impl KeyLimit {
    pub fn holds(&self, key: &Key) -> bool {
        let text = key.as_str();
        text.len() <= self.bytes
            && text.chars().count() <= self.chars
            && !(self.three_byte_chars && text.chars().any(|c| c.len_utf8() > 3))
    }
}

/// The columns that a complete table has on every database.
const COLUMNS: [&str; 17] = [
    "key_resource",
    "status",
    "lock_flag",
    "begin_time",
    "end_time",
    "client_ip",
    "time",
    "holder",
    "token",
    "expires_at",
    "claimed_at",
    "confirms",
    "prior_token",
    "prior_client_ip",
    "prior_status",
    "prior_begin_time",
    "prior_end_time",
];

impl Schema {
    pub fn empty() -> Self {
        Self {
            columns: Vec::new(),
            own_column: None,
            queue: false,
            key_type: String::new(),
            key_limit: KeyLimit { bytes: usize::MAX, chars: usize::MAX, three_byte_chars: false },
            label_chars: usize::MAX,
            nowait: false,
            wrong: None,
            refused: None,
            untried: None,
        }
    }

    /// Takes down what the server's version banner tells of it.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub fn judge_server(&mut self, banner: String) {
        match support(&banner) {
            Support::Known => {}
            Support::Untried(name) => self.untried = Some((name, banner)),
            Support::Refused(name) => self.refused = Some(refusal(name, &banner)),
        }
    }

    pub fn missing(&self) -> Vec<&'static str> {
        let there = |wanted: &&str| self.columns.iter().any(|has| has.eq_ignore_ascii_case(wanted));
        let columns = COLUMNS.into_iter().chain(self.own_column).filter(|wanted| !there(wanted));
        columns.chain((!self.queue).then_some("its table t_resource_lock_queue")).collect()
    }
}

/// What is wrong with a column of a type that the statements do not work on.
pub fn unfit(column: &str, column_type: &str, fit: &str) -> String {
    format!("its column {column} ({column_type}) does not hold what rowlock writes there; use {fit}")
}

/// What a [`Store`] stands on.
pub trait SchemaStore: Store {
    /// Reads what the table is like.
    fn schema(conn: &mut Self::Connection) -> impl Future<Output = Reply<Schema>> + Send;

    /// Creates the tables, or adds what is missing beside the one that is found; may run at any time, in any number of processes.
    fn install(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send;
}
