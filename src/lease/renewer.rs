//! The renewer: renews all leases of one lock in the background.
//!
//! A lease is *held* while its deadline lies ahead. It is *unknown* when a renewal brought no
//! reply: the deadline stands, and the renewal is retried sooner. It is *lost* when its deadline
//! has passed or the row was seen without the claim. The deadline is on this machine's monotonic
//! clock, counted from before the request was sent, so it comes before the server could grant the
//! key to another holder.
//!
//! One task with one timer serves the lock while it has leases or endings; tasks on other runtimes
//! stand by (`task.rs`). A renewal and an ending take one connection each, and a second one if the
//! first does not answer (`changes.rs`).

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    runtime::Id,
    sync::{OnceCell, oneshot, watch},
    time::{Instant, timeout},
};
use tokio_util::task::TaskTracker;

use crate::{
    batch::batcher::Batcher,
    key::Claim,
    lease::{
        agenda::{self, Agenda, Scheduled},
        changes::{ChangeReply, Changes, Exchange, PartReply},
        ending::{Ended, Ending},
        releases::Releases,
        settings::Settings,
        state::LeaseState,
    },
    metrics,
    queue::local::Wakeups,
    retry::Backoff,
    schema::Table,
    store::{Change, Database, Outcome, failure::Remedy, lost_among, skipped_among},
    sync::lock,
    task::{self, Duty, Role, UnderWay, Work},
};

const SEEN_WITHOUT: &str = "its row was seen without the claim";

/// Renews the leases of one lock.
pub(crate) struct Renewer<DB: Database> {
    changes: Changes<DB>,
    lease: Duration,
    pub releases: Arc<Batcher<DB, Releases>>,
    wakeups: Arc<Wakeups>,
    agenda: Mutex<Agenda>,
    /// Wakes the tasks.
    work: watch::Sender<()>,
    pub tracker: TaskTracker,
    /// When the last of the claims that could not be ended expires.
    left_behind_until: Mutex<Instant>,
}

impl<DB: Database> Renewer<DB> {
    pub fn new(
        settings: &Settings<DB>,
        table: Arc<OnceCell<Table>>,
        wakeups: Arc<Wakeups>,
        tracker: TaskTracker,
    ) -> Arc<Self> {
        let Settings { pool: requests, renewals: pool, terms, batching, .. } = settings;
        let (requests, pool, terms) = (requests.clone(), pool.clone(), terms.clone());
        let lease = terms.lease.to_std().unwrap_or_default();
        let changes = Changes {
            pool,
            requests: requests.clone(),
            terms: terms.clone(),
            patience: attempt(lease) / 4,
            scarce_until: Mutex::new(Instant::now()),
        };
        let releases = Batcher::new(Releases { terms, table }, requests, tracker.clone(), *batching);
        Arc::new(Self {
            changes,
            lease,
            releases,
            wakeups,
            agenda: Mutex::new(Agenda::new(Duty::new(lease / 20))),
            work: watch::Sender::new(()),
            tracker,
            left_behind_until: Mutex::new(Instant::now()),
        })
    }

    /// Starts renewing claims that were granted to a request sent at `sent`.
    pub fn hold(self: &Arc<Self>, claims: Vec<Claim>, sent: Instant) -> Arc<LeaseState> {
        let held = Arc::new(LeaseState::new(claims, self.deadline(sent, self.lease), self.wakeups.clone()));
        let renew_at = sent + self.lease / 3;
        let mut agenda = lock(&self.agenda);
        agenda.leases.insert(held.id(), Scheduled { held: held.clone(), renew_at, suspect: false });
        self.run(agenda, renew_at);
        held
    }

    /// Stops renewing a lease.
    pub fn let_go(&self, held: &LeaseState) {
        lock(&self.agenda).leases.remove(&held.id());
    }

    /// Reports that the claim at index `place` is lost. The other claims of the lease are
    /// abandoned.
    pub fn lose(self: &Arc<Self>, held: &Arc<LeaseState>, place: usize, why: &str) {
        self.let_go(held);
        if held.tell_lost(place, why) && held.claims.len() > 1 {
            drop(self.abandon(held.clone()));
        }
    }

    /// Abandons claims of stopped work in the background. The receiver gets the outcome.
    pub fn abandon(self: &Arc<Self>, held: Arc<LeaseState>) -> oneshot::Receiver<Ended> {
        self.end(held, Change::Abandon)
    }

    /// Ends claims in the background with `change`. The receiver gets the outcome.
    pub fn end(self: &Arc<Self>, held: Arc<LeaseState>, change: Change) -> oneshot::Receiver<Ended> {
        let (ending, receiver) = Ending::new(held, change, self.pauses(), self.tracker.token());
        let at = ending.at;
        let mut agenda = lock(&self.agenda);
        agenda.end(ending);
        self.run(agenda, at);
        receiver
    }

    /// Waits for at most `limit` until no background work is left. Returns whether none is, and no
    /// claim was left behind.
    pub async fn settled(self: &Arc<Self>, limit: Duration) -> bool {
        self.attend();
        timeout(limit, self.tracker.wait()).await.is_ok() && *lock(&self.left_behind_until) <= Instant::now()
    }

    /// Renews one lease now.
    pub async fn renew(self: &Arc<Self>, held: &Arc<LeaseState>, limit: Instant) -> Exchange<Outcome> {
        self.attend();
        let Exchange { reply, unanswered } = self.changes.send(&held.claims, self.renewal(), limit).await;
        Exchange { reply: reply.map(|answer| self.renewed(held, &answer)), unanswered }
    }

    fn renewed(self: &Arc<Self>, held: &Arc<LeaseState>, ChangeReply { sent, outcomes }: &ChangeReply) -> Outcome {
        if let Some(place) = lost_among(outcomes) {
            self.lose(held, place, SEEN_WITHOUT);
            return Outcome::Lost;
        }
        if let Some(left) = skipped_among(outcomes) {
            return Outcome::Skipped { left };
        }
        held.renewed();
        held.hold_until(self.deadline(*sent, self.lease));
        if let Some(kept) = lock(&self.agenda).leases.get_mut(&held.id()) {
            (kept.renew_at, kept.suspect) = (*sent + self.lease / 3, false);
        }
        Outcome::Done
    }

    fn renewal(&self) -> Change {
        Change::Renew(self.changes.terms.lease)
    }

    /// Returns when a claim with `left` at `sent` counts as lost. The deadline is a little early,
    /// for clocks that diverge and timers that fire late.
    fn deadline(&self, sent: Instant, left: Duration) -> Instant {
        sent + left.saturating_sub(self.lease / 20)
    }

    /// Returns how long a whole lease counts on the client's side.
    pub fn counted(&self) -> Duration {
        self.lease - self.lease / 20
    }

    /// Returns the pauses between attempts to end a claim.
    pub fn pauses(&self) -> Backoff {
        Backoff::up_to(self.longest_pause())
    }

    fn longest_pause(&self) -> Duration {
        (self.lease / 12).min(Duration::from_secs(1))
    }

    /// Starts a task on this runtime too, because the active task may be on a runtime that makes no
    /// progress.
    pub fn attend(self: &Arc<Self>) {
        if !lock(&self.agenda).is_empty() {
            task::start(self);
        }
    }

    /// Ensures that a task handles what is due at `due`.
    fn run(self: &Arc<Self>, mut agenda: MutexGuard<'_, Agenda>, due: Instant) {
        let sooner = agenda.duty.expect(due);
        drop(agenda);
        if sooner {
            self.work.send_replace(());
        }
        task::start(self);
    }

    fn start_what_is_due(self: &Arc<Self>, agenda: &mut Agenda, UnderWay { renewal, ending }: &mut UnderWay) {
        let now = Instant::now();
        if renewal.is_none() && agenda.leases.values().any(|kept| kept.renew_at <= now) {
            // Renewals that are due a little later join the batch.
            *renewal = Some(Box::pin(self.clone().renew_batch(agenda.renewals(now + self.lease / 12))));
        }
        // An abandonment waits for the renewal in flight, which might revive the claim that it
        // ended.
        if renewal.is_none()
            && ending.is_none()
            && let Some((change, batch)) = agenda.endings()
        {
            *ending = Some(Box::pin(self.clone().end_batch(batch, change)));
        }
    }

    async fn renew_batch(self: Arc<Self>, batch: agenda::Batch<Arc<LeaseState>>) {
        let limit = Instant::now() + attempt(self.lease);
        let parties: Vec<Vec<Claim>> = batch.items.iter().map(|held| held.claims.clone()).collect();
        let shares = self.changes.send_apart(&parties, batch.suspects, self.renewal(), limit).await;
        let failed = shares.iter().filter(|share| share.reply.is_err()).count();
        if failed > 0 {
            metrics::renewals_failed(failed);
            tracing::warn!(leases = failed, "renewal brought no answer; the deadlines stand, trying again");
        }
        let soon = Instant::now() + self.longest_pause().mul_f64(fastrand::f64() / 2.0 + 0.5);
        for (held, PartReply { reply, .. }) in batch.items.iter().zip(shares) {
            let outcome = reply.as_ref().map(|answer| (answer.sent, self.renewed(held, answer)));
            // A lease that is no longer scheduled has been ended.
            let mut agenda = lock(&self.agenda);
            let Some(kept) = agenda.leases.get_mut(&held.id()) else { continue };
            match outcome {
                Ok((sent, Outcome::Skipped { left })) => {
                    let left = left.to_std().unwrap_or_default();
                    held.hold_until(self.deadline(sent, left));
                    (kept.renew_at, kept.suspect) = (soon.max(sent + left.saturating_sub(self.lease * 2 / 3)), false);
                }
                Ok((_, Outcome::Done | Outcome::Lost)) => {}
                Err(remedy) => (kept.renew_at, kept.suspect) = (soon, *remedy != Remedy::Again),
            }
        }
    }

    async fn end_batch(self: Arc<Self>, batch: agenda::Batch<(u64, Claim)>, change: Change) {
        let limit = Instant::now() + attempt(self.lease);
        let parties: Vec<Vec<Claim>> = batch.items.iter().map(|(_, claim)| vec![claim.clone()]).collect();
        let shares = self.changes.send_apart(&parties, batch.suspects, change, limit).await;
        let mut rest = shares.as_slice();
        for claims in batch.items.chunk_by(|one, next| one.0 == next.0) {
            let (shares, others) = rest.split_at(claims.len().min(rest.len()));
            rest = others;
            let number = claims[0].0;
            let mut agenda = lock(&self.agenda);
            let ended = agenda.hear(number, claims.iter().map(|(_, claim)| claim).zip(shares));
            drop(agenda);
            if let Some((ended, ending)) = ended {
                if matches!(ended, Ended::GivenUp(_)) {
                    let mut until = lock(&self.left_behind_until);
                    *until = ending.held.deadline().max(*until);
                }
                ending.tell(ended);
            }
        }
    }
}

impl<DB: Database> Work for Renewer<DB> {
    fn join(&self, runtime: Id) -> bool {
        lock(&self.agenda).duty.join(runtime)
    }

    fn woken(&self) -> &watch::Sender<()> {
        &self.work
    }

    fn look(self: &Arc<Self>, runtime: Id, under_way: &mut UnderWay) -> Option<Instant> {
        let role = lock(&self.agenda).duty.role(runtime, Instant::now());
        if role != Role::Work {
            // These statements were started before another task took over, which sends them again.
            *under_way = UnderWay::default();
        }
        let late = lock(&self.agenda).take_late();
        for held in late {
            self.lose(&held, 0, "no renewal came through before its lease ended");
        }
        let mut agenda = lock(&self.agenda);
        if agenda.duty.role(runtime, Instant::now()).is_other_than(role) {
            return Some(Instant::now());
        }
        if agenda.is_empty() && under_way.renewal.is_none() && under_way.ending.is_none() {
            agenda.duty.leave(runtime);
            return None;
        }
        match role {
            Role::StandBy(until) => return Some(until),
            Role::TakeOver => agenda.take_over(),
            Role::Work => {}
        }
        self.start_what_is_due(&mut agenda, under_way);
        let next = agenda.next(under_way.renewal.is_some(), under_way.ending.is_some());
        // A statement in flight is given up by then, so a task whose runtime makes progress looks
        // no later.
        let latest = Instant::now() + attempt(self.lease);
        let wakes_at = next.map_or(latest, |next| next.min(latest));
        agenda.duty.wakes_at(wakes_at);
        Some(wakes_at)
    }

    /// If no other task is left, renewals stop and the holders are notified of the loss. Claims to
    /// be abandoned end with their leases.
    fn leave(&self, runtime: Id) {
        let mut agenda = lock(&self.agenda);
        if agenda.duty.leave(runtime) {
            drop(agenda);
            self.work.send_replace(());
            return;
        }
        let (leases, endings) = agenda.clear();
        drop(agenda);
        drop(endings);
        for held in leases {
            held.tell_lost(0, "the runtime that renewed it was shut down");
        }
    }
}

/// How long one statement may take, including all requests that are sent in its place.
fn attempt(lease: Duration) -> Duration {
    (lease / 3).min(Duration::from_secs(10))
}
