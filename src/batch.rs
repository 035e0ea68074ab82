//! Many requests in one statement: those that come while one is under way travel together in the next.
//!
//! There is no timer, and nothing waits where nothing is under way: a request that comes alone goes alone, at once. Each
//! is answered on its own. Whoever goes away before the departure stays behind; what comes for whoever went away later
//! is dropped, and ended there. A statement that fails is no answer to anybody but the first: the others ask again, or
//! are sent one by one. Where an answer is long in coming, the next ones take another connection.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    sync::{Arc, Mutex},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    runtime::Handle,
    sync::oneshot,
    time::{Instant, timeout_at},
};

use crate::{
    fault::Fault,
    finish::{Background, Finish},
    held::lock,
    key::Key,
    store::{
        Database, Reply,
        borrowed::{Borrowed, Failure},
    },
};

/// The most requests of one statement: beyond, it only takes longer.
const MOST: usize = 256;

/// How long a request waits for the answer to others.
const PATIENCE: Duration = Duration::from_millis(20);

/// A kind of request.
pub(crate) trait Errand<DB: Database>: Send + Sync + 'static {
    type Request: Send + Sync + 'static;
    type Answer: Send + 'static;

    /// What it is about: two for the same key never travel in one statement. Without one it goes alone.
    fn key(request: &Self::Request) -> Option<&Key>;

    /// Whether one statement can do both.
    fn goes_with(request: &Self::Request, other: &Self::Request) -> bool;

    /// Whether the answer to the other, sent for the same key after this had come, can be the answer to this as well.
    fn may_share(request: &Self::Request, other: &Self::Request) -> bool;

    /// The same answer once more, if it is one for several.
    fn share(answer: &Self::Answer) -> Option<Self::Answer>;

    /// Sends all of them; one answer each, in order.
    fn run(
        &self,
        conn: &mut DB::Connection,
        requests: &[Self::Request],
        sent: Instant,
    ) -> impl Future<Output = Reply<Vec<Self::Answer>>> + Send;
}

/// When a request is given up.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// By whoever waits for it.
    pub caller: Instant,
    /// By the statement.
    pub statement: Instant,
}

/// Sends the requests of one lock object.
pub(crate) struct Batch<DB: Database, E: Errand<DB>> {
    errand: E,
    pool: Pool<DB>,
    background: Background,
    on: bool,
    state: Mutex<State<DB, E>>,
}

struct State<DB: Database, E: Errand<DB>> {
    /// Those that wait to be sent, in the order of their coming.
    waiting: BTreeMap<u64, Waiting<DB, E>>,
    last_number: u64,
    /// How many statements are under way, or will be once there is a connection.
    lanes: usize,
    /// How many of them take along whoever waits.
    boarding: usize,
}

struct Waiting<DB: Database, E: Errand<DB>> {
    request: E::Request,
    reply: oneshot::Sender<Result<E::Answer, Failure>>,
    limits: Limits,
}

enum Way<'a, DB: Database, E: Errand<DB>> {
    Alone(E::Request, Lane<DB, E>),
    WithOthers(Place<'a, DB, E>, oneshot::Receiver<Result<E::Answer, Failure>>),
}

/// A request that is sent, and those for the same key that may share in its answer.
struct Seat<DB: Database, E: Errand<DB>> {
    number: u64,
    first: Waiting<DB, E>,
    others: Vec<(u64, Waiting<DB, E>)>,
}

impl<DB: Database, E: Errand<DB>> Batch<DB, E> {
    /// Switched off, it sends each request by itself.
    pub fn new(errand: E, pool: Pool<DB>, background: Background, on: bool) -> Arc<Self> {
        let state = State { waiting: BTreeMap::new(), last_number: 0, lanes: 0, boarding: 0 };
        Arc::new(Self { errand, pool, background, on, state: Mutex::new(state) })
    }

    /// Dropped, it is not sent, or what it comes to is dropped in the background.
    pub async fn send(
        self: &Arc<Self>,
        runtime: &Handle,
        request: E::Request,
        limits: Limits,
    ) -> Result<E::Answer, Failure> {
        if !self.on || E::key(&request).is_none() {
            return self.send_alone(runtime, request, limits, None).await;
        }
        match self.set_out(runtime, request, limits) {
            Way::Alone(request, lane) => self.send_alone(runtime, request, limits, Some(lane)).await,
            Way::WithOthers(place, answer) => place.answer(runtime, answer, limits.caller).await,
        }
    }

    /// Alone, if nothing is under way; otherwise with the next.
    fn set_out(self: &Arc<Self>, runtime: &Handle, request: E::Request, limits: Limits) -> Way<'_, DB, E> {
        let mut state = lock(&self.state);
        if state.lanes == 0 {
            state.lanes += 1;
            return Way::Alone(request, Lane { batch: self.clone(), runtime: runtime.clone(), stage: Stage::Alone });
        }
        let (reply, answer) = oneshot::channel();
        state.last_number += 1;
        let place = Place { batch: self, number: state.last_number };
        state.waiting.insert(place.number, Waiting { request, reply, limits });
        Way::WithOthers(place, answer)
    }

    async fn send_alone(
        self: &Arc<Self>,
        runtime: &Handle,
        request: E::Request,
        limits: Limits,
        lane: Option<Lane<DB, E>>,
    ) -> Result<E::Answer, Failure> {
        let conn = Borrowed::checkout(&self.pool, limits.caller).await?;
        let batch = self.clone();
        let sending = async move {
            let sent = batch.exchange(conn, &[request], limits.statement).await;
            let (conn, mut answers) = sent?;
            conn.give_back();
            drop(lane);
            answers.pop().ok_or(Failure::NoReply)
        };
        let answered = timeout_at(limits.caller, Finish::new(runtime.clone(), &self.background, sending)).await;
        answered.unwrap_or(Err(Failure::NoReply))
    }

    async fn exchange(
        &self,
        mut conn: Borrowed<DB>,
        requests: &[E::Request],
        limit: Instant,
    ) -> Result<(Borrowed<DB>, Vec<E::Answer>), Failure> {
        let reply = timeout_at(limit, self.errand.run(conn.get(), requests, Instant::now())).await;
        conn.proceed(reply)
    }

    /// Sends whoever waits, until nobody does.
    async fn carry(self: Arc<Self>, mut lane: Lane<DB, E>) {
        let mut loan = None;
        while let Some((number, limit)) = lane.next() {
            let conn = match loan.take() {
                Some(conn) => conn,
                None => match Borrowed::checkout(&self.pool, limit).await {
                    Ok(conn) => conn,
                    Err(failure) => {
                        self.refuse(number, failure);
                        continue;
                    }
                },
            };
            let seats = lane.board();
            loan = self.carry_together(conn, seats).await.and_then(|conn| self.keep(conn));
        }
        if let Some(conn) = loan {
            conn.give_back();
        }
    }

    /// Keeps the connection for the next statement, if others find one in the pool meanwhile.
    fn keep(&self, conn: Borrowed<DB>) -> Option<Borrowed<DB>> {
        if self.pool.num_idle() > 0 || self.pool.size() < self.pool.options().get_max_connections() {
            return Some(conn);
        }
        conn.give_back();
        None
    }

    /// The connection, if it is good for more.
    async fn carry_together(&self, conn: Borrowed<DB>, seats: Vec<Seat<DB, E>>) -> Option<Borrowed<DB>> {
        let Some(limit) = seats.iter().map(|seat| seat.first.limits.statement).max() else { return Some(conn) };
        let _ongoing = self.background.begin();
        let (mut requests, mut replies) = (Vec::with_capacity(seats.len()), Vec::with_capacity(seats.len()));
        for Seat { number, first: Waiting { request, reply, limits }, others } in seats {
            requests.push(request);
            replies.push((number, reply, limits, others));
        }
        match self.exchange(conn, &requests, limit).await {
            Ok((conn, answers)) => {
                for ((_, reply, _, others), answer) in replies.into_iter().zip(answers) {
                    self.share(&answer, others);
                    // Nobody waits for it any more: it is dropped, and a claim abandoned.
                    drop(reply.send(Ok(answer)));
                }
                Some(conn)
            }
            Err(failure) => {
                let together = requests.into_iter().zip(replies);
                let seats = together.map(|(request, (number, reply, limits, others))| Seat {
                    number,
                    first: Waiting { request, reply, limits },
                    others,
                });
                self.fail(seats.collect(), failure).await;
                None
            }
        }
    }

    fn share(&self, answer: &E::Answer, others: Vec<(u64, Waiting<DB, E>)>) {
        for (number, other) in others {
            match E::share(answer) {
                Some(answer) => drop(other.reply.send(Ok(answer))),
                None => drop(lock(&self.state).waiting.insert(number, other)),
            }
        }
    }

    /// A statement came to nothing, or nobody knows to what.
    async fn fail(&self, mut seats: Vec<Seat<DB, E>>, failure: Failure) {
        for seat in &mut seats {
            lock(&self.state).waiting.extend(seat.others.drain(..));
        }
        // The server refused it: for the sake of one of them, perhaps.
        if seats.len() > 1 && failure.fault() != Fault::Contention && !failure.is_in_doubt() {
            for seat in seats {
                self.send_by_itself(seat.first).await;
            }
            return;
        }
        let undone = failure.fault() == Fault::Contention;
        let mut failure = Some(failure);
        for seat in seats {
            let other = if undone { Failure::Undone } else { Failure::NoReply };
            drop(seat.first.reply.send(Err(failure.take().unwrap_or(other))));
        }
    }

    async fn send_by_itself(&self, Waiting { request, reply, limits }: Waiting<DB, E>) {
        let answer = match Borrowed::checkout(&self.pool, limits.caller).await {
            Ok(conn) => self.exchange(conn, &[request], limits.statement).await,
            Err(failure) => Err(failure),
        };
        drop(reply.send(answer.and_then(|(conn, mut answers)| {
            conn.give_back();
            answers.pop().ok_or(Failure::NoReply)
        })));
    }

    /// Whoever was in front could not be sent.
    fn refuse(&self, number: u64, failure: Failure) {
        let waiting = lock(&self.state).waiting.remove(&number);
        drop(waiting.map(|waiting| waiting.reply.send(Err(failure))));
    }
}

impl<DB: Database, E: Errand<DB>> State<DB, E> {
    /// Those that can go in one statement, the first of them in any case.
    fn board(&mut self) -> Vec<Seat<DB, E>> {
        let (mut seats, mut places): (Vec<Seat<DB, E>>, HashMap<Key, usize>) = (Vec::new(), HashMap::new());
        let mut stay = BTreeMap::new();
        while let Some((number, waiting)) = self.waiting.pop_first() {
            let first = seats.first().map(|seat| &seat.first.request);
            if seats.len() == MOST || first.is_some_and(|first| !E::goes_with(&waiting.request, first)) {
                stay.insert(number, waiting);
                if seats.len() == MOST {
                    break;
                }
                continue;
            }
            let Some(key) = E::key(&waiting.request).cloned() else { continue };
            match places.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(seats.len());
                    seats.push(Seat { number, first: waiting, others: Vec::new() });
                }
                Entry::Occupied(place) => match &mut seats[*place.get()] {
                    seat if E::may_share(&waiting.request, &seat.first.request) => seat.others.push((number, waiting)),
                    _ => drop(stay.insert(number, waiting)),
                },
            }
        }
        self.waiting.append(&mut stay);
        seats
    }
}

/// A request that waits to be sent; dropped before, it never is.
struct Place<'a, DB: Database, E: Errand<DB>> {
    batch: &'a Arc<Batch<DB, E>>,
    number: u64,
}

impl<DB: Database, E: Errand<DB>> Place<'_, DB, E> {
    async fn answer(
        self,
        runtime: &Handle,
        mut answer: oneshot::Receiver<Result<E::Answer, Failure>>,
        limit: Instant,
    ) -> Result<E::Answer, Failure> {
        loop {
            match timeout_at(limit.min(Instant::now() + PATIENCE), &mut answer).await {
                Ok(Ok(answer)) => return answer,
                // The runtime that carried it went away.
                Ok(Err(_)) => return Err(Failure::NoReply),
                Err(_) if Instant::now() < limit => self.batch.open_lane(self.number, runtime),
                Err(_) if self.leave() => return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut)),
                Err(_) => return Err(Failure::NoReply),
            }
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

/// A statement under way, and those that follow it.
struct Lane<DB: Database, E: Errand<DB>> {
    batch: Arc<Batch<DB, E>>,
    runtime: Handle,
    stage: Stage,
}

impl<DB: Database, E: Errand<DB>> Batch<DB, E> {
    /// The answer to others is long in coming, and nobody is about to take this one along.
    fn open_lane(self: &Arc<Self>, number: u64, runtime: &Handle) {
        let mut state = lock(&self.state);
        if state.boarding > 0 || !state.waiting.contains_key(&number) {
            return;
        }
        state.lanes += 1;
        state.boarding += 1;
        drop(state);
        let lane = Lane { batch: self.clone(), runtime: runtime.clone(), stage: Stage::Boarding };
        runtime.spawn(self.clone().carry(lane));
    }
}

impl<DB: Database, E: Errand<DB>> Lane<DB, E> {
    /// Who is in front, and when it gives up; with nobody there, the lane ends.
    fn next(&mut self) -> Option<(u64, Instant)> {
        let mut state = lock(&self.batch.state);
        let next = state.waiting.first_key_value().map(|(number, waiting)| (*number, waiting.limits.caller));
        self.stage = state.shift(self.stage, if next.is_some() { Stage::Boarding } else { Stage::Ended });
        next
    }

    fn board(&mut self) -> Vec<Seat<DB, E>> {
        let mut state = lock(&self.batch.state);
        self.stage = state.shift(self.stage, Stage::UnderWay);
        state.board()
    }
}

impl<DB: Database, E: Errand<DB>> State<DB, E> {
    /// Counts a lane at its new stage.
    fn shift(&mut self, from: Stage, to: Stage) -> Stage {
        self.boarding -= usize::from(from == Stage::Boarding);
        self.boarding += usize::from(to == Stage::Boarding);
        self.lanes -= usize::from(from != Stage::Ended && to == Stage::Ended);
        to
    }
}

/// One that went alone passes the lane on to those who came meanwhile. One that ends with its runtime does not: they find out by themselves.
impl<DB: Database, E: Errand<DB>> Drop for Lane<DB, E> {
    fn drop(&mut self) {
        let mut state = lock(&self.batch.state);
        if self.stage == Stage::Alone && !state.waiting.is_empty() {
            let stage = state.shift(self.stage, Stage::Boarding);
            drop(state);
            let lane = Lane { batch: self.batch.clone(), runtime: self.runtime.clone(), stage };
            self.runtime.spawn(self.batch.clone().carry(lane));
        } else {
            self.stage = state.shift(self.stage, Stage::Ended);
        }
    }
}
