//! The waiting requests of a batch, and the counts of its workers.

use std::collections::{BTreeMap, HashMap, hash_map::Entry};

use tokio::{runtime::Id, sync::oneshot, time::Instant};

use crate::{
    batch::op::{BatchOp, Limits},
    key::Key,
    store::{Database, failure::Failure},
};

/// The most requests in one statement. A larger statement only takes longer.
const MAX_REQUESTS: usize = 256;

pub(crate) struct Waiting<DB: Database, Op: BatchOp<DB>> {
    pub request: Op::Request,
    pub reply: oneshot::Sender<Result<Op::Output, Failure>>,
    pub limits: Limits,
}

pub(crate) type Numbered<DB, Op> = (u64, Waiting<DB, Op>);

/// A request to send, and the requests for the same key that may share its output.
pub(crate) struct Slot<DB: Database, Op: BatchOp<DB>> {
    pub first: Waiting<DB, Op>,
    pub others: Vec<Numbered<DB, Op>>,
}

pub(crate) struct State<DB: Database, Op: BatchOp<DB>> {
    /// The requests to be sent, in order of arrival.
    pub waiting: BTreeMap<u64, Waiting<DB, Op>>,
    last_number: u64,
    /// The number of workers, and their runtime.
    pub workers: usize,
    runtime: Option<Id>,
    /// The number of workers that are about to take the waiting requests, and since when the latest
    /// of these has been.
    pub collecting: usize,
    pub collecting_since: Instant,
}

impl<DB: Database, Op: BatchOp<DB>> State<DB, Op> {
    pub fn new() -> Self {
        let collecting_since = Instant::now();
        Self { waiting: BTreeMap::new(), last_number: 0, workers: 0, runtime: None, collecting: 0, collecting_since }
    }

    pub fn is_idle(&self) -> bool {
        self.workers == 0
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub fn runs_on(&self, runtime: Id) -> bool {
        self.runtime == Some(runtime)
    }

    /// Adds a worker on this runtime.
    pub fn begin(&mut self, runtime: Id) {
        self.workers += 1;
        self.runtime = Some(runtime);
    }

    pub fn queue(&mut self, waiting: Waiting<DB, Op>) -> u64 {
        self.last_number += 1;
        self.waiting.insert(self.last_number, waiting);
        self.last_number
    }

    /// Puts requests back in their original order. A cancelled request is dropped.
    pub fn put_back(&mut self, waiting: Vec<Numbered<DB, Op>>) {
        self.waiting.extend(waiting.into_iter().filter(|(_, waiting)| !waiting.reply.is_closed()));
    }

    /// Takes the requests that fit in one statement, always including the first.
    pub fn take_batch(&mut self) -> Vec<Slot<DB, Op>> {
        let (mut slots, mut queued): (Vec<Slot<DB, Op>>, HashMap<Key, usize>) = (Vec::new(), HashMap::new());
        let mut stay = BTreeMap::new();
        while slots.len() < MAX_REQUESTS
            && let Some((number, waiting)) = self.waiting.pop_first()
        {
            let Some(key) = Op::key(&waiting.request).cloned() else { continue };
            if slots.first().is_some_and(|slot| !Op::can_share_statement(&waiting.request, &slot.first.request)) {
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
    InFlight,
    Ended,
}
