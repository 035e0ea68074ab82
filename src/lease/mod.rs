//! The pessimistic lock: leases on keys in the table `t_resource_lock`.
//!
//! # Locks, handles and terms
//!
//! A handle refers to its lock (`shared.rs`) and to its terms (`terms.rs`). The lock has the
//! batches, the renewer, the tickets, and the tracker that a shutdown waits for. Handles on equal
//! terms share the queues of waiting tasks, because a refusal of one task applies to the others. A
//! lease keeps the terms under which it was acquired. Locks of one application pool share sessions,
//! the listener and wakeups (`session/sessions.rs`).

pub(crate) mod admin;
pub(crate) mod agenda;
pub(crate) mod attempt;
pub(crate) mod builder;
pub(crate) mod changes;
pub(crate) mod claims;
pub(crate) mod ending;
mod forgetting;
pub(crate) mod guard;
pub(crate) mod handle;
pub(crate) mod handle_terms;
pub(crate) mod held;
pub(crate) mod info;
pub(crate) mod ledger;
pub(crate) mod lock;
pub(crate) mod readers;
pub(crate) mod renewer;
pub(crate) mod replies;
pub(crate) mod resource_lock;
mod run;
pub(crate) mod shared;
#[cfg(all(test, feature = "sqlite", feature = "schedule"))]
mod slept_tests;
pub(crate) mod state;
pub(crate) mod terms;
pub(crate) mod wait;
pub(crate) mod wanted;
