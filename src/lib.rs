// The README's example runs on SQLite.
#![cfg_attr(feature = "sqlite", doc = include_str!("../README.md"))]
#![cfg_attr(not(feature = "sqlite"), doc = "Locks in the SQL database an application already has; see the README.")]

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
compile_error!("rowlock needs a database: enable one of the features `sqlite`, `postgres`, `mysql`");

mod agenda;
mod amount;
mod batch;
mod changes;
mod claiming;
mod ending;
mod error;
mod fault;
mod fence;
mod finish;
mod held;
mod keeper;
mod key;
mod lanes;
mod lease;
mod lease_lock;
mod lease_set;
mod line;
mod listen;
mod lock;
mod migrate;
mod names;
mod operate;
mod releases;
mod retry;
mod rules;
mod settings;
mod standing;
mod store;
mod task;
mod telemetry;
mod tenure;
mod transaction;
mod turns;
mod version;
mod versioned_table;
mod wait;

pub use amount::{Amount, Insufficient};
pub use error::{Action, Certainty, Contention, Error};
pub use key::{Claim, Holder, Key, Prior, Token};
pub use lease::Lease;
pub use lease_lock::LeaseLock;
pub use lease_set::LeaseSet;
pub use lock::{Answering, Attempt, Grant, Order, Receipt, ResourceLock, ResourceLockExt, Run, Settled};
pub use migrate::migrate;
pub use operate::{Entry, Filter};
pub use retry::Retry;
pub use rules::{Reason, Refusal, Rules, State, Status};
pub use store::Database;
pub use store::versions::Value;
pub use transaction::{AnyError, TransactionError, Tx, WorkError};
pub use version::VersionLock;
pub use versioned_table::{Columns, UpdateError, Updated, Versioned, VersionedTable};
