//! The optimistic lock: a version column in the application's own tables.

pub(crate) mod amount;
pub(crate) mod balance;
pub(crate) mod change;
pub(crate) mod identifier;
pub(crate) mod known;
pub(crate) mod lock;
pub(crate) mod rows;
pub(crate) mod table;
pub(crate) mod update;
