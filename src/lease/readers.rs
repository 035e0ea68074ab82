//! What the readers of one name share within a process: the numbers of their keys, and a claim on
//! the name under which those that waited are let in together.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    key::Key,
    lease::{handle::LeaseHandle, terms::KeyTerms},
    session::time::Instant,
    store::Database,
    sync::lock,
};

/// The most readers of a name at a time: the keys `NAME#r1` to `NAME#r1024`.
pub(crate) const MAX_READERS: u32 = 1024;

/// The readers of all names.
pub(crate) struct AllReaders<DB: Database> {
    known: Mutex<HashMap<Key, Weak<Readers<DB>>>>,
    /// The first number that this process uses. Processes that begin at random numbers rarely ask
    /// for the same keys.
    first: u32,
}

impl<DB: Database> Default for AllReaders<DB> {
    fn default() -> Self {
        Self { known: Mutex::default(), first: fastrand::u32(1..=MAX_READERS) }
    }
}

impl<DB: Database> AllReaders<DB> {
    pub fn of(&self, name: &Key) -> Arc<Readers<DB>> {
        let mut known = lock(&self.known);
        if let Some(readers) = known.get(name).and_then(Weak::upgrade) {
            return readers;
        }
        known.retain(|_, readers| readers.strong_count() > 0);
        let readers = Arc::new(Readers {
            first: self.first,
            used: Mutex::default(),
            was_closed: AtomicBool::new(false),
            entrance: tokio::sync::Mutex::default(),
        });
        known.insert(name.clone(), Arc::downgrade(&readers));
        readers
    }
}

/// The readers of one name.
pub(crate) struct Readers<DB: Database> {
    first: u32,
    /// One bit for each number in use.
    used: Mutex<[u64; MAX_READERS as usize / 64]>,
    /// The last read of the name's row showed a claim: the next reader looks before it claims.
    was_closed: AtomicBool,
    /// The last claim on the name by a reader that waited. Readers lock it in order of arrival, and
    /// one of them waits for the name on behalf of those behind it.
    pub entrance: tokio::sync::Mutex<Weak<Entrance<DB>>>,
}

impl<DB: Database> Readers<DB> {
    /// Takes a number that no reader of this process uses: the next from the first one, or from
    /// `from`.
    pub fn take_number(self: &Arc<Self>, from: Option<u32>, held: impl Fn(u32) -> bool) -> Option<Number<DB>> {
        let first = from.unwrap_or(self.first) - 1;
        let mut used = lock(&self.used);
        let mut numbers = (0..MAX_READERS).map(|step| (first + step) % MAX_READERS);
        let index = numbers.find(|index| used[*index as usize / 64] >> (index % 64) & 1 == 0 && !held(index + 1))?;
        used[index as usize / 64] |= 1 << (index % 64);
        Some(Number { readers: self.clone(), number: index + 1 })
    }

    pub fn was_closed(&self) -> bool {
        self.was_closed.load(Ordering::Relaxed)
    }

    pub fn set_closed(&self, closed: bool) {
        self.was_closed.store(closed, Ordering::Relaxed);
    }
}

/// The number of a reader, in use until it is dropped.
pub(crate) struct Number<DB: Database> {
    readers: Arc<Readers<DB>>,
    pub number: u32,
}

impl<DB: Database> Drop for Number<DB> {
    fn drop(&mut self) {
        let index = self.number - 1;
        lock(&self.readers.used)[index as usize / 64] &= !(1 << (index % 64));
    }
}

/// A claim on the name, held while readers that waited for it claim keys of their own. The last of
/// them ends it.
pub(crate) struct Entrance<DB: Database> {
    pub claim: LeaseHandle<DB>,
    pub key_terms: Arc<KeyTerms<DB>>,
    /// Readers that came later wait for another claim, so that a writer's turn comes.
    pub granted_at: Instant,
}

impl<DB: Database> Entrance<DB> {
    /// Returns whether a reader that has waited since then may enter under this claim.
    pub fn admits(&self, since: Instant, key_terms: &Arc<KeyTerms<DB>>) -> bool {
        since < self.granted_at && Arc::ptr_eq(&self.key_terms, key_terms) && self.claim.held.stands()
    }
}
