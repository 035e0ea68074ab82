//! Reads of rows that show every claim committed before them. Concurrent readers of one key share a
//! read that begins after all of them have asked for it.

use std::sync::Arc;

use tokio::{
    sync::OnceCell,
    time::{Duration, Instant},
};

use crate::{
    action::{Action, Certainty},
    batch::{
        batcher::Batcher,
        op::{BatchOp, Limits},
    },
    error::Error,
    key::Key,
    lease::{handle::subject, terms::KeyTerms},
    retry::Repeat,
    schema::Table,
    store::{
        Database, Reply,
        admin::{KeyRange, Listed},
        schema::Freshness,
    },
    task::current_runtime,
};

/// The batch operation that reads.
pub(crate) struct Reads {
    pub table: Arc<OnceCell<Table>>,
}

/// One read of a range of keys.
pub(crate) struct RangeRead<DB: Database> {
    pub keys: KeyRange,
    pub key_terms: Arc<KeyTerms<DB>>,
}

impl<DB: Database> BatchOp<DB> for Reads {
    type Request = RangeRead<DB>;
    type Output = Vec<Listed>;

    /// A read of several keys is sent by itself.
    fn key(read: &RangeRead<DB>) -> Option<&Key> {
        read.keys.is_one().then_some(&read.keys.first)
    }

    /// One statement serves the requests for one key.
    fn can_share_statement(read: &RangeRead<DB>, other: &RangeRead<DB>) -> bool {
        read.keys.first == other.keys.first && Arc::ptr_eq(&read.key_terms, &other.key_terms)
    }

    /// The rows are as they were after each of these requests was made.
    fn share(rows: &Vec<Listed>) -> Option<Vec<Listed>> {
        Some(rows.clone())
    }

    async fn run(&self, conn: &mut DB::Connection, reads: &[RangeRead<DB>], _: Instant) -> Reply<Vec<Vec<Listed>>> {
        let freshness = self.table.get().map_or(Freshness::Plain, |table| table.freshness);
        let mut found = Vec::with_capacity(reads.len());
        for RangeRead { keys, key_terms } in reads {
            found.push(DB::read_range(conn, keys, &key_terms.terms, freshness).await?);
        }
        Ok(found)
    }
}

impl<DB: Database> Batcher<DB, Reads> {
    /// Reads the rows as they are at some moment after the call. Transient failures are retried up
    /// to the limit.
    pub async fn read(
        self: &Arc<Self>,
        keys: &KeyRange,
        key_terms: &Arc<KeyTerms<DB>>,
        limit: Instant,
        time_limit: Duration,
    ) -> Result<Vec<Listed>, Error> {
        let runtime = current_runtime()?;
        let limits = Limits { caller: limit, statement: limit };
        let mut repeat = Repeat::until(limit);
        loop {
            let read = RangeRead { keys: keys.clone(), key_terms: key_terms.clone() };
            if let Some(rows) = repeat.final_or_pause(self.send(&runtime, read, limits).await).await {
                return rows.map_err(|failure| {
                    let subject = subject([keys.first.as_str()].into_iter());
                    failure.into_error(Action::Inspect, subject, time_limit, Certainty::NothingChanged)
                });
            }
        }
    }
}
