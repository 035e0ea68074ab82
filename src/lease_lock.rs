//! The pessimistic lock: asks for keys, and runs work under them.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    error::{Action, Certainty, Error},
    fault::Fault,
    keeper::Keeper,
    key::{Claim, Holder, Key},
    lease::Lease,
    migrate::Table,
    rules::{Reason, Refusal, Row, Status, Verdict, judge},
    settings::Settings,
    store::{
        Answer, Ask, Database,
        borrowed::{Borrowed, Failure},
    },
};
use sqlx::Pool;
use tokio::{
    runtime::Handle,
    sync::OnceCell,
    time::{Instant, sleep, timeout_at},
};

/// How long a try goes on while somebody else's transaction is at the row.
const PATIENCE: Duration = Duration::from_millis(100);

/// A lock on named resources, kept in the table `t_resource_lock`.
///
/// Cheap to clone; the clones share one background task that renews their leases. It keeps no
/// connection: each operation borrows one from the pool for one statement.
pub struct LeaseLock<DB: Database> {
    settings: Settings<DB>,
    keeper: Arc<Keeper<DB>>,
    table: Arc<OnceCell<Table>>,
}

impl<DB: Database> Clone for LeaseLock<DB> {
    fn clone(&self) -> Self {
        Self { settings: self.settings.clone(), keeper: self.keeper.clone(), table: self.table.clone() }
    }
}

impl<DB: Database> fmt::Debug for LeaseLock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseLock").field("database", &DB::NAME).field("terms", &self.settings.terms).finish()
    }
}

/// The answer to a try.
#[derive(Debug)]
#[must_use = "a lease that is dropped is abandoned"]
pub enum Attempt<DB: Database> {
    /// The key is this lease's.
    Acquired(Lease<DB>),
    /// Somebody or something stands in the way.
    Refused(Refusal),
}

impl<DB: Database> Attempt<DB> {
    /// The lease, if there is one.
    pub fn acquired(self) -> Option<Lease<DB>> {
        match self {
            Self::Acquired(lease) => Some(lease),
            Self::Refused(_) => None,
        }
    }

    /// The refusal, if it is one.
    pub fn refused(self) -> Option<Refusal> {
        match self {
            Self::Acquired(_) => None,
            Self::Refused(refusal) => Some(refusal),
        }
    }
}

/// What became of [`LeaseLock::run`].
#[derive(Debug)]
#[must_use = "the work may have been refused, cancelled, or have failed"]
pub enum Run<T, E> {
    /// The work did not start.
    Refused(Refusal),
    /// The work came to its end.
    Ended {
        /// Its own result.
        result: Result<T, E>,
        /// Whether the row tells so: `S` or `F`. If not, the next one may not know that it ended.
        recorded: Result<(), Error>,
    },
    /// The lease was lost and the work cancelled on the way.
    Lost(Claim),
}

impl<DB: Database> LeaseLock<DB> {
    /// A lock on the pool's database, with the default settings. Sends nothing yet.
    pub fn new(pool: Pool<DB>) -> Self {
        Self::with(Settings::new(pool), Arc::default())
    }

    fn with(settings: Settings<DB>, table: Arc<OnceCell<Table>>) -> Self {
        let keeper = Keeper::new(settings.renewals.clone(), settings.terms.clone());
        Self { settings, keeper, table }
    }

    pub(crate) fn rebuild(self, change: impl FnOnce(Settings<DB>) -> Settings<DB>) -> Self {
        // The pool stays, and with it what is known of its table.
        Self::with(change(self.settings), self.table)
    }

    pub(crate) fn settings(&self) -> &Settings<DB> {
        &self.settings
    }

    /// The table's shape, looked at by the first call alone.
    pub(crate) async fn table(&self, limit: Instant) -> Result<&Table, Error> {
        let Settings { pool, time_limit, .. } = &self.settings;
        self.table.get_or_try_init(|| Table::read(pool, limit, *time_limit)).await
    }

    /// Asks for a key once, and never waits for another holder.
    ///
    /// One round trip where the row exists (see the README's table for the rest); the first call of a lock
    /// object looks at the table's shape as well.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] and [`Error::KeyTooLong`] before anything is sent; [`Error::TableMissing`] and its like
    /// say what to run; [`Error::Database`] and [`Error::TimedOut`] say whether the key may have been taken.
    /// A database that fails never counts as a refusal.
    ///
    /// # Cancel safety
    /// Dropped while a claim is under way, it may leave the key taken until the lease ends.
    pub async fn try_acquire(&self, key: &str) -> Result<Attempt<DB>, Error> {
        let key = Key::new(key)?;
        Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let limit = Instant::now() + self.settings.time_limit;
        self.table(limit).await?.admits(&key, &self.settings.terms.label)?;
        let attempt = Try { lock: self, ask: Ask { key, holder: Holder::unique() }, limit, unanswered: false };
        let attempt = attempt.run().await?;
        match &attempt {
            Attempt::Acquired(lease) => {
                tracing::info!(key = %lease.key(), token = %lease.token(), taken_over_from = ?lease.taken_over_from(), "acquired");
            }
            Attempt::Refused(refusal) => {
                tracing::debug!(key = %refusal.key, reason = %refusal.reason, %refusal, "refused")
            }
        }
        Ok(attempt)
    }

    /// Runs `work` under the key, if it can be had: releases it as succeeded or failed by the work's result.
    ///
    /// The work is cancelled (its future is dropped) when the lease is lost; hand [`Lease::cancellation_token`] to the tasks
    /// that it spawns. Work that blocks its thread cannot be cancelled, and on a runtime of one thread it stops the renewals:
    /// put it into `spawn_blocking`, and let it look at [`Lease::is_held`]. A panic abandons the key.
    ///
    /// In a task of its own: `tokio::spawn({ let lock = lock.clone(); async move { lock.run("key", async |lease| { ... }).await } })`.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire). What happens after the start is told by [`Run`].
    ///
    /// # Cancel safety
    /// Dropped, it drops the work and abandons the key in the background: the next one may take over at once.
    pub async fn run<T, E, W>(&self, key: &str, work: W) -> Result<Run<T, E>, Error>
    where
        W: AsyncFnOnce(&Lease<DB>) -> Result<T, E>,
    {
        let lease = match self.try_acquire(key).await? {
            Attempt::Acquired(lease) => lease,
            Attempt::Refused(refusal) => return Ok(Run::Refused(refusal)),
        };
        let result = tokio::select! {
            biased;
            result = work(&lease) => result,
            () = lease.lost() => return Ok(Run::Lost(lease.claim().clone())),
        };
        let status = if result.is_ok() { Status::Succeeded } else { Status::Failed };
        let recorded = lease.release(status).await;
        Ok(Run::Ended { result, recorded })
    }

    /// Waits until all leases that were dropped have been abandoned, or have ended.
    ///
    /// Call it before the program ends, so that the next one need not wait for those leases to run out.
    /// Leases that are still held stay held.
    ///
    /// # Cancel safety
    /// Dropped, it stops waiting; nothing else changes.
    pub async fn shutdown(&self) {
        self.keeper.settled().await;
    }
}

/// One try: the same holder asks until there is an answer.
struct Try<'a, DB: Database> {
    lock: &'a LeaseLock<DB>,
    ask: Ask,
    limit: Instant,
    /// A claim was sent whose outcome is not known.
    unanswered: bool,
}

impl<DB: Database> Try<'_, DB> {
    async fn run(mut self) -> Result<Attempt<DB>, Error> {
        let terms = &self.lock.settings.terms;
        let mut busy_since = None;
        loop {
            let sent = Instant::now();
            let (row, now) = match self.claim().await {
                // The answer came so late that its lease is over; asked again, it begins anew.
                Ok(Answer::Granted { .. })
                    if sent.elapsed() >= self.lock.keeper.counted() && Instant::now() < self.limit =>
                {
                    self.unanswered = true;
                    continue;
                }
                Ok(Answer::Granted { token, prior }) => {
                    let claim = Claim { key: self.ask.key.clone(), holder: self.ask.holder, token };
                    let time_limit = self.lock.settings.time_limit;
                    let lease = Lease::begin(&self.lock.keeper, claim, prior, sent, time_limit);
                    // Dropped, it is abandoned.
                    return if lease.is_held() { Ok(Attempt::Acquired(lease)) } else { Err(self.too_late()) };
                }
                Ok(Answer::Seen { row, now }) => (row, now),
                Err(failure) => match failure.fault() {
                    Fault::Contention => {
                        if let Some(refusal) = self.busy(&mut busy_since, None).await? {
                            return Ok(Attempt::Refused(refusal));
                        }
                        continue;
                    }
                    // Sent, and no answer: the same holder asks again, and gets the same claim if it was granted.
                    Fault::Outage if Instant::now() < self.limit => {
                        self.unanswered = true;
                        pause(20..60).await;
                        continue;
                    }
                    _ => return Err(self.error(failure)),
                },
            };
            match judge(row.as_ref(), now, self.ask.holder, terms) {
                Verdict::Create => self.create().await?,
                Verdict::Refuse(reason, until) => {
                    let refusal = row.map(|row| Refusal::new(self.ask.key, reason, until, &row, now));
                    return refusal.map(Attempt::Refused).ok_or(Error::TableMissing);
                }
                Verdict::Acquire | Verdict::Same | Verdict::TakeOver => {
                    if let Some(refusal) = self.busy(&mut busy_since, row.as_ref()).await? {
                        return Ok(Attempt::Refused(refusal));
                    }
                }
            }
        }
    }

    async fn claim(&self) -> Result<Answer, Failure> {
        let Settings { pool, terms, .. } = &self.lock.settings;
        let mut conn = Borrowed::checkout(pool, self.limit).await?;
        let reply = timeout_at(self.limit, DB::claim(conn.get(), std::slice::from_ref(&self.ask), terms)).await;
        let mut answers = conn.settle(reply)?;
        answers.pop().ok_or(Failure::NoReply)
    }

    /// Somebody else's create wins just as well; contention is met by asking again.
    async fn create(&self) -> Result<(), Error> {
        let Settings { pool, terms, .. } = &self.lock.settings;
        let mut conn = Borrowed::checkout(pool, self.limit).await.map_err(|failure| self.error(failure))?;
        // The server gives up a little earlier than this end, so that no backend goes on waiting there.
        let patience = self.limit.saturating_duration_since(Instant::now()).mul_f64(0.9);
        let reply = timeout_at(
            self.limit,
            DB::create(conn.get(), std::slice::from_ref(&self.ask.key), terms.minutes(), patience),
        )
        .await;
        match conn.settle(reply) {
            Err(failure)
                if matches!(failure.fault(), Fault::Contention | Fault::Outage) && Instant::now() < self.limit =>
            {
                pause(2..10).await;
            }
            Err(failure) => return Err(self.error(failure)),
            Ok(()) => {}
        }
        Ok(())
    }

    /// Waits a moment for whoever is at the row; after 100 ms of that, gives the refusal.
    ///
    /// Not while an earlier request of this try has no answer: the row may be its own.
    async fn busy(&self, since: &mut Option<Instant>, row: Option<&Row>) -> Result<Option<Refusal>, Error> {
        let now = Instant::now();
        let since = *since.get_or_insert(now);
        if now < self.limit && (self.unanswered || now < since + PATIENCE) {
            pause(2..10).await;
            return Ok(None);
        }
        if self.unanswered {
            return Err(self.too_late());
        }
        Ok(Some(Refusal {
            key: self.ask.key.clone(),
            reason: Reason::Busy,
            by: row.map(|row| row.client_ip.clone()).unwrap_or_default(),
            since: row.and_then(|row| row.begin_time),
            until: None,
            retry_after: Some(PATIENCE),
        }))
    }

    fn too_late(&self) -> Error {
        self.error(Failure::NoReply)
    }

    fn error(&self, failure: Failure) -> Error {
        let before = if self.unanswered { Certainty::Unknown } else { Certainty::NothingChanged };
        failure.into_error(
            Action::Acquire,
            format!("{:?}", self.ask.key.as_str()),
            self.lock.settings.time_limit,
            before,
        )
    }
}

async fn pause(millis: std::ops::Range<u64>) {
    sleep(Duration::from_millis(fastrand::u64(millis))).await;
}
