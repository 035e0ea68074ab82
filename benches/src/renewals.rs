//! Counts the leases that this process renews, from the event that rowlock emits for each. Shows
//! events on stderr.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    layer::{Context, SubscriberExt as _},
    util::SubscriberInitExt as _,
};

use crate::error::Error;

/// The renewal event is the only one of this room at level TRACE.
const RENEWAL: &str = "rowlock::lease";

#[derive(Clone, Default)]
pub struct Renewals(Arc<AtomicI64>);

impl Renewals {
    /// Counts from now on if `counting` is set, and shows the events that `shown` selects.
    pub fn install(shown: Option<&str>, counting: bool) -> Result<Self, Error> {
        let renewals = Self::default();
        let shown: Option<Targets> = shown.map(str::parse).transpose()?;
        let show =
            shown.map(|targets| tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(targets));
        let events = Targets::new().with_target(RENEWAL, Level::TRACE);
        let count = counting.then(|| renewals.clone().with_filter(events));
        tracing_subscriber::registry().with(count).with(show).try_init()?;
        Ok(renewals)
    }

    pub fn so_far(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<S: Subscriber> Layer<S> for Renewals {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == Level::TRACE {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{sleep, timeout};

    use super::*;

    #[tokio::test]
    async fn a_renewal_is_counted() {
        let renewals = Renewals::install(None, true).unwrap();
        let pool = sqlx::SqlitePool::connect("sqlite::memory:").await.unwrap();
        rowlock::migrate(&pool).await.unwrap();
        let lock = rowlock::LeaseLock::new(pool).lease(Duration::from_secs(3));
        let lease = lock.acquire("held", Duration::from_secs(60)).await.unwrap();
        let counted = async {
            while renewals.so_far() == 0 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(Duration::from_secs(60), counted).await.unwrap();
        lease.release().await.unwrap();
    }
}
