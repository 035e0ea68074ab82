//! Whether this process is the one that started the library's threads, and whether a thread is one
//! of them.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU32, Ordering},
};

/// The process that has the threads, or starts them; 0 before. It is read before a lock is waited
/// for: a process that was forked has none of the threads, and copies of locks that they may have
/// held.
static PROCESS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static OWN: Cell<Own> = const { Cell::new(Own::No) };
}

/// The runtime of the library to which a thread belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Own {
    No,
    Requests,
    Renewals,
}

impl Own {
    /// Records that this thread belongs to the runtime.
    pub fn begins(self) {
        OWN.set(self);
    }

    pub fn current() -> Self {
        OWN.get()
    }
}

/// Returns whether this thread is one of the library's own runtimes.
pub(crate) fn is_own() -> bool {
    Own::current() != Own::No
}

/// Records that this process has the threads, or is about to start them.
pub(crate) fn has_threads() {
    PROCESS.store(std::process::id(), Ordering::Release);
}

/// Returns whether this process was forked from one that had begun to start the threads.
pub(crate) fn is_forked() -> bool {
    // A forked process has no thread but a copy of the one that forked it, which is none of these.
    // They are spared a system call.
    if is_own() {
        return false;
    }
    let process = PROCESS.load(Ordering::Acquire);
    process != 0 && process != std::process::id()
}
