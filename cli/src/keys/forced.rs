//! `release --force`: an operator frees a key, whichever claim holds it.

use rowlock::{
    Database, Error, LeaseLock, Schedules, Status, Token,
    admin::{ForcedRelease, LockInfo},
};

use crate::{
    args::keys::{Ending, Release},
    exit::{self, Failure},
    keys::{names::is_claimed, rows::claim},
    operator::logged,
    out::{self, printable},
};

/// How often the key may change hands before it is released without a read of its row.
const LOOKS: u32 = 5;

pub async fn release<DB: Database>(
    lock: &LeaseLock<DB>,
    schedules: &Schedules<DB>,
    release: &Release,
) -> Result<u8, Failure> {
    let key = release.key.as_str();
    let freed = match free(lock, key, release.ending().into()).await {
        Ok(Some((token, row))) => Ok((token, row.as_ref().map(taken_from))),
        Ok(None) => Err(no_row(schedules, key).await),
        Err(error) => Err(error.into()),
    };
    let (token, was) = logged("release", key, freed, |(_, was)| was.clone().unwrap_or_else(|| "-".to_owned()))?;
    let was = was.map(|was| format!("; it was {was}")).unwrap_or_default();
    let closed = match release.ending() {
        Ending::F => "; under the rules of the article it stays closed until `--status S`",
        Ending::S => "",
    };
    out::say(format_args!("{} is free; its token is {token}{was}{closed}", printable(key)))
}

/// Frees the key. Returns its new token and the row that was there before.
async fn free<DB: Database>(
    lock: &LeaseLock<DB>,
    key: &str,
    status: Status,
) -> Result<Option<(Token, Option<LockInfo>)>, Error> {
    let mut seen = lock.inspect(key).await?;
    for _ in 0..LOOKS {
        let Some(row) = seen else { return Ok(None) };
        match lock.force_release_if_unchanged(&row, status).await? {
            ForcedRelease::Released(token) => return Ok(Some((token, Some(row)))),
            ForcedRelease::Changed(now) => seen = now,
        }
    }
    Ok(lock.force_release(key, status).await?.map(|token| (token, None)))
}

/// Describes the claim that a key was taken from.
fn taken_from(row: &LockInfo) -> String {
    let holder = row.holder.map(|holder| format!(", holder {holder}")).unwrap_or_default();
    let under = if is_claimed(row.state) { format!(" under token {}{holder}", row.token) } else { String::new() };
    printable(&format!("{}{under}", claim(row)))
}

/// Says what the name is instead.
async fn no_row<DB: Database>(schedules: &Schedules<DB>, key: &str) -> Failure {
    // Without rights on the tables of schedules, the name is that of a key without a row.
    let text = match schedules.inspect(key).await {
        Ok(Some(_)) => format!(
            "{key:?} is no key, but a schedule: `rowlock pause {key}` lets no run begin, and `rowlock trigger {key}` asks for one"
        ),
        _ => format!("{key:?} has no row: it was never taken, or its row was deleted; `rowlock list` shows the keys"),
    };
    Failure::new(exit::REFUSED, text)
}
