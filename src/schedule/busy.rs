//! The schedules whose work has not ended here, which is what the limits of an instance count.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{key::Key, sync::lock};

/// The schedules that are not claimed: their lease may have ended while the work blocks a thread,
/// or while the end of the run cannot be recorded. An instance that takes the place of another one
/// has the same.
#[derive(Debug, Default)]
pub struct Busy {
    /// The group of each, as it was when its run began.
    groups: Mutex<HashMap<Key, Option<Key>>>,
    /// Notified when a run of an instance that claims nothing more has ended, and when work has
    /// ended whose run was over before.
    pub freed: Notify,
}

/// Marks a schedule as busy, until it is dropped.
pub struct Mark {
    all: Arc<Busy>,
    name: Key,
    /// The run is over. Its work may block a thread for longer.
    run_over: CancellationToken,
}

impl Busy {
    /// Returns the groups of the schedules, by their names.
    pub fn groups(&self) -> MutexGuard<'_, HashMap<Key, Option<Key>>> {
        lock(&self.groups)
    }

    /// Returns how many of `most` runs may begin.
    pub fn room(&self, most: u32) -> u32 {
        most.saturating_sub(u32::try_from(self.groups().len()).unwrap_or(u32::MAX))
    }

    pub fn mark(self: &Arc<Self>, name: &Key, group: Option<&Key>, run_over: CancellationToken) -> Mark {
        self.groups().insert(name.clone(), group.cloned());
        Mark { all: self.clone(), name: name.clone(), run_over }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.all.groups().remove(&self.name);
        if self.run_over.is_cancelled() {
            self.all.freed.notify_one();
        }
    }
}
