//! The optimistic lock: a version column in the application's own tables.
//!
//! `lock.rs` is the lock, and `table.rs` the table of values. `change.rs` has the attempts of a
//! change, and `update.rs` their results. `balance.rs` and `amount.rs` deduct and deposit.
//! `rows.rs` says why a statement has no result. `identifier.rs` checks the names that become part
//! of a statement.

pub(crate) mod amount;
pub(crate) mod balance;
pub(crate) mod change;
pub(crate) mod identifier;
pub(crate) mod lock;
pub(crate) mod rows;
pub(crate) mod table;
pub(crate) mod update;
