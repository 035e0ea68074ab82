//! rowlock itself: a key with batching and without, the permits of a semaphore, and readers.

use std::time::Duration;

use rowlock::{Access, Lease, LeaseLock};
use sqlx::Pool;

use super::{Ask, Lock};
use crate::{
    database::{Bench, PATIENCE},
    error::Error,
};

/// The only function in which the benchmarks create a lock that is compared.
pub fn lock<DB: Bench>(pool: Pool<DB>, batching: bool) -> Result<LeaseLock<DB>, Error> {
    Ok(LeaseLock::builder(pool).batching(batching).label(super::CLIENT).time_limit(PATIENCE).build()?)
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
        granted(self.lock.acquire(ask.key, self.wait).await)
    }

    async fn release(&self, _: &Ask<'_>, lease: Lease<DB>) -> Result<(), Error> {
        Ok(lease.release().await?)
    }
}

/// The permits of a semaphore, or the readers of a read-write lock.
pub struct Places<DB: Bench> {
    access: Access<DB>,
    wait: Duration,
}

impl<DB: Bench> Places<DB> {
    pub fn permits(pool: Pool<DB>, permits: u32, wait: Duration) -> Result<Self, Error> {
        Ok(Self { access: lock(pool, true)?.semaphore("permits", permits), wait })
    }

    pub fn readers(pool: Pool<DB>, wait: Duration) -> Result<Self, Error> {
        Ok(Self { access: lock(pool, true)?.read_write("readers").readers().clone(), wait })
    }
}

impl<DB: Bench> Lock for Places<DB> {
    type Held = Lease<DB>;

    async fn acquire(&self, _: &Ask<'_>) -> Result<Option<Lease<DB>>, Error> {
        granted(self.access.acquire(self.wait).await)
    }

    async fn release(&self, _: &Ask<'_>, place: Lease<DB>) -> Result<(), Error> {
        Ok(place.release().await?)
    }
}

fn granted<DB: Bench>(result: Result<Lease<DB>, rowlock::Error>) -> Result<Option<Lease<DB>>, Error> {
    match result {
        Ok(lease) => Ok(Some(lease)),
        Err(rowlock::Error::Refused(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
