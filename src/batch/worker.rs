//! Who of a [`Batch`] waits, and who is under way.
//!
//! A lane is a statement under way and those that follow it. As a rule there is one. Where it is long in coming to its
//! end, or to a connection, whoever waits opens another, so that nobody pays for one connection that does not answer.

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
    store::{
        Database,
        connection::{IdleConn, PooledConn},
        failure::Failure,
    },
    sync::lock,
};

/// How long a request waits behind others, at first.
const PATIENCE: Duration = Duration::from_millis(20);

/// A request that waits to be sent; dropped before, it never is.
pub(crate) struct Queued<'a, DB: Database, E: BatchOp<DB>> {
    pub batch: &'a Arc<Batcher<DB, E>>,
    pub number: u64,
}

impl<DB: Database, E: BatchOp<DB>> Queued<'_, DB, E> {
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
                Err(_) if Instant::now() < limit => self.batch.open_worker(self.number, runtime),
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

impl<DB: Database, E: BatchOp<DB>> Drop for Queued<'_, DB, E> {
    fn drop(&mut self) {
        self.leave();
    }
}

pub(crate) struct Worker<DB: Database, E: BatchOp<DB>> {
    batch: Arc<Batcher<DB, E>>,
    runtime: Handle,
    stage: Stage,
}

impl<DB: Database, E: BatchOp<DB>> Batcher<DB, E> {
    /// The answer to others is long in coming, and nobody is about to take this one along.
    fn open_worker(self: &Arc<Self>, number: u64, runtime: &Handle) {
        let most = self.pool.most() as usize;
        let mut state = lock(&self.state);
        let stuck = state.collecting == 0 || (state.collecting_since.elapsed() >= PATIENCE && state.workers < most);
        if !stuck || !state.waiting.contains_key(&number) {
            return;
        }
        state.workers += 1;
        let stage = state.shift(Stage::Alone, Stage::Collecting);
        drop(state);
        let worker = Worker { batch: self.clone(), runtime: runtime.clone(), stage };
        runtime.spawn(worker.work());
    }
}

impl<DB: Database, E: BatchOp<DB>> Worker<DB, E> {
    /// Of a request that goes alone.
    pub fn alone(batch: &Arc<Batcher<DB, E>>, runtime: &Handle) -> Self {
        Self { batch: batch.clone(), runtime: runtime.clone(), stage: Stage::Alone }
    }

    /// Sends whoever waits, until nobody does.
    async fn work(mut self) {
        let mut kept: Option<IdleConn<DB>> = None;
        while let Some((number, limit)) = self.next() {
            let conn = match kept.take() {
                Some(kept) => kept.lend(),
                None => match PooledConn::checkout(&self.batch.pool, limit).await {
                    Ok(conn) => conn,
                    Err(failure) => {
                        self.refuse(number, failure);
                        continue;
                    }
                },
            };
            let slots = self.take_batch();
            let conn = self.batch.send_together(conn, slots).await;
            kept = conn.and_then(|conn| conn.keep(&self.batch.pool));
        }
    }

    /// Who is in front, and when it gives up; with nobody there, or another lane about to take them along, this one ends.
    fn next(&mut self) -> Option<(u64, Instant)> {
        let mut state = lock(&self.batch.state);
        let others = state.collecting - usize::from(self.stage == Stage::Collecting);
        let surplus = others > 0 && state.collecting_since.elapsed() < PATIENCE;
        let next = state.waiting.first_key_value().filter(|_| !surplus);
        let next = next.map(|(number, waiting)| (*number, waiting.limits.caller));
        self.stage = state.shift(self.stage, if next.is_some() { Stage::Collecting } else { Stage::Ended });
        next
    }

    fn take_batch(&mut self) -> Vec<Slot<DB, E>> {
        let mut state = lock(&self.batch.state);
        self.stage = state.shift(self.stage, Stage::UnderWay);
        state.take_batch()
    }

    /// Whoever was in front could not be sent.
    fn refuse(&self, number: u64, failure: Failure) {
        let waiting = lock(&self.batch.state).waiting.remove(&number);
        drop(waiting.map(|waiting| waiting.reply.send(Err(failure))));
    }
}

/// One that went alone passes the lane on to those who came meanwhile. One that ends with its runtime does not: they find out by themselves.
impl<DB: Database, E: BatchOp<DB>> Drop for Worker<DB, E> {
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
