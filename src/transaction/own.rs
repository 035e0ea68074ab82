//! The check of a transaction that the application has begun.

use std::time::Duration;

use sqlx::Connection as _;

use crate::{
    action::{Action, Certainty},
    causes::TransactionFault,
    error::Error,
    invalid::Invalid,
    key::Key,
    session::{time::Instant, timers::timeout_at},
    store::{
        Database,
        failure::Failure,
        fault::{self, Fault},
    },
};

/// Fails unless `conn` is inside a transaction, by the driver's count and by the database's. It
/// cannot detect a transaction that has taken the place of the one that the application began.
///
/// # Errors
/// [`Error::Invalid`] by the driver's count, [`Error::Transaction`] by the database's,
/// and [`Error::Conflict`].
pub(crate) async fn in_transaction<DB: Database>(
    conn: &mut DB::Connection,
    key: &Key,
    time_limit: Duration,
) -> Result<(), Error> {
    if !conn.is_in_transaction() {
        let text = format!(
            "key {:?} was not confirmed: the connection is not in a transaction; begin one with sqlx first",
            key.as_str()
        );
        return Err(Invalid::new(text).into());
    }
    let failure = match timeout_at(Instant::now() + time_limit, DB::in_transaction(conn)).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(source)) if fault::denies(&source) => {
            let (key, outcome) = (key.clone(), Certainty::Unknown);
            return Err(TransactionFault::Over { key, outcome, work: None, source: Some(source) }.into());
        }
        Ok(Err(error)) => Failure::Failed(error),
        Err(_) => Failure::NoReply,
    };
    // A cluster may report at the next statement that it has rolled the transaction back.
    if failure.fault() == Fault::Contention {
        return Err(Error::conflict(key.clone(), 1));
    }
    let subject = key.quoted();
    Err(failure.into_error(Action::Confirm, subject, time_limit, Certainty::NothingChanged))
}
