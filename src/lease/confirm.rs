//! Makes a lease a condition of a commit. The lease's row counts the transactions that confirmed
//! it.

use std::time::Duration;

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::Claim,
    lock::{CommitOutcome, Confirmation},
    retry::{Repeat, pause},
    session::{sessions::Sessions, time::Instant, timers::timeout_at},
    store::{Confirmed, Database, failure::Failure, fault::Fault},
    transaction::own::in_transaction,
};

/// Counts a confirmation in the application's own transaction.
pub(crate) async fn confirm<DB: Database>(
    claim: &Claim,
    tx: &mut DB::Connection,
    time_limit: Duration,
) -> Result<Confirmation, Error> {
    in_transaction::<DB>(tx, &claim.key, time_limit).await?;
    confirm_within::<DB>(claim, tx, time_limit).await
}

/// Counts a confirmation in a transaction that is known to be open. While another transaction has
/// the row locked, it retries instead of blocking, so that no statement outlives its limit.
pub(crate) async fn confirm_within<DB: Database>(
    claim: &Claim,
    tx: &mut DB::Connection,
    time_limit: Duration,
) -> Result<Confirmation, Error> {
    let key = claim.key.clone();
    let limit = Instant::now() + time_limit;
    loop {
        let failure = match timeout_at(limit, DB::confirm(tx, claim)).await {
            Ok(Ok(Confirmed::Done(count))) => return Ok(Confirmation(count)),
            Ok(Ok(Confirmed::Lost)) => return Err(Error::Lost { key, token: claim.token }),
            Ok(Ok(Confirmed::TooOld)) => return Err(Error::conflict(key, 1)),
            Ok(Ok(Confirmed::Skipped)) if Instant::now() < limit => {
                pause(5..20).await;
                continue;
            }
            Ok(Ok(Confirmed::Skipped)) | Err(_) => Failure::NoReply,
            Ok(Err(error)) => Failure::Failed(error),
        };
        if failure.fault() == Fault::Contention {
            return Err(Error::conflict(key, 1));
        }
        let subject = key.quoted();
        return Err(failure.into_error(Action::Confirm, subject, time_limit, Certainty::NothingChanged));
    }
}

/// Derives the commit outcome from the count, which only confirmations under this claim change.
pub(crate) async fn commit_outcome<DB: Database>(
    pool: &Sessions<DB>,
    claim: &Claim,
    confirmation: Confirmation,
    time_limit: Duration,
) -> CommitOutcome {
    let limit = Instant::now() + time_limit;
    let mut repeat = Repeat::until(limit);
    let count = loop {
        let count = pool.send(limit, async |conn| DB::confirms(conn, claim).await).await;
        if let Some(count) = repeat.final_or_pause(count).await {
            break count;
        }
    };
    match count {
        Ok(Some(count)) if count == confirmation.0 => CommitOutcome::Committed,
        Ok(Some(count)) if count == confirmation.0 - 1 => CommitOutcome::RolledBack,
        _ => CommitOutcome::Unknown,
    }
}
