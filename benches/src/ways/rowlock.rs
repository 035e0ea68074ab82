//! rowlock itself: a key with batching and without, the permits of a semaphore, and readers.

use std::time::Duration;

use rowlock::{Access, Lease, LeaseLock, ReadWriteLock};
use sqlx::Pool;

use super::{Ask, Lock};
use crate::{
    Error,
    database::{Bench, PATIENCE},
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

pub struct Permits<DB: Bench> {
    semaphore: Access<DB>,
    wait: Duration,
}

impl<DB: Bench> Permits<DB> {
    pub fn new(pool: Pool<DB>, permits: u32, wait: Duration) -> Result<Self, Error> {
        Ok(Self { semaphore: lock(pool, true)?.semaphore("permits", permits), wait })
    }
}

impl<DB: Bench> Lock for Permits<DB> {
    type Held = Lease<DB>;

    async fn acquire(&self, _: &Ask<'_>) -> Result<Option<Lease<DB>>, Error> {
        granted(self.semaphore.acquire(self.wait).await)
    }

    async fn release(&self, _: &Ask<'_>, permit: Lease<DB>) -> Result<(), Error> {
        Ok(permit.release().await?)
    }
}

pub struct Readers<DB: Bench> {
    lock: ReadWriteLock<DB>,
    wait: Duration,
}

impl<DB: Bench> Readers<DB> {
    pub fn new(pool: Pool<DB>, wait: Duration) -> Result<Self, Error> {
        Ok(Self { lock: lock(pool, true)?.read_write("readers"), wait })
    }
}

impl<DB: Bench> Lock for Readers<DB> {
    type Held = Lease<DB>;

    async fn acquire(&self, _: &Ask<'_>) -> Result<Option<Lease<DB>>, Error> {
        granted(self.lock.readers().acquire(self.wait).await)
    }

    async fn release(&self, _: &Ask<'_>, reader: Lease<DB>) -> Result<(), Error> {
        Ok(reader.release().await?)
    }
}

fn granted<DB: Bench>(result: Result<Lease<DB>, rowlock::Error>) -> Result<Option<Lease<DB>>, Error> {
    match result {
        Ok(lease) => Ok(Some(lease)),
        Err(rowlock::Error::Refused(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
