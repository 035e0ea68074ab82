//! Locks in the SQL database that an application already has: PostgreSQL, MySQL, MariaDB or SQLite.
//!
//! A [`LeaseLock`] keeps a key in the table `t_resource_lock` for as long as work runs, renews it
//! in the background, and hands it to another instance when this one dies. A [`VersionLock`] raises
//! a version column of the application's own table when a transaction commits, and a
//! [`VersionedTable`] changes balances with it. Both locks are a [`ResourceLock`], and both run
//! work with [`ResourceLockExt::run`] and [`ResourceLockExt::transaction`].
//!
//! - [`migrate`] creates the table, or completes it.
//! - [`LeaseLock::try_acquire`] and [`LeaseLock::acquire`] return an [`Attempt`]: a [`Lease`], or
//!   the [`Refusal`] that says who holds the key and until when. A database that fails is an
//!   [`Error`], never a refusal.
//! - Each claim has a fencing [`Token`], which grows with every claim of its key.
//! - An [`Error`] says what happened, to which key, and whether anything may have been changed
//!   ([`Certainty`]).
//!
//! # Examples
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use rowlock::{Attempt, LeaseLock, Status};
//!
//! let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
//! rowlock::migrate(&pool).await?;
//! let lock = LeaseLock::new(pool);
//! match lock.try_acquire("nightly-report").await? {
//!     Attempt::Acquired(lease) => {
//!         println!("working under token {}", lease.token());
//!         lease.release(Status::Succeeded).await?;
//!     }
//!     Attempt::Refused(refusal) => println!("not now: {refusal}"),
//! }
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "sqlite"))]
//! # fn main() {}
//! ```
//!
//! # Features
//!
//! `sqlite` (the default), `postgres` and `mysql` (MariaDB too) select the databases.
//! `rust_decimal` adds balances as decimals, `metrics` counters and histograms, `cli` the program
//! `rowlock`.

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
compile_error!("rowlock needs a database: enable one of the features `sqlite`, `postgres`, `mysql`");

mod batch;
mod detach;
mod error;
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

/// The examples of the README and of the guide, compiled and run with the tests.
#[cfg(all(doctest, feature = "sqlite"))]
mod guide {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/jobs.md")]
    mod jobs {}
    #[doc = include_str!("../docs/transactions.md")]
    mod transactions {}
    #[doc = include_str!("../docs/waiting.md")]
    mod waiting {}
    #[doc = include_str!("../docs/clusters.md")]
    mod clusters {}
}
