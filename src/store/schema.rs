//! The lock's tables: how they are defined on this database, and how they are created.

use std::future::Future;

use crate::key::Key;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::store::servers::{Support, refusal, support};
use crate::store::{Form, Reply, Store};

/// The lock's table as found on this database.
#[derive(Clone, Debug)]
pub struct Schema {
    /// Empty if there is no table.
    pub columns: Vec<String>,
    /// A column that only some databases need.
    pub own_column: Option<&'static str>,
    /// Whether the table of tickets exists.
    pub queue: bool,
    /// The type of the key column, as the database names it.
    pub key_type: String,
    pub key_limit: KeyLimit,
    /// How many characters the column `client_ip` holds.
    pub label_chars: usize,
    /// The statements that this server and table allow.
    pub form: Form,
    /// What a read needs to show all that was committed before it.
    pub freshness: Freshness,
    /// Why the table or the connection is unusable.
    pub wrong: Option<String>,
    /// Why the database is unusable, whatever its table.
    pub refused: Option<String>,
    /// An untested server: its name and version banner.
    pub untried: Option<(&'static str, String)>,
    /// Whether it is one on which two holders can hold a key, which the application has accepted.
    pub accepted: bool,
}

/// What a read needs to show all that was committed before it, on whichever server of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Nothing: the server that answers has it all.
    Plain,
    /// The server may be a node of a Galera cluster (MariaDB).
    SyncWait,
    /// The server may be a member of a group (MySQL Group Replication).
    Before,
    /// The server may be a primary that was replaced and answers reads still, or a standby
    /// (PostgreSQL).
    Primary,
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
            form: Form::Common,
            freshness: Freshness::Plain,
            wrong: None,
            refused: None,
            untried: None,
            accepted: false,
        }
    }

    /// Records what the server's version banner says about support.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub fn judge_server(&mut self, banner: String) {
        match support(&banner) {
            Support::Known => {}
            Support::Untried(name) => self.untried = Some((name, banner)),
            Support::Accepted(name) => (self.untried, self.accepted) = (Some((name, banner)), true),
            Support::Refused(name) => self.refused = Some(refusal(name, &banner)),
        }
    }

    pub fn missing(&self) -> Vec<&'static str> {
        let there = |wanted: &&str| self.columns.iter().any(|has| has.eq_ignore_ascii_case(wanted));
        let columns = COLUMNS.into_iter().chain(self.own_column).filter(|wanted| !there(wanted));
        columns.chain((!self.queue).then_some("its table t_resource_lock_queue")).collect()
    }
}

/// What is wrong with a table in which a key can have several rows.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub const NO_KEY: &str =
    "its column key_resource is not unique by itself; delete rows with the same key, and make it the primary key";

/// Describes a column whose type does not fit the statements.
pub fn unfit(column: &str, column_type: &str, fit: &str) -> String {
    format!("its column {column} ({column_type}) does not hold what rowlock writes there; use {fit}")
}

/// The schema operations of a [`Store`].
pub trait SchemaStore: Store {
    /// Whether what is installed is there as a whole or not at all, since it is one transaction.
    const INSTALLS_ATOMICALLY: bool = false;

    /// Reads the definition of the tables.
    fn schema(conn: &mut Self::Connection) -> impl Future<Output = Reply<Schema>> + Send;

    /// Creates the tables, or adds what is missing to an existing one. It may run at any time, in
    /// any number of processes. It waits for a lock for a second at most, on the server: requests
    /// of other clients wait behind it.
    fn install(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send;

    /// Describes the oldest transaction that keeps the lock's table from being changed, if one is
    /// found. Changes nothing.
    fn blocker(conn: &mut Self::Connection) -> impl Future<Output = Reply<Option<String>>> + Send;

    /// Creates or replaces the lock's functions, beside the tables. Returns `false` where the
    /// database has no functions.
    fn install_functions(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send;
}
