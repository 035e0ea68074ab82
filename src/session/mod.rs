//! What every statement goes through: the library's own threads and time, and its sessions.
//!
//! # Sessions
//!
//! A session is idle in its line, lent for one statement, or closed. `Loan` returns it only after a
//! reply. A session that is dropped with a statement in flight, or after an error that is not the
//! server's, is closed. A session that does not answer makes its line suspect: idle sessions that
//! were last used before it are closed instead of lent.
//!
//! A connection of the application's pool is borrowed in three cases: `share_pool()`; a SQLite file
//! that is not in WAL mode, is locked exclusively, or has a pool of one connection; and a database
//! in memory. On SQLite a line has one session, because a file has one writer.
//!
//! A process that was forked has no threads and holds no lease: its calls fail, and a lease or a
//! ticket that it drops does nothing.

pub(crate) mod clock;
pub(crate) mod exchange;
pub(crate) mod fork;
mod line;
pub(crate) mod loan;
pub(crate) mod pulse;
pub(crate) mod queue;
pub(crate) mod sessions;
pub(crate) mod threads;
pub(crate) mod time;
pub(crate) mod timers;
