//! Reads of rows that show every claim committed before them. Concurrent readers of one key share a
//! read that begins after all of them have asked for it.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use tokio::sync::OnceCell;

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::Key,
    lease::terms::KeyTerms,
    retry::Repeat,
    session::{
        exchange::{Request, exchange, silence},
        loan::Loan,
        queue::{BatchOp, Limits, Queue},
        sessions::Sessions,
        time::Instant,
    },
    store::{
        Database, Reply,
        admin::{KeyRange, Listed},
        failure::Failure,
        schema::{Freshness, Schema},
    },
};

/// The batch operation that reads.
pub(crate) struct Reads {
    pub table: Arc<OnceCell<Schema>>,
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

    async fn run(
        &self,
        session: Loan<DB>,
        sessions: &Sessions<DB>,
        reads: &[RangeRead<DB>],
        limit: Instant,
    ) -> Result<Vec<Vec<Listed>>, Failure> {
        let freshness = self.table.get().map_or(Freshness::Plain, |table| table.freshness);
        let silence = silence(sessions, limit - Instant::now());
        // A statement has one read: no two keys share one.
        let Some(read) = reads.first() else { return Ok(Vec::new()) };
        let answer = exchange(Some(session), sessions, silence, limit, &Fresh { read, freshness }).await;
        Ok(vec![answer.reply?.reply])
    }
}

/// A read that shows what was committed before it.
struct Fresh<'a, DB: Database> {
    read: &'a RangeRead<DB>,
    freshness: Freshness,
}

impl<DB: Database> Request<DB> for Fresh<'_, DB> {
    type Reply = Vec<Listed>;

    fn send(
        &self,
        conn: &mut DB::Connection,
        _: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<Vec<Listed>>> + Send {
        DB::read_range(conn, &self.read.keys, &self.read.key_terms.terms, self.freshness)
    }
}

impl<DB: Database> Queue<DB, Reads> {
    /// Reads the rows as they are at some moment after the call. Transient failures are retried up
    /// to the limit.
    pub async fn read(
        self: &Arc<Self>,
        keys: &KeyRange,
        key_terms: &Arc<KeyTerms<DB>>,
        limit: Instant,
        time_limit: Duration,
    ) -> Result<Vec<Listed>, Error> {
        let limits = Limits { caller: limit, statement: limit };
        let mut repeat = Repeat::until(limit);
        loop {
            let read = RangeRead { keys: keys.clone(), key_terms: key_terms.clone() };
            if let Some(rows) = repeat.final_or_pause(self.send(read, limits).await).await {
                return rows.map_err(|failure| {
                    failure.into_error(Action::Inspect, keys.first.quoted(), time_limit, Certainty::NothingChanged)
                });
            }
        }
    }
}
