//! Queued requests, and the workers that send them.
//!
//! A worker sends one statement after another. Usually there is one worker. When its statement is
//! slow, a waiting request opens another, so that one unresponsive connection does not delay every
//! request. A worker that returns while the other waits for a connection, for longer than
//! [`QUEUE_DELAY`], goes on beside it.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    sync::oneshot,
    time::{Instant, timeout_at},
};

use crate::{
    batch::{
        batcher::Batcher,
        op::BatchOp,
        state::{Slot, Stage},
    },
    store::{Database, failure::Failure},
    sync::lock,
};

/// How long a request first waits behind others before it tries to open another worker. Each
/// further wait is twice as long.
const QUEUE_DELAY: Duration = Duration::from_millis(20);

/// A queued request. If it is dropped before it is sent, it is never sent.
pub(crate) struct Queued<'a, DB: Database, Op: BatchOp<DB>> {
    pub batch: &'a Arc<Batcher<DB, Op>>,
    pub number: u64,
}

impl<DB: Database, Op: BatchOp<DB>> Queued<'_, DB, Op> {
    pub async fn output(
        self,
        runtime: &Handle,
        mut output: oneshot::Receiver<Result<Op::Output, Failure>>,
        limit: Instant,
    ) -> Result<Op::Output, Failure> {
        // With a short deadline, the first wait takes half of the time left.
        let half = limit.saturating_duration_since(Instant::now()) / 2;
        let mut delay = QUEUE_DELAY.min(half).max(Duration::from_millis(1));
        loop {
            match timeout_at(limit.min(Instant::now() + delay), &mut output).await {
                Ok(Ok(output)) => return output,
                // The runtime of the worker was shut down.
                Ok(Err(_)) => return Err(Failure::NoReply),
                Err(_) if Instant::now() < limit => self.batch.open_worker(self.number, runtime),
                Err(_) if self.leave() => return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut)),
                Err(_) => return Err(Failure::NoReply),
            }
            delay *= 2;
        }
    }

    /// Removes the request. Returns whether it was still queued.
    fn leave(&self) -> bool {
        lock(&self.batch.state).waiting.remove(&self.number).is_some()
    }
}

impl<DB: Database, Op: BatchOp<DB>> Drop for Queued<'_, DB, Op> {
    fn drop(&mut self) {
        self.leave();
    }
}

pub(crate) struct Worker<DB: Database, Op: BatchOp<DB>> {
    batch: Arc<Batcher<DB, Op>>,
    runtime: Handle,
    stage: Stage,
}

impl<DB: Database, Op: BatchOp<DB>> Batcher<DB, Op> {
    /// Opens a worker for a request that is still queued, if no worker is collecting.
    fn open_worker(self: &Arc<Self>, number: u64, runtime: &Handle) {
        let mut state = lock(&self.state);
        if state.collecting > 0 || !state.waiting.contains_key(&number) {
            return;
        }
        state.workers += 1;
        let stage = state.shift(Stage::Alone, Stage::Collecting);
        drop(state);
        let worker = Worker { batch: self.clone(), runtime: runtime.clone(), stage };
        runtime.spawn(worker.work());
    }
}

impl<DB: Database, Op: BatchOp<DB>> Worker<DB, Op> {
    /// Creates the worker of a request that is sent by itself.
    pub fn alone(batch: &Arc<Batcher<DB, Op>>, runtime: &Handle) -> Self {
        Self { batch: batch.clone(), runtime: runtime.clone(), stage: Stage::Alone }
    }

    /// Sends waiting requests until there are none.
    async fn work(mut self) {
        while let Some((number, limit)) = self.next() {
            match self.batch.checkout(limit).await {
                Ok((conn, turn)) => {
                    let slots = self.take_batch();
                    self.batch.send_together(conn, slots, turn).await;
                }
                Err(failure) => self.refuse(number, failure),
            }
        }
    }

    /// Returns the first waiting request and its deadline. The worker ends if no request waits, or
    /// if another worker is collecting and the latest has been for less than `QUEUE_DELAY`.
    fn next(&mut self) -> Option<(u64, Instant)> {
        let mut state = lock(&self.batch.state);
        let others = state.collecting - usize::from(self.stage == Stage::Collecting);
        let surplus = others > 0 && state.collecting_since.elapsed() < QUEUE_DELAY;
        let next = state.waiting.first_key_value().filter(|_| !surplus);
        let next = next.map(|(number, waiting)| (*number, waiting.limits.caller));
        self.stage = state.shift(self.stage, if next.is_some() { Stage::Collecting } else { Stage::Ended });
        next
    }

    fn take_batch(&mut self) -> Vec<Slot<DB, Op>> {
        let mut state = lock(&self.batch.state);
        self.stage = state.shift(self.stage, Stage::InFlight);
        state.take_batch()
    }

    /// Reports to the first request that it could not be sent.
    fn refuse(&self, number: u64, failure: Failure) {
        let waiting = lock(&self.batch.state).waiting.remove(&number);
        drop(waiting.map(|waiting| waiting.reply.send(Err(failure))));
    }
}

/// A worker that sent a single request starts another if requests have arrived since. Any other
/// worker, such as one that is dropped with its runtime, does not: the waiting requests open one
/// themselves.
impl<DB: Database, Op: BatchOp<DB>> Drop for Worker<DB, Op> {
    fn drop(&mut self) {
        let mut state = lock(&self.batch.state);
        if self.stage == Stage::Alone && !state.waiting.is_empty() {
            let stage = state.shift(self.stage, Stage::Collecting);
            drop(state);
            let worker = Self { batch: self.batch.clone(), runtime: self.runtime.clone(), stage };
            self.runtime.spawn(worker.work());
        } else {
            self.stage = state.shift(self.stage, Stage::Ended);
        }
    }
}
