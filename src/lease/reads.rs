//! Reads of rows that show every claim committed before them. Concurrent readers of one key share a
//! read that begins after all of them have asked for it.

use std::sync::Arc;

use chrono::{DateTime, Utc};

use crate::{
    key::Key,
    lease::terms::KeyTerms,
    session::{
        exchange::{Request, exchange_on},
        loan::Loan,
        queue::Batched,
        sessions::Sessions,
        time::Instant,
    },
    store::{
        Database, Form, Reply,
        admin::{KeyRange, Listed},
        failure::Failure,
    },
};

/// One read of a range of keys.
pub(crate) struct RangeRead<DB: Database> {
    pub keys: KeyRange,
    pub key_terms: Arc<KeyTerms<DB>>,
}

impl<DB: Database> Batched<DB> for RangeRead<DB> {
    type Output = Vec<Listed>;

    /// A read of several keys is sent by itself.
    fn key(&self) -> Option<&Key> {
        self.keys.is_one().then_some(&self.keys.first)
    }

    /// One statement serves the requests for one key.
    fn can_share_statement(&self, other: &Self) -> bool {
        self.keys.first == other.keys.first && Arc::ptr_eq(&self.key_terms, &other.key_terms)
    }

    /// The rows are as they were after each of these requests was made.
    fn share(rows: &Vec<Listed>) -> Option<Vec<Listed>> {
        Some(rows.clone())
    }

    async fn run(
        &self,
        _one: &[Self],
        session: Loan<DB>,
        sessions: &Sessions<DB>,
        form: Form,
        limit: Instant,
    ) -> Result<Vec<Vec<Listed>>, Failure> {
        // A statement has one read: no two keys share one.
        let answer = exchange_on(session, sessions, limit, &Fresh { read: self, form }).await;
        Ok(vec![answer.reply?.reply])
    }
}

/// A read that shows what was committed before it.
struct Fresh<'a, DB: Database> {
    read: &'a RangeRead<DB>,
    form: Form,
}

impl<DB: Database> Request<DB> for Fresh<'_, DB> {
    type Reply = Vec<Listed>;

    fn send(
        &self,
        conn: &mut DB::Connection,
        _: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<Vec<Listed>>> + Send {
        DB::read_range(conn, &self.read.keys, &self.read.key_terms.terms, self.form)
    }
}
