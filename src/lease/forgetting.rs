//! Deletes old rows in steps; in the background, by one instance at a time.

use std::{convert::Infallible, time::Duration};

use crate::{
    action::{Action, Certainty},
    error::Error,
    lease::{
        admin::{QUEUE, TABLE},
        lock::LeaseLock,
    },
    retry::{age as checked_age, within},
    rules::{Status, Terms},
    session::{time::Instant, timers::sleep},
    store::{Database, failure::Failure},
    sync::lock,
};

/// The key of the instance that deletes.
const KEY: &str = "rowlock/forget";
/// The bounds of the time between two passes over the table.
const SHORTEST_PERIOD: Duration = Duration::from_secs(1);
const LONGEST_PERIOD: Duration = Duration::from_secs(60 * 60);
/// A pass begins after each such part of the age.
const PERIODS: u32 = 8;
/// The pause after a step, as a multiple of the step's duration: the server spends two percent of
/// its time on steps, unless one takes longer than a tenth of a second.
const PAUSE: u32 = 49;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl<DB: Database> LeaseLock<DB> {
    /// Deletes rows that have not been touched for `age`, as [`forget`](Self::forget) does, again
    /// and again until the future is dropped.
    ///
    /// It is for applications with keys that come once, such as a lock for each order. All
    /// instances may call it: each pass over the table is made by one of them, which holds the key
    /// `rowlock/forget`. Passes begin about every eighth of the age, from once a second to once an
    /// hour. A pass reads rows in steps of 500, deletes the old ones, and pauses after each step
    /// for 49 times as long as the step took, at most 5 s. Rows that rowlock has created are kept
    /// for an hour at least.
    ///
    /// # Errors
    /// The errors of [`forget`](Self::forget) that are not [retryable](Error::is_retryable), such
    /// as a missing right to delete. After any other error the next pass is awaited.
    ///
    /// # Cancel safety
    /// If the future is dropped, the pass ends, and another instance begins the next one.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use std::time::Duration;
    ///
    /// let forgetting = lock.clone();
    /// tokio::spawn(async move {
    ///     let Err(error) = forgetting.forget_after(Duration::from_secs(24 * 60 * 60)).await;
    ///     eprintln!("old rows are kept: {error}");
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub async fn forget_after(&self, age: Duration) -> Result<Infallible, Error> {
        checked_age(age)?;
        let period = (age / PERIODS).clamp(SHORTEST_PERIOD, LONGEST_PERIOD);
        let rule = "a part of the age";
        let min_interval = within("a period", period.mul_f64(0.85), Duration::ZERO, LONGEST_PERIOD, rule)?;
        let Terms { retry_failed, article_clients, label, .. } = self.key_terms.terms.clone();
        // The interval is not set by the method of that name: it is one of this key alone.
        let terms = Terms { min_interval, retry_failed, article_clients, label, ..Terms::default() };
        let one = Self { key_terms: self.shared.key_terms(terms), ..self.clone() };
        loop {
            match one.forget_as_one(age).await {
                Err(error) if error.is_retryable() || error.is_of_a_failover() => {
                    tracing::warn!(%error, "old rows are deleted later")
                }
                done => done?,
            }
            // The instances do not ask at the same moment.
            sleep(period.mul_f64(0.9 + fastrand::f64() / 5.0)).await;
        }
    }

    /// Makes a pass, unless another instance makes it or has just made it.
    async fn forget_as_one(&self, age: Duration) -> Result<(), Error> {
        let Some(lease) = self.try_acquire(KEY).await?.acquired() else { return Ok(()) };
        let rows = tokio::select! {
            rows = self.forget_in_steps(age, PAUSE) => rows,
            () = lease.lost() => return Ok(()),
        };
        let status = if rows.is_ok() { Status::Succeeded } else { Status::Failed };
        if let Err(error) = lease.end(status).await {
            tracing::debug!(%error, "the claim ends later");
        }
        rows.map(|rows| tracing::debug!(rows, "old rows were deleted"))
    }

    /// Deletes old rows in steps, and then the tickets of waiters that died. Returns the number of
    /// rows. After each step it pauses for `rest` times as long as the step took.
    pub(super) async fn forget_in_steps(&self, older_than: Duration, rest: u32) -> Result<u64, Error> {
        let older_than = checked_age(older_than)?;
        let terms = Terms { min_interval: *lock(&self.key_terms.longest_interval), ..self.key_terms.terms.clone() };
        let failed = |failure: Failure, subject: &str, rows: u64| {
            let before = if rows > 0 { Certainty::Unknown } else { Certainty::NothingChanged };
            failure.into_error(Action::Forget, subject.to_owned(), self.shared.time_limit, before)
        };
        let (mut rows, mut after) = (0, Some(String::new()));
        while let Some(last) = after {
            let (began, limit) = (Instant::now(), self.checked_deadline().await?);
            let forget = async |conn: &mut DB::Connection| DB::forget(conn, older_than, &last, &terms).await;
            let step = self.shared.sessions.send_once(limit, forget).await;
            let step = step.map_err(|failure| failed(failure, TABLE, rows))?;
            (rows, after) = (rows + step.rows, step.after);
            sleep((began.elapsed() * rest).min(LONGEST_PAUSE)).await;
        }
        let limit = self.checked_deadline().await?;
        let swept = self.shared.sessions.send_once(limit, async |conn| DB::sweep(conn).await).await;
        swept.map_err(|failure| failed(failure, QUEUE, rows))?;
        Ok(rows)
    }
}
