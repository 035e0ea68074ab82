//! The tick that is passed to the work.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::{Claim, PreviousClaim, Token},
    lock::ResourceLock as _,
    rules::Status,
    schedule::{
        core::{Core, answered},
        plan::{self, Row, Then},
        spec::Schedule,
    },
    session::{
        time::Instant,
        timers::{timeout, timeout_at},
    },
    store::{
        Database,
        failure::Failure,
        fault::Fault,
        schedule::{ClaimedRow, End, Times, is_trigger},
    },
    transaction::in_transaction,
};

/// The most bytes of an output that the history keeps.
const OUTPUT: usize = 64 * 1024;
/// The most characters of a note.
const NOTE: usize = 255;

/// Sets what a run says of itself.
pub(super) async fn note<DB: Database>(core: &Core<DB>, claim: &Claim, text: &str) -> Result<(), Error> {
    let text: String = text.chars().filter(|c| !c.is_control()).take(NOTE).collect();
    answered!(core, Action::Update, &claim.key.quoted(), conn => DB::set_note(conn, claim, &text))
}

/// A tick of a schedule, as one run of it sees it. It is cheap to clone.
///
/// ```
/// # async fn ready() -> bool { true }
/// # async fn example<DB: rowlock::Database>(tick: rowlock::Tick<DB>) {
/// if let Some(lost) = tick.taken_over_from() {
///     println!("the run of {} may be half done", lost.label);
/// }
/// let stop = tick.cancellation_token();
/// while !stop.is_cancelled() && !ready().await {}
/// println!("{} of {}, token {}", tick.name(), tick.slot(), tick.token());
/// # }
/// ```
pub struct Tick<DB: Database>(Arc<Inner<DB>>);

pub(super) struct Inner<DB: Database> {
    pub core: Arc<Core<DB>>,
    pub schedule: Arc<Schedule>,
    pub times: Times,
    pub claim: Claim,
    pub row: Row,
    previous: Option<PreviousClaim>,
    /// The database's time of the claim, and the instant at which it was sent.
    claimed: (DateTime<Utc>, Instant),
    /// The database's time at which the work begins: after the wait for its key.
    begins: DateTime<Utc>,
    /// Cancelled when the run is over, or its work is to stop.
    over: CancellationToken,
    exclusive: Option<Claim>,
    /// What goes on after the work was dropped.
    going_on: TaskTracker,
    in_transaction: watch::Sender<InTransaction>,
    /// Held by the transaction that is to end the tick, until it is over.
    alone: Mutex<()>,
    /// An operator has stopped the tick.
    stopped: AtomicBool,
    output: OnceLock<Vec<u8>>,
    /// Whether the end of the run is recorded. It is not, if the sender is gone before.
    recorded: watch::Receiver<bool>,
}

/// What is known of transactions that end the tick.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InTransaction {
    /// There was none.
    None,
    /// The history shows whether one was committed.
    Tried,
    /// One is being committed.
    Committing,
    Committed,
}

impl<DB: Database> Inner<DB> {
    /// Returns the database's time, by this machine's clock since the claim.
    pub fn now(&self) -> DateTime<Utc> {
        self.claimed.0 + self.claimed.1.elapsed()
    }

    /// Tells the work's tasks to stop.
    pub fn cancel(&self) {
        self.over.cancel();
    }

    /// Records that an operator has stopped the tick: it is not run again.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Waits for what goes on although the work has ended or was dropped.
    pub async fn quiet(&self) {
        self.going_on.close();
        self.going_on.wait().await;
    }

    pub fn in_transaction(&self) -> InTransaction {
        *self.in_transaction.borrow()
    }

    pub fn set_in_transaction(&self, state: InTransaction) {
        // After a commit, no other transaction ends the tick.
        self.in_transaction.send_if_modified(|now| {
            let changes = *now != InTransaction::Committed;
            if changes {
                *now = state;
            }
            changes
        });
    }

    /// Waits, up to this time, until no other transaction of the work is to end the tick.
    pub async fn alone(&self, within: Duration) -> Result<MutexGuard<'_, ()>, Error> {
        timeout(within, self.alone.lock()).await.map_err(|_| Error::conflict(self.claim.key.clone(), 1))
    }

    /// Records that a transaction that was being committed is over, or was given up.
    pub fn end_committing(&self) {
        if self.in_transaction() == InTransaction::Committing {
            self.set_in_transaction(InTransaction::Tried);
        }
    }

    /// Waits while a transaction that ends the tick is being committed.
    pub async fn not_committing(&self) {
        // The sender is this one.
        drop(self.in_transaction.subscribe().wait_for(|now| *now != InTransaction::Committing).await);
    }

    /// Returns the error of a run that lost its lease, or has ended.
    pub fn lost(&self) -> Error {
        Error::Lost { key: self.claim.key.clone(), token: self.claim.token }
    }

    /// Ends the tick, as succeeded, as the last part of the transaction that is open on `tx`.
    pub async fn end_in(&self, tx: &mut DB::Connection) -> Result<(), Error> {
        if let Some((claim, lock)) = self.exclusive.as_ref().zip(self.core.lock_of(&self.schedule)) {
            lock.confirm_within(claim, tx).await?;
        }
        let end = self.end(Status::Succeeded, None);
        let failure = match timeout_at(self.core.limit(), DB::end_run(tx, &self.claim, &end, true)).await {
            Ok(Ok(true)) => return Ok(()),
            Ok(Ok(false)) => return Err(self.lost()),
            Ok(Err(error)) => Failure::Failed(error),
            Err(_) => Failure::NoReply,
        };
        let key = &self.claim.key;
        if failure.fault() == Fault::Contention {
            return Err(Error::conflict(key.clone(), 1));
        }
        Err(self.core.failed(failure, Action::Confirm, &key.quoted(), Certainty::NothingChanged))
    }

    /// Returns the end of the run.
    pub fn end<'a>(&'a self, status: Status, error: Option<&'a str>) -> End<'a> {
        let row = Row { stopped: self.stopped.load(Ordering::Relaxed), ..self.row.clone() };
        let (next, pause) = match plan::end(&self.schedule, &row, status, self.now()) {
            Then::Next(next) => (Some(next), chrono::TimeDelta::zero()),
            Then::Again(pause) => (None, pause),
        };
        let (status, output) = (status.letter(), self.output.get().map(Vec::as_slice));
        let Row { slot, attempt, missed, .. } = row;
        End { times: &self.times, slot, attempt, missed, status, error, next, pause, output }
    }
}

impl<DB: Database> Tick<DB> {
    pub(super) fn new(
        core: Arc<Core<DB>>,
        schedule: Arc<Schedule>,
        (claimed, sent): (ClaimedRow, Instant),
        row: Row,
        exclusive: Option<Claim>,
        recorded: watch::Receiver<bool>,
    ) -> Self {
        let times = schedule.times();
        let begins = claimed.now + sent.elapsed();
        let (claim, previous, claimed) = (claimed.claim, claimed.lost, (claimed.now, sent));
        let stopped = AtomicBool::new(row.stopped);
        let (over, in_transaction) = (CancellationToken::new(), watch::Sender::new(InTransaction::None));
        Self(Arc::new(Inner {
            core,
            schedule,
            times,
            claim,
            row,
            previous,
            claimed,
            begins,
            over,
            exclusive,
            going_on: TaskTracker::new(),
            in_transaction,
            alone: Mutex::default(),
            stopped,
            output: OnceLock::new(),
            recorded,
        }))
    }

    pub(super) fn inner(&self) -> &Arc<Inner<DB>> {
        &self.0
    }

    /// Returns the schedule's name.
    pub fn name(&self) -> &str {
        self.0.claim.key.as_str()
    }

    /// Returns the time of the tick. For a triggered run, this is the time of the trigger.
    pub fn slot(&self) -> DateTime<Utc> {
        self.0.row.slot
    }

    /// Returns the number of this attempt at the tick, from 1.
    pub fn attempt(&self) -> u32 {
        self.0.row.attempt
    }

    /// Returns how many earlier ticks were not run, for which this one stands. Of a cron pattern,
    /// 10,000 and more means at least as many.
    pub fn missed(&self) -> u32 {
        self.0.row.missed
    }

    /// Returns whether the run was requested with
    /// [`Schedules::trigger`](crate::Schedules::trigger), in addition to the ticks.
    pub fn is_triggered(&self) -> bool {
        is_trigger(self.0.row.slot)
    }

    /// Returns whether the work began later than the schedule's [grace](crate::Schedule::grace)
    /// after the tick: since no instance had claimed it, or since the run waited for its
    /// [key](crate::Schedule::exclusive_with).
    pub fn is_late(&self) -> bool {
        self.0.begins - self.0.row.slot > self.0.schedule.grace
    }

    /// Returns the fencing token of this run. It grows with every run of the schedule.
    pub fn token(&self) -> Token {
        self.0.claim.token
    }

    /// Returns the run that this one took over from, whose process died or stopped. Its token is
    /// that of the last claim, under which an instance may have stopped before any work began.
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.0.previous.as_ref()
    }

    /// Returns the claim of the key that the run holds as well
    /// ([`Schedule::exclusive_with`](crate::Schedule::exclusive_with)). Its token fences what the
    /// key guards.
    pub fn exclusive_claim(&self) -> Option<&Claim> {
        self.0.exclusive.as_ref()
    }

    /// Returns a token for tasks that the work spawns. It is cancelled at the moment at which the
    /// run loses its lease or its key, takes longer than its timeout or is stopped, and when the
    /// work has ended. The work is dropped at the same moment; if the commit of a
    /// [`transaction`](Self::transaction) is in flight at a loss, it is waited for at most until
    /// the lease ends.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.0.over.child_token()
    }

    /// Returns a guard for something that takes time to stop after the work was dropped, a process
    /// for instance. Until it is dropped, the run keeps the leases that it still has.
    #[doc(hidden)]
    pub fn going_on(&self) -> impl Send + Sync + 'static + use<DB> {
        self.0.going_on.token()
    }

    /// Waits until the run is over, and returns whether its end is recorded: it was not lost, or
    /// handed back. For what follows the end; the work would wait for itself.
    #[doc(hidden)]
    pub fn recorded(&self) -> impl Future<Output = bool> + Send + 'static + use<DB> {
        let mut recorded = self.0.recorded.clone();
        async move { recorded.wait_for(|is_recorded| *is_recorded).await.is_ok() }
    }

    /// Sets the note that operators see while the run is under way, such as its progress. It
    /// replaces an earlier note. At most 255 characters are kept.
    ///
    /// # Errors
    /// [`Error::Database`]. The run goes on.
    ///
    /// # Cancel safety
    /// If the future is dropped, the text may be shown.
    ///
    /// # Examples
    /// ```
    /// # async fn example<DB: rowlock::Database>(tick: rowlock::Tick<DB>) -> Result<(), rowlock::Error> {
    /// for (number, customer) in ["a", "b"].iter().enumerate() {
    ///     tick.note(&format!("customer {number} of 2: {customer}")).await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn note(&self, text: &str) -> Result<(), Error> {
        let tick = &*self.0;
        note(&tick.core, &tick.claim, text).await
    }

    /// Returns whether an operator has [stopped](crate::Schedules::stop) the tick. The work is
    /// dropped then, and the tick is not run again.
    pub fn is_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Relaxed)
    }

    /// Keeps the last 64 KiB of the output with the run's row in the history, until that row is
    /// deleted. Only the first call has an effect. A run that is lost or handed back keeps nothing.
    ///
    /// ```
    /// # async fn example<DB: rowlock::Database>(tick: rowlock::Tick<DB>) {
    /// tick.keep_output(b"12 customers, 3 without an address".to_vec());
    /// # }
    /// ```
    pub fn keep_output(&self, mut output: Vec<u8>) {
        output.drain(..output.len().saturating_sub(OUTPUT));
        // Another call was first.
        let _ = self.0.output.set(output);
    }

    /// Makes the tick end, as succeeded, with the commit of the transaction that is open on `tx`.
    /// The work and its tick are then committed together: exactly once. A key that the run holds as
    /// well is confirmed by the same commit.
    ///
    /// For work that has a transaction of its own. [`transaction`](Self::transaction) begins one,
    /// repeats it after contention, and resolves a COMMIT without a reply.
    ///
    /// It is the last statement of the transaction. The work then commits, and returns. If it does
    /// not commit, the run counts as failed. Work that goes on after the commit is dropped when the
    /// lease is to be renewed the next time, because the commit has ended it. A run that loses its
    /// lease is dropped at once, also while its commit is in flight; the history then shows whether
    /// the tick has ended.
    ///
    /// It asks the database whether the connection is in a transaction. The server ends one by
    /// itself after a deadlock (MySQL, MariaDB), with a statement that commits implicitly (DDL),
    /// and on SQLite after `OR ROLLBACK`. It cannot detect that the work, or one of its statements,
    /// has begun another transaction since. The tick then succeeds with the second part of the work
    /// alone. So the work rolls back after each error of the database.
    ///
    /// # Errors
    /// After any error the transaction has to be rolled back. [`Error::Transaction`] if the
    /// transaction has ended. [`Error::Lost`] if the run lost its lease or its key: another
    /// instance has the tick, or another holder the key. [`Error::Lost`] is also returned if the
    /// tick has ended: an earlier transaction was committed, perhaps without a reply.
    /// [`Error::Conflict`] if another transaction used the row. A renewal of the lease uses it,
    /// after each third of the lease. [`Error::Conflict`] is also returned while a
    /// [`transaction`](Self::transaction) of the tick is under way. A transaction
    /// under REPEATABLE READ or SERIALIZABLE on PostgreSQL, or one that begins by reading on
    /// SQLite, has to commit before the next renewal. [`Error::Invalid`] if the connection is in no
    /// transaction, [`Error::Database`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the transaction has to be rolled back.
    ///
    /// # Examples
    /// ```
    /// # async fn report(tick: rowlock::Tick<sqlx::Sqlite>, pool: sqlx::SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?; // SQLite; otherwise pool.begin()
    /// sqlx::query("INSERT INTO report (day) VALUES (?)").bind(tick.slot()).execute(&mut *tx).await?;
    /// tick.finish_in(&mut tx).await?;
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn finish_in(&self, tx: &mut DB::Connection) -> Result<(), Error> {
        let tick = &*self.0;
        let key = &tick.claim.key;
        let _alone = tick.alone.try_lock().map_err(|_| Error::conflict(key.clone(), 1))?;
        in_transaction::<DB>(tx, key, tick.core.time_limit).await?;
        tick.set_in_transaction(InTransaction::Tried);
        tick.end_in(tx).await
    }
}

impl<DB: Database> Clone for Tick<DB> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<DB: Database> fmt::Debug for Tick<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tick").field("name", &self.name()).field("row", &self.0.row).finish_non_exhaustive()
    }
}
