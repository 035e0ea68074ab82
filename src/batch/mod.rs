//! Batches requests: those that arrive while a statement is in flight are sent together in the
//! next.
//!
//! There is no timer. With no statement in flight, the caller yields once so that ready tasks can
//! join, then sends. Each request gets its own reply. A request cancelled before sending is
//! removed; one cancelled later has its result dropped, which abandons the lease. After a statement
//! has failed, each of its requests is sent by itself, or the first receives the failure and the
//! others one that is retried. When a reply is slow, waiting requests open another worker
//! (`worker.rs`).

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
    store::{Database, failure::Failure},
    sync::lock,
};

enum Route<'a, DB: Database, Op: BatchOp<DB>> {
    /// Sent by itself, whatever else is in flight.
    Alone(Op::Request),
    /// Sent by itself, with nothing else in flight.
    First(Op::Request, Worker<DB, Op>),
    WithOthers(Queued<'a, DB, Op>, oneshot::Receiver<Result<Op::Output, Failure>>),
}

impl<DB: Database, Op: BatchOp<DB>> Batcher<DB, Op> {
    /// Sends a request. If the future is dropped, an unsent request is not sent, and the result of
    /// a sent one is dropped in the background.
    pub async fn send(
        self: &Arc<Self>,
        runtime: &Handle,
        request: Op::Request,
        limits: Limits,
    ) -> Result<Op::Output, Failure> {
        let mut route = self.route(runtime, request, limits);
        if let Route::First(request, worker) = route {
            // Ready tasks join here.
            yield_now().await;
            route = self.join_if_others(request, worker, limits);
        }
        match route {
            Route::Alone(request) => self.send_alone(runtime, request, limits, None).await,
            Route::First(request, worker) => self.send_alone(runtime, request, limits, Some(worker)).await,
            Route::WithOthers(queued, output) => queued.output(runtime, output, limits.caller).await,
        }
    }

    /// Returns `First` if nothing is in flight; otherwise the request joins the next batch. A
    /// request never waits for a statement in flight on another runtime, which may not be driven.
    fn route(self: &Arc<Self>, runtime: &Handle, request: Op::Request, limits: Limits) -> Route<'_, DB, Op> {
        if !self.enabled || Op::key(&request).is_none() {
            return Route::Alone(request);
        }
        let mut state = lock(&self.state);
        if state.is_idle() {
            state.begin(runtime.id());
            return Route::First(request, Worker::alone(self, runtime));
        }
        if !state.runs_on(runtime.id()) {
            return Route::Alone(request);
        }
        self.join(state, request, limits)
    }

    /// Joins the requests that arrived during the yield, if there are any. The worker then sends
    /// all of them.
    fn join_if_others(
        self: &Arc<Self>,
        request: Op::Request,
        worker: Worker<DB, Op>,
        limits: Limits,
    ) -> Route<'_, DB, Op> {
        let state = lock(&self.state);
        if !state.has_waiting() {
            return Route::First(request, worker);
        }
        let route = self.join(state, request, limits);
        drop(worker);
        route
    }

    fn join(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State<DB, Op>>,
        request: Op::Request,
        limits: Limits,
    ) -> Route<'_, DB, Op> {
        let (reply, output) = oneshot::channel();
        let number = state.queue(Waiting { request, reply, limits });
        Route::WithOthers(Queued { batch: self, number }, output)
    }

    async fn send_alone(
        self: &Arc<Self>,
        runtime: &Handle,
        request: Op::Request,
        limits: Limits,
        worker: Option<Worker<DB, Op>>,
    ) -> Result<Op::Output, Failure> {
        let (conn, turn) = match &worker {
            Some(_) => self.checkout(limits.caller).await?,
            None => self.checkout_alone(limits.caller).await?,
        };
        let batch = self.clone();
        let sending = async move {
            let output = batch.exchange_one(conn, request, limits).await;
            drop((worker, turn));
            output
        };
        let answered = timeout_at(limits.caller, DetachOnDrop::new(runtime.clone(), &self.tracker, sending)).await;
        answered.unwrap_or(Err(Failure::NoReply))
    }
}
