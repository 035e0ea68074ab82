//! Who of a [`Batch`] waits, and who is under way.
//!
//! A lane is a statement under way and those that follow it. As a rule there is one. Where it is long in coming to its
//! end, or to a connection, whoever waits opens another, so that nobody pays for one connection that does not answer.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use tokio::{
    runtime::{Handle, Id},
    sync::oneshot,
    time::{Instant, timeout_at},
};

use crate::{
    batch::{
        Batch,
        op::{Errand, Limits},
    },
    key::Key,
    store::{
        Database,
        connection::{Borrowed, Kept},
        failure::Failure,
    },
    sync::lock,
};

/// The most requests of one statement: beyond, it only takes longer.
const MOST: usize = 256;

/// How long a request waits behind others, at first.
const PATIENCE: Duration = Duration::from_millis(20);

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
    waiting: BTreeMap<u64, Waiting<DB, E>>,
    last_number: u64,
    /// How many there are, and on which runtime.
    lanes: usize,
    home: Option<Id>,
    /// How many of them are about to take along whoever waits, and since when the last of these.
    boarding: usize,
    boarding_since: Instant,
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
    fn board(&mut self) -> Vec<Seat<DB, E>> {
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
    fn shift(&mut self, from: Stage, to: Stage) -> Stage {
        self.boarding -= usize::from(from == Stage::Boarding);
        if to == Stage::Boarding {
            self.boarding += 1;
            self.boarding_since = Instant::now();
        }
        self.lanes -= usize::from(from != Stage::Ended && to == Stage::Ended);
        to
    }
}

/// A request that waits to be sent; dropped before, it never is.
pub(crate) struct Place<'a, DB: Database, E: Errand<DB>> {
    pub batch: &'a Arc<Batch<DB, E>>,
    pub number: u64,
}

impl<DB: Database, E: Errand<DB>> Place<'_, DB, E> {
    pub async fn answer(
        self,
        runtime: &Handle,
        mut answer: oneshot::Receiver<Result<E::Answer, Failure>>,
        limit: Instant,
    ) -> Result<E::Answer, Failure> {
        // Whoever has little time spends half of it behind others.
        let half = limit.saturating_duration_since(Instant::now()) / 2;
        let mut patience = PATIENCE.min(half).max(Duration::from_millis(1));
        loop {
            match timeout_at(limit.min(Instant::now() + patience), &mut answer).await {
                Ok(Ok(answer)) => return answer,
                // The runtime that carried it went away.
                Ok(Err(_)) => return Err(Failure::NoReply),
                Err(_) if Instant::now() < limit => self.batch.open_lane(self.number, runtime),
                Err(_) if self.leave() => return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut)),
                Err(_) => return Err(Failure::NoReply),
            }
            patience *= 2;
        }
    }

    /// Whether it was still waiting.
    fn leave(&self) -> bool {
        lock(&self.batch.state).waiting.remove(&self.number).is_some()
    }
}

impl<DB: Database, E: Errand<DB>> Drop for Place<'_, DB, E> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What a lane is at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// One request, which takes nobody along.
    Alone,
    Boarding,
    UnderWay,
    Ended,
}

pub(crate) struct Lane<DB: Database, E: Errand<DB>> {
    batch: Arc<Batch<DB, E>>,
    runtime: Handle,
    stage: Stage,
}

impl<DB: Database, E: Errand<DB>> Batch<DB, E> {
    /// The answer to others is long in coming, and nobody is about to take this one along.
    fn open_lane(self: &Arc<Self>, number: u64, runtime: &Handle) {
        let most = self.pool.most() as usize;
        let mut state = lock(&self.state);
        let stuck = state.boarding == 0 || (state.boarding_since.elapsed() >= PATIENCE && state.lanes < most);
        if !stuck || !state.waiting.contains_key(&number) {
            return;
        }
        state.lanes += 1;
        let stage = state.shift(Stage::Alone, Stage::Boarding);
        drop(state);
        let lane = Lane { batch: self.clone(), runtime: runtime.clone(), stage };
        runtime.spawn(lane.carry());
    }
}

impl<DB: Database, E: Errand<DB>> Lane<DB, E> {
    /// Of a request that goes alone.
    pub fn alone(batch: &Arc<Batch<DB, E>>, runtime: &Handle) -> Self {
        Self { batch: batch.clone(), runtime: runtime.clone(), stage: Stage::Alone }
    }

    /// Sends whoever waits, until nobody does.
    async fn carry(mut self) {
        let mut kept: Option<Kept<DB>> = None;
        while let Some((number, limit)) = self.next() {
            let conn = match kept.take() {
                Some(kept) => kept.lend(),
                None => match Borrowed::checkout(&self.batch.pool, limit).await {
                    Ok(conn) => conn,
                    Err(failure) => {
                        self.refuse(number, failure);
                        continue;
                    }
                },
            };
            let seats = self.board();
            let conn = self.batch.carry_together(conn, seats).await;
            kept = conn.and_then(|conn| conn.keep(&self.batch.pool));
        }
    }

    /// Who is in front, and when it gives up; with nobody there, or another lane about to take them along, this one ends.
    fn next(&mut self) -> Option<(u64, Instant)> {
        let mut state = lock(&self.batch.state);
        let others = state.boarding - usize::from(self.stage == Stage::Boarding);
        let surplus = others > 0 && state.boarding_since.elapsed() < PATIENCE;
        let next = state.waiting.first_key_value().filter(|_| !surplus);
        let next = next.map(|(number, waiting)| (*number, waiting.limits.caller));
        self.stage = state.shift(self.stage, if next.is_some() { Stage::Boarding } else { Stage::Ended });
        next
    }

    fn board(&mut self) -> Vec<Seat<DB, E>> {
        let mut state = lock(&self.batch.state);
        self.stage = state.shift(self.stage, Stage::UnderWay);
        state.board()
    }

    /// Whoever was in front could not be sent.
    fn refuse(&self, number: u64, failure: Failure) {
        let waiting = lock(&self.batch.state).waiting.remove(&number);
        drop(waiting.map(|waiting| waiting.reply.send(Err(failure))));
    }
}

/// One that went alone passes the lane on to those who came meanwhile. One that ends with its runtime does not: they find out by themselves.
impl<DB: Database, E: Errand<DB>> Drop for Lane<DB, E> {
    fn drop(&mut self) {
        let mut state = lock(&self.batch.state);
        if self.stage == Stage::Alone && !state.waiting.is_empty() {
            let stage = state.shift(self.stage, Stage::Boarding);
            drop(state);
            let lane = Self { batch: self.batch.clone(), runtime: self.runtime.clone(), stage };
            self.runtime.spawn(lane.carry());
        } else {
            self.stage = state.shift(self.stage, Stage::Ended);
        }
    }
}
