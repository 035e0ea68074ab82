//! The pessimistic lock: asks for keys, and runs work under them.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    error::{Action, Certainty, Error},
    fault::Fault,
    fence,
    keeper::Keeper,
    key::{Claim, Holder, Key},
    lease::Lease,
    lock::{Answering, Attempt, Grant, Order, Receipt, ResourceLock, Settled},
    migrate::Table,
    retry::Retry,
    rules::{Reason, Refusal, Row, Status, Verdict, judge},
    settings::Settings,
    store::{
        Answer, Ask, Database,
        borrowed::{Borrowed, Failure},
    },
    telemetry,
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
    pub async fn try_acquire(&self, key: &str) -> Result<Attempt<Lease<DB>>, Error> {
        let key = Key::new(key)?;
        Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let limit = Instant::now() + self.settings.time_limit;
        self.table(limit).await?.admits(&key, &self.settings.terms.label)?;
        let attempt = Try { lock: self, ask: Ask { key, holder: Holder::unique() }, limit, unanswered: false };
        let attempt = attempt.run().await?;
        match &attempt {
            Attempt::Acquired(lease) => {
                telemetry::acquired();
                tracing::info!(key = %lease.key(), token = %lease.token(), taken_over_from = ?lease.taken_over_from(), "acquired");
            }
            Attempt::Refused(refusal) => {
                telemetry::refused(refusal.reason);
                tracing::debug!(key = %refusal.key, reason = %refusal.reason, %refusal, "refused")
            }
        }
        Ok(attempt)
    }

    /// Takes up a claim again by the id of its holder: one that another process was granted, and [detached](Lease::detach).
    ///
    /// It is renewed, if it stands, even expired; nothing is acquired anew. Two round trips.
    ///
    /// # Errors
    /// [`Error::NotHeld`] or [`Error::Lost`] if the claim does not stand; otherwise as [`inspect`](Self::inspect) and [`Lease::renew`].
    ///
    /// # Cancel safety
    /// Dropped, the claim may have been prolonged; it is not abandoned.
    pub async fn resume(&self, key: &str, holder: Holder) -> Result<Lease<DB>, Error> {
        let entry = self.inspect(key).await?.filter(|entry| entry.holder == Some(holder));
        let key = Key::new(key)?;
        match entry {
            Some(entry) => {
                let claim = Claim { key, holder, token: entry.token };
                Lease::resume(&self.keeper, claim, self.settings.time_limit).await
            }
            None => Err(Error::NotHeld { key, holder }),
        }
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

impl<DB: Database> ResourceLock<DB> for LeaseLock<DB> {
    fn try_acquire<'a>(&'a self, key: &'a str) -> Answering<'a, Result<Attempt<Grant<DB>>, Error>> {
        Box::pin(async move {
            Ok(match LeaseLock::try_acquire(self, key).await? {
                Attempt::Acquired(lease) => Attempt::Acquired(lease.into()),
                Attempt::Refused(refusal) => Attempt::Refused(refusal),
            })
        })
    }

    fn confirm<'a>(&'a self, claim: &'a Claim, tx: &'a mut DB::Connection) -> Answering<'a, Result<Receipt, Error>> {
        Box::pin(fence::confirm::<DB>(claim, tx, self.settings.time_limit))
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> Answering<'_, Result<(), Error>> {
        Box::pin(async move {
            let Claim { key, token, .. } = grant.claim().clone();
            match grant.into_lease() {
                Some(lease) => lease.release(status).await,
                None => Err(Error::Lost { key, token }),
            }
        })
    }

    fn settle<'a>(&'a self, claim: &'a Claim, receipt: Receipt) -> Answering<'a, Settled> {
        Box::pin(fence::settle(&self.settings.pool, claim, receipt, self.settings.time_limit))
    }

    fn order(&self) -> Order {
        Order::First
    }

    fn retry(&self) -> Retry {
        self.settings.retry
    }

    fn time_limit(&self) -> Duration {
        self.settings.time_limit
    }

    fn pool(&self) -> &Pool<DB> {
        &self.settings.pool
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
    async fn run(mut self) -> Result<Attempt<Lease<DB>>, Error> {
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
