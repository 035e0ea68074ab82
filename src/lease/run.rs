//! Work that runs under a key.

use std::time::Duration;

use tracing::{Instrument as _, field::display};

use crate::{
    error::Error,
    invalid::Invalid,
    lease::{guard::Lease, held::Held, lock::LeaseLock},
    rules::Status,
    session::time::Instant,
    spans,
    store::Database,
    transaction::error::RunError,
};

impl<DB: Database> LeaseLock<DB> {
    /// Runs `work` under `key`, for which it waits for at most `wait`, and releases the key as
    /// succeeded or failed according to the work's result. A `wait` of zero runs the work now or
    /// not at all.
    ///
    /// The work is cancelled (its future is dropped) when the lease is lost. Pass
    /// [`Held::cancellation_token`] to the tasks that it spawns. Work that blocks its thread keeps
    /// its lease and cannot be cancelled: run it in `spawn_blocking`, and let it check
    /// [`Held::is_held`]. A panic abandons the key.
    ///
    /// If the work returns before it is cancelled, the call returns its result, even if the lease
    /// was lost. An end that could not be recorded is logged: the next holder may then not know
    /// that the work has ended.
    ///
    /// # With a minimum interval
    /// The work runs once in each interval, and again elsewhere if the instance that runs it
    /// crashes. All instances call it at each tick. While one of them works, the others wait. When
    /// it succeeds, they are refused at once. When it crashes, one of them takes over, unless
    /// [`Rules::Article`](crate::Rules::Article) leaves the key to an operator. `wait` is longer
    /// than the lease, because a crashed instance is replaced when its lease ends, and shorter than
    /// the interval, which begins when the work does. Half of the interval is a good value. A
    /// `Schedule` catches up on a tick that no instance ran; a minimum interval does not.
    ///
    /// # Errors
    /// [`RunError::Work`] is the work's own error. [`RunError::Refused`] if the key was not granted
    /// in time, so that the work did not begin. [`RunError::Lost`] if the lease was lost, and the
    /// work was cancelled. [`RunError::Other`] for all other errors of
    /// [`acquire`](Self::acquire), after which the work did not begin. It contains
    /// [`Error::Invalid`] if there is a minimum interval and `wait` is not shorter: the wait could
    /// outlast the interval, and the same tick would run twice.
    ///
    /// # Cancel safety
    /// If the future is dropped, the work is dropped and the key is abandoned in the background.
    /// The next claim may take over at once, or after the [`lock_delay`](Self::lock_delay), because
    /// tasks of the work may still run. While the call waits, it is as [`acquire`](Self::acquire).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::RunError;
    /// use std::{io, time::Duration};
    ///
    /// let lines = lock.run("report", Duration::from_secs(10), async |held| {
    ///     println!("working under token {}", held.token());
    ///     Ok::<_, io::Error>(42)
    /// });
    /// assert_eq!(lines.await?, 42);
    ///
    /// // In a task of its own, unless another instance runs it:
    /// let task = tokio::spawn(async move {
    ///     lock.run("report", Duration::ZERO, async |_held| Ok::<_, io::Error>(7)).await
    /// });
    /// match RunError::unless_refused(task.await?)? {
    ///     Some(lines) => println!("{lines} lines"),
    ///     None => println!("it runs elsewhere"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run<T, E, W, F>(&self, key: &str, wait: Duration, work: W) -> Result<T, RunError<E>>
    where
        W: FnOnce(Held) -> F,
        F: Future<Output = Result<T, E>>,
    {
        self.run_with(key, wait, self.acquire(key, wait), work).await
    }

    /// Runs `work` under the lease that `request` is granted.
    pub(crate) async fn run_with<T, E, W, F>(
        &self,
        name: &str,
        wait: Duration,
        request: impl Future<Output = Result<Lease<DB>, Error>>,
        work: W,
    ) -> Result<T, RunError<E>>
    where
        W: FnOnce(Held) -> F,
        F: Future<Output = Result<T, E>>,
    {
        let span = spans::run(name);
        let ran = async {
            self.check_wait(wait).map_err(Error::from)?;
            let lease = request.await?;
            span.record("token", display(lease.token()));
            under(lease, work).await
        };
        let ran = ran.instrument(span.clone()).await;
        if let Err(RunError::Refused(refusal)) = &ran {
            tracing::info!(key = %refusal.key, outcome = "refused", reason = %refusal.reason, "run");
        }
        spans::ended(&span, &ran, "succeeded");
        ran
    }

    /// Checks that a wait for work that is to run once in each minimum interval ends within it.
    fn check_wait(&self, wait: Duration) -> Result<(), Invalid> {
        let interval = self.key_terms.terms.min_interval.to_std().unwrap_or_default();
        if interval.is_zero() || wait < interval {
            return Ok(());
        }
        let rule = "it has to be shorter than the minimum interval, or the same tick runs again after that interval";
        Err(Invalid::setting("a wait", format!("{wait:?}"), rule))
    }
}

/// Runs the work under a lease, and ends the lease.
async fn under<DB: Database, T, E, W, F>(lease: Lease<DB>, work: W) -> Result<T, RunError<E>>
where
    W: FnOnce(Held) -> F,
    F: Future<Output = Result<T, E>>,
{
    let started = Instant::now();
    let (key, token) = (lease.key().clone(), lease.token());
    let ended = |outcome| tracing::info!(%key, %token, outcome, wall = ?started.elapsed(), "run");
    let lost = || {
        ended("lost");
        Err(RunError::Lost { key: key.clone(), token })
    };
    // The caller may have been polled long after the grant.
    if !lease.is_held() {
        return lost();
    }
    let result = tokio::select! {
        biased;
        result = work(lease.held()) => result,
        () = lease.lost() => return lost(),
    };
    ended(if result.is_ok() { "succeeded" } else { "failed" });
    let status = if result.is_ok() { Status::Succeeded } else { Status::Failed };
    if let Err(error) = lease.end(status).await {
        tracing::warn!(%key, %token, ?error, "the work has ended, but its end is not recorded");
    }
    result.map_err(RunError::Work)
}
