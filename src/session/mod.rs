//! What every statement goes through: the library's own threads and time, and its sessions.
//!
//! - Threads: `threads.rs` starts them, `clock.rs` is `rowlock-clock`, `pulse.rs` notices a thread
//!   that takes no turn, and `fork.rs` whether this process has them. `time.rs` and `timers.rs` are
//!   the only clock and the only timers.
//! - Sessions: `sessions.rs` chooses where a statement gets one, and finds what the locks of one
//!   application pool share. `line.rs` opens and closes those of one purpose, and `loan.rs` lends
//!   one for a statement.
//! - Requests: `queue.rs` sends those of many tasks in one statement, and `exchange.rs` sends one
//!   on a second session if the first is silent.
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
