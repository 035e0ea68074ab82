//! The waiting requests of a batch, and the counts of its workers.

use std::collections::{BTreeMap, HashMap, hash_map::Entry};

use tokio::{runtime::Id, sync::oneshot, time::Instant};

use crate::{
    batch::op::{BatchOp, Limits},
    key::Key,
    store::{Database, failure::Failure},
};

/// The most requests in one statement. A larger statement only takes longer.
const MOST: usize = 256;

pub(crate) struct Waiting<DB: Database, E: BatchOp<DB>> {
    pub request: E::Request,
    pub reply: oneshot::Sender<Result<E::Answer, Failure>>,
    pub limits: Limits,
}

pub(crate) type Numbered<DB, E> = (u64, Waiting<DB, E>);

/// A request to send, and the requests for the same key that may share its answer.
pub(crate) struct Slot<DB: Database, E: BatchOp<DB>> {
    pub first: Waiting<DB, E>,
    pub others: Vec<Numbered<DB, E>>,
}

pub(crate) struct State<DB: Database, E: BatchOp<DB>> {
    /// The requests to be sent, in order of arrival.
    pub waiting: BTreeMap<u64, Waiting<DB, E>>,
    last_number: u64,
    /// The number of workers, and their runtime.
    pub workers: usize,
    home: Option<Id>,
    /// The number of workers that are about to take the waiting requests, and since when the latest
    /// of these has been.
    pub collecting: usize,
    pub collecting_since: Instant,
}

impl<DB: Database, E: BatchOp<DB>> State<DB, E> {
    pub fn new() -> Self {
        let collecting_since = Instant::now();
        Self { waiting: BTreeMap::new(), last_number: 0, workers: 0, home: None, collecting: 0, collecting_since }
    }

    pub fn is_idle(&self) -> bool {
        self.workers == 0
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub fn is_at_home(&self, runtime: Id) -> bool {
        self.home == Some(runtime)
    }

    /// Adds a worker on this runtime.
    pub fn begin(&mut self, runtime: Id) {
        self.workers += 1;
        self.home = Some(runtime);
    }

    pub fn queue(&mut self, waiting: Waiting<DB, E>) -> u64 {
        self.last_number += 1;
        self.waiting.insert(self.last_number, waiting);
        self.last_number
    }

    /// Puts requests back in their original order. A cancelled request is dropped.
    pub fn put_back(&mut self, waiting: Vec<Numbered<DB, E>>) {
        self.waiting.extend(waiting.into_iter().filter(|(_, waiting)| !waiting.reply.is_closed()));
    }

    /// Takes the requests that fit in one statement, always including the first.
    pub fn take_batch(&mut self) -> Vec<Slot<DB, E>> {
        let (mut slots, mut queued): (Vec<Slot<DB, E>>, HashMap<Key, usize>) = (Vec::new(), HashMap::new());
        let mut stay = BTreeMap::new();
        while slots.len() < MOST
            && let Some((number, waiting)) = self.waiting.pop_first()
        {
            let Some(key) = E::key(&waiting.request).cloned() else { continue };
            if slots.first().is_some_and(|slot| !E::goes_with(&waiting.request, &slot.first.request)) {
                stay.insert(number, waiting);
                continue;
            }
            match queued.entry(key) {
                Entry::Vacant(queued) => {
                    queued.insert(slots.len());
                    slots.push(Slot { first: waiting, others: Vec::new() });
                }
                Entry::Occupied(queued) => slots[*queued.get()].others.push((number, waiting)),
            }
        }
        self.waiting.append(&mut stay);
        slots
    }

    /// Moves a worker to its new stage and updates the counts.
    pub fn shift(&mut self, from: Stage, to: Stage) -> Stage {
        self.collecting -= usize::from(from == Stage::Collecting);
        if to == Stage::Collecting {
            self.collecting += 1;
            self.collecting_since = Instant::now();
        }
        self.workers -= usize::from(from != Stage::Ended && to == Stage::Ended);
        to
    }
}

/// What a worker is doing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Sends a single request, without the waiting ones.
    Alone,
    Collecting,
    UnderWay,
    Ended,
}
