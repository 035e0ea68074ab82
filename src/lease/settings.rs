//! The settings of a lock.

use std::{sync::Arc, time::Duration};

use chrono::TimeDelta;
use sqlx::Pool;

use crate::{
    retry::Retry,
    rules::{Rules, Terms},
    store::{
        Database,
        pools::{Connections, Purpose},
    },
};

pub(crate) struct Settings<DB: Database> {
    /// The connections for claims, releases and reads.
    pub pool: Connections<DB>,
    /// The connections for renewals and abandonments.
    pub renewals: Connections<DB>,
    pub terms: Arc<Terms>,
    pub time_limit: Duration,
    pub retry: Retry,
    pub fair: bool,
    pub batching: bool,
}

impl<DB: Database> Clone for Settings<DB> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            renewals: self.renewals.clone(),
            terms: self.terms.clone(),
            time_limit: self.time_limit,
            retry: self.retry,
            fair: self.fair,
            batching: self.batching,
        }
    }
}

impl<DB: Database> Settings<DB> {
    pub fn new(pool: Pool<DB>) -> Self {
        let renewals = Connections::new(pool.clone(), Purpose::Renewals);
        let pool = Connections::new(pool, Purpose::Requests);
        let terms = Terms {
            rules: Rules::default(),
            min_interval: TimeDelta::zero(),
            lease: TimeDelta::seconds(30),
            retry_failed: false,
            article_clients: None,
            label: default_label(),
        };
        Self {
            pool,
            renewals,
            terms: Arc::new(terms),
            time_limit: Duration::from_secs(5),
            retry: Retry::default(),
            fair: false,
            batching: true,
        }
    }

    pub fn with_terms(mut self, change: impl FnOnce(&mut Terms)) -> Self {
        change(Arc::make_mut(&mut self.terms));
        self
    }
}

/// Returns the default label: the host name without control characters, cut so that `/process id`
/// fits into 45 characters.
fn default_label() -> String {
    let process = format!("/{}", std::process::id());
    let host = gethostname::gethostname();
    let host = host.to_string_lossy();
    let host = host.chars().filter(|c| !c.is_control()).take(45 - process.len());
    host.chain(process.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_label_fits_its_column_and_names_the_process() {
        let label = default_label();
        assert!(label.chars().count() <= 45, "{label}");
        assert!(label.ends_with(&format!("/{}", std::process::id())), "{label}");
    }
}
