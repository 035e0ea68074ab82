//! The renewer: renews the leases of one lock that have the same duration and lock-delay, in the
//! background.
//!
//! A lease is *held* while its deadline lies ahead. It is *unknown* when a renewal brought no
//! reply: the deadline stands, and the renewal is retried sooner. It is *lost* when its deadline
//! has passed or the row was seen without the claim. The deadline is on this machine's monotonic
//! clock, counted from before the request was sent, so it comes before the server could grant the
//! key to another holder.
//!
//! One task with one timer is active while there are leases or endings; tasks on other runtimes
//! stand by (`task.rs`). A renewal and an ending take one connection each, and a second one if the
//! first does not answer (`hedge.rs`).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Duration,
};

use chrono::TimeDelta;
use tokio::{
    runtime::{Handle, Id},
    sync::{oneshot, watch},
    time::{Instant, timeout},
};
use tokio_util::task::TaskTracker;

use crate::{
    hedge::{Exchange, Hedge},
    key::Claim,
    lease::{
        agenda::{self, Agenda},
        changes::{ChangeReply, Changes, GroupReply},
        ending::{EndOutcome, Ending},
        left_behind::LeftBehind,
        state::{LeaseState, NO_RENEWAL, SEEN_WITHOUT},
    },
    metrics,
    pacing::{self, Backoff},
    queue::wakeups::Wakeups,
    store::{Change, Database, Outcome, failure::Remedy, late_among, lost_among, pools::Connections, skipped_among},
    sync::lock,
    task::{self, Duty, InFlight, Role, Work},
};

/// Renews the leases of one lock that have the same duration and lock-delay.
pub(crate) struct Renewer<DB: Database> {
    all: Arc<Renewers<DB>>,
    changes: Changes<DB>,
    /// How long a holder trusts a lease. The row's lease is longer by the lock-delay.
    lease: Duration,
    lock_delay: TimeDelta,
    renewal: Change,
    agenda: Mutex<Agenda>,
    /// Wakes the tasks.
    work: watch::Sender<()>,
}

/// The renewers of one lock, one for each duration of a lease and lock-delay, because one statement
/// renews leases of one duration, of which their holders trust the same part.
pub(crate) struct Renewers<DB: Database> {
    pool: Connections<DB>,
    requests: Connections<DB>,
    wakeups: Arc<Wakeups>,
    tracker: TaskTracker,
    left_behind: Arc<LeftBehind>,
    /// Until when no connection of the pool is waited for, because it had none a moment ago.
    pool_exhausted_until: Arc<Mutex<Instant>>,
    known: Mutex<Vec<Weak<Renewer<DB>>>>,
    /// The runtimes that have used the lock. Each renewer with leases has a task on each of them,
    /// so that the task of a runtime that stands still is replaced.
    runtimes: Mutex<HashMap<Id, Handle>>,
}

impl<DB: Database> Renewers<DB> {
    pub fn new(
        pool: Connections<DB>,
        requests: Connections<DB>,
        wakeups: Arc<Wakeups>,
        tracker: TaskTracker,
        left_behind: Arc<LeftBehind>,
    ) -> Arc<Self> {
        let pool_exhausted_until = Arc::new(Mutex::new(Instant::now()));
        let (known, runtimes) = (Mutex::default(), Mutex::default());
        Arc::new(Self { pool, requests, wakeups, tracker, left_behind, pool_exhausted_until, known, runtimes })
    }

    /// Returns the renewer of leases of this duration in the row, `lock_delay` included.
    pub fn of(self: &Arc<Self>, lease: TimeDelta, lock_delay: TimeDelta) -> Arc<Renewer<DB>> {
        let mut known = lock(&self.known);
        known.retain(|renewer| renewer.strong_count() > 0);
        let renews =
            |renewer: &Arc<Renewer<DB>>| renewer.renewal == Change::Renew(lease) && renewer.lock_delay == lock_delay;
        if let Some(renewer) = known.iter().filter_map(Weak::upgrade).find(renews) {
            return renewer;
        }
        let renewer = Renewer::new(self, lease, lock_delay);
        known.push(Arc::downgrade(&renewer));
        renewer
    }

    /// Waits for at most `limit` until no background work is left. Returns whether none is, and no
    /// claim was left behind.
    pub async fn settled(&self, limit: Duration) -> bool {
        if Handle::try_current().is_err() {
            return false; // the limit cannot be watched
        }
        self.renewers().iter().for_each(Renewer::ensure_task);
        timeout(limit, self.tracker.wait()).await.is_ok() && !self.left_behind.any()
    }

    fn renewers(&self) -> Vec<Arc<Renewer<DB>>> {
        lock(&self.known).iter().filter_map(Weak::upgrade).collect()
    }

    /// Called when `renewer` has started a task on this runtime.
    fn joined(&self, renewer: &Arc<Renewer<DB>>, runtime: Handle) {
        let mut runtimes = lock(&self.runtimes);
        let is_new = runtimes.insert(runtime.id(), runtime.clone()).is_none();
        let others: Vec<Handle> = runtimes.values().filter(|other| other.id() != runtime.id()).cloned().collect();
        drop(runtimes);
        for other in others {
            task::start_on(renewer, &other);
        }
        if is_new {
            self.renewers().iter().filter(|peer| !lock(&peer.agenda).is_empty()).for_each(|peer| {
                task::start_on(peer, &runtime);
            });
        }
    }
}

impl<DB: Database> Renewer<DB> {
    fn new(all: &Arc<Renewers<DB>>, lease: TimeDelta, lock_delay: TimeDelta) -> Arc<Self> {
        let renewal = Change::Renew(lease);
        let lease = (lease - lock_delay).to_std().unwrap_or_default();
        let hedge = Hedge {
            pool: all.pool.clone(),
            requests: all.requests.clone(),
            delay: pacing::hedge_delay(lease),
            pool_exhausted_until: all.pool_exhausted_until.clone(),
        };
        Arc::new(Self {
            all: all.clone(),
            changes: Changes { hedge },
            lease,
            lock_delay,
            renewal,
            agenda: Mutex::new(Agenda::new(Duty::new(lease / 20))),
            work: watch::Sender::new(()),
        })
    }

    /// Starts renewing claims that were granted to a request sent at `sent`.
    pub fn hold(self: &Arc<Self>, claims: Vec<Claim>, sent: Instant) -> Arc<LeaseState> {
        let (deadline, row_ends) = (self.deadline(sent, self.lease), Instant::now() + self.lease_of_row());
        let held = Arc::new(LeaseState::new(claims, deadline, row_ends, self.all.wakeups.clone()));
        let renew_at = sent + pacing::renewal_interval(self.lease);
        let mut agenda = lock(&self.agenda);
        agenda.add(held.clone(), renew_at);
        self.ensure_task_by(agenda, renew_at);
        held
    }

    /// Stops renewing a lease.
    pub fn stop_renewing(&self, held: &LeaseState) {
        lock(&self.agenda).remove(held.id());
    }

    /// Reports that the claim at this index is lost. The other claims of the lease are
    /// abandoned.
    pub fn report_lost(self: &Arc<Self>, held: &Arc<LeaseState>, index: usize, why: &'static str) {
        self.stop_renewing(held);
        if held.mark_lost(index, why) && held.claims.len() > 1 {
            // The work may not have stopped yet.
            drop(self.end(held.clone(), Change::Abandon(self.lock_delay)));
        }
    }

    /// Ends claims in the background with `change`. The receiver gets the outcome.
    pub fn end(self: &Arc<Self>, held: Arc<LeaseState>, change: Change) -> oneshot::Receiver<EndOutcome> {
        let (ending, receiver) = Ending::new(held, change, self.pauses(), self.all.tracker.token());
        let at = ending.at;
        let mut agenda = lock(&self.agenda);
        agenda.end(ending);
        self.ensure_task_by(agenda, at);
        receiver
    }

    /// Renews one lease now.
    pub async fn renew(self: &Arc<Self>, held: &Arc<LeaseState>, change: Change, limit: Instant) -> Exchange<Outcome> {
        self.ensure_task();
        held.row_lasts_until(limit + self.lease_of_row());
        let Exchange { reply, unanswered } = self.changes.send(&held.claims, change, limit).await;
        let next = pacing::renewal_interval(self.lease);
        Exchange { reply: reply.map(|answer| self.renewed(held, &answer, next)), unanswered }
    }

    /// Applies the reply to a renewal, which is followed by the next one after `next`.
    fn renewed(
        self: &Arc<Self>,
        held: &Arc<LeaseState>,
        ChangeReply { sent, outcomes }: &ChangeReply,
        next: Duration,
    ) -> Outcome {
        if let Some(index) = lost_among(outcomes) {
            self.report_lost(held, index, SEEN_WITHOUT);
            return Outcome::Lost;
        }
        if let Some(left) = skipped_among(outcomes) {
            return Outcome::Skipped { left };
        }
        if let Some(late) = late_among(outcomes) {
            return Outcome::TooLate(late);
        }
        held.trace_renewed();
        held.hold_until(self.deadline(*sent, self.lease));
        lock(&self.agenda).reschedule(held.id(), *sent + next, false);
        Outcome::Done
    }

    /// Returns when a claim with `left` at `sent` counts as lost. The deadline is a little early,
    /// for clocks that diverge and timers that fire late.
    fn deadline(&self, sent: Instant, left: Duration) -> Instant {
        sent + pacing::trusted(left, self.lease)
    }

    /// Records which of these claims may stand, because they are not ended any more.
    fn leave_behind(&self, ending: &Ending) {
        let Ending { held, left, .. } = ending;
        held.claims.iter().for_each(|claim| self.all.left_behind.remove(claim.holder));
        left.iter().for_each(|claim| self.all.left_behind.add(claim.holder, held.row_ends()));
    }

    /// Returns the whole lease as the row keeps it.
    fn lease_of_row(&self) -> Duration {
        self.lease + self.lock_delay.to_std().unwrap_or_default()
    }

    /// Returns how long a whole lease counts on the client's side.
    pub fn local_duration(&self) -> Duration {
        pacing::trusted(self.lease, self.lease)
    }

    /// Returns the pauses between attempts to end a claim.
    pub fn pauses(&self) -> Backoff {
        Backoff::up_to(pacing::longest_retry_pause(self.lease))
    }

    /// Starts a task on this runtime too, because the active task may be on a runtime that makes no
    /// progress.
    pub fn ensure_task(self: &Arc<Self>) {
        if !lock(&self.agenda).is_empty() {
            self.start();
        }
    }

    fn start(self: &Arc<Self>) {
        if let Some(runtime) = task::start(self) {
            self.all.joined(self, runtime);
        }
    }

    /// Ensures that a task handles what is due at `due`.
    fn ensure_task_by(self: &Arc<Self>, mut agenda: MutexGuard<'_, Agenda>, due: Instant) {
        let sooner = agenda.duty.expect(due);
        // Under the same lock as what is due: the task of another runtime that ends at this moment
        // would otherwise take it for work that no task is left to do.
        let joined = Handle::try_current().ok().filter(|runtime| agenda.duty.join(runtime.id()));
        drop(agenda);
        if sooner {
            self.work.send_replace(());
        }
        if let Some(runtime) = joined {
            task::spawn_on(self, &runtime);
            self.all.joined(self, runtime);
        }
    }

    fn start_what_is_due(self: &Arc<Self>, agenda: &mut Agenda, InFlight { keeping, ending }: &mut InFlight) {
        let now = Instant::now();
        if keeping.is_none() && agenda.has_renewals(now) {
            // Renewals that are due a little later join the batch.
            *keeping =
                Some(Box::pin(self.clone().renew_batch(agenda.renewals(now + pacing::joins_within(self.lease)))));
        }
        // An abandonment waits for the renewal in flight, which might revive the claim that it
        // ended.
        if keeping.is_none()
            && ending.is_none()
            && let Some((change, batch)) = agenda.endings()
        {
            *ending = Some(Box::pin(self.clone().end_batch(batch, change)));
        }
    }

    async fn renew_batch(self: Arc<Self>, batch: agenda::Batch<Arc<LeaseState>>) {
        let sent = Instant::now();
        let limit = sent + pacing::attempt(self.lease);
        batch.items.iter().for_each(|held| held.row_lasts_until(limit + self.lease_of_row()));
        let groups: Vec<Vec<Claim>> = batch.items.iter().map(|held| held.claims.clone()).collect();
        let replies = self.changes.send_apart(&groups, batch.refused_from, self.renewal, limit).await;
        metrics::renewed(sent.elapsed());
        let failed = replies.iter().filter(|reply| reply.reply.is_err()).count();
        if failed > 0 {
            metrics::renewals_failed(failed);
            tracing::warn!(leases = failed, "renewal got no reply; the deadlines stand, trying again");
        }
        let soon = Instant::now() + pacing::renewal_retry(self.lease);
        // Leases that were renewed together stay together.
        let next = pacing::renewal_interval(self.lease);
        for (held, GroupReply { reply, .. }) in batch.items.iter().zip(replies) {
            let outcome = reply.as_ref().map(|answer| (answer.sent, self.renewed(held, answer, next)));
            match outcome {
                Ok((sent, Outcome::Skipped { left })) => {
                    let left = (left - self.lock_delay).to_std().unwrap_or_default();
                    held.hold_until(self.deadline(sent, left));
                    let renew_at = soon.max(sent + left.saturating_sub(self.lease * 2 / 3));
                    lock(&self.agenda).reschedule(held.id(), renew_at, false);
                }
                Ok((_, Outcome::TooLate(_))) => lock(&self.agenda).reschedule(held.id(), soon, false),
                Ok((_, Outcome::Done | Outcome::Lost)) => {}
                Err(remedy) => lock(&self.agenda).reschedule(held.id(), soon, *remedy != Remedy::Again),
            }
        }
    }

    async fn end_batch(self: Arc<Self>, batch: agenda::Batch<(u64, Claim)>, change: Change) {
        let limit = Instant::now() + pacing::attempt(self.lease);
        let groups: Vec<Vec<Claim>> = batch.items.iter().map(|(_, claim)| vec![claim.clone()]).collect();
        let replies = self.changes.send_apart(&groups, batch.refused_from, change, limit).await;
        let mut rest = replies.as_slice();
        for claims in batch.items.chunk_by(|one, next| one.0 == next.0) {
            let (replies, others) = rest.split_at(claims.len().min(rest.len()));
            rest = others;
            let number = claims[0].0;
            let mut agenda = lock(&self.agenda);
            let ended = agenda.apply_replies(number, claims.iter().map(|(_, claim)| claim).zip(replies));
            drop(agenda);
            if let Some((ended, ending)) = ended {
                self.leave_behind(&ending);
                ending.complete(ended);
            }
        }
    }
}

impl<DB: Database> Work for Renewer<DB> {
    fn with_duty<T>(&self, act: impl FnOnce(&mut Duty) -> T) -> T {
        act(&mut lock(&self.agenda).duty)
    }

    fn woken(&self) -> &watch::Sender<()> {
        &self.work
    }

    fn poll(self: &Arc<Self>, runtime: Id, role: Role, in_flight: &mut InFlight) -> Option<Instant> {
        let late = lock(&self.agenda).take_late();
        for held in late {
            self.report_lost(&held, 0, NO_RENEWAL);
        }
        let mut agenda = lock(&self.agenda);
        if agenda.duty.was_replaced(runtime, role) {
            return Some(Instant::now());
        }
        if agenda.is_empty() && in_flight.is_empty() {
            agenda.duty.leave(runtime);
            return None;
        }
        match role {
            Role::StandBy(until) => return Some(until),
            Role::TakeOver => agenda.take_over(),
            Role::Work => {}
        }
        self.start_what_is_due(&mut agenda, in_flight);
        let next = agenda.next(in_flight.keeping.is_some(), in_flight.ending.is_some());
        // A statement in flight is given up by then, so a task whose runtime makes progress polls
        // no later.
        let latest = Instant::now() + pacing::attempt(self.lease);
        let wakes_at = next.map_or(latest, |next| next.min(latest));
        agenda.duty.wakes_at(wakes_at);
        Some(wakes_at)
    }

    /// If no other task is left, renewals stop and the holders are notified of the loss. Claims to
    /// be abandoned end with their leases.
    fn leave(&self, runtime: Id) {
        let ended = lock(&self.all.runtimes).remove(&runtime);
        drop(ended);
        let mut agenda = lock(&self.agenda);
        if agenda.duty.leave(runtime) {
            drop(agenda);
            self.work.send_replace(());
            return;
        }
        let (leases, endings) = agenda.clear();
        drop(agenda);
        endings.iter().for_each(|ending| self.leave_behind(ending));
        drop(endings);
        for held in leases {
            held.mark_lost(0, "the runtime that renewed it was shut down");
        }
    }
}
