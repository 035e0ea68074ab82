//! What every statement goes through: the library's own threads and time, and its sessions.

pub(crate) mod clock;
pub(crate) mod exchange;
pub(crate) mod fork;
mod line;
pub(crate) mod loan;
pub(crate) mod pulse;
pub(crate) mod queue;
pub(crate) mod registry;
pub(crate) mod sessions;
pub(crate) mod threads;
pub(crate) mod time;
pub(crate) mod timers;
