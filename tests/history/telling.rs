//! A lock that records what it is granted: the claims of a transaction are not visible otherwise.

use std::{sync::Arc, time::Duration};

use harness::TestDatabase;
use rowlock::{
    Claim, Error, LeaseLock, ResourceLock,
    strategy::{BoxFuture, CommitOutcome, Confirmation, Grant, TransactionTerms},
};
use sqlx::Pool;

use crate::worker::{Orders, tell_grant};

pub struct Telling<DB: TestDatabase> {
    pub lock: LeaseLock<DB>,
    pub orders: Arc<Orders>,
    pub process: usize,
    pub op: u64,
}

impl<DB: TestDatabase> ResourceLock<DB> for Telling<DB> {
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move {
            let grant = ResourceLock::acquire(&self.lock, key, wait).await?;
            let lease = grant.lease().unwrap();
            tell_grant(lease.claim(), lease.time_left(), lease.taken_over_from(), self.process, self.op);
            self.orders.pause("granted", self.process, self.op).await;
            Ok(grant)
        })
    }
    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        self.lock.confirm(claim, tx)
    }
    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        self.lock.commit_outcome(claim, confirmation)
    }
    fn terms(&self) -> TransactionTerms {
        self.lock.terms()
    }
    fn pool(&self) -> &Pool<DB> {
        ResourceLock::pool(&self.lock)
    }
}
