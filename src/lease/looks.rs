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
pub(crate) struct Looks {
    pub table: Arc<OnceCell<Table>>,
}

/// One read.
pub(crate) struct Look<DB: Database> {
    pub keys: KeyRange,
    pub on: Arc<KeyTerms<DB>>,
}

impl<DB: Database> BatchOp<DB> for Looks {
    type Request = Look<DB>;
    type Output = Vec<Listed>;

    /// A read of several keys is sent by itself.
    fn key(look: &Look<DB>) -> Option<&Key> {
        look.keys.is_one().then_some(&look.keys.first)
    }

    /// One statement serves the requests for one key.
    fn can_share_statement(look: &Look<DB>, other: &Look<DB>) -> bool {
        look.keys.first == other.keys.first && Arc::ptr_eq(&look.on, &other.on)
    }

    /// The rows are as they were after each of these requests was made.
    fn share(rows: &Vec<Listed>) -> Option<Vec<Listed>> {
        Some(rows.clone())
    }

    async fn run(&self, conn: &mut DB::Connection, looks: &[Look<DB>], _: Instant) -> Reply<Vec<Vec<Listed>>> {
        let freshness = self.table.get().map_or(Freshness::Plain, |table| table.freshness);
        let mut found = Vec::with_capacity(looks.len());
        for Look { keys, on } in looks {
            found.push(DB::read_range(conn, keys, &on.terms, freshness).await?);
        }
        Ok(found)
    }
}

impl<DB: Database> Batcher<DB, Looks> {
    /// Reads the rows as they are at some moment after the call. Transient failures are retried up
    /// to the limit.
    pub async fn look(
        self: &Arc<Self>,
        keys: &KeyRange,
        on: &Arc<KeyTerms<DB>>,
        limit: Instant,
        time_limit: Duration,
    ) -> Result<Vec<Listed>, Error> {
        let runtime = current_runtime()?;
        let limits = Limits { caller: limit, statement: limit };
        let mut repeat = Repeat::until(limit);
        loop {
            let look = Look { keys: keys.clone(), on: on.clone() };
            if let Some(rows) = repeat.final_or_pause(self.send(&runtime, look, limits).await).await {
                return rows.map_err(|failure| {
                    let subject = subject([keys.first.as_str()].into_iter());
                    failure.into_error(Action::Inspect, subject, time_limit, Certainty::NothingChanged)
                });
            }
        }
    }
}
