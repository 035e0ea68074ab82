//! How many wait for keys: those that wait in order.

use std::{borrow::Cow, collections::HashMap};

use rowlock::{Database, Error, LeaseLock};

use crate::{
    keys::names::{Kind, kind},
    out,
};

/// How many tickets each queue has, if that is known.
#[derive(Default)]
pub struct Queues(Option<HashMap<String, u64>>);

impl Queues {
    pub async fn read<DB: Database>(lock: &LeaseLock<DB>) -> Result<Self, Error> {
        Ok(Self(Some(lock.queue_lengths().await?.into_iter().collect())))
    }

    /// Reads the queues, or says why they are not known. Rights on the table of locks are enough
    /// for a key.
    pub async fn if_possible<DB: Database>(lock: &LeaseLock<DB>) -> Self {
        Self::read(lock).await.unwrap_or_else(|error| {
            out::print_error(format_args!("how many wait is not known: {error:?}"));
            Self(None)
        })
    }

    /// Returns how many wait for a key, or for a permit of a name.
    pub fn of(&self, key: &str) -> Option<u64> {
        self.0.as_ref().map(|lengths| lengths.get(&*queue(key)).copied().unwrap_or_default())
    }

    /// Returns how many wait for a name and for its permits.
    pub fn of_name(&self, name: &str) -> Option<u64> {
        Some(self.of(name)? + self.of(&format!("{name}#"))?)
    }
}

/// Returns the key under which the waiters of a key queue: those of a permit wait for any permit.
pub fn queue(key: &str) -> Cow<'_, str> {
    match kind(key) {
        Kind::Permit { of } => format!("{of}#").into(),
        Kind::Lock | Kind::Reader { .. } => key.into(),
    }
}

/// Writes the number for people.
pub fn text(waiting: Option<u64>) -> String {
    match waiting {
        None => "?".to_owned(),
        Some(0) => "-".to_owned(),
        Some(number) => number.to_string(),
    }
}
