//! A mutex that outlives a panic of its holder.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex for a moment; never across an await.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
