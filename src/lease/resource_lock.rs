//! The pessimistic lock as a [`ResourceLock`].

use std::time::Duration;

use sqlx::Pool;

use crate::{
    error::Error,
    grant::Grant,
    key::Claim,
    lease::{confirm, lock::LeaseLock},
    lock::{BoxFuture, CommitOutcome, ConfirmAt, Confirmation, ResourceLock},
    retry::Retry,
    rules::Status,
    store::Database,
};

impl<DB: Database> ResourceLock<DB> for LeaseLock<DB> {
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move { Ok(LeaseLock::acquire(self, key, wait).await?.into()) })
    }

    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(confirm::confirm::<DB>(claim, tx, self.shared.settings.time_limit))
    }

    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(confirm::confirm_within::<DB>(claim, tx, self.shared.settings.time_limit))
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            let Claim { key, token, .. } = grant.claim().clone();
            match grant.into_lease() {
                Some(lease) => lease.end(status).await,
                None => Err(Error::Lost { key, token }),
            }
        })
    }

    fn acquire_for_run<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move { Ok(LeaseLock::acquire_for_run(self, key, wait).await?.into()) })
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        let settings = &self.shared.settings;
        Box::pin(confirm::commit_outcome(&settings.sessions, claim, confirmation, settings.time_limit))
    }

    fn confirm_at(&self) -> ConfirmAt {
        ConfirmAt::First
    }

    fn retry(&self) -> Retry {
        self.retry
    }

    fn time_limit(&self) -> Duration {
        self.shared.settings.time_limit
    }

    fn pool(&self) -> &Pool<DB> {
        self.shared.settings.sessions.application()
    }
}
