//! rowlock itself, with batching and without.

use std::time::Duration;

use rowlock::{Attempt, Lease, LeaseLock, Status};
use sqlx::Pool;

use super::{Ask, Lock};
use crate::{
    Error,
    database::{Bench, PATIENCE},
};

/// The only function in which the benchmarks create a lock that is compared.
pub fn lock<DB: Bench>(pool: Pool<DB>, batching: bool) -> Result<LeaseLock<DB>, Error> {
    Ok(LeaseLock::new(pool).batching(batching).label(super::CLIENT)?.time_limit(PATIENCE)?)
}

pub struct Rowlock<DB: Bench> {
    lock: LeaseLock<DB>,
    /// The wait for obstacles other than a holder, such as SQLite's one writer.
    wait: Duration,
}

impl<DB: Bench> Rowlock<DB> {
    pub fn new(pool: Pool<DB>, batching: bool, wait: Duration) -> Result<Self, Error> {
        Ok(Self { lock: lock(pool, batching)?, wait })
    }
}

impl<DB: Bench> Lock for Rowlock<DB> {
    type Held = Lease<DB>;

    async fn acquire(&self, ask: &Ask<'_>) -> Result<Option<Lease<DB>>, Error> {
        Ok(match self.lock.acquire(ask.key, self.wait).await? {
            Attempt::Acquired(lease) => Some(lease),
            Attempt::Refused(_) => None,
        })
    }

    async fn release(&self, _: &Ask<'_>, lease: Lease<DB>) -> Result<(), Error> {
        Ok(lease.release(Status::Succeeded).await?)
    }
}
