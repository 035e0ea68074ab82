//! Whether this process is the one that started the library's threads.

use std::sync::atomic::{AtomicU32, Ordering};

/// The process that has the threads; 0 before they are started. It is read before any lock is
/// taken: a process that was forked has none of the threads, and copies of locks that they may have
/// held.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Records that this process has the threads.
pub(crate) fn has_threads() {
    PROCESS.store(std::process::id(), Ordering::Release);
}

/// Returns whether this process was forked from one that had started the threads.
pub(crate) fn is_forked() -> bool {
    let process = PROCESS.load(Ordering::Acquire);
    process != 0 && process != std::process::id()
}
