//! Campaigning for the leadership, and leading.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use crate::{
    election::{leaders::Leaders, leadership::Leadership},
    error::Error,
    key::Key,
    lease::{
        held::Held,
        lock::{LeaseLock, PAUSES},
    },
    pacing::Backoff,
    session::time::Instant,
    store::Database,
    sync::lock,
};

/// An election of one leader among the instances that campaign under one name.
///
/// The leader is the holder of the key of that name, and its term is the fencing token. A leader
/// that crashes is replaced when its lease ends, one that resigns at once. Set a
/// [`lock_delay`](LeaseLock::lock_delay) if the work of a leader needs a moment to stop after a
/// loss.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// let election = lock.election("indexer");
/// let indexed = election.lead(async |held| {
///     println!("leading in term {}", held.token());
///     7 // returning is resigning
/// });
/// assert_eq!(indexed.await?, 7);
/// # Ok(())
/// # }
/// ```
pub struct Election<DB: Database> {
    lock: LeaseLock<DB>,
    name: Key,
    /// The last term that was won through this value or a clone of it.
    term: Arc<Mutex<Option<Held>>>,
}

impl<DB: Database> Clone for Election<DB> {
    fn clone(&self) -> Self {
        Self { lock: self.lock.clone(), name: self.name.clone(), term: self.term.clone() }
    }
}

impl<DB: Database> fmt::Debug for Election<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election").field("name", &self.name).field("is_leader", &self.is_leader()).finish()
    }
}

impl<DB: Database> LeaseLock<DB> {
    /// Returns an election on the terms of this handle. Nothing is sent. A name that is no key is
    /// reported by the first call.
    pub fn election(&self, name: &str) -> Election<DB> {
        let mut lock = self.clone();
        let name = Key::checked(name, &mut lock.faults);
        Election { lock, name, term: Arc::default() }
    }
}

impl<DB: Database> Election<DB> {
    /// Returns the name: the key that the leader holds.
    pub fn name(&self) -> &Key {
        &self.name
    }

    /// Returns whether this instance leads at this moment: the last campaign of this value, or of a
    /// clone of it, was won, and its lease is held.
    pub fn is_leader(&self) -> bool {
        lock(&self.term).as_ref().is_some_and(Held::is_held)
    }

    /// Waits until this instance is the leader, through outages of the database.
    ///
    /// A database that becomes read-only while the instance campaigns is waited for as well: it may
    /// be about to hand its work to another server.
    ///
    /// # Errors
    /// As [`LeaseLock::acquire`], for failures that do not pass by themselves.
    ///
    /// # Cancel safety
    /// As [`LeaseLock::acquire`].
    pub async fn campaign(&self) -> Result<Leadership<DB>, Error> {
        self.campaign_since(Instant::now()).await
    }

    /// Campaigns, for an instance that takes part in the election since that instant.
    async fn campaign_since(&self, since: Instant) -> Result<Leadership<DB>, Error> {
        self.lock.check()?;
        let goes_on = |error: &Error| match error {
            // Refused for longer than a wait can last.
            Error::Refused(_) => true,
            // An instance whose first requests find a read-only database may have been given the
            // wrong one.
            error if error.is_of_a_failover() && since.elapsed() > PAUSES.1 => {
                tracing::warn!(name = %self.name, %error, "no leader can be elected; trying again");
                true
            }
            _ => false,
        };
        let lease = self.lock.acquire_while(&self.name, goes_on).await?;
        *lock(&self.term) = Some(lease.held());
        tracing::info!(name = %self.name, term = %lease.token(), "leading");
        Ok(Leadership::new(lease))
    }

    /// Leads: campaigns, runs `work` as the leader, and resigns when it returns. If the leadership
    /// is lost, the work is dropped at its next await, and the campaign begins again. Returns the
    /// result of the work that still led when it returned.
    ///
    /// The work may run several times; each term calls a clone of it. Work that returns because the
    /// leadership is lost is run again. [`Held::cancellation_token`] reports the loss to the work
    /// and to the tasks that it spawns.
    ///
    /// # Errors
    /// As [`campaign`](Self::campaign).
    ///
    /// # Cancel safety
    /// If the future is dropped, the work is dropped and the leadership is abandoned.
    pub async fn lead<T, W, F>(&self, work: W) -> Result<T, Error>
    where
        W: FnOnce(Held) -> F + Clone,
        F: Future<Output = T>,
    {
        let since = Instant::now();
        let mut pauses = Backoff::between(PAUSES.0, PAUSES.1);
        loop {
            let leadership = self.campaign_since(since).await?;
            let (began, term) = (Instant::now(), leadership.term());
            let result = match leadership.is_held() {
                true => tokio::select! {
                    biased;
                    result = work.clone()(leadership.held()) => Some(result),
                    () = leadership.lost() => None,
                },
                // The caller was polled long after the grant.
                false => None,
            };
            if let Some(result) = result
                && leadership.goes_on()
            {
                let (result, freed) = leadership.resign(std::future::ready(result)).await;
                if let Err(error) = freed {
                    tracing::warn!(name = %self.name, %term, %error, "resigned, but the key is not free yet");
                }
                return Ok(result);
            }
            tracing::warn!(name = %self.name, %term, "stepped down: the leadership was lost");
            drop(leadership);
            // A term that lasted was no failure to lead.
            if began.elapsed() > PAUSES.1 {
                pauses = Backoff::between(PAUSES.0, PAUSES.1);
            }
            pauses.pause(PAUSES.1).await;
        }
    }

    /// Returns the leaders, one after another: first the one that leads when the stream is first
    /// polled, then each change, `None` while no instance leads. It does not campaign.
    ///
    /// A resignation is notified within this process and, on PostgreSQL and SQLite, to other
    /// processes. All other changes are read from the database, at intervals of up to one second. A
    /// leader that was replaced between two reads is left out.
    pub fn observe(&self) -> Leaders<DB> {
        Leaders::new(self.lock.clone(), self.name.clone())
    }
}
