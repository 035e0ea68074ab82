//! Waiting for keys: in order within this process and across processes, with a wakeup when a key is
//! released.
//!
//! `local.rs` has the queues within a process, `tickets.rs` and `position.rs` the order across
//! processes, `wakeups.rs` the tasks that a release in this process notifies, and `listener.rs` the
//! releases elsewhere. `releases.rs` is how a task waits for both. `places.rs` says which of several
//! keys is claimed first. The loop of a waiter is `lease/wait.rs`.
//!
//! Whatever notifies a waiter is a hint: the waiter polls as it does without it.

pub(crate) mod listener;
pub(crate) mod local;
mod places;
pub(crate) mod position;
pub(crate) mod releases;
pub(crate) mod tickets;
pub(crate) mod wakeups;
