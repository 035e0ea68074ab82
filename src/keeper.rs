//! Renewal: what a lock does for all of its leases at once, in the background.
//!
//! A lease is *held* while its deadline lies ahead, *unknown* when a renewal brought no answer (the
//! deadline stands, and it is tried again sooner), and *lost* when its deadline has come or the row
//! was seen without the claim. The deadline is on this machine's monotonic clock, counted from before
//! the request was sent: it comes before the server could let another in.
//!
//! One task serves the lock while it has leases or endings, with one timer and at most two connections.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use chrono::TimeDelta;
use sqlx::Pool;
use tokio::{
    runtime::Handle,
    sync::{Notify, OnceCell, oneshot},
    time::{Instant, sleep_until, timeout, timeout_at},
};

use crate::{
    batch::Batch,
    fault::Fault,
    finish::{Background, Ongoing},
    held::{Held, lock},
    key::Claim,
    migrate::Table,
    releases::Releases,
    rules::Terms,
    settings::Settings,
    store::{
        Change, Database, Outcome,
        borrowed::{Borrowed, Failure},
        lost_among, skipped, skipped_among,
    },
    telemetry,
    turns::Bells,
};

/// The most claims one statement names.
pub(crate) const BATCH: usize = 1000;

const SEEN_WITHOUT: &str = "its row was seen without the claim";

struct Kept {
    held: Arc<Held>,
    renew_at: Instant,
}

/// Claims to end, tried until their lease is over.
struct Ending {
    held: Arc<Held>,
    change: Change,
    /// What is not settled yet.
    left: Vec<Claim>,
    lost: bool,
    outcome: Option<oneshot::Sender<Outcome>>,
    /// A request was sent whose outcome is not known.
    unanswered: bool,
    _ongoing: Ongoing,
}

struct State {
    running: bool,
    /// When the task looks next, of its own accord.
    wakes_at: Instant,
    /// By [`Held::id`]: a claim that is resumed is kept once more.
    leases: HashMap<usize, Kept>,
    endings: Vec<Ending>,
    end_at: Instant,
}

/// Keeps one lock's leases.
pub(crate) struct Keeper<DB: Database> {
    pool: Pool<DB>,
    terms: Arc<Terms>,
    lease: Duration,
    pub releases: Arc<Batch<DB, Releases>>,
    bells: Arc<Bells>,
    state: Mutex<State>,
    work: Notify,
    pub background: Background,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl<DB: Database> Keeper<DB> {
    pub fn new(
        settings: &Settings<DB>,
        table: Arc<OnceCell<Table>>,
        bells: Arc<Bells>,
        background: Background,
    ) -> Arc<Self> {
        let Settings { renewals: pool, terms, batching, .. } = settings;
        let (pool, terms) = (pool.clone(), terms.clone());
        let releases =
            Batch::new(Releases { terms: terms.clone(), table }, pool.clone(), background.clone(), *batching);
        let now = Instant::now();
        let state = State { running: false, wakes_at: now, leases: HashMap::new(), endings: Vec::new(), end_at: now };
        Arc::new(Self {
            pool,
            lease: terms.lease.to_std().unwrap_or_default(),
            terms,
            releases,
            bells,
            state: Mutex::new(state),
            work: Notify::new(),
            background,
        })
    }

    /// Begins to renew claims that were granted to a request sent at `sent`.
    pub fn hold(self: &Arc<Self>, claims: Vec<Claim>, sent: Instant) -> Arc<Held> {
        let held = Arc::new(Held::new(claims, self.deadline(sent, self.lease), self.bells.clone()));
        let renew_at = sent + self.lease / 3;
        let mut state = lock(&self.state);
        state.leases.insert(held.id(), Kept { held: held.clone(), renew_at });
        if renew_at < state.wakes_at {
            self.work.notify_one();
        }
        self.run(state);
        held
    }

    /// Renews a lease no more.
    pub fn let_go(&self, held: &Held) {
        lock(&self.state).leases.remove(&held.id());
    }

    /// Tells the work that the claim at this place is lost; what else the lease has goes with it.
    pub fn lose(self: &Arc<Self>, held: &Arc<Held>, place: usize, why: &str) {
        self.let_go(held);
        if held.tell_lost(place, why) && held.claims.len() > 1 {
            drop(self.abandon(held.clone()));
        }
    }

    /// Ends claims that were stopped, in the background; the receiver hears how that went.
    pub fn abandon(self: &Arc<Self>, held: Arc<Held>) -> oneshot::Receiver<Outcome> {
        self.end(held, Change::Abandon)
    }

    /// Ends claims in the background, like this; the receiver hears how that went.
    pub fn end(self: &Arc<Self>, held: Arc<Held>, change: Change) -> oneshot::Receiver<Outcome> {
        let (outcome, receiver) = oneshot::channel();
        let mut state = lock(&self.state);
        state.leases.remove(&held.id());
        let (left, _ongoing) = (held.claims.clone(), self.background.begin());
        let outcome = Some(outcome);
        state.endings.push(Ending { held, change, left, lost: false, outcome, unanswered: false, _ongoing });
        self.work.notify_one();
        self.run(state);
        receiver
    }

    /// Waits until nothing goes on in the background, or until it is over without that.
    pub async fn settled(self: &Arc<Self>) {
        self.run(lock(&self.state));
        // The time is up where nobody drives the task.
        let _ = timeout(self.lease + self.attempt(), self.background.over()).await;
    }

    /// Prolongs one lease now.
    pub async fn renew(self: &Arc<Self>, held: &Arc<Held>, limit: Instant) -> Result<Outcome, Failure> {
        let sent = Instant::now();
        let outcomes = self.change(&held.claims, self.renewal(), limit).await?;
        if let Some(place) = lost_among(&outcomes) {
            self.lose(held, place, SEEN_WITHOUT);
            return Ok(Outcome::Lost);
        }
        if let Some(left) = skipped_among(&outcomes) {
            return Ok(Outcome::Skipped { left });
        }
        held.renewed();
        held.hold_until(self.deadline(sent, self.lease));
        if let Some(kept) = lock(&self.state).leases.get_mut(&held.id()) {
            kept.renew_at = sent + self.lease / 3;
        }
        Ok(Outcome::Done)
    }

    /// Sends one change for all of these claims.
    pub async fn change(&self, claims: &[Claim], change: Change, limit: Instant) -> Result<Vec<Outcome>, Failure> {
        let mut conn = Borrowed::checkout(&self.pool, limit).await?;
        let reply = timeout_at(limit, DB::change(conn.get(), claims, change, &self.terms, false)).await;
        conn.settle(reply)
    }

    fn renewal(&self) -> Change {
        Change::Renew(self.terms.lease)
    }

    /// When a claim with `left` at `sent` has to count as lost: a little early, for clocks that run apart and timers that run late.
    fn deadline(&self, sent: Instant, left: Duration) -> Instant {
        sent + left.saturating_sub(self.lease / 20)
    }

    /// How long a whole lease counts on this side.
    pub fn counted(&self) -> Duration {
        self.lease - self.lease / 20
    }

    /// How long one statement may take.
    fn attempt(&self) -> Duration {
        (self.lease / 3).min(Duration::from_secs(10))
    }

    /// How long to wait after a try that brought no answer.
    fn soon(&self) -> Duration {
        (self.lease / 12).min(Duration::from_secs(1)).mul_f64(fastrand::f64() / 2.0 + 0.5)
    }

    /// Starts the task, where there is a runtime and none runs yet.
    fn run(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let idle = state.leases.is_empty() && state.endings.is_empty();
        if state.running || idle {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        state.running = true;
        state.wakes_at = Instant::now();
        // A runtime that is shutting down drops the task within `spawn`, and its guard takes this lock.
        drop(state);
        // The guard goes in with the task, which may be dropped before it ever runs.
        runtime.spawn(self.clone().keep(OnStop { keeper: self.clone(), armed: true }));
    }

    async fn keep(self: Arc<Self>, mut on_stop: OnStop<DB>) {
        let (mut renewal, mut ending): (Option<Task>, Option<Task>) = (None, None);
        while let Some(wakes_at) = self.next(&mut renewal, &mut ending) {
            tokio::select! {
                () = finish(&mut renewal) => renewal = None,
                () = finish(&mut ending) => ending = None,
                () = self.work.notified() => {}
                () = sleep_until(wakes_at) => {}
            }
        }
        on_stop.armed = false;
    }

    /// Tells losses, starts what is due, and says when to look again; `None` when there is nothing left to do.
    fn next(self: &Arc<Self>, renewal: &mut Option<Task>, ending: &mut Option<Task>) -> Option<Instant> {
        let now = Instant::now();
        let late: Vec<Kept> =
            lock(&self.state).leases.extract_if(|_, kept| kept.held.deadline() <= now).map(|(_, kept)| kept).collect();
        for kept in late {
            self.lose(&kept.held, 0, "no renewal came through before its lease ended");
        }
        let mut state = lock(&self.state);
        if renewal.is_none() && state.leases.values().any(|kept| kept.renew_at <= now) {
            // Those that are due a little later travel along.
            let due = now + self.lease / 12;
            let due = state.leases.values().filter(|kept| kept.renew_at <= due).map(|kept| &kept.held);
            let batch = due.scan(0, within_batch).cloned().collect();
            *renewal = Some(Box::pin(self.clone().renew_batch(batch)));
        }
        // An abandonment waits for the renewal under way, which might revive what it ended.
        if renewal.is_none() && ending.is_none() && !state.endings.is_empty() && state.end_at <= now {
            let (change, mut claims) = (state.endings[0].change, 0);
            let fits =
                |ending: &mut Ending| ending.change == change && within_batch(&mut claims, &ending.held).is_some();
            let batch = state.endings.extract_if(.., fits).collect();
            *ending = Some(Box::pin(self.clone().end_batch(batch, change)));
        }
        if renewal.is_none() && ending.is_none() && state.leases.is_empty() && state.endings.is_empty() {
            state.running = false;
            return None;
        }
        let deadlines = state.leases.values().map(|kept| kept.held.deadline());
        let renewals = state.leases.values().map(|kept| kept.renew_at).filter(|_| renewal.is_none());
        let endings = (ending.is_none() && !state.endings.is_empty()).then_some(state.end_at);
        let wakes_at = deadlines.chain(renewals).chain(endings).min().unwrap_or(now + self.lease);
        state.wakes_at = wakes_at;
        Some(wakes_at)
    }

    async fn renew_batch(self: Arc<Self>, batch: Vec<Arc<Held>>) {
        let sent = Instant::now();
        let claims: Vec<Claim> = batch.iter().flat_map(|held| held.claims.clone()).collect();
        let reply = self.change(&claims, self.renewal(), sent + self.attempt()).await;
        let soon = Instant::now() + self.soon();
        if let Err(failure) = &reply {
            telemetry::renewals_failed(batch.len());
            tracing::warn!(
                leases = batch.len(),
                ?failure,
                "renewal brought no answer; the deadlines stand, trying again"
            );
        }
        let mut lost = Vec::new();
        let mut rest = reply.as_deref().unwrap_or_default();
        let mut state = lock(&self.state);
        for held in &batch {
            let (outcomes, others) = rest.split_at(held.claims.len().min(rest.len()));
            rest = others;
            // Who let go of it meanwhile has ended it.
            let Some(kept) = state.leases.get_mut(&held.id()) else { continue };
            if outcomes.is_empty() {
                kept.renew_at = soon;
            } else if let Some(place) = lost_among(outcomes) {
                lost.push((held, place));
            } else if let Some(left) = skipped_among(outcomes) {
                let left = left.to_std().unwrap_or_default();
                held.hold_until(self.deadline(sent, left));
                kept.renew_at = soon.max(sent + left.saturating_sub(self.lease * 2 / 3));
            } else {
                held.renewed();
                held.hold_until(self.deadline(sent, self.lease));
                kept.renew_at = sent + self.lease / 3;
            }
        }
        drop(state);
        for (held, place) in lost {
            self.lose(held, place, SEEN_WITHOUT);
        }
    }

    async fn end_batch(self: Arc<Self>, batch: Vec<Ending>, change: Change) {
        let claims: Vec<Claim> = batch.iter().flat_map(|ending| ending.left.clone()).collect();
        let now = Instant::now();
        let reply = self.change(&claims, change, now + self.attempt()).await;
        // What no waiting mends (a closed pool, a table that is gone) is not tried again.
        let hopeless = reply.as_ref().is_err_and(|failure| !failure.fault().is_transient());
        if let Err(failure) = &reply {
            tracing::warn!(
                claims = batch.len(),
                ?failure,
                "abandoning brought no answer; trying again until the lease ends"
            );
        }
        let unanswered = reply.as_ref().is_err_and(|failure| failure.fault() == Fault::Outage);
        let reply = reply.unwrap_or_default();
        let mut rest = reply.as_slice();
        let unknown = Outcome::Skipped { left: TimeDelta::zero() };
        let mut state = lock(&self.state);
        for mut ending in batch {
            ending.unanswered |= unanswered;
            let (outcomes, others) = rest.split_at(ending.left.len().min(rest.len()));
            rest = others;
            ending.lost |= lost_among(outcomes).is_some();
            if !outcomes.is_empty() {
                ending.left = skipped(std::mem::take(&mut ending.left), outcomes);
            }
            let mut outcome = match ending.lost {
                _ if !ending.left.is_empty() => unknown,
                true => Outcome::Lost,
                false => Outcome::Done,
            };
            if matches!(outcome, Outcome::Skipped { .. }) && !hopeless && Instant::now() < ending.held.deadline() {
                state.endings.push(ending);
                state.end_at = Instant::now() + self.soon();
                continue;
            }
            // A request that went unanswered may have ended it before somebody else took the key.
            if outcome == Outcome::Lost && ending.unanswered {
                outcome = unknown;
            }
            ending.held.pass_on();
            for Claim { key, token, .. } in &ending.held.claims {
                tracing::info!(%key, %token, ?outcome, "abandoned");
            }
            // Whoever dropped the lease does not listen.
            let _ = ending.outcome.take().map(|sender| sender.send(outcome));
        }
    }
}

/// The runtime went away under the task: nobody renews any more, and whoever still holds a lease is told.
/// What was to be abandoned ends with its lease.
struct OnStop<DB: Database> {
    keeper: Arc<Keeper<DB>>,
    armed: bool,
}

impl<DB: Database> Drop for OnStop<DB> {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        let mut state = lock(&self.keeper.state);
        state.running = false;
        let leases = std::mem::take(&mut state.leases);
        let endings = std::mem::take(&mut state.endings);
        drop(state);
        drop(endings);
        for kept in leases.into_values() {
            kept.held.tell_lost(0, "the runtime that renewed it was shut down");
        }
    }
}

async fn finish(task: &mut Option<Task>) {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

/// Goes on while a statement has room for what each of these leases holds.
fn within_batch<'a>(claims: &mut usize, held: &'a Arc<Held>) -> Option<&'a Arc<Held>> {
    *claims += held.claims.len();
    (*claims <= BATCH).then_some(held)
}
