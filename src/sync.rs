//! A mutex that remains usable after a panic of its holder.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex briefly. The guard must not be held across an await.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
