//! The transaction under every lock.

use std::future::Future;

use crate::{
    lock::ResourceLock,
    store::Database,
    transaction::{
        self,
        error::{RunError, WorkError},
        tx::Tx,
    },
};

/// The method that every [`ResourceLock`] has, also one that configuration chooses.
///
/// ```
/// use rowlock::{Database, ResourceLock, RunError, strategy::ResourceLockExt};
/// use std::io;
///
/// async fn write<DB: Database>(lock: &dyn ResourceLock<DB>) -> Result<(), RunError<io::Error>> {
///     lock.transaction("report", async |_tx| Ok(())).await
/// }
/// ```
pub trait ResourceLockExt<DB: Database>: ResourceLock<DB> {
    /// Runs `work` in a transaction that commits only if the claim on `key` stands until its end,
    /// as [`LeaseLock::transaction`](crate::LeaseLock::transaction) does.
    ///
    /// # Errors
    /// As [`LeaseLock::transaction`](crate::LeaseLock::transaction).
    ///
    /// # Cancel safety
    /// As [`LeaseLock::transaction`](crate::LeaseLock::transaction).
    fn transaction<T, E, W, F>(&self, key: &str, work: W) -> impl Future<Output = Result<T, RunError<E>>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>;
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLockExt<DB> for L {
    async fn transaction<T, E, W, F>(&self, key: &str, work: W) -> Result<T, RunError<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        transaction::run(self, key, |wait| self.acquire(key, wait), work).await
    }
}
