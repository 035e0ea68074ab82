//! Counts the statements that this process sends, on any database, from the event that sqlx emits
//! after each one. Also counts the leases that it renews.

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

use crate::Error;

/// The targets of the events of a statement and of a renewal. The renewal event is the only one of
/// its target at level TRACE.
const STATEMENT: &str = "sqlx::query";
const RENEWAL: &str = "rowlock::lease::state";

#[derive(Clone, Default)]
pub struct Queries {
    statements: Arc<AtomicI64>,
    renewals: Arc<AtomicI64>,
}

impl Queries {
    /// Counts from now on if `counting` is set, which slows down each statement, and shows the
    /// events that `shown` selects on stderr.
    pub fn install(shown: Option<&str>, counting: bool) -> Result<Self, Error> {
        let queries = Self::default();
        let shown: Option<Targets> = shown.map(str::parse).transpose()?;
        let show =
            shown.map(|targets| tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(targets));
        let events = Targets::new().with_target(STATEMENT, Level::DEBUG).with_target(RENEWAL, Level::TRACE);
        let count = counting.then(|| queries.clone().with_filter(events));
        tracing_subscriber::registry().with(count).with(show).try_init()?;
        Ok(queries)
    }

    pub fn so_far(&self) -> i64 {
        self.statements.load(Ordering::Relaxed)
    }

    /// Leases that were renewed. rowlock emits an event for each.
    pub fn renewals(&self) -> i64 {
        self.renewals.load(Ordering::Relaxed)
    }
}

impl<S: Subscriber> Layer<S> for Queries {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        match (metadata.target(), *metadata.level()) {
            (STATEMENT, _) => self.statements.fetch_add(1, Ordering::Relaxed),
            (RENEWAL, Level::TRACE) => self.renewals.fetch_add(1, Ordering::Relaxed),
            _ => return,
        };
    }
}
