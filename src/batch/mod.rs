//! Many requests in one statement: those that come while one is under way travel together in the next.
//!
//! There is no timer, and nothing waits where nothing is under way: a request that comes alone goes alone, at once, after
//! those who are ready to run have had their turn to come along. Each is answered on its own. Whoever goes away before
//! the departure stays behind; what comes for whoever went away later is dropped, and ended there. A statement that fails
//! is no answer to anybody but the first: the others ask again, or are sent one by one. Where an answer or a connection is
//! long in coming, the next ones take another (`lanes.rs`).

pub(crate) mod op;
mod worker;

use std::sync::{Arc, Mutex, MutexGuard};

use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::yield_now,
    time::{Instant, timeout_at},
};

use crate::{
    batch::{
        op::{Errand, Limits},
        worker::{Lane, Numbered, Place, Seat, State, Waiting},
    },
    finish::{Background, Finish},
    store::{
        Database,
        connection::Borrowed,
        failure::{Failure, Remedy, remedy},
        fault::Fault,
        pools::Connections,
    },
    sync::lock,
};

/// Sends the requests of one lock object.
pub(crate) struct Batch<DB: Database, E: Errand<DB>> {
    errand: E,
    pub pool: Connections<DB>,
    background: Background,
    on: bool,
    pub state: Mutex<State<DB, E>>,
}

enum Way<'a, DB: Database, E: Errand<DB>> {
    /// Whatever the others do.
    Alone(E::Request),
    /// With nothing under way.
    First(E::Request, Lane<DB, E>),
    WithOthers(Place<'a, DB, E>, oneshot::Receiver<Result<E::Answer, Failure>>),
}

impl<DB: Database, E: Errand<DB>> Batch<DB, E> {
    /// Switched off, it sends each request by itself.
    pub fn new(errand: E, pool: Connections<DB>, background: Background, on: bool) -> Arc<Self> {
        Arc::new(Self { errand, pool, background, on, state: Mutex::new(State::new()) })
    }

    /// Dropped, it is not sent, or what it comes to is dropped in the background.
    pub async fn send(
        self: &Arc<Self>,
        runtime: &Handle,
        request: E::Request,
        limits: Limits,
    ) -> Result<E::Answer, Failure> {
        let mut way = self.set_out(runtime, request, limits);
        if let Way::First(request, lane) = way {
            // Others who are ready to ask do so now.
            yield_now().await;
            way = self.look_round(request, lane, limits);
        }
        match way {
            Way::Alone(request) => self.send_alone(runtime, request, limits, None).await,
            Way::First(request, lane) => self.send_alone(runtime, request, limits, Some(lane)).await,
            Way::WithOthers(place, answer) => place.answer(runtime, answer, limits.caller).await,
        }
    }

    /// First, if nothing is under way; otherwise with the next. What is under way on another runtime is not waited for:
    /// perhaps nobody drives that one.
    fn set_out(self: &Arc<Self>, runtime: &Handle, request: E::Request, limits: Limits) -> Way<'_, DB, E> {
        if !self.on || E::key(&request).is_none() {
            return Way::Alone(request);
        }
        let mut state = lock(&self.state);
        if state.is_idle() {
            state.begin(runtime.id());
            return Way::First(request, Lane::alone(self, runtime));
        }
        if !state.is_at_home(runtime.id()) {
            return Way::Alone(request);
        }
        self.join(state, request, limits)
    }

    /// With those who came meanwhile, if there are any; the lane is theirs then.
    fn look_round(self: &Arc<Self>, request: E::Request, lane: Lane<DB, E>, limits: Limits) -> Way<'_, DB, E> {
        let state = lock(&self.state);
        if !state.has_waiting() {
            return Way::First(request, lane);
        }
        let way = self.join(state, request, limits);
        drop(lane);
        way
    }

    fn join(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State<DB, E>>,
        request: E::Request,
        limits: Limits,
    ) -> Way<'_, DB, E> {
        let (reply, answer) = oneshot::channel();
        let number = state.queue(Waiting { request, reply, limits });
        Way::WithOthers(Place { batch: self, number }, answer)
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
            let answer = batch.exchange_one(conn, request, limits).await;
            drop(lane);
            answer
        };
        let answered = timeout_at(limits.caller, Finish::new(runtime.clone(), &self.background, sending)).await;
        answered.unwrap_or(Err(Failure::NoReply))
    }

    async fn exchange_one(
        &self,
        conn: Borrowed<DB>,
        request: E::Request,
        limits: Limits,
    ) -> Result<E::Answer, Failure> {
        let (conn, mut answers) = self.exchange(conn, &[request], limits.statement).await?;
        conn.give_back();
        answers.pop().ok_or(Failure::NoReply)
    }

    async fn exchange(
        &self,
        mut conn: Borrowed<DB>,
        requests: &[E::Request],
        limit: Instant,
    ) -> Result<(Borrowed<DB>, Vec<E::Answer>), Failure> {
        let sent = Instant::now();
        if sent >= limit {
            // Begun and given up at once, it might be carried out all the same.
            conn.give_back();
            return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut));
        }
        let reply = timeout_at(limit, self.errand.run(conn.get(), requests, sent)).await;
        conn.proceed(reply)
    }

    /// Sends those who go together; hands the connection back, if it is good for more.
    pub async fn carry_together(&self, conn: Borrowed<DB>, seats: Vec<Seat<DB, E>>) -> Option<Borrowed<DB>> {
        let Some(limit) = seats.iter().map(|seat| seat.first.limits.statement).max() else { return Some(conn) };
        let _ongoing = self.background.begin();
        let (mut requests, mut replies) = (Vec::with_capacity(seats.len()), Vec::with_capacity(seats.len()));
        for Seat { first: Waiting { request, reply, limits }, others } in seats {
            requests.push(request);
            replies.push((reply, limits, others));
        }
        match self.exchange(conn, &requests, limit).await {
            Ok((conn, answers)) => {
                for ((reply, _, others), answer) in replies.into_iter().zip(answers) {
                    self.share(&answer, others);
                    // Nobody waits for it any more: it is dropped, and a claim abandoned.
                    drop(reply.send(Ok(answer)));
                }
                Some(conn)
            }
            Err(failure) => {
                let mut firsts = Vec::with_capacity(replies.len());
                for (request, (reply, limits, others)) in requests.into_iter().zip(replies) {
                    lock(&self.state).put_back(others);
                    firsts.push(Waiting { request, reply, limits });
                }
                self.fail(firsts, failure).await;
                None
            }
        }
    }

    fn share(&self, answer: &E::Answer, others: Vec<Numbered<DB, E>>) {
        if others.is_empty() {
            return;
        }
        let mut rest = Vec::new();
        for (number, other) in others {
            match E::share(answer) {
                Some(answer) => drop(other.reply.send(Ok(answer))),
                None => rest.push((number, other)),
            }
        }
        lock(&self.state).put_back(rest);
    }

    /// A statement came to nothing, or nobody knows to what.
    async fn fail(&self, firsts: Vec<Waiting<DB, E>>, failure: Failure) {
        let fault = failure.fault();
        // For the sake of one of them, perhaps; and each is to have an error of its own.
        if firsts.len() > 1 && remedy(&failure, firsts.len()) != Remedy::Again {
            for first in firsts {
                self.send_by_itself(first).await;
            }
            return;
        }
        let mut failure = Some(failure);
        for first in firsts {
            let other = match fault {
                Fault::Contention => Failure::Undone,
                Fault::NoConnection => Failure::NoConnection(sqlx::Error::PoolTimedOut),
                _ => Failure::NoReply,
            };
            drop(first.reply.send(Err(failure.take().unwrap_or(other))));
        }
    }

    async fn send_by_itself(&self, Waiting { request, reply, limits }: Waiting<DB, E>) {
        if reply.is_closed() {
            return;
        }
        let answer = match Borrowed::checkout(&self.pool, limits.caller).await {
            Ok(conn) => self.exchange_one(conn, request, limits).await,
            Err(failure) => Err(failure),
        };
        drop(reply.send(answer));
    }
}
