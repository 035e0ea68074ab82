//! Renewal: what a lock does for all of its leases at once, in the background.
//!
//! A lease is *held* while its deadline lies ahead, *unknown* when a renewal brought no answer (the
//! deadline stands, and it is tried again sooner), and *lost* when its deadline has come or the row
//! was seen without the claim. The deadline is on this machine's monotonic clock, counted from before
//! the request was sent: it comes before the server could let another in.
//!
//! One task serves the lock while it has leases or endings, with one timer; on other runtimes tasks stand by (`task.rs`).
//! A renewal and an ending take one connection each, and a second one where the first does not answer (`changes.rs`).

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    runtime::Id,
    sync::{OnceCell, oneshot, watch},
    time::{Instant, timeout},
};

use crate::{
    batch::batcher::Batcher,
    finish::Background,
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

/// Keeps one lock's leases.
pub(crate) struct Renewer<DB: Database> {
    changes: Changes<DB>,
    lease: Duration,
    pub releases: Arc<Batcher<DB, Releases>>,
    wakeups: Arc<Wakeups>,
    agenda: Mutex<Agenda>,
    /// Wakes the tasks.
    work: watch::Sender<()>,
    pub background: Background,
    /// When the last of the claims ends by itself that could not be ended.
    left_behind_until: Mutex<Instant>,
}

impl<DB: Database> Renewer<DB> {
    pub fn new(
        settings: &Settings<DB>,
        table: Arc<OnceCell<Table>>,
        wakeups: Arc<Wakeups>,
        background: Background,
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
        let releases = Batcher::new(Releases { terms, table }, requests, background.clone(), *batching);
        Arc::new(Self {
            changes,
            lease,
            releases,
            wakeups,
            agenda: Mutex::new(Agenda::new(Duty::new(lease / 20))),
            work: watch::Sender::new(()),
            background,
            left_behind_until: Mutex::new(Instant::now()),
        })
    }

    /// Begins to renew claims that were granted to a request sent at `sent`.
    pub fn hold(self: &Arc<Self>, claims: Vec<Claim>, sent: Instant) -> Arc<LeaseState> {
        let held = Arc::new(LeaseState::new(claims, self.deadline(sent, self.lease), self.wakeups.clone()));
        let renew_at = sent + self.lease / 3;
        let mut agenda = lock(&self.agenda);
        agenda.leases.insert(held.id(), Scheduled { held: held.clone(), renew_at, suspect: false });
        self.run(agenda, renew_at);
        held
    }

    /// Renews a lease no more.
    pub fn let_go(&self, held: &LeaseState) {
        lock(&self.agenda).leases.remove(&held.id());
    }

    /// Tells the work that the claim at this place is lost; what else the lease has goes with it.
    pub fn lose(self: &Arc<Self>, held: &Arc<LeaseState>, place: usize, why: &str) {
        self.let_go(held);
        if held.tell_lost(place, why) && held.claims.len() > 1 {
            drop(self.abandon(held.clone()));
        }
    }

    /// Ends claims that were stopped, in the background; the receiver hears how that went.
    pub fn abandon(self: &Arc<Self>, held: Arc<LeaseState>) -> oneshot::Receiver<Ended> {
        self.end(held, Change::Abandon)
    }

    /// Ends claims in the background, like this; the receiver hears how that went.
    pub fn end(self: &Arc<Self>, held: Arc<LeaseState>, change: Change) -> oneshot::Receiver<Ended> {
        let (ending, receiver) = Ending::new(held, change, self.pauses(), self.background.begin());
        let at = ending.at;
        let mut agenda = lock(&self.agenda);
        agenda.end(ending);
        self.run(agenda, at);
        receiver
    }

    /// Waits until nothing goes on in the background, for so long at most; whether nothing does, and no claim was left behind.
    pub async fn settled(self: &Arc<Self>, limit: Duration) -> bool {
        self.attend();
        timeout(limit, self.background.over()).await.is_ok() && *lock(&self.left_behind_until) <= Instant::now()
    }

    /// Prolongs one lease now.
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

    /// When a claim with `left` at `sent` has to count as lost: a little early, for clocks that run apart and timers that run late.
    fn deadline(&self, sent: Instant, left: Duration) -> Instant {
        sent + left.saturating_sub(self.lease / 20)
    }

    /// How long a whole lease counts on this side.
    pub fn counted(&self) -> Duration {
        self.lease - self.lease / 20
    }

    /// Between tries to end a claim.
    pub fn pauses(&self) -> Backoff {
        Backoff::up_to(self.longest_pause())
    }

    fn longest_pause(&self) -> Duration {
        (self.lease / 12).min(Duration::from_secs(1))
    }

    /// Has a task of this runtime look after the leases too: the one that does may be on a runtime that stands still.
    pub fn attend(self: &Arc<Self>) {
        if !lock(&self.agenda).is_empty() {
            task::start(self);
        }
    }

    /// Has a task look after what is due at this time.
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
            // Those that are due a little later travel along.
            *renewal = Some(Box::pin(self.clone().renew_batch(agenda.renewals(now + self.lease / 12))));
        }
        // An abandonment waits for the renewal under way, which might revive what it ended.
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
            // A lease that was let go of by now is ended.
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
            // Begun before another task took over, and sent anew by that one.
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
        // A statement under way is given up by then: a task that is driven looks no later.
        let latest = Instant::now() + attempt(self.lease);
        let wakes_at = next.map_or(latest, |next| next.min(latest));
        agenda.duty.wakes_at(wakes_at);
        Some(wakes_at)
    }

    /// Without another task nothing is renewed any more, and the holders are told; what was to be abandoned ends with its lease.
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

/// How long one statement may take, with all that is sent in its place.
fn attempt(lease: Duration) -> Duration {
    (lease / 3).min(Duration::from_secs(10))
}
