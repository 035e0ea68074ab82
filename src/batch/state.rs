//! The requests of a batch that wait, and the workers that send them.

use std::collections::{BTreeMap, HashMap, hash_map::Entry};

use tokio::{runtime::Id, sync::oneshot, time::Instant};

use crate::{
    batch::op::{BatchOp, Limits},
    key::Key,
    store::{Database, failure::Failure},
};

/// The most requests of one statement: beyond, it only takes longer.
const MOST: usize = 256;

pub(crate) struct Waiting<DB: Database, E: BatchOp<DB>> {
    pub request: E::Request,
    pub reply: oneshot::Sender<Result<E::Answer, Failure>>,
    pub limits: Limits,
}

pub(crate) type Numbered<DB, E> = (u64, Waiting<DB, E>);

/// A request that is sent, and those for the same key that may share in its answer.
pub(crate) struct Slot<DB: Database, E: BatchOp<DB>> {
    pub first: Waiting<DB, E>,
    pub others: Vec<Numbered<DB, E>>,
}

pub(crate) struct State<DB: Database, E: BatchOp<DB>> {
    /// Those that wait to be sent, in the order of their coming.
    pub waiting: BTreeMap<u64, Waiting<DB, E>>,
    last_number: u64,
    /// How many there are, and on which runtime.
    pub workers: usize,
    home: Option<Id>,
    /// How many of them are about to take along whoever waits, and since when the last of these.
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

    /// One lane more, on this runtime.
    pub fn begin(&mut self, runtime: Id) {
        self.workers += 1;
        self.home = Some(runtime);
    }

    pub fn queue(&mut self, waiting: Waiting<DB, E>) -> u64 {
        self.last_number += 1;
        self.waiting.insert(self.last_number, waiting);
        self.last_number
    }

    /// To where they came from, those who still wait.
    pub fn put_back(&mut self, waiting: Vec<Numbered<DB, E>>) {
        self.waiting.extend(waiting.into_iter().filter(|(_, waiting)| !waiting.reply.is_closed()));
    }

    /// Those that can go in one statement, the first of them in any case.
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

    /// Counts a lane at its new stage.
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

/// What a lane is at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// One request, which takes nobody along.
    Alone,
    Collecting,
    UnderWay,
    Ended,
}
