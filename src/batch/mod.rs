//! Many requests in one statement: those that come while one is under way travel together in the next.
//!
//! There is no timer, and nothing waits where nothing is under way: a request that comes alone goes alone, at once, after
//! those who are ready to run have had their turn to come along. Each is answered on its own. Whoever goes away before
//! the departure stays behind; what comes for whoever went away later is dropped, and ended there. A statement that fails
//! is no answer to anybody but the first: the others ask again, or are sent one by one. Where an answer or a connection is
//! long in coming, the next ones take another (`worker.rs`).

pub(crate) mod batcher;
pub(crate) mod op;
mod state;
mod worker;

use std::sync::{Arc, MutexGuard};

use tokio::{runtime::Handle, sync::oneshot, task::yield_now, time::timeout_at};

use crate::{
    batch::{
        batcher::Batcher,
        op::{BatchOp, Limits},
        state::{State, Waiting},
        worker::{Queued, Worker},
    },
    finish::Finish,
    store::{Database, connection::PooledConn, failure::Failure},
    sync::lock,
};

enum Route<'a, DB: Database, E: BatchOp<DB>> {
    /// Whatever the others do.
    Alone(E::Request),
    /// With nothing under way.
    First(E::Request, Worker<DB, E>),
    WithOthers(Queued<'a, DB, E>, oneshot::Receiver<Result<E::Answer, Failure>>),
}

impl<DB: Database, E: BatchOp<DB>> Batcher<DB, E> {
    /// Dropped, it is not sent, or what it comes to is dropped in the background.
    pub async fn send(
        self: &Arc<Self>,
        runtime: &Handle,
        request: E::Request,
        limits: Limits,
    ) -> Result<E::Answer, Failure> {
        let mut way = self.route(runtime, request, limits);
        if let Route::First(request, worker) = way {
            // Others who are ready to ask do so now.
            yield_now().await;
            way = self.join_if_others(request, worker, limits);
        }
        match way {
            Route::Alone(request) => self.send_alone(runtime, request, limits, None).await,
            Route::First(request, worker) => self.send_alone(runtime, request, limits, Some(worker)).await,
            Route::WithOthers(queued, answer) => queued.answer(runtime, answer, limits.caller).await,
        }
    }

    /// First, if nothing is under way; otherwise with the next. What is under way on another runtime is not waited for:
    /// perhaps nobody drives that one.
    fn route(self: &Arc<Self>, runtime: &Handle, request: E::Request, limits: Limits) -> Route<'_, DB, E> {
        if !self.on || E::key(&request).is_none() {
            return Route::Alone(request);
        }
        let mut state = lock(&self.state);
        if state.is_idle() {
            state.begin(runtime.id());
            return Route::First(request, Worker::alone(self, runtime));
        }
        if !state.is_at_home(runtime.id()) {
            return Route::Alone(request);
        }
        self.join(state, request, limits)
    }

    /// With those who came meanwhile, if there are any; the lane is theirs then.
    fn join_if_others(
        self: &Arc<Self>,
        request: E::Request,
        worker: Worker<DB, E>,
        limits: Limits,
    ) -> Route<'_, DB, E> {
        let state = lock(&self.state);
        if !state.has_waiting() {
            return Route::First(request, worker);
        }
        let way = self.join(state, request, limits);
        drop(worker);
        way
    }

    fn join(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State<DB, E>>,
        request: E::Request,
        limits: Limits,
    ) -> Route<'_, DB, E> {
        let (reply, answer) = oneshot::channel();
        let number = state.queue(Waiting { request, reply, limits });
        Route::WithOthers(Queued { batch: self, number }, answer)
    }

    async fn send_alone(
        self: &Arc<Self>,
        runtime: &Handle,
        request: E::Request,
        limits: Limits,
        worker: Option<Worker<DB, E>>,
    ) -> Result<E::Answer, Failure> {
        let conn = PooledConn::checkout(&self.pool, limits.caller).await?;
        let batch = self.clone();
        let sending = async move {
            let answer = batch.exchange_one(conn, request, limits).await;
            drop(worker);
            answer
        };
        let answered = timeout_at(limits.caller, Finish::new(runtime.clone(), &self.background, sending)).await;
        answered.unwrap_or(Err(Failure::NoReply))
    }
}
