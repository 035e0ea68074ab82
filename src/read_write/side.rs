//! The two sides of a read-write lock, each as a lock of its own.

use std::{fmt, time::Duration};

use sqlx::Pool;

use crate::{
    error::Error,
    grant::Grant,
    key::Claim,
    lease::{guard::Lease, lock::LeaseLock},
    lock::{BoxFuture, CommitOutcome, ConfirmAt, Confirmation, ResourceLock},
    read_write::{call::Call, names::Names},
    retry::Retry,
    rules::Status,
    store::Database,
};

/// One side of a [`ReadWriteLock`](crate::ReadWriteLock): its readers or its writers.
///
/// As a [`ResourceLock`], it grants that access to the name that is passed, which is usually that
/// of the lock. Another name is another lock.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::ResourceLockExt;
///
/// let readers = lock.read_write("cache").readers();
/// readers.run("cache", async |_grant| Ok::<_, std::io::Error>(7)).await?;
/// # Ok(())
/// # }
/// ```
pub struct Side<DB: Database> {
    pub(crate) lock: LeaseLock<DB>,
    pub(crate) of: SideOf,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum SideOf {
    Readers,
    Writers,
}

impl<DB: Database> Clone for Side<DB> {
    fn clone(&self) -> Self {
        Self { lock: self.lock.clone(), of: self.of }
    }
}

impl<DB: Database> fmt::Debug for Side<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Side").field("of", &self.of).finish()
    }
}

impl<DB: Database> ResourceLock<DB> for Side<DB> {
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move {
            let names = Names::new(key)?;
            let of = self.of;
            let lease = self.lock.on_thread(move |lock| async move {
                let call = Call::new(&lock, &names, wait).await?;
                match of {
                    SideOf::Readers => call.read().await,
                    SideOf::Writers => Ok(call.write().await?.map(Lease::new)),
                }
            });
            Ok(lease.await?.into_result()?.into())
        })
    }

    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        self.lock.confirm(claim, tx)
    }

    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        self.lock.confirm_within(claim, tx)
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        self.lock.release(grant, status)
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        self.lock.commit_outcome(claim, confirmation)
    }

    fn confirm_at(&self) -> ConfirmAt {
        self.lock.confirm_at()
    }

    fn retry(&self) -> Retry {
        ResourceLock::retry(&self.lock)
    }

    fn time_limit(&self) -> Duration {
        self.lock.time_limit()
    }

    fn pool(&self) -> &Pool<DB> {
        self.lock.pool()
    }
}
