//! Renews the lease of one run in the background, and reports its loss.

use std::{sync::Arc, time::Duration};

use chrono::TimeDelta;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    hedge::{Answer, Request},
    key::Claim,
    lease::state::{NO_RENEWAL, SEEN_WITHOUT},
    pacing,
    schedule::core::Core,
    store::{Database, Outcome, Reply, failure::Failure},
    task::emit_apart,
};

/// The lease of a run. Dropping it ends the renewals.
pub struct Keeper {
    lost: CancellationToken,
    /// When the lease counts as lost unless it is renewed.
    deadline: watch::Receiver<Instant>,
    stopped: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Keeper {
    /// Begins to renew a claim that was granted to a request sent at `sent`.
    pub fn start<DB: Database>(core: &Arc<Core<DB>>, claim: &Claim, sent: Instant) -> Self {
        let (lost, stopped) = (CancellationToken::new(), CancellationToken::new());
        let (until, deadline) = watch::channel(sent + trusted(core, core.lease));
        let keeping = keep(core.clone(), claim.clone(), sent, until, [lost.clone(), stopped.clone()]);
        Self { lost, deadline, stopped, task: AbortOnDropHandle::new(tokio::spawn(keeping)) }
    }

    /// Waits until the lease is lost. The clock is watched here too, because the task that renews
    /// may be held up by a subscriber that blocks.
    pub async fn lost(&self) {
        let mut deadline = self.deadline.clone();
        loop {
            let until = *deadline.borrow_and_update();
            tokio::select! {
                biased;
                () = self.lost.cancelled() => return,
                Ok(()) = deadline.changed() => {}
                () = sleep_until(until) => return self.lost.cancel(),
            }
        }
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
        DB::extend_run(conn, self.claim, self.lease, None)
    }

    fn is_settled(outcome: &Outcome) -> bool {
        !matches!(outcome, Outcome::Skipped { .. })
    }
}

/// Returns how long after it was sent a claim or a renewal counts that left this much of the lease.
fn trusted<DB: Database>(core: &Core<DB>, left: TimeDelta) -> Duration {
    let whole = core.lease.to_std().unwrap_or_default();
    pacing::trusted(left.to_std().unwrap_or_default(), whole)
}

async fn keep<DB: Database>(
    core: Arc<Core<DB>>,
    claim: Claim,
    sent: Instant,
    deadline: watch::Sender<Instant>,
    [lost, stopped]: [CancellationToken; 2],
) {
    let whole = core.lease.to_std().unwrap_or_default();
    let mut renew_at = sent + pacing::renewed_within(whole);
    loop {
        let until = *deadline.borrow();
        let renewal = async {
            stopped.run_until_cancelled(sleep_until(renew_at)).await?;
            Some(extend(&core, &claim, Instant::now() + pacing::attempt(whole)).await)
        };
        let reply = tokio::select! {
            biased;
            () = sleep_until(until) => return report_lost(&lost, claim, NO_RENEWAL),
            reply = renewal => reply,
        };
        let soon = Instant::now() + pacing::renewal_retry(whole);
        let Some(reply) = reply else { return };
        match reply {
            Ok(Answer { sent, reply: Outcome::Done }) => {
                deadline.send_replace(sent + trusted(&core, core.lease));
                renew_at = sent + pacing::renewed_within(whole);
            }
            Ok(Answer { sent, reply: Outcome::Skipped { left } }) => {
                deadline.send_replace(sent + trusted(&core, left));
                renew_at = soon;
            }
            Ok(Answer { reply: Outcome::TooLate(_), .. }) => renew_at = soon,
            Ok(Answer { reply: Outcome::Lost, .. }) => return report_lost(&lost, claim, SEEN_WITHOUT),
            Err(failure) => {
                tracing::warn!(schedule = %claim.key, %failure, "renewal got no reply; the deadline stands, trying again");
                renew_at = soon;
            }
        }
    }
}

/// Cancels the token of the loss, and then emits the event.
fn report_lost(lost: &CancellationToken, claim: Claim, why: &'static str) {
    lost.cancel();
    emit_apart(move || tracing::error!(schedule = %claim.key, token = %claim.token, "lost: {why}"));
}

async fn extend<DB: Database>(core: &Core<DB>, claim: &Claim, limit: Instant) -> Result<Answer<Outcome>, Failure> {
    core.hedge.send(&Extension { claim, lease: core.lease }, limit).await.reply
}
