//! Renews the lease of one run in the background, and tells its loss.

use std::sync::Arc;

use chrono::TimeDelta;
use tokio::time::{Instant, sleep_until};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    hedge::{Answer, Request},
    key::Claim,
    pacing,
    retry::Repeat,
    schedule::core::Core,
    store::{Database, Outcome, Reply, failure::Failure},
};

/// The lease of a run. Dropping it ends the renewals.
pub struct Keeper {
    /// Cancelled when the lease is lost.
    pub lost: CancellationToken,
    stopped: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Keeper {
    /// Begins to renew a claim that was granted to a request sent at `sent`.
    pub fn start<DB: Database>(core: &Arc<Core<DB>>, claim: &Claim, sent: Instant) -> Self {
        let (lost, stopped) = (CancellationToken::new(), CancellationToken::new());
        let keeping = keep(core.clone(), claim.clone(), sent, [lost.clone(), stopped.clone()]);
        Self { lost, stopped, task: AbortOnDropHandle::new(tokio::spawn(keeping)) }
    }

    /// Stops the renewals, and waits for one in flight, which might revive a claim that was ended.
    pub async fn stop(self) {
        self.stopped.cancel();
        self.task.await.ok();
    }
}

/// Makes the claim's lease end after this time from now.
struct Extension<'a> {
    claim: &'a Claim,
    lease: TimeDelta,
}

impl<DB: Database> Request<DB> for Extension<'_> {
    type Reply = Outcome;

    fn send(&self, conn: &mut DB::Connection) -> impl Future<Output = Reply<Outcome>> + Send {
        DB::extend_run(conn, self.claim, self.lease)
    }

    fn is_settled(outcome: &Outcome) -> bool {
        !matches!(outcome, Outcome::Skipped { .. })
    }
}

async fn keep<DB: Database>(core: Arc<Core<DB>>, claim: Claim, sent: Instant, [lost, stopped]: [CancellationToken; 2]) {
    let whole = core.lease.to_std().unwrap_or_default();
    let (mut deadline, mut renew_at) = (sent + core.counted(core.lease), sent + pacing::renewed_within(whole));
    loop {
        let renewal = async {
            stopped.run_until_cancelled(sleep_until(renew_at)).await?;
            Some(extend(&core, &claim, core.lease, Instant::now() + pacing::attempt(whole)).await)
        };
        let reply = tokio::select! {
            biased;
            () = sleep_until(deadline) => {
                tracing::error!(schedule = %claim.key, token = %claim.token, "lost: no renewal came through before its lease ended");
                return lost.cancel();
            }
            reply = renewal => reply,
        };
        let soon = Instant::now() + pacing::renewal_retry(whole);
        let Some(reply) = reply else { return };
        match reply {
            Ok(Answer { sent, reply: Outcome::Done }) => {
                (deadline, renew_at) = (sent + core.counted(core.lease), sent + pacing::renewed_within(whole));
            }
            Ok(Answer { sent, reply: Outcome::Skipped { left } }) => {
                (deadline, renew_at) = (sent + core.counted(left), soon);
            }
            Ok(Answer { reply: Outcome::Lost, .. }) => {
                tracing::error!(schedule = %claim.key, token = %claim.token, "lost: its row was seen without the claim");
                return lost.cancel();
            }
            Err(failure) => {
                tracing::warn!(schedule = %claim.key, %failure, "renewal brought no answer; the deadline stands, trying again");
                renew_at = soon;
            }
        }
    }
}

async fn extend<DB: Database>(
    core: &Core<DB>,
    claim: &Claim,
    lease: TimeDelta,
    limit: Instant,
) -> Result<Answer<Outcome>, Failure> {
    core.hedge.send(&Extension { claim, lease }, limit).await.reply
}

/// Ends a claim of work that has stopped, so that another instance may take over at once. If no
/// statement comes through, the claim ends with its lease.
pub async fn abandon<DB: Database>(core: &Core<DB>, claim: &Claim) {
    let limit = core.limit();
    let mut repeat = Repeat::until(limit);
    loop {
        let reply = match extend(core, claim, TimeDelta::zero(), limit).await {
            // Another statement has the row locked, perhaps a renewal that was given up.
            Ok(Answer { reply: Outcome::Skipped { .. }, .. }) => Err(Failure::Undone),
            reply => reply.map(drop),
        };
        if let Some(reply) = repeat.last(reply).await {
            if let Err(failure) = reply {
                tracing::warn!(schedule = %claim.key, %failure, "not handed back; it ends with its lease");
            }
            return;
        }
    }
}
