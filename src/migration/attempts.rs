//! The attempts of a migration, and the pauses between them.

use std::time::Duration;

use crate::{
    action::{Action, Certainty},
    causes::DatabaseFault,
    error::Error,
    session::{sessions::Sessions, time::Instant, timers::sleep},
    store::{Database, failure::Failure, fault::Fault, migration::Part},
};

/// How long creating the table may take, including a wait for other transactions.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The pauses between attempts that waited for a lock: as long as they waited, up to twice that.
const LEAST_PAUSE: Duration = Duration::from_millis(20);
const MOST_PAUSE: Duration = Duration::from_secs(2);
/// How long an attempt may take that waits for a lock for a second, and the look for what is in its
/// way.
const ATTEMPT: Duration = Duration::from_secs(4);
pub const LOOK: Duration = Duration::from_secs(2);

/// The attempts of one call to create or complete tables or functions.
///
/// Instances that start together conflict with each other (a type or column that already exists, a
/// busy file). An instance that fails looks again, and returns the error only if it persists.
pub struct Attempts {
    pub limit: Instant,
    failures: u32,
    /// What is known of the outcome of the attempts so far.
    outcome: Certainty,
    /// When the present attempt was begun.
    begun: Instant,
    /// What kept an attempt from changing the table.
    blocker: Option<String>,
}

impl Attempts {
    pub fn new() -> Self {
        let begun = Instant::now();
        Self { limit: begun + LIMIT, failures: 0, outcome: Certainty::NothingChanged, begun, blocker: None }
    }

    /// Records that something was changed.
    pub fn changed(&mut self) {
        self.outcome = Certainty::Unknown;
    }

    /// Returns whether something was changed, or may have been.
    pub fn has_changed(&self) -> bool {
        self.outcome == Certainty::Unknown
    }

    /// Returns the error of a read of the tables, which is that of the call.
    pub fn error(&self, mut error: Error) -> Error {
        if let Some((action, outcome)) = error.outcome_mut().filter(|_| self.has_changed()) {
            (*action, *outcome) = (Action::Migrate, Certainty::Unknown);
        }
        error
    }

    pub fn failed(&self, failure: Failure, part: Part) -> Error {
        failure.into_error(Action::Migrate, part.subject().to_owned(), LIMIT, self.outcome)
    }

    /// Pauses after an attempt that failed, or after its check, which changes nothing.
    ///
    /// # Errors
    /// The error of the call, if there is no next attempt: the time is over, the failure was the
    /// tenth, or no connection was available.
    pub async fn after<DB: Database>(
        &mut self,
        failure: Failure,
        part: Part,
        is_check: bool,
        connections: &Sessions<DB>,
    ) -> Result<(), Error> {
        let was_sent = !matches!(failure, Failure::NoThreads(_) | Failure::NoConnection(_));
        if !is_check && (failure.is_unanswered() || (was_sent && !DB::CHANGES_ATOMICALLY)) {
            self.changed(); // a part may be there
        }
        if failure.fault() == Fault::Contention {
            return self.blocked(connections).await;
        }
        if was_sent && self.looks_again().await { Ok(()) } else { Err(self.failed(failure, part)) }
    }

    /// Pauses before another attempt, ten times at most.
    pub async fn looks_again(&mut self) -> bool {
        self.failures += 1;
        if self.failures == 10 {
            return false;
        }
        sleep(Duration::from_millis(fastrand::u64(5..50)) * self.failures).await;
        self.begun = Instant::now();
        true
    }

    /// Pauses after an attempt that waited in vain for a lock on the table, so that the clients
    /// behind it go on.
    ///
    /// # Errors
    /// [`Error::Database`], if the time is over.
    async fn blocked<DB: Database>(&mut self, connections: &Sessions<DB>) -> Result<(), Error> {
        let limit = (Instant::now() + LOOK).min(self.limit);
        if let Ok(Some(by)) = connections.send(limit, async |conn| DB::blocker(conn).await).await {
            if self.blocker.is_none() {
                tracing::warn!(by, "the table t_resource_lock is in use: waiting to change it");
            }
            self.blocker = Some(by);
        }
        let pause = (Instant::now() - self.begun).clamp(LEAST_PAUSE, MOST_PAUSE);
        let pause = pause.mul_f64(1.0 + fastrand::f64());
        if Instant::now() + pause + ATTEMPT >= self.limit {
            let by = self.blocker.take().unwrap_or_else(|| "a transaction that is not known".to_owned());
            return Err(DatabaseFault::InUse { limit: LIMIT, by, outcome: self.outcome }.into());
        }
        sleep(pause).await;
        self.begun = Instant::now();
        Ok(())
    }
}

#[cfg(test)]
#[cfg(feature = "sqlite")]
mod tests {
    use super::*;
    use crate::session::sessions::Purpose;

    fn connections<DB: Database>(url: &str) -> Sessions<DB> {
        let Ok(pool) = sqlx::Pool::connect_lazy(url) else { panic!("{url}") };
        Sessions::new(pool, Purpose::Requests)
    }

    fn told(error: Error) -> (Action, Certainty) {
        let Error::Database(fault) = error else { panic!("{error:?}") };
        (fault.action(), fault.outcome())
    }

    /// Returns what is known after these failures, and then one to connect, which ends the call.
    async fn outcome_after<DB: Database>(url: &str, failures: impl IntoIterator<Item = Failure>) -> Certainty {
        let mut attempts = Attempts::new();
        let connections = connections::<DB>(url);
        for failure in failures {
            attempts.after(failure, Part::Locks, false, &connections).await.unwrap();
        }
        let last = Failure::NoConnection(sqlx::Error::PoolTimedOut);
        let error = attempts.after(last, Part::Locks, false, &connections).await.unwrap_err();
        assert!(matches!(error, Error::Database(DatabaseFault::NoConnection { .. })), "{error:?}");
        let (action, outcome) = told(error);
        assert_eq!(action, Action::Migrate);
        outcome
    }

    #[tokio::test]
    async fn a_table_in_use_tells_of_the_parts_before_it() {
        let mut attempts = Attempts { limit: Instant::now(), ..Attempts::new() };
        attempts.changed();
        let before = attempts.outcome;
        let Err(Error::Database(fault)) = attempts.blocked(&connections::<sqlx::Sqlite>("sqlite::memory:")).await
        else {
            panic!("the time is over")
        };
        assert!(matches!(fault, DatabaseFault::InUse { .. }) && fault.outcome() == before, "{fault}");
        assert_ne!(before, Certainty::NothingChanged);
    }

    /// The look that follows an attempt may be what fails.
    #[tokio::test]
    async fn a_look_after_an_attempt_tells_of_the_attempt() {
        let looked = || Error::timed_out(Action::Inspect, "a table".into(), LIMIT, Certainty::NothingChanged);
        let mut attempts = Attempts::new();
        assert_eq!(told(attempts.error(looked())), (Action::Inspect, Certainty::NothingChanged));
        let connections = connections::<sqlx::Sqlite>("sqlite::memory:");
        attempts.after(Failure::NoReply, Part::Locks, false, &connections).await.unwrap();
        assert_eq!(told(attempts.error(looked())), (Action::Migrate, Certainty::Unknown));
    }

    /// SQLite creates one table after another.
    #[tokio::test]
    async fn an_attempt_that_may_have_done_a_part_is_not_forgotten() {
        assert_eq!(outcome_after::<sqlx::Sqlite>("sqlite::memory:", []).await, Certainty::NothingChanged);
        for sent in [Failure::NoReply, Failure::Undone] {
            assert_eq!(outcome_after::<sqlx::Sqlite>("sqlite::memory:", [sent]).await, Certainty::Unknown);
        }
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn an_attempt_that_was_undone_has_changed_nothing() {
        for (sent, outcome) in [(Failure::Undone, Certainty::NothingChanged), (Failure::NoReply, Certainty::Unknown)] {
            assert_eq!(outcome_after::<sqlx::Postgres>("postgres://nowhere", [sent]).await, outcome);
        }
    }
}
