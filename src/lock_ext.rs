//! Running work under a key, for every lock.

use std::time::Duration;

use tracing::{Instrument as _, field::display};

use crate::{
    error::Error,
    grant::{Attempt, Grant},
    key::Claim,
    lock::ResourceLock,
    rules::{Refusal, Status},
    session::time::Instant,
    spans,
    store::Database,
    transaction::{
        self,
        error::{TransactionError, WorkError},
        tx::Tx,
    },
};

/// The outcome of [`ResourceLockExt::run`] and [`ResourceLockExt::run_within`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::{ResourceLockExt, RunOutcome};
///
/// match lock.run("report", async |_grant| Ok::<_, std::io::Error>(42)).await? {
///     RunOutcome::Ended { result, recorded } => {
///         println!("the work returned {}", result?);
///         recorded?; // the row has S or F
///     }
///     RunOutcome::Refused(refusal) => println!("not now: {refusal}"),
///     RunOutcome::Lost(claim) => println!("lost {} and cancelled the work", claim.key),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the work may have been refused, cancelled, or have failed"]
pub enum RunOutcome<T, E> {
    /// The work did not start.
    Refused(Refusal),
    /// The work completed.
    Ended {
        /// The work's own result.
        result: Result<T, E>,
        /// Whether the row records the result as `S` or `F`. If not, the next holder may not know
        /// that the work ended. A handle ([`Grant::reenter`]) that outlives the work continues to
        /// hold the key, and the row records the status with which that handle ends.
        recorded: Result<(), Error>,
    },
    /// The lease was lost, and the work was cancelled before it completed.
    Lost(Claim),
}

impl<T, E> RunOutcome<T, E> {
    /// Returns a short name for programs. It never changes.
    fn name(&self) -> &'static str {
        match self {
            Self::Refused(_) => "refused",
            Self::Ended { result: Ok(_), .. } => "succeeded",
            Self::Ended { result: Err(_), .. } => "failed",
            Self::Lost(_) => "lost",
        }
    }
}

/// Methods that every [`ResourceLock`] has.
///
/// | method | for |
/// |---|---|
/// | [`run`](Self::run) | work that runs now or not at all |
/// | [`run_within`](Self::run_within) | a scheduled job, or work that waits for its key |
/// | [`transaction`](Self::transaction) | statements of which all or none take effect |
///
/// ```
/// # async fn example<DB: rowlock::Database>(
/// #     lock: rowlock::LeaseLock<DB>,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use rowlock::ResourceLockExt;
/// use std::{io, time::Duration};
///
/// let now = lock.run("report", async |_grant| Ok::<_, io::Error>(())).await?;
/// let soon = Duration::from_secs(10);
/// let waited = lock.run_within("report", soon, async |_grant| Ok::<_, io::Error>(())).await?;
/// let written = lock.transaction("report", async |_tx, _claim| Ok::<_, io::Error>(())).await?;
/// # Ok(())
/// # }
/// ```
pub trait ResourceLockExt<DB: Database>: ResourceLock<DB> {
    /// Attempts to acquire `key` once, without waiting for another holder.
    ///
    /// # Errors
    /// As [`ResourceLock::acquire`], except for a refusal.
    ///
    /// # Cancel safety
    /// As [`ResourceLock::acquire`].
    fn try_acquire(&self, key: &str) -> impl Future<Output = Result<Attempt<Grant<DB>>, Error>>;

    /// Runs `work` under `key` if the key is available now, and releases the key as succeeded or
    /// failed according to the work's result.
    ///
    /// The work is cancelled (its future is dropped) when a lease is lost. Pass
    /// [`Grant::cancellation_token`] to the tasks that it spawns. Work that blocks its thread
    /// keeps its lease and cannot be cancelled: run it in `spawn_blocking`, and let it check
    /// [`Grant::is_held`]. A panic abandons the key. A version
    /// excludes no other holder: work that is to run only once, or that writes, belongs under a
    /// lease or into [`transaction`](Self::transaction).
    ///
    /// # Errors
    /// As [`ResourceLock::acquire`], except for a refusal. [`RunOutcome`] reports what happens after
    /// the start.
    ///
    /// # Cancel safety
    /// If the future is dropped, the work is dropped and the key is abandoned in the background.
    /// The next claim may take over at once, or after the
    /// [`lock_delay`](crate::LeaseLock::lock_delay), because tasks of the work may still run.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::{ResourceLockExt, RunOutcome};
    /// use std::io;
    ///
    /// let ran = lock.run("report", async |grant| {
    ///     println!("working under token {}", grant.token());
    ///     Ok::<_, io::Error>(())
    /// });
    /// assert!(matches!(ran.await?, RunOutcome::Ended { .. }));
    ///
    /// // In a task of its own:
    /// let task = tokio::spawn(async move {
    ///     lock.run("report", async move |_grant| Ok::<_, io::Error>(())).await
    /// });
    /// # task.await??;
    /// # Ok(())
    /// # }
    /// ```
    fn run<T, E, W>(&self, key: &str, work: W) -> impl Future<Output = Result<RunOutcome<T, E>, Error>>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>;

    /// Runs `work` under `key` as [`run`](Self::run) does, and waits for the key for at most
    /// `wait`.
    ///
    /// With a minimum interval, this runs the work once per tick, and again elsewhere if the
    /// instance that runs it crashes. All instances call it at each tick. While one of them works,
    /// the others wait. When it succeeds, they are refused at once, because the interval has not
    /// passed. When it crashes, one of them takes over, unless [`Rules::Article`](crate::Rules)
    /// leave the key to an operator.
    ///
    /// `wait` is longer than the lease, because a crashed instance is replaced when its lease ends,
    /// and as long as the work may take. `wait` plus the lateness of a tick is shorter than the
    /// interval, which begins when the work does. Otherwise a run that takes longer than the
    /// interval is followed by a second one. Half of the interval is a good value. An instance that
    /// is later than that skips the tick.
    ///
    /// # Errors
    /// As [`ResourceLock::acquire`]. [`Error::Invalid`] if there is a minimum interval and
    /// `wait` is not shorter: the wait could outlast the interval, and the same tick would run
    /// twice.
    ///
    /// # Cancel safety
    /// As [`run`](Self::run). While the call waits, it is as [`ResourceLock::acquire`].
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::{ResourceLockExt, RunOutcome};
    /// use std::{io, time::Duration};
    ///
    /// // A job that ticks on the hour, and takes less than a quarter of an hour.
    /// let hourly = lock.min_interval(Duration::from_secs(30 * 60));
    /// let wait = Duration::from_secs(15 * 60);
    /// let ran = hourly.run_within("report", wait, async |_grant| Ok::<_, io::Error>(())).await?;
    /// assert!(matches!(ran, RunOutcome::Ended { .. }));
    ///
    /// // Another instance, at the same tick.
    /// let ran = hourly.run_within("report", wait, async |_grant| Ok::<_, io::Error>(())).await?;
    /// assert!(matches!(ran, RunOutcome::Refused(_)));
    /// # Ok(())
    /// # }
    /// ```
    fn run_within<T, E, W>(
        &self,
        key: &str,
        wait: Duration,
        work: W,
    ) -> impl Future<Output = Result<RunOutcome<T, E>, Error>>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>;

    /// Runs `work` in a transaction that commits only if the claim on `key` stands until its end:
    /// acquire, begin, work, confirm, commit, release.
    ///
    /// Conflicts, losses before the commit, and errors that mean contention, including those that
    /// the work itself met, are rolled back and retried. Each attempt calls a clone of the work, as
    /// it was passed. The work may run several times, so it does nothing outside the transaction.
    /// The isolation level is the connection's, because a
    /// statement that sets it comes too late. The work returns every database error, neither
    /// commits nor rolls back, and returns the transaction by dropping it. Contention in the work
    /// is detected through its error's chain of sources ([`WorkError`]). On MySQL and MariaDB a
    /// statement that commits by itself commits what the work wrote before it, which stands. If the
    /// statement writes (`CREATE`, `TRUNCATE`), it is then refused at once (1792), and so are all
    /// later writes of the work.
    ///
    /// A failure to release after the commit is not a failure of the transaction. It is logged, and
    /// the lease ends by itself.
    ///
    /// # Errors
    /// [`TransactionError::Work`] is the work's own error, after a rollback.
    /// [`TransactionError::Refused`] is returned if the key was not available in time.
    /// [`TransactionError::Failed`] contains [`Error::Conflict`] when the retries are used up, and
    /// [`Error::CommitUnknown`] if it cannot be determined whether the transaction was committed, and
    /// [`Error::TransactionOver`], which says what may stand, if the transaction ended before its
    /// commit: the work ended it, or continued after an error that ended it. After every other error
    /// nothing was committed.
    ///
    /// # Cancel safety
    /// If the future is dropped before the commit is sent, nothing is committed. If it is dropped
    /// later, the commit may stand. The claim is abandoned and the connection closed. The key stays
    /// closed for the [`lock_delay`](crate::LeaseLock::lock_delay), because tasks of the work may
    /// still run; a transaction that returns keeps no delay.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # let sql = "CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER, version INTEGER)";
    /// # sqlx::query(sql).execute(&pool).await?;
    /// # let sql = "INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)";
    /// # sqlx::query(sql).execute(&pool).await?;
    /// use rowlock::ResourceLockExt;
    ///
    /// # rowlock::migrate(&pool).await?;
    /// let lock = rowlock::LeaseLock::new(pool); // or a VersionLock
    /// let paid = lock.transaction("alice", |mut tx, claim| async move {
    ///     let sql = "UPDATE account SET balance = balance - 30 WHERE id = 'alice'";
    ///     sqlx::query(sql).execute(&mut *tx).await?;
    ///     Ok::<_, sqlx::Error>(claim.token)
    /// });
    /// println!("committed under token {}", paid.await?);
    /// # Ok(())
    /// # }
    /// ```
    fn transaction<T, E, W, F>(&self, key: &str, work: W) -> impl Future<Output = Result<T, TransactionError<E>>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>, Claim) -> F + Clone,
        F: Future<Output = Result<T, E>>;
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLockExt<DB> for L {
    async fn try_acquire(&self, key: &str) -> Result<Attempt<Grant<DB>>, Error> {
        Attempt::of(self.acquire(key, Duration::ZERO).await)
    }

    async fn run<T, E, W>(&self, key: &str, work: W) -> Result<RunOutcome<T, E>, Error>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>,
    {
        run(self, key, self.acquire(key, Duration::ZERO), work).await
    }

    async fn run_within<T, E, W>(&self, key: &str, wait: Duration, work: W) -> Result<RunOutcome<T, E>, Error>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>,
    {
        run(self, key, self.acquire_for_run(key, wait), work).await
    }

    async fn transaction<T, E, W, F>(&self, key: &str, work: W) -> Result<T, TransactionError<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>, Claim) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        transaction::run(self, key, work).await
    }
}

async fn run<DB, L, T, E, W>(
    lock: &L,
    key: &str,
    request: impl Future<Output = Result<Grant<DB>, Error>>,
    work: W,
) -> Result<RunOutcome<T, E>, Error>
where
    DB: Database,
    L: ResourceLock<DB> + ?Sized,
    W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>,
{
    let span = spans::run(key);
    let ran = async {
        match request.await {
            Ok(grant) => {
                span.record("token", display(grant.token()));
                Ok(under(lock, grant, work).await)
            }
            Err(Error::Refused(refusal)) => {
                tracing::info!(key = %refusal.key, outcome = "refused", reason = %refusal.reason, "run");
                span.record("reason", refusal.reason.name());
                Ok(RunOutcome::Refused(refusal))
            }
            Err(error) => Err(error),
        }
    };
    let ran = ran.instrument(span.clone()).await;
    match &ran {
        Ok(outcome) => {
            span.record("outcome", outcome.name());
        }
        Err(error) => spans::failed(&span, error),
    }
    ran
}

/// Runs the work under a claim, and ends the claim.
async fn under<DB, L, T, E, W>(lock: &L, grant: Grant<DB>, work: W) -> RunOutcome<T, E>
where
    DB: Database,
    L: ResourceLock<DB> + ?Sized,
    W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>,
{
    let started = Instant::now();
    let (key, token) = (grant.key().clone(), grant.token());
    let ended = |outcome| tracing::info!(%key, %token, outcome, wall = ?started.elapsed(), "run");
    let result = tokio::select! {
        biased;
        result = work(&grant) => result,
        () = grant.lost() => {
            ended("lost");
            return RunOutcome::Lost(grant.claim().clone());
        }
    };
    ended(if result.is_ok() { "succeeded" } else { "failed" });
    let status = if result.is_ok() { Status::Succeeded } else { Status::Failed };
    let recorded = lock.release(grant, status).await;
    RunOutcome::Ended { result, recorded }
}
