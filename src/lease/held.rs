//! What work sees of the lease under which it runs.

use std::{
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use crate::{
    key::{Claim, Key, PreviousClaim, Token},
    lease::state::LeaseState,
};

/// A view of a lease for the work that runs under it. Cloning it is cheap. Dropping it does not end
/// the lease.
///
/// [`LeaseLock::run`](crate::LeaseLock::run) and [`Election::lead`](crate::Election::lead) pass it
/// to the work; [`Lease::held`](crate::Lease::held) returns one.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use std::time::Duration;
///
/// let ran = lock.run("report", Duration::ZERO, async |held| {
///     println!("{} under token {}", held.key(), held.token());
///     let stop = held.cancellation_token(); // for the tasks that the work spawns
///     tokio::spawn(async move { stop.run_until_cancelled(step()).await }).await
/// });
/// ran.await?;
/// # async fn step() {}
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Held {
    claim: Claim,
    prior: Option<PreviousClaim>,
    writer_token: Option<Token>,
    /// The state ends with its handles.
    state: Weak<LeaseState>,
    lost: CancellationToken,
    over: CancellationToken,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("claim", &self.claim).field("time_left", &self.time_left()).finish()
    }
}

impl Held {
    pub(crate) fn new(
        state: &Arc<LeaseState>,
        claim: &Claim,
        prior: Option<&PreviousClaim>,
        writer_token: Option<Token>,
    ) -> Self {
        Self {
            claim: claim.clone(),
            prior: prior.cloned(),
            writer_token,
            state: Arc::downgrade(state),
            lost: state.lost.clone(),
            over: state.over.clone(),
        }
    }

    /// Returns the claim: key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Returns the key.
    pub fn key(&self) -> &Key {
        &self.claim.key
    }

    /// Returns the fencing token, as [`Lease::token`](crate::Lease::token) does.
    pub fn token(&self) -> Token {
        self.claim.token
    }

    /// Returns the token by which a reader's work is fenced, as
    /// [`Lease::writer_token`](crate::Lease::writer_token) does.
    pub fn writer_token(&self) -> Option<Token> {
        self.writer_token
    }

    /// Returns the claim that this one took over from, if its holder did not end it. That holder's
    /// work may be half done.
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.prior.as_ref()
    }

    /// Returns whether the lease is known to be held at this moment, as
    /// [`Lease::is_held`](crate::Lease::is_held) does. It is `false` once the lease has ended.
    pub fn is_held(&self) -> bool {
        !self.time_left().is_zero()
    }

    /// Returns how long the lease is certain to be held unless it is renewed; zero once it is lost
    /// or has ended.
    pub fn time_left(&self) -> Duration {
        let state = self.state.upgrade().filter(|_| !self.over.is_cancelled());
        state.map_or(Duration::ZERO, |state| state.time_left())
    }

    /// Waits until the lease is lost, as [`Lease::lost`](crate::Lease::lost) does. It does not
    /// complete if the lease ends in another way.
    ///
    /// # Cancel safety
    /// No state is lost if the future is dropped.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Returns a token to pass to the tasks of the work. It is cancelled when the lease is lost,
    /// and when it ends in any other way.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.over.child_token()
    }
}
