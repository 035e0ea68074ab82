//! Batched creations of the rows of keys that come for the first time.

use std::time::Duration;

use crate::{
    key::Key,
    session::{loan::Loan, queue::Batched, sessions::Sessions, time::Instant, timers::timeout_at},
    store::{Database, Form, failure::Failure},
};

/// How long a statement of several requests waits for another transaction's uncommitted insert of
/// one of their keys. After that, each of them is sent by itself.
const SHARED_LOCK_TIMEOUT: Duration = Duration::from_millis(50);

/// The creation of rows. Its statement is sent without a wait for the disk where that is possible:
/// a row that is lost is created again, and the claim that follows waits.
pub(crate) struct Creation {
    /// Several keys of one holder are created together.
    pub keys: Vec<Key>,
    pub minutes: i32,
}

impl<DB: Database> Batched<DB> for Creation {
    type Output = ();

    /// One of them may wait for a row.
    const APART_BY_CALLER: bool = true;

    fn key(&self) -> Option<&Key> {
        if let [key] = &self.keys[..] { Some(key) } else { None }
    }

    fn can_share_statement(&self, other: &Self) -> bool {
        self.minutes == other.minutes
    }

    /// The row exists for all.
    fn share((): &()) -> Option<()> {
        Some(())
    }

    async fn run(
        &self,
        creations: &[Self],
        mut session: Loan<DB>,
        _: &Sessions<DB>,
        form: Form,
        limit: Instant,
    ) -> Result<Vec<()>, Failure> {
        // The server gives up slightly earlier than the client, so that no backend continues to
        // wait there.
        let left = (limit - Instant::now()).mul_f64(0.9);
        let lock_timeout = if creations.len() == 1 { left } else { SHARED_LOCK_TIMEOUT };
        let mut keys: Vec<Key> = creations.iter().flat_map(|creation| creation.keys.clone()).collect();
        keys.sort(); // instances that insert the same keys do not deadlock
        let creating = DB::create(session.get(), &keys, self.minutes, lock_timeout, form);
        let reply = timeout_at(limit, creating).await;
        session.settle(reply)?;
        Ok(vec![(); creations.len()])
    }
}
