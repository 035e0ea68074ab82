// The README's example runs on SQLite.
#![cfg_attr(feature = "sqlite", doc = include_str!("../README.md"))]
#![cfg_attr(not(feature = "sqlite"), doc = "Locks in the SQL database an application already has; see the README.")]

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
compile_error!("rowlock needs a database: enable one of the features `sqlite`, `postgres`, `mysql`");

mod error;
mod fault;
mod keeper;
mod key;
mod lease;
mod lease_lock;
mod migrate;
mod operate;
mod rules;
mod settings;
mod store;

pub use error::{Action, Certainty, Error};
pub use key::{Claim, Holder, Key, Prior, Token};
pub use lease::Lease;
pub use lease_lock::{Attempt, LeaseLock, Run};
pub use migrate::migrate;
pub use operate::{Entry, Filter};
pub use rules::{Reason, Refusal, Rules, State, Status};
pub use store::Database;
