//! `acquire`, `renew` and `release`: claims that outlive the program, for scripts and other
//! languages.

use std::time::Duration;

use rowlock::{Attempt, Claim, Database, LeaseLock, PreviousClaim};
use serde_json::{Value, json};
use sqlx::Pool;

use crate::{
    args::{Acquire, Release, Renew},
    exit::{self, Failure},
    out, show,
    signals::{Asked, number},
};

/// How long the database has to end a claim whose holder id was not printed.
const GRACE: Duration = Duration::from_secs(10);

pub async fn acquire<DB: Database>(lock: LeaseLock<DB>, acquire: Acquire) -> Result<u8, Failure> {
    let mut asked = Asked::listen()?;
    let attempt = tokio::select! {
        attempt = lock.acquire(acquire.key.as_str(), acquire.terms.wait) => attempt?,
        // A claim that is under way is undone, since its holder id would never be printed.
        signal = asked.next() => {
            let _ = asked.within(GRACE, lock.shutdown(Duration::MAX)).await;
            return Ok(exit::SIGNAL + number(signal));
        }
    };
    match attempt {
        Attempt::Acquired(lease) => {
            let prior = lease.taken_over_from().cloned();
            let told = print(&lock, lease.claim(), prior).await;
            if told.is_ok() {
                lease.detach();
            } else {
                // The holder id was not printed, so that no other process could release the claim.
                drop(lease);
                lock.shutdown(GRACE).await;
            }
            told
        }
        Attempt::Refused(refusal) => {
            out::complain(format_args!("refused: {refusal}"));
            Ok(exit::REFUSED)
        }
    }
}

pub async fn renew<DB: Database>(pool: Pool<DB>, renew: Renew) -> Result<u8, Failure> {
    let lock = LeaseLock::new(pool).lease(renew.lease)?;
    let claim = lock.resume(renew.key.as_str(), renew.holder).await?.detach();
    print(&lock, &claim, None).await
}

pub async fn release<DB: Database>(lock: LeaseLock<DB>, release: Release) -> Result<u8, Failure> {
    let key = release.key.as_str();
    match release.holder {
        Some(holder) => lock.resume(key, holder).await?.release(release.status.into()).await?,
        None => match lock.force_release(key, release.status.into()).await? {
            Some(token) => out::say(format_args!("{} is free; its token is {token}", out::printable(key)))?,
            None => return Err(Failure::new(exit::REFUSED, format_args!("{key:?} has no row"))),
        },
    }
    Ok(exit::OK)
}

/// Prints the claim as one JSON object on one line. `expires_at` is read from the row; it is null
/// if the row cannot be read or no longer has this holder.
async fn print<DB: Database>(lock: &LeaseLock<DB>, claim: &Claim, prior: Option<PreviousClaim>) -> Result<u8, Failure> {
    let entry =
        lock.inspect(claim.key.as_str()).await.ok().flatten().filter(|entry| entry.holder == Some(claim.holder));
    let claim: Value = json!({
        "key": claim.key.as_str(),
        "token": claim.token.get(),
        "holder": claim.holder.to_string(),
        "expires_at": entry.and_then(|entry| entry.until).map(show::precise),
        "taken_over_from": prior.map(|prior| json!({ "token": prior.token.get(), "by": prior.label })),
    });
    out::say_json(&claim)?;
    Ok(exit::OK)
}
