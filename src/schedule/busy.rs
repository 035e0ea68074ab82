//! The schedules whose work has not ended here, which is what the limits of an instance count.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::Notify;

use crate::{key::Key, sync::lock};

/// The schedules that are not claimed: their lease may have ended while the work blocks a thread,
/// or while the end of the run cannot be recorded. An instance that takes the place of another one
/// has the same.
#[derive(Debug, Default)]
pub struct Busy {
    names: Mutex<HashSet<Key>>,
    /// Notified when the work of a schedule has ended.
    pub freed: Notify,
}

/// Marks a schedule as busy, until it is dropped.
pub struct Mark {
    all: Arc<Busy>,
    name: Key,
}

impl Busy {
    pub fn names(&self) -> MutexGuard<'_, HashSet<Key>> {
        lock(&self.names)
    }

    /// Returns how many of `most` runs may begin.
    pub fn room(&self, most: u32) -> u32 {
        most.saturating_sub(u32::try_from(self.names().len()).unwrap_or(u32::MAX))
    }

    pub fn mark(self: &Arc<Self>, name: &Key) -> Mark {
        self.names().insert(name.clone());
        Mark { all: self.clone(), name: name.clone() }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.all.names().remove(&self.name);
        self.all.freed.notify_one();
    }
}
