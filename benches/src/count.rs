//! How many statements this process sends, on any database: sqlx tells of each one when it is over.

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

#[derive(Clone, Default)]
pub struct Queries(Arc<AtomicI64>);

impl Queries {
    /// Counts from here on, and shows on stderr what `shown` asks for.
    pub fn install(shown: Option<&str>) -> Result<Self, Error> {
        let queries = Self::default();
        let shown: Option<Targets> = shown.map(str::parse).transpose()?;
        let show =
            shown.map(|targets| tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(targets));
        let count = queries.clone().with_filter(Targets::new().with_target("sqlx::query", Level::DEBUG));
        tracing_subscriber::registry().with(count).with(show).try_init()?;
        Ok(queries)
    }

    pub fn so_far(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<S: Subscriber> Layer<S> for Queries {
    fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
