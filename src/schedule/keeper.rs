//! Renews the lease of one run in the background, from its claim on, and reports its loss.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    key::{Claim, Holder},
    lease::state::NO_RENEWAL,
    pacing,
    schedule::core::Core,
    session::{
        clock::{Deadline, Watch, watch},
        exchange::{Answer, Request, exchange},
        threads::{self, RECOVERED, Subscriber},
        time::Instant,
        timers::sleep_until,
    },
    store::{
        Database, Outcome, Reply, TooLate,
        failure::Failure,
        schedule::{ClaimedRow, DueReply, Extended, Extension, Known},
    },
    sync::lock,
};

/// The longest pause between two renewals, after which an order to stop is noticed.
const NOTICED: Duration = Duration::from_secs(20);
const NOT_RECORDED: &str = "its end was not recorded under its claim";

/// A row that was claimed, whose lease is renewed.
pub struct Claimed {
    pub row: ClaimedRow,
    /// When the claim was sent.
    pub sent: Instant,
    pub keeper: Keeper,
}

/// Claims what is due, once. Each claim is renewed from the reply on: the runtime may be blocked
/// before it begins the run. What was claimed is not a part of the reply.
pub async fn claim<DB: Database>(
    core: &Arc<Core<DB>>,
    known: &[Known],
    holder: Holder,
    most: u32,
) -> Result<(Vec<Claimed>, DueReply), Failure> {
    let (sent, mut reply) = core.claim(known, holder, most).await?;
    let keep = |row: ClaimedRow| {
        let known = known.iter().find(|known| known.times.name == row.claim.key);
        let lease = known.map_or(core.default_lease, |known| known.lease);
        Claimed { keeper: Keeper::start(core, &row.claim, lease, sent), row, sent }
    };
    Ok((reply.claimed.drain(..).map(keep).collect(), reply))
}

/// The lease of a run. Dropping it ends the renewals. One in flight revives no claim that has
/// ended: it extends a row that has its holder and its token.
pub struct Keeper {
    kept: Arc<Kept>,
    watch: Option<Watch>,
    _stopped: DropGuard,
}

/// What the work, and the thread that watches the clock, see of it.
pub struct Kept {
    claim: Claim,
    lease: TimeDelta,
    /// When the lease counts as lost unless it is renewed.
    deadline: Mutex<Instant>,
    lost: CancellationToken,
    /// The event of the loss was emitted.
    told: AtomicBool,
    /// An operator has stopped the tick.
    stopped: CancellationToken,
    subscriber: Subscriber,
}

impl Kept {
    fn hold_until(&self, deadline: Instant) {
        let mut current = lock(&self.deadline);
        // After the deadline the run may have been seen to be lost.
        if *current > Instant::now() {
            *current = deadline.max(*current);
        }
    }

    /// Returns whether the claim is known to stand at this moment. A loss is final.
    pub fn stands(&self) -> bool {
        // Read before the deadline: a lease that is found to be over is not extended after that.
        let now = Instant::now();
        !self.lost.is_cancelled() && now < self.deadline()
    }

    /// Cancels the token of the loss, and then emits the event. A row that was seen without the
    /// claim may be that of a run that has succeeded, which only the end of the run tells.
    fn report_overdue(&self) {
        if !self.lost.is_cancelled() {
            self.lost.cancel();
            self.tell(NO_RENEWAL);
        }
    }

    /// Emits the event of the loss that the end of the run has found, unless it was emitted.
    pub fn tell_not_recorded(&self) {
        self.tell(NOT_RECORDED);
    }

    fn tell(&self, why: &'static str) {
        if self.told.swap(true, Ordering::Relaxed) {
            return;
        }
        let claim = self.claim.clone();
        self.subscriber
            .emit_loss(move || tracing::error!(schedule = %claim.key, token = %claim.token, "the run was lost: {why}"));
    }
}

impl Deadline for Kept {
    fn deadline(&self) -> Instant {
        *lock(&self.deadline)
    }

    fn pass(self: Arc<Self>) {
        self.report_overdue();
    }
}

impl Keeper {
    /// Begins to renew a claim that was granted to a request sent at `sent`.
    fn start<DB: Database>(core: &Arc<Core<DB>>, claim: &Claim, lease: TimeDelta, sent: Instant) -> Self {
        let kept = Arc::new(Kept {
            claim: claim.clone(),
            lease,
            deadline: Mutex::new(sent + trusted(lease, lease)),
            lost: CancellationToken::new(),
            told: AtomicBool::new(false),
            stopped: CancellationToken::new(),
            subscriber: Subscriber::current(),
        });
        let stopped = CancellationToken::new();
        threads::spawn_renewal(keep(core.clone(), kept.clone(), sent, stopped.clone()));
        Self { watch: Some(watch(&kept)), kept, _stopped: stopped.drop_guard() }
    }

    pub fn kept(&self) -> Arc<Kept> {
        self.kept.clone()
    }

    pub fn claim(&self) -> &Claim {
        &self.kept.claim
    }

    /// Waits until the lease is lost.
    pub async fn lost(&self) {
        // The thread that watches the clock may be a moment late.
        if !self.kept.stands() {
            self.kept.report_overdue();
        }
        self.kept.lost.cancelled().await;
    }

    /// Waits until an operator has stopped the tick.
    pub async fn stopped_by_an_operator(&self) {
        self.kept.stopped.cancelled().await;
    }

    /// Leaves it to the end of the run to tell of a loss: the end is recorded after the lease too.
    pub fn leave_loss_to_end(&mut self) {
        self.watch = None;
    }
}

/// Makes the lease end after its time from now.
impl<DB: Database> Request<DB> for Kept {
    type Reply = Extended;

    fn send(
        &self,
        conn: &mut DB::Connection,
        not_after: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<Extended>> + Send {
        let is_stopped = self.stopped.is_cancelled();
        DB::extend_run(conn, &self.claim, Extension { lease: self.lease, is_stopped, not_after })
    }

    fn too_late(&self, extended: &Extended, _: Option<DateTime<Utc>>) -> Option<TooLate> {
        if let Extended::Is(Outcome::TooLate(late)) = extended { Some(*late) } else { None }
    }

    fn is_settled(&self, extended: &Extended) -> bool {
        !matches!(extended, Extended::Is(Outcome::Skipped { .. }))
    }
}

/// Returns how long after it was sent a claim or a renewal counts that left this much of the lease.
fn trusted(lease: TimeDelta, left: TimeDelta) -> Duration {
    pacing::trusted(left.to_std().unwrap_or_default(), lease.to_std().unwrap_or_default())
}

async fn keep<DB: Database>(core: Arc<Core<DB>>, kept: Arc<Kept>, sent: Instant, stopped: CancellationToken) {
    let sessions = core.renewals();
    let whole = kept.lease.to_std().unwrap_or_default();
    let pause = pacing::renewed_within(whole).min(NOTICED);
    let (mut renew_at, mut is_failing) = (sent + pause, false);
    loop {
        let waited = stopped.run_until_cancelled(sleep_until(renew_at)).await;
        // A renewal would revive a claim that counts as lost.
        if waited.is_none() || !kept.stands() {
            return;
        }
        let limit = Instant::now() + pacing::attempt(whole);
        let reply = exchange(None, &sessions, pacing::hedge_delay(whole), limit, &*kept).await.reply;
        let soon = Instant::now() + pacing::renewal_retry(whole);
        if stopped.is_cancelled() {
            return;
        }
        match reply {
            Ok(Answer { sent, reply: Extended::Is(Outcome::Done) }) => {
                kept.hold_until(sent + trusted(kept.lease, kept.lease));
                renew_at = sent + pause;
                if std::mem::take(&mut is_failing) {
                    let schedule = kept.claim.key.clone();
                    kept.subscriber.emit(move || tracing::info!(target: RECOVERED, %schedule, "renewed again"));
                }
            }
            // What is being stopped keeps its lease until it has ended.
            Ok(Answer { reply: Extended::Stopped, .. }) => kept.stopped.cancel(),
            Ok(Answer { sent, reply: Extended::Is(Outcome::Skipped { left }) }) => {
                kept.hold_until(sent + trusted(kept.lease, left));
                renew_at = soon;
            }
            Ok(Answer { reply: Extended::Is(Outcome::TooLate(_)), .. }) => renew_at = soon,
            Ok(Answer { reply: Extended::Is(Outcome::Lost), .. }) => return kept.lost.cancel(),
            Err(failure) => {
                is_failing = true;
                let schedule = kept.claim.key.clone();
                kept.subscriber.emit(move || {
                    tracing::warn!(%schedule, %failure, "a renewal received no reply; the lease is valid until its deadline, trying again");
                });
                renew_at = soon;
            }
        }
    }
}
