//! What a run waits for before its work begins: the key that it needs as well.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, Key},
    lease::guard::Lease,
    schedule::{core::Core, info::WAITS_FOR, keeper::Keeper, spec::Schedule, tick::note},
    session::timers::sleep,
    store::Database,
};

/// A run that waits for its key for longer says so.
const MOMENT: Duration = Duration::from_secs(1);

/// What came of the wait for the key that a run needs as well.
pub enum Exclusive<DB: Database> {
    /// `None`: the run needs no key.
    Acquired(Option<Lease<DB>>),
    Failed(String),
    /// An operator has stopped the tick.
    Stopped,
    /// The tick was lost, no run may begin any more, or the schedule was paused.
    Closed,
}

/// Waits for the key that a run needs as well, if it needs one and the work may begin. The wait may
/// be long, so the schedule is read once more after it: it may have been paused.
pub async fn acquire_exclusive<DB: Database>(
    core: &Core<DB>,
    schedule: &Schedule,
    keeper: &Keeper,
    closed: &CancellationToken,
) -> Exclusive<DB> {
    let (mut held, has_said) = (None, AtomicBool::new(false));
    let acquiring = async {
        let (key, lock) = schedule.exclusive.as_ref().zip(core.lock_of(schedule))?;
        // What the library itself sends ends no tick.
        let goes_on = |error: &Error| {
            let goes_on = matches!(error, Error::Database(_) | Error::Setup(_));
            if goes_on {
                tracing::warn!(schedule = %schedule.name, ?error, "a run cannot acquire its key; trying again");
            }
            goes_on
        };
        match lock.acquire_while(key, goes_on).await {
            Ok(lease) => held = Some(lease),
            Err(error) => return Some(Exclusive::Failed(format!("{error:?}"))),
        }
        is_paused(core, &schedule.name).await.then_some(Exclusive::Closed)
    };
    let not_begun = tokio::select! {
        biased;
        () = keeper.lost() => Some(Exclusive::Closed),
        () = keeper.stopped_by_an_operator() => Some(Exclusive::Stopped),
        () = closed.cancelled() => Some(Exclusive::Closed),
        not_begun = acquiring => not_begun,
        () = say_what_it_waits_for(core, keeper.claim(), schedule, &has_said) => None,
    };
    if has_said.load(Ordering::Relaxed) {
        say(core, keeper.claim(), "").await;
    }
    let Some(not_begun) = not_begun else { return Exclusive::Acquired(held) };
    if let Some(lease) = held {
        // A failure is logged, and the key ends with its lease.
        drop(lease.abandon().await);
    }
    not_begun
}

/// Says of a run, once, that it waits for its key, if it does so for more than a moment. Never
/// ends.
async fn say_what_it_waits_for<DB: Database>(
    core: &Core<DB>,
    claim: &Claim,
    schedule: &Schedule,
    has_said: &AtomicBool,
) {
    sleep(MOMENT).await;
    has_said.store(true, Ordering::Relaxed);
    let key = schedule.exclusive.as_ref().map_or("", Key::as_str);
    say(core, claim, &format!("{WAITS_FOR}{key}")).await;
    std::future::pending().await
}

async fn say<DB: Database>(core: &Core<DB>, claim: &Claim, text: &str) {
    if let Err(error) = note(core, claim, text).await {
        tracing::debug!(schedule = %claim.key, text, ?error, "the note of the run was not stored");
    }
}

/// Returns whether the schedule is known to be paused.
async fn is_paused<DB: Database>(core: &Core<DB>, name: &Key) -> bool {
    match core.row(name).await {
        Ok(row) => row.is_some_and(|row| row.paused),
        Err(error) => {
            tracing::warn!(schedule = %name, ?error, "it is unknown whether it was paused; it is run");
            false
        }
    }
}
