//! A lock that tells of what it is granted: what a transaction asks for, nobody else sees.

use std::{sync::Arc, time::Duration};

use rowlock::{
    Answering, Attempt, Claim, Error, Grant, LeaseLock, Order, Receipt, ResourceLock, Retry, Settled, Status,
};
use sqlx::Pool;

use crate::{
    bed::Bed,
    worker::{Orders, tell_grant},
};

pub struct Telling<DB: Bed> {
    pub lock: LeaseLock<DB>,
    pub orders: Arc<Orders>,
    pub process: usize,
    pub op: u64,
}

impl<DB: Bed> ResourceLock<DB> for Telling<DB> {
    fn try_acquire<'a>(&'a self, key: &'a str) -> Answering<'a, Result<Attempt<Grant<DB>>, Error>> {
        self.acquire(key, Duration::ZERO)
    }
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> Answering<'a, Result<Attempt<Grant<DB>>, Error>> {
        Box::pin(async move {
            let attempt = ResourceLock::acquire(&self.lock, key, wait).await?;
            if let Attempt::Acquired(grant) = &attempt {
                tell_grant(grant.lease().unwrap(), self.process, self.op);
                self.orders.pause("granted", self.process, self.op).await;
            }
            Ok(attempt)
        })
    }
    fn confirm<'a>(&'a self, claim: &'a Claim, tx: &'a mut DB::Connection) -> Answering<'a, Result<Receipt, Error>> {
        self.lock.confirm(claim, tx)
    }
    fn release(&self, grant: Grant<DB>, status: Status) -> Answering<'_, Result<(), Error>> {
        self.lock.release(grant, status)
    }
    fn settle<'a>(&'a self, claim: &'a Claim, receipt: Receipt) -> Answering<'a, Settled> {
        self.lock.settle(claim, receipt)
    }
    fn order(&self) -> Order {
        ResourceLock::order(&self.lock)
    }
    fn retry(&self) -> Retry {
        ResourceLock::retry(&self.lock)
    }
    fn time_limit(&self) -> Duration {
        ResourceLock::time_limit(&self.lock)
    }
    fn pool(&self) -> &Pool<DB> {
        ResourceLock::pool(&self.lock)
    }
}
