//! A term of office.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, PreviousClaim, Token},
    lease::{guard::Lease, held::Held},
    store::Database,
};

/// A term of this instance as the leader, which lasts until it resigns or the lease is lost.
///
/// Dropping it abandons the lease, and another instance takes over after the
/// [`lock_delay`](crate::LeaseLock::lock_delay).
///
/// ```
/// # async fn follow() {}
/// # async fn example(lock: rowlock::LeaseLock<impl rowlock::Database>) -> Result<(), rowlock::Error> {
/// let election = lock.election("indexer");
/// let leadership = election.campaign().await?; // waits for this instance's turn
/// tokio::select! {
///     () = follow() => {}
///     () = leadership.lost() => println!("term {} is over", leadership.term()),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Leadership<DB: Database> {
    lease: Lease<DB>,
    stop: CancellationToken,
}

impl<DB: Database> Leadership<DB> {
    pub(crate) fn new(lease: Lease<DB>) -> Self {
        let stop = lease.cancellation_token();
        Self { lease, stop }
    }

    /// Returns the number of the term: the fencing token, which is higher than that of any earlier
    /// term.
    pub fn term(&self) -> Token {
        self.lease.token()
    }

    /// Returns the claim, which a transaction can [confirm](crate::ResourceLock::confirm).
    pub fn claim(&self) -> &Claim {
        self.lease.claim()
    }

    /// Returns a view of the term for the work.
    pub fn held(&self) -> Held {
        self.lease.held()
    }

    /// Returns whether this instance still leads, as [`Lease::is_held`] does.
    pub fn is_held(&self) -> bool {
        self.lease.is_held()
    }

    /// Returns for how long this instance leads if no renewal succeeds, as [`Lease::time_left`]
    /// does.
    pub fn time_left(&self) -> Duration {
        self.lease.time_left()
    }

    /// Returns the lease, to end it explicitly. The tokens that were made before are cancelled when
    /// it ends or is lost.
    pub fn into_lease(self) -> Lease<DB> {
        self.lease
    }

    /// Returns the claim of the leader before, if it crashed. Its work may be half done.
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.lease.taken_over_from()
    }

    /// Whether this instance leads, and the work has not been told of a loss either, which may come
    /// a moment before the lease counts as lost.
    pub(crate) fn goes_on(&self) -> bool {
        self.is_held() && !self.stop.is_cancelled()
    }

    /// Waits until the leadership is lost, as [`Lease::lost`] does.
    ///
    /// # Cancel safety
    /// No state is lost if the future is dropped.
    pub async fn lost(&self) {
        self.lease.lost().await;
    }

    /// Returns a token to pass to the tasks of the work. It is cancelled when the leadership is
    /// lost, when [`resign`](Self::resign) begins, and when the leadership is dropped.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.stop.child_token()
    }

    /// Asks the work to stop, waits until it has stopped, and then frees the key for the next
    /// leader. `work` is the handle of the work, such as a `JoinHandle`. The lease is renewed until
    /// then, so that no other instance leads while this one still works.
    ///
    /// Returns the result of the work, and whether the key was freed. If it was not, the next
    /// leader waits until the lease ends.
    ///
    /// # Cancel safety
    /// If the future is dropped, the leadership is dropped. A detached task, whose `JoinHandle` was
    /// passed, may then still work while the next instance leads; see
    /// [`lock_delay`](crate::LeaseLock::lock_delay).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// let leadership = lock.election("indexer").campaign().await?;
    /// let stop = leadership.cancellation_token();
    /// let work = tokio::spawn(async move {
    ///     stop.cancelled().await; // finish what was begun
    ///     7
    /// });
    /// let (result, freed) = leadership.resign(work).await;
    /// assert_eq!(result?, 7);
    /// freed?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn resign<T>(self, work: impl Future<Output = T>) -> (T, Result<(), Error>) {
        self.stop.cancel();
        let result = work.await;
        (result, self.lease.release().await)
    }
}
