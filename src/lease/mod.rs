//! The pessimistic lock: leases on keys in the table `t_resource_lock`.
//!
//! - A call: `lock.rs` is the handle, `attempt.rs` one attempt, and `wait.rs` the attempts up to a
//!   deadline. `replies.rs` and `wanted.rs` decide what follows from a reply: pure.
//! - Requests that a queue of `session/queue.rs` sends in batches: `claims.rs`, which also creates
//!   and reads rows, and the releases of `changes.rs`.
//! - A lease: `guard.rs` is what the caller holds, `handle.rs` ends its claims once, and `state.rs`
//!   has how long it lasts, its deadline and its loss.
//! - The background: `renewer.rs` renews and ends, `agenda.rs` says what is due, `changes.rs` sends
//!   it, `ending.rs` is an end that is under way, `ledger.rs` has the claims that may stand
//!   although no reply has told of them, and `forgetting.rs` deletes old rows.
//! - Settings: `builder.rs` for a lock, `handle_terms.rs` for a handle.
//! - Operators: `admin.rs`, `info.rs`.
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
