//! The requests of a batch that wait, and the workers that send them.

use std::collections::{BTreeMap, HashMap, hash_map::Entry};

use tokio::{runtime::Id, sync::oneshot, time::Instant};

use crate::{
    batch::op::{Errand, Limits},
    key::Key,
    store::{Database, failure::Failure},
};

/// The most requests of one statement: beyond, it only takes longer.
const MOST: usize = 256;

pub(crate) struct Waiting<DB: Database, E: Errand<DB>> {
    pub request: E::Request,
    pub reply: oneshot::Sender<Result<E::Answer, Failure>>,
    pub limits: Limits,
}

pub(crate) type Numbered<DB, E> = (u64, Waiting<DB, E>);

/// A request that is sent, and those for the same key that may share in its answer.
pub(crate) struct Seat<DB: Database, E: Errand<DB>> {
    pub first: Waiting<DB, E>,
    pub others: Vec<Numbered<DB, E>>,
}

pub(crate) struct State<DB: Database, E: Errand<DB>> {
    /// Those that wait to be sent, in the order of their coming.
    pub waiting: BTreeMap<u64, Waiting<DB, E>>,
    last_number: u64,
    /// How many there are, and on which runtime.
    pub lanes: usize,
    home: Option<Id>,
    /// How many of them are about to take along whoever waits, and since when the last of these.
    pub boarding: usize,
    pub boarding_since: Instant,
}

impl<DB: Database, E: Errand<DB>> State<DB, E> {
    pub fn new() -> Self {
        let boarding_since = Instant::now();
        Self { waiting: BTreeMap::new(), last_number: 0, lanes: 0, home: None, boarding: 0, boarding_since }
    }

    pub fn is_idle(&self) -> bool {
        self.lanes == 0
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub fn is_at_home(&self, runtime: Id) -> bool {
        self.home == Some(runtime)
    }

    /// One lane more, on this runtime.
    pub fn begin(&mut self, runtime: Id) {
        self.lanes += 1;
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
    pub fn board(&mut self) -> Vec<Seat<DB, E>> {
        let (mut seats, mut places): (Vec<Seat<DB, E>>, HashMap<Key, usize>) = (Vec::new(), HashMap::new());
        let mut stay = BTreeMap::new();
        while seats.len() < MOST
            && let Some((number, waiting)) = self.waiting.pop_first()
        {
            let Some(key) = E::key(&waiting.request).cloned() else { continue };
            if seats.first().is_some_and(|seat| !E::goes_with(&waiting.request, &seat.first.request)) {
                stay.insert(number, waiting);
                continue;
            }
            match places.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(seats.len());
                    seats.push(Seat { first: waiting, others: Vec::new() });
                }
                Entry::Occupied(place) => seats[*place.get()].others.push((number, waiting)),
            }
        }
        self.waiting.append(&mut stay);
        seats
    }

    /// Counts a lane at its new stage.
    pub fn shift(&mut self, from: Stage, to: Stage) -> Stage {
        self.boarding -= usize::from(from == Stage::Boarding);
        if to == Stage::Boarding {
            self.boarding += 1;
            self.boarding_since = Instant::now();
        }
        self.lanes -= usize::from(from != Stage::Ended && to == Stage::Ended);
        to
    }
}

/// What a lane is at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// One request, which takes nobody along.
    Alone,
    Boarding,
    UnderWay,
    Ended,
}
