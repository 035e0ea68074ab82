//! Reads of rows that show every claim committed before them. Concurrent readers of one key share a
//! read that begins after all of them have asked for it.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use tokio::sync::OnceCell;

use crate::{
    key::Key,
    lease::terms::KeyTerms,
    session::{
        exchange::{Request, exchange_on},
        loan::Loan,
        queue::BatchOp,
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
        // A statement has one read: no two keys share one.
        let Some(read) = reads.first() else { return Ok(Vec::new()) };
        let answer = exchange_on(session, sessions, limit, &Fresh { read, freshness }).await;
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
