//! Observing who leads.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use chrono::{DateTime, Utc};
use futures_core::Stream;

use crate::{
    error::Error,
    key::{Key, Token},
    lease::lock::LeaseLock,
    lock::BoxFuture,
    pacing::{Backoff, retry_backoff},
    queue::releases::Releases,
    session::{time::Instant, timers::sleep},
    store::{Database, admin::Listed},
};

/// The instance that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Leader {
    /// The number of the term: the fencing token.
    pub term: Token,
    /// The label of the instance.
    pub label: String,
    /// When the term began, on the database's clock.
    pub since: Option<DateTime<Utc>>,
    /// Until when the key is closed to others, as of the last read: the end of the lease and of the
    /// lock-delay. The leader renews it before that.
    pub until: Option<DateTime<Utc>>,
}

/// Derives the leader from the row of the election. The row does not tell which part of the time is
/// the leader's lock-delay.
fn leader(listed: Option<&Listed>) -> Option<Leader> {
    let Listed { row, now, .. } = listed.filter(|listed| listed.row.is_rowlocks())?;
    let until = row.expires_at;
    let leads = until.is_none_or(|end| *now < end);
    let (term, label) = (Token::new(row.token), row.client_ip.clone());
    leads.then_some(Leader { term, label, since: row.begin_time, until })
}

/// The leaders of an election, one after another: a `Stream` that does not end.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// let election = lock.election("indexer");
/// let mut leaders = election.observe();
/// assert_eq!(leaders.next().await?, None);
///
/// let leadership = election.campaign().await?;
/// let leader = leaders.next().await?.expect("this instance leads");
/// assert_eq!(leader.term, leadership.term());
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is read until it is polled"]
pub struct Leaders<DB: Database>(BoxFuture<'static, (Change, Observer<DB>)>);

type Change = Result<Option<Leader>, Error>;

impl<DB: Database> std::fmt::Debug for Leaders<DB> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leaders").finish_non_exhaustive()
    }
}

impl<DB: Database> Leaders<DB> {
    pub(crate) fn new(lock: LeaseLock<DB>, name: Key) -> Self {
        let names = [name].into();
        let releases = Releases::of(&lock.shared.listener, &names);
        let pauses = retry_backoff();
        let observer = Observer { lock, names, seen: None, releases, pauses };
        Self(Box::pin(observer.next()))
    }

    /// Waits for the next change, as the stream does.
    ///
    /// # Errors
    /// As [`LeaseLock::inspect`], for failures that do not pass by themselves. The next call reads
    /// again.
    ///
    /// # Cancel safety
    /// No change is lost if the future is dropped.
    pub async fn next(&mut self) -> Result<Option<Leader>, Error> {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Change> {
        let (change, observer) = ready!(self.0.as_mut().poll(cx));
        self.0 = Box::pin(observer.next());
        Poll::Ready(change)
    }
}

impl<DB: Database> Stream for Leaders<DB> {
    type Item = Result<Option<Leader>, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll(cx).map(Some)
    }
}

struct Observer<DB: Database> {
    lock: LeaseLock<DB>,
    /// The name of the election alone.
    names: Arc<[Key]>,
    /// The term that was returned last, if any term was.
    seen: Option<Option<Token>>,
    releases: Releases<DB>,
    pauses: Backoff,
}

impl<DB: Database> Observer<DB> {
    async fn next(mut self) -> (Change, Self) {
        loop {
            match self.lock.read(&self.names[0]).await {
                Ok(listed) => {
                    let leader = leader(listed.as_ref());
                    let term = leader.as_ref().map(|leader| leader.term);
                    if self.seen.replace(term) != Some(term) {
                        self.pauses = retry_backoff();
                        return (Ok(leader), self);
                    }
                    self.pause(listed, leader).await;
                }
                Err(error) if error.is_retryable() => {
                    tracing::debug!(%error, "the leader could not be read; trying again");
                    sleep(self.pauses.next()).await;
                }
                Err(error) => {
                    // The next call reads again, and not in a tight loop.
                    sleep(self.pauses.next()).await;
                    return (Err(error), self);
                }
            }
        }
    }

    /// Waits for a notification, up to the next read: not past the end of the leader's lease.
    async fn pause(&mut self, listed: Option<Listed>, leader: Option<Leader>) {
        let mut pause = self.pauses.next();
        if let (Some(Listed { row, now, .. }), Some(leader)) = (listed, leader) {
            let unmarked: &[Key] = if row.awaited { &[] } else { &self.names };
            if self.releases.request(&self.lock.shared.sessions, unmarked, None).await {
                return; // it resigned
            }
            let left = leader.until.and_then(|until| (until - now).to_std().ok());
            pause = left.map_or(pause, |left| pause.min(left));
        }
        self.releases.notified_before(Instant::now() + pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        rules::Row,
        rules_tests::{at, held},
    };

    fn listed(locked: bool, expires_at: i64, now: i64) -> Listed {
        let row = Row { locked, token: 9, ..held(7, Some(expires_at)) };
        Listed { key: "indexer".into(), row, end_time: None, now: at(now) }
    }

    #[test]
    fn an_instance_leads_until_its_key_is_open_to_others() {
        let leads = |listed: Listed| leader(Some(&listed)).map(|leader| leader.term.get());
        assert_eq!(leads(listed(true, 40, 39)), Some(9));
        assert_eq!(leads(listed(true, 40, 40)), None);
        assert_eq!(leads(listed(false, 40, 39)), None);
        assert_eq!(leader(None), None);
    }
}
