//! Batches requests: those that arrive while a statement is in flight are sent together in the
//! next.
//!
//! There is no timer. With no statement in flight, the caller yields once so that ready tasks can
//! join, then sends. Each request gets its own answer. A request cancelled before sending is
//! removed; one cancelled later has its result dropped, which abandons the lease. After a statement
//! has failed, each of its requests is sent by itself, or the first receives the failure and the
//! others one that is retried. When a reply or a connection is slow, waiting requests open another
//! worker (`worker.rs`).

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
    detach::DetachOnDrop,
    store::{Database, connection::PooledConn, failure::Failure},
    sync::lock,
};

enum Route<'a, DB: Database, E: BatchOp<DB>> {
    /// Sent by itself, whatever else is in flight.
    Alone(E::Request),
    /// Sent by itself, with nothing else in flight.
    First(E::Request, Worker<DB, E>),
    WithOthers(Queued<'a, DB, E>, oneshot::Receiver<Result<E::Answer, Failure>>),
}

impl<DB: Database, E: BatchOp<DB>> Batcher<DB, E> {
    /// Sends a request. If the future is dropped, an unsent request is not sent, and the result of
    /// a sent one is dropped in the background.
    pub async fn send(
        self: &Arc<Self>,
        runtime: &Handle,
        request: E::Request,
        limits: Limits,
    ) -> Result<E::Answer, Failure> {
        let mut way = self.route(runtime, request, limits);
        if let Route::First(request, worker) = way {
            // Ready tasks join here.
            yield_now().await;
            way = self.join_if_others(request, worker, limits);
        }
        match way {
            Route::Alone(request) => self.send_alone(runtime, request, limits, None).await,
            Route::First(request, worker) => self.send_alone(runtime, request, limits, Some(worker)).await,
            Route::WithOthers(queued, answer) => queued.answer(runtime, answer, limits.caller).await,
        }
    }

    /// Returns `First` if nothing is in flight; otherwise the request joins the next batch. A
    /// request never waits for a statement in flight on another runtime, which may not be driven.
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

    /// Joins the requests that arrived during the yield, if there are any. The worker then sends
    /// all of them.
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
        let answered = timeout_at(limits.caller, DetachOnDrop::new(runtime.clone(), &self.tracker, sending)).await;
        answered.unwrap_or(Err(Failure::NoReply))
    }
}
