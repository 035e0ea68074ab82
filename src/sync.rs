//! A mutex that remains usable after a panic of its holder, and what is done at a drop.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex briefly. The guard must not be held across an await.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Acts when it is dropped: also if the future that has it is dropped, or panics.
pub(crate) struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
