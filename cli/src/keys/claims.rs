//! `acquire`, `renew` and `release`: claims that outlive the program, for scripts and other
//! languages.

use std::time::Duration;

use rowlock::{Claim, Database, Key, Lease, LeaseLock, Schedules, leases::PreviousClaim};
use serde_json::{Value, json};
use sqlx::Pool;

use crate::{
    args::{
        claims::Terms,
        keys::{Release, Renew},
    },
    database,
    exit::{self, Failure},
    format::precise,
    keys::{claiming::Claiming, forced},
    operator::label,
    out,
    process::signals::{StopSignals, exit_code},
};

pub async fn acquire<DB: Database>(lock: &LeaseLock<DB>, key: &Key, terms: &Terms) -> Result<u8, Failure> {
    let mut stop = StopSignals::listen()?;
    let claiming = Claiming::without_command(lock, key.as_str(), terms);
    // A claim that is under way is undone at a signal, since its holder id would never be printed.
    let lease = claiming.wait_for(lock.acquire(key.as_str(), terms.wait), &mut stop).await?;
    let lease = claiming.beside_no_reader(lease, &mut stop).await?;
    match print_unless_asked(lock, &lease, &mut stop).await {
        Ok(code) => {
            lease.detach();
            Ok(code)
        }
        // No other process could release the claim, because its holder id was not printed.
        Err(failure) => Err(claiming.put_back(lease, &mut stop, failure).await),
    }
}

pub async fn renew<DB: Database>(pool: Pool<DB>, renew: Renew) -> Result<u8, Failure> {
    let lock = database::lock(pool, None)?.lease(renew.lease);
    let claim = lock.attach(renew.key.as_str(), renew.holder).await?.detach();
    print(&lock, &claim, None).await
}

pub async fn release<DB: Database>(pool: Pool<DB>, release: Release) -> Result<u8, Failure> {
    let label = label();
    let lock = database::lock(pool.clone(), release.force.then_some(label.as_str()))?;
    match release.holder {
        Some(holder) => lock.attach(release.key.as_str(), holder).await?.end(release.ending().into()).await?,
        None => return forced::release(&lock, &Schedules::new(pool), &release).await,
    }
    Ok(exit::OK)
}

/// Prints the claim. A claim that is not read within a second after a signal is not printed.
pub async fn print_unless_asked<DB: Database>(
    lock: &LeaseLock<DB>,
    lease: &Lease<DB>,
    stop: &mut StopSignals,
) -> Result<u8, Failure> {
    let printed = stop.within(Duration::MAX, print(lock, lease.claim(), lease.taken_over_from())).await;
    printed.unwrap_or_else(|_| Err(Failure::silent(stop.asked().map_or(exit::SIGNAL, exit_code))))
}

/// Prints the claim as one JSON object on one line. `expires_at` is read from the row; it is null
/// if the row cannot be read or no longer has this holder.
async fn print<DB: Database>(
    lock: &LeaseLock<DB>,
    claim: &Claim,
    prior: Option<&PreviousClaim>,
) -> Result<u8, Failure> {
    let entry =
        lock.inspect(claim.key.as_str()).await.ok().flatten().filter(|entry| entry.holder == Some(claim.holder));
    let claim: Value = json!({
        "key": claim.key.as_str(),
        "token": claim.token.get(),
        "holder": claim.holder.to_string(),
        "expires_at": entry.and_then(|entry| entry.until).map(precise),
        "taken_over_from": prior.map(|prior| json!({ "token": prior.token.get(), "by": prior.label })),
    });
    out::say_json_aside(claim).await
}
