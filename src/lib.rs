//! Locks and scheduled jobs of an application, kept in its SQL database: PostgreSQL, MySQL, MariaDB
//! or SQLite.
//!
//! | for | use |
//! |---|---|
//! | a key that one task holds at a time | [`LeaseLock::try_acquire`], [`LeaseLock::acquire`] |
//! | several keys, all or none | [`LeaseLock::acquire_all`] |
//! | at most N holders at a time | [`LeaseLock::semaphore`] |
//! | many readers, or one writer | [`LeaseLock::read_write`] |
//! | one leader among all instances | [`LeaseLock::election`] |
//! | a scheduled job | `Schedules`, with `Schedule::cron`, `Schedule::every`, `Schedule::after` |
//! | work under a key, from its claim to its end | [`LeaseLock::run`] |
//! | a transaction that commits only under a lock | [`LeaseLock::transaction`] |
//! | a balance | [`VersionedTable::deduct`], [`VersionedTable::deposit`] |
//! | a version in the application's own table | [`VersionLock`], [`VersionedTable::update`] |
//!
//! # Leases
//!
//! A [`LeaseLock`] keeps a key in the table `t_resource_lock`, which [`migrate`] creates. A claim
//! on a key is a [`Lease`]. It is renewed in the background while its holder lives. When the holder
//! crashes, another claim takes over as soon as the lease ends. Each claim has a fencing [`Token`],
//! which grows with every claim of its key. A claim that is not granted is a [`Refusal`], which
//! says who holds the key and until when.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use rowlock::{Attempt, LeaseLock};
//!
//! let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?; // or a PgPool, or a MySqlPool
//! rowlock::migrate(&pool).await?;
//! let lock = LeaseLock::new(pool);
//! match lock.try_acquire("import").await? {
//!     Attempt::Acquired(lease) => {
//!         println!("working under token {}", lease.token());
//!         lease.release().await?;
//!     }
//!     Attempt::Refused(refusal) => println!("not now: {refusal}"),
//! }
//! lock.shutdown(std::time::Duration::from_secs(10)).await; // before the program ends
//! # Ok(())
//! # }
//! ```
//!
//! # Locks and handles
//!
//! An application creates one lock and clones it. Each clone is a handle on the same lock, with
//! terms of its own for the keys that it acquires. What concerns the lock as a whole is set with
//! [`LeaseLock::builder`].
//!
//! ```
//! # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) -> Result<(), rowlock::Error> {
//! use rowlock::LeaseLock;
//! use std::time::Duration;
//!
//! let lock = LeaseLock::builder(pool).label("node-1").build()?;
//! let nightly = lock.clone().min_interval(Duration::from_secs(12 * 60 * 60));
//! let quick = lock.clone().lease(Duration::from_secs(5));
//! # Ok(())
//! # }
//! ```
//!
//! # Scheduled jobs
//!
//! Each tick of a `Schedule` runs on one of the instances that know it, and on another one if that
//! instance dies. A tick is over when its run has ended, so a crash loses none. The schedules are
//! in the feature `schedule`, which is a default.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
//! # rowlock::migrate(&pool).await?;
//! use rowlock::{Schedule, Schedules, Tick};
//! use std::time::Duration;
//!
//! let nightly = Schedule::cron("nightly-report", "30 2 * * *").zone("Europe/Berlin");
//! let jobs = Schedules::new(pool).on(nightly, async |tick: Tick<_>| {
//!     println!("the report of {} under token {}", tick.slot(), tick.token());
//!     Ok::<_, std::io::Error>(()) // an error makes the run fail
//! });
//! let running = jobs.start().await?;
//! // ... until the program is asked to end
//! running.shutdown(Duration::from_secs(20)).await;
//! # Ok(())
//! # }
//! ```
//!
//! [`LeaseLock::run`] runs a job that has no schedule under a key. While another instance runs the
//! job, the call waits, or is refused.
//!
//! # Transactions and balances
//!
//! [`transaction`](LeaseLock::transaction) commits only if the claim on its key stands. The
//! claim is a lease, a version ([`VersionLock`]), or one of the application's own
//! ([`ResourceLock`]). A [`VersionedTable`] changes a value and its version in one call. Every
//! program that changes such a row has to raise its version.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
//! # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
//! #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
//! # rowlock::migrate(&pool).await?;
//! use rowlock::{LeaseLock, VersionedTable, balances::Columns};
//!
//! let lock = LeaseLock::new(pool.clone());
//! let paid = lock.transaction("alice", async |mut tx| {
//!     let sql = "UPDATE account SET balance = 70, version = version + 1 WHERE id = 'alice'";
//!     sqlx::query(sql).execute(&mut *tx).await.map(|_| ())
//! });
//! paid.await?;
//!
//! let columns = Columns { table: "account", key: "id", value: "balance", version: "version" };
//! let accounts = VersionedTable::new(pool, columns);
//! assert_eq!(accounts.deduct("alice", 30).await?.value, 40);
//! # Ok(())
//! # }
//! ```
//!
//! # Errors
//!
//! A database that fails is an [`Error`], never a refusal. An error says what happened, to which
//! key, and whether anything may have been changed ([`Certainty`](errors::Certainty)).
//! [`Error::is_retryable`] says whether the same call may succeed a little later.
//!
//! # Cancel safety
//!
//! Every future of this crate may be dropped, as `tokio::select!` and `tokio::time::timeout` do.
//! The section *Cancel safety* of each method says what may have happened by then.
//!
//! # Threads
//!
//! Threads of the library's own send requests, renew leases and wait for keys. The first call
//! starts them, and they live as long as the process: `rowlock`, `rowlock-renew` (two),
//! `rowlock-events` and `rowlock-clock`. A lease is therefore renewed, and its loss reported, while
//! the application's runtime is blocked, paused, driven for one call at a time or shut down. The
//! calls may be awaited on any executor. Jobs run on the tokio runtime that starts them, and
//! [`LeaseLock::connect`] needs one.
//!
//! A process that was forked after the first call has none of these threads. There each call fails
//! with [`Error::Setup`], and a dropped lease ends nothing.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `sqlite` (default) | SQLite |
//! | `schedule` (default) | schedules, with a parser of cron patterns and the time zones |
//! | `postgres` | PostgreSQL |
//! | `mysql` | MySQL and MariaDB |
//! | `tls` | TLS, for applications in which no other crate enables it for sqlx 0.9 |
//! | `rust_decimal` | balances as decimals (not on SQLite) |
//! | `metrics` | counters and histograms |
//! | `serde` | claims, keys and rules are read and written; refusals, and what operators see, are written |
//!
//! An application without SQLite sets `default-features = false`, and names `schedule` if it has
//! jobs. It then does not build SQLite's C code, which another crate may link too.
//!
//! An application that uses sqlx 0.8, diesel or rusqlite has no pool of sqlx 0.9. It connects with
//! [`LeaseLock::connect`], and finds the types of sqlx 0.9 in [`rowlock::sqlx`](sqlx).

#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
compile_error!("rowlock needs a database: enable one of the features `sqlite`, `postgres`, `mysql`");

mod access;
mod action;
mod causes;
mod chain;
#[cfg(all(debug_assertions, not(test)))]
mod compiled;
mod election;
mod error;
mod grant;
mod invalid;
mod key;
mod label;
mod lease;
mod lock;
mod metrics;
pub mod migration;
mod pacing;
mod queue;
mod read_write;
mod retry;
mod rules;
#[cfg(test)]
mod rules_tests;
#[cfg(feature = "schedule")]
mod schedule;
mod schema;
#[cfg(feature = "serde")]
mod serialized;
mod session;
mod spans;
mod store;
mod sync;
mod transaction;
mod version;

pub use access::Access;
pub use election::campaign::Election;
pub use error::Error;
pub use grant::Attempt;
pub use key::{Claim, Key, Token};
pub use lease::guard::{Lease, LeaseSet};
pub use lease::held::Held;
pub use lease::lock::LeaseLock;
pub use lock::ResourceLock;
#[cfg(feature = "metrics")]
pub use metrics::{METRIC_BUCKETS, describe_metrics, label_metrics_by_key};
pub use migration::migrate;
pub use read_write::lock::ReadWriteLock;
pub use retry::Retry;
pub use rules::{Reason, Refusal, Rules, Status};
#[cfg(feature = "schedule")]
pub use schedule::{schedules::Schedules, spec::Schedule, tick::Tick};
pub use store::Database;
pub use transaction::{error::RunError, tx::Tx};
pub use version::{lock::VersionLock, table::VersionedTable};

/// Types for operators: the state of locks, jobs, runs and instances, and the options of lists.
pub mod admin {
    pub use crate::lease::info::{ForcedRelease, ListOptions, LockInfo};
    pub use crate::rules::LockState;
    #[cfg(feature = "schedule")]
    pub use crate::schedule::info::ScheduleInfo;
    pub use crate::store::admin::ChangeInfo;
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub use crate::store::servers::accept_any_server;
    #[cfg(feature = "schedule")]
    pub use crate::store::{
        instances::{DeclaredTimes, InstanceInfo},
        run_info::{RunInfo, RunOptions, RunStatus},
    };
}

/// Types for [`VersionedTable`]: columns, amounts, and the results of changes.
pub mod balances {
    pub use crate::store::version::Value;
    pub use crate::version::amount::{Amount, Insufficient};
    pub use crate::version::table::Columns;
    pub use crate::version::update::{UpdateError, Updated, Versioned};
}

/// Types for [`Error`] and [`RunError`]: the action that failed, its cause, and what may have been
/// changed.
pub mod errors {
    pub use crate::action::{Action, Certainty};
    pub use crate::causes::{DatabaseFault, NotFound, Setup, TransactionFault};
    pub use crate::invalid::Invalid;
    pub use crate::store::fault::Contention;
    pub use crate::transaction::error::{AnyError, WorkError};
}

/// Types for [`Schedule`] and for its runs.
#[cfg(feature = "schedule")]
pub mod jobs {
    pub use crate::schedule::{
        end::TickOutcome,
        runner::Running,
        terms::{Backoff, CatchUp},
    };
}

/// Types for [`Election`]: a term of leadership, and the current leader.
pub mod leaders {
    pub use crate::election::{
        leaders::{Leader, Leaders},
        leadership::Leadership,
    };
}

/// Types for [`LeaseLock`] and [`Lease`].
pub mod leases {
    pub use crate::key::{Holder, PreviousClaim};
    pub use crate::lease::builder::LeaseLockBuilder;
    pub use crate::lease::guard::{One, Several};
}

/// The extension trait of [`ResourceLock`], and the types that an application's own lock returns.
pub mod strategy {
    pub use crate::grant::Grant;
    pub use crate::lock::{BoxFuture, CommitOutcome, Confirmation, TransactionTerms};
    pub use crate::transaction::ResourceLockExt;
}

/// The version of sqlx that this crate uses, for applications that have another one or none.
///
/// [`LeaseLock::connect`] takes a database type of it. The feature `tls` enables TLS for it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use rowlock::{LeaseLock, VersionLock, sqlx::Sqlite};
///
/// let lock = LeaseLock::<Sqlite>::connect("sqlite::memory:").await?;
/// let versions = VersionLock::new(lock.pool().clone(), "account", "id", "version");
/// # Ok(())
/// # }
/// ```
pub use sqlx;

/// The examples of the README and of the guide, compiled and run with the tests.
#[cfg(all(doctest, feature = "sqlite"))]
mod guide {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/locks.md")]
    mod locks {}
    #[doc = include_str!("../docs/handles.md")]
    mod handles {}
    #[doc = include_str!("../docs/jobs.md")]
    mod jobs {}
    #[doc = include_str!("../docs/cron-patterns.md")]
    mod cron_patterns {}
    #[doc = include_str!("../docs/jobs-under-a-lock.md")]
    mod jobs_under_a_lock {}
    #[doc = include_str!("../docs/testing.md")]
    mod testing {}
    #[doc = include_str!("../docs/transactions.md")]
    mod transactions {}
    #[doc = include_str!("../docs/balances.md")]
    mod balances {}
    #[doc = include_str!("../docs/waiting.md")]
    mod waiting {}
    #[doc = include_str!("../docs/galera.md")]
    mod galera {}
}
