//! The ways of locking that are compared, one file each.

pub mod advisory;
pub mod article;
pub mod etcd;
pub mod functions;
pub mod limit;
pub mod program;
pub mod redis;
pub mod rowlock;
pub mod single;

use std::{future::Future, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    contest::{Contender, Cycling, Ending, Round},
    error::Error,
    statistics::{Summary, now, ratio},
};

/// The label of this client in the locks.
pub const CLIENT: &str = "rowlock-bench";

/// The task that asks, and the key.
pub struct Ask<'a> {
    pub task: usize,
    pub key: &'a str,
}

/// A way of locking.
pub trait Lock: Send + Sync + 'static {
    type Held: Send + 'static;

    /// Asks once. `None` if another client holds the key.
    fn acquire(&self, ask: &Ask<'_>) -> impl Future<Output = Result<Option<Self::Held>, Error>> + Send;

    fn release(&self, ask: &Ask<'_>, held: Self::Held) -> impl Future<Output = Result<(), Error>> + Send;
}

/// A prefix for the keys on servers where a run has no database of its own.
pub fn own_prefix() -> String {
    format!("rowlock_bench/{}", uuid::Uuid::new_v4().simple())
}

/// Picks the key of a task, or one of many keys at random.
pub type Pick = Box<dyn Fn(usize) -> String + Send + Sync>;

/// Acquires and releases.
struct Cycle<L> {
    lock: L,
    key: Pick,
}

pub fn cycle<L: Lock>(lock: L, key: Pick) -> Arc<dyn Contender> {
    Arc::new(Cycle { lock, key })
}

impl<L: Lock> Contender for Cycle<L> {
    fn cycle(&self, task: usize) -> Cycling<'_> {
        Box::pin(async move {
            let key = (self.key)(task);
            let ask = Ask { task, key: &key };
            let held = self.lock.acquire(&ask).await?.ok_or_else(|| format!("{key} is not free"))?;
            self.lock.release(&ask, held).await?;
            Ok(1)
        })
    }
}

/// Acquires and releases, by one task. Only the claims are timed.
struct Claim<L> {
    lock: L,
    key: &'static str,
}

pub fn claim<L: Lock>(lock: L, key: &'static str) -> Arc<dyn Contender> {
    Arc::new(Claim { lock, key })
}

impl<L: Lock> Claim<L> {
    /// Returns how many nanoseconds the claim took.
    async fn timed(&self) -> Result<i64, Error> {
        let ask = Ask { task: 0, key: self.key };
        let from = now();
        let held = self.lock.acquire(&ask).await?.ok_or_else(|| format!("{} is not free", self.key))?;
        let took = now() - from;
        self.lock.release(&ask, held).await?;
        Ok(took)
    }
}

impl<L: Lock> Contender for Claim<L> {
    /// The rate is that of claims alone.
    fn round(self: Arc<Self>, _: usize, span: Duration) -> Ending<Round> {
        Box::pin(async move {
            let (begin, mut latencies) = (Instant::now(), Vec::new());
            while latencies.is_empty() || begin.elapsed() < span {
                latencies.push(self.timed().await?);
            }
            let seconds = latencies.iter().sum::<i64>() as f64 / 1e9;
            let per_second = ratio(latencies.len() as f64, seconds).ok_or("no claim took any time")?;
            Ok(Round { per_second, attempts: 1.0, latencies: Summary::of(latencies) })
        })
    }
}

/// Asks for a key that another client holds.
struct Refusal<L> {
    lock: L,
    key: &'static str,
}

pub fn refusal<L: Lock>(lock: L, key: &'static str) -> Arc<dyn Contender> {
    Arc::new(Refusal { lock, key })
}

impl<L: Lock> Contender for Refusal<L> {
    fn cycle(&self, task: usize) -> Cycling<'_> {
        Box::pin(async move {
            match self.lock.acquire(&Ask { task, key: self.key }).await? {
                None => Ok(1),
                Some(_) => Err(format!("{} was granted to a second holder", self.key).into()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sqlx::{Pool, Sqlite};

    use super::{article::Article, rowlock::Rowlock, single::Single, *};
    use crate::{
        database::{at_own_site, patient_pool},
        speak::fill,
    };

    const ASK: Ask<'static> = Ask { task: 0, key: "key" };

    async fn holds_alone<L: Lock>(make: impl Fn(Pool<Sqlite>) -> Result<L, Error>) -> Result<(), Error> {
        at_own_site::<Sqlite>("", async |site| {
            let pool = patient_pool::<Sqlite>(&site.url, 2).await?;
            fill(&pool, "t_resource_lock (key_resource)", std::iter::once("('key')".to_owned())).await?;
            let (one, other) = (make(pool.clone())?, make(pool)?);
            for _ in 0..2 {
                let held = one.acquire(&ASK).await?.ok_or("it is free")?;
                assert!(other.acquire(&ASK).await?.is_none(), "a second holder");
                one.release(&ASK, held).await?;
            }
            Ok(())
        })
        .await
    }

    #[tokio::test]
    async fn a_key_is_held_by_one_holder_until_it_is_released() -> Result<(), Error> {
        holds_alone(|pool| Ok(Article(pool))).await?;
        holds_alone(|pool| Ok(Single(pool))).await?;
        holds_alone(|pool| Rowlock::new(pool, true, Duration::ZERO)).await?;
        holds_alone(|pool| Rowlock::new(pool, false, Duration::ZERO)).await
    }

    #[tokio::test]
    async fn what_one_way_holds_no_other_takes() -> Result<(), Error> {
        at_own_site::<Sqlite>("", async |site| {
            let pool = patient_pool::<Sqlite>(&site.url, 4).await?;
            let rowlock = Rowlock::new(pool.clone(), true, Duration::ZERO)?;
            let lease = rowlock.acquire(&ASK).await?.ok_or("it is free")?;
            assert!(Article(pool.clone()).acquire(&ASK).await?.is_none(), "the article took it");
            assert!(Single(pool.clone()).acquire(&ASK).await?.is_none(), "the single statement took it");
            rowlock.release(&ASK, lease).await?;
            let held = Single(pool.clone()).acquire(&ASK).await?.ok_or("it is free")?;
            assert!(rowlock.acquire(&ASK).await?.is_none(), "rowlock took it");
            Single(pool).release(&ASK, held).await
        })
        .await
    }
}
