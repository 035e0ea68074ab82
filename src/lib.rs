// The README's example runs on SQLite.
#![cfg_attr(feature = "sqlite", doc = include_str!("../README.md"))]
#![cfg_attr(not(feature = "sqlite"), doc = "Locks in the SQL database an application already has; see the README.")]

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
compile_error!("rowlock needs a database: enable one of the features `sqlite`, `postgres`, `mysql`");

mod batch;
mod error;
mod finish;
mod key;
mod lease;
mod lock;
mod lock_ext;
mod metrics;
mod queue;
mod retry;
mod rules;
mod schema;
mod store;
mod sync;
mod task;
mod transaction;
mod version;

pub use error::{Action, Certainty, Error};
pub use key::{Claim, Holder, InvalidHolder, InvalidKey, Key, PreviousClaim, Token};
pub use lease::admin::{ListOptions, LockInfo};
pub use lease::guard::Lease;
pub use lease::lock::LeaseLock;
pub use lease::set::LeaseSet;
pub use lock::{Attempt, BoxFuture, CommitOutcome, ConfirmAt, Confirmation, Grant, ResourceLock};
pub use lock_ext::{ResourceLockExt, RunOutcome};
pub use retry::Retry;
pub use rules::{Reason, Refusal, Rules, State, Status};
pub use schema::migrate;
pub use store::version::Value;
pub use store::{Database, fault::Contention};
pub use transaction::{AnyError, TransactionError, Tx, WorkError};
pub use version::amount::{Amount, Insufficient};
pub use version::lock::VersionLock;
pub use version::table::{Columns, UpdateError, Updated, Versioned, VersionedTable};
