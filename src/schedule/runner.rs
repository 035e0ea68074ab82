//! The loop of an instance: it looks when something is due, and runs what it has claimed.

use std::{collections::HashMap, pin::Pin, sync::Arc, time::Duration};

use tokio::task::{JoinHandle, JoinSet};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::Instrument as _;

use crate::{
    error::Error,
    key::{Holder, Key},
    pacing::Backoff,
    schedule::{
        busy::Busy,
        core::Core,
        keeper::claim,
        pacing::{most_claims, poll_backoff, poll_pause, precedence_of_others},
        presence::{Presence, beat_pause},
        run::{self, Job, StopTokens},
    },
    session::{
        threads::{RECOVERED, Subscriber},
        time::Instant,
        timers::{sleep_until, timeout, timeout_at},
    },
    store::{Database, failure::Failure, fault::Fault, schedule::Known},
};

/// A time that does not come.
const FAR: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// How long an instance that is shut down may take to tell the others.
const FAREWELL: Duration = Duration::from_secs(1);

/// An instance that runs its schedules, until it is shut down or dropped.
///
/// If it is dropped, it claims nothing more, and its runs are stopped and handed back in the
/// background.
///
/// ```
/// # async fn example<DB: rowlock::Database>(
/// #     jobs: rowlock::Schedules<DB>,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// let running = jobs.start().await?;
/// tokio::signal::ctrl_c().await?;
/// if !running.shutdown(Duration::from_secs(20)).await {
///     println!("a run was stopped");
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it stops the schedules"]
#[derive(Debug)]
pub struct Running {
    tokens: StopTokens,
    /// An operator has ordered that it ends.
    drained: CancellationToken,
    pub(super) busy: Arc<Busy>,
    /// Shared with each work that has not ended.
    works: Arc<()>,
    driver: Option<JoinHandle<()>>,
}

impl Running {
    pub(super) fn start<DB: Database>(
        core: Arc<Core<DB>>,
        jobs: HashMap<Key, Job<DB>>,
        presence: Presence,
        busy: Arc<Busy>,
    ) -> Self {
        let (tokens, drained) = (StopTokens::default(), CancellationToken::new());
        let (pauses, works) = (poll_backoff(core.poll_interval), Arc::new(()));
        let runner = Runner {
            core,
            jobs,
            presence,
            busy: busy.clone(),
            works: works.clone(),
            tokens: tokens.clone(),
            drained: drained.clone(),
            pauses,
            failing: None,
            fault: None,
            due_at: Instant::now(),
            unheard: 0,
            subscriber: Subscriber::current(),
        };
        Self { tokens, drained, busy, works, driver: Some(tokio::spawn(runner.drive())) }
    }

    /// Stops claiming ticks, and waits for the runs to end. A run whose work has not begun, because
    /// it waits for its key for example, does not begin it. After `limit`, those that are left are
    /// stopped and handed back: another instance runs their ticks again. Returns whether all ended
    /// by themselves.
    ///
    /// Work that is stopped is dropped. Handing it back may take another fifteen seconds. If the
    /// database does not answer while a run records its end, that is tried for the time limit and a
    /// lease more. Work that succeeds before it can be dropped, because it blocks its thread, is
    /// recorded as succeeded. Work that blocks its thread for longer than that goes on, and the
    /// result is `false`.
    ///
    /// # Cancel safety
    /// If the future is dropped, the runs are stopped and handed back in the background.
    pub async fn shutdown(mut self, limit: Duration) -> bool {
        self.tokens.closed.cancel();
        let Some(mut driver) = self.driver.take() else { return true };
        let ended = timeout(limit, &mut driver).await;
        self.tokens.stopped.cancel();
        if ended.is_err() {
            driver.await.ok();
        }
        matches!(ended, Ok(Ok(()))) && Arc::strong_count(&self.works) == 1
    }

    /// Waits until an operator has [drained](crate::Schedules::drain) the instance: it claims
    /// nothing more, and its runs go on. The application then calls [`shutdown`](Self::shutdown)
    /// and ends. An order that comes while the instance is being shut down is noticed too.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn drained(&self) -> impl Future<Output = ()> + Send + use<> {
        self.drained.clone().cancelled_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tokens.closed.cancel();
        self.tokens.stopped.cancel();
    }
}

struct Runner<DB: Database> {
    core: Arc<Core<DB>>,
    jobs: HashMap<Key, Job<DB>>,
    presence: Presence,
    busy: Arc<Busy>,
    works: Arc<()>,
    tokens: StopTokens,
    drained: CancellationToken,
    /// The pauses while something is due that cannot be claimed, or the database fails.
    pauses: Backoff,
    /// Why the last poll failed, if it did, and why this one has.
    failing: Option<Fault>,
    fault: Option<Fault>,
    /// When a schedule is due, as far as is known.
    due_at: Instant,
    /// How many beats in a row have failed.
    unheard: u32,
    /// The events of the loop are emitted in the background: a panic of the subscriber ends no
    /// loop.
    subscriber: Subscriber,
}

/// An instance counts as alive for four beats. One that fails is nothing to report.
const REPORTED: u32 = 2;

/// Sends a request in a task of its own. Its panic, as of a driver that cannot represent a value of
/// a row, ends this request and not the instance.
async fn apart<T: Send + 'static>(
    subscriber: Subscriber,
    request: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    let reply = AbortOnDropHandle::new(tokio::spawn(request.in_current_span())).await;
    let told = |error| {
        subscriber.emit(move || tracing::error!(%error, "a request of the schedules was not completed; trying again"));
    };
    reply.map_err(told).ok()
}

/// A beat that is under way, which gives the presence back. `None`: it panicked.
type Beating = Pin<Box<dyn Future<Output = Option<(Presence, Result<bool, Error>)>> + Send>>;

/// The runs of an instance. A run tells whether it was one of a group that has a limit, and how
/// long from its end until the schedule is due again.
type Runs = JoinSet<(bool, Option<Duration>)>;

impl<DB: Database> Runner<DB> {
    async fn drive(mut self) {
        let (mut runs, mut beating) = (Runs::new(), None::<Beating>);
        let mut poll_at = Instant::now();
        let (mut polled_at, mut beat_at) = (poll_at, poll_at + self.until_beat());
        loop {
            let free = self.busy.room(self.core.max_concurrent_runs);
            tokio::select! {
                biased;
                () = self.tokens.closed.cancelled() => break,
                Some(ended) = runs.join_next() => {
                    // A run that ended leaves room, perhaps in its group, and its schedule may be
                    // due again.
                    let (in_group, due_in) = ended.unwrap_or_else(|error| {
                        self.subscriber.emit(move || tracing::error!(%error, "a run was not completed"));
                        (false, None)
                    });
                    let due_in = if free == 0 || in_group { Some(Duration::ZERO) } else { due_in };
                    if let Some(due_at) = due_in.map(|due_in| Instant::now() + due_in) {
                        (poll_at, self.due_at) = (poll_at.min(due_at), self.due_at.min(due_at));
                    }
                }
                () = self.busy.freed.notified() => (poll_at, self.due_at) = (Instant::now(), Instant::now()),
                Some(beaten) = async { Some(beating.as_mut()?.await) } => {
                    (beating, beat_at) = (None, Instant::now() + self.until_beat());
                    if self.end_beat(beaten) {
                        poll_at = Instant::now();
                    }
                }
                () = sleep_until(if free > 0 { poll_at.min(beat_at) } else { beat_at }) => {
                    let (now, pause) = (Instant::now(), self.core.poll_interval);
                    // A beat takes the place of a poll that comes soon, if nothing is due before
                    // the next one. It does not take that of two polls in a row.
                    let soon = now + pause.min(beat_pause(pause)) / 2;
                    let is_idle = self.due_at > now + pause && polled_at + pause * 3 / 2 > now;
                    let quiet = free == 0 || (poll_at <= soon && is_idle);
                    if beat_at <= if quiet { soon } else { now } {
                        (beating, beat_at) = (Some(self.begin_beat()), now + FAR);
                        // A run that ends before that is polled for.
                        if quiet && free > 0 {
                            poll_at = now + poll_pause(pause, pause);
                        }
                    }
                    if poll_at <= now && free > 0 {
                        let pause = self.poll(&mut runs, free).await;
                        (polled_at, poll_at) = (Instant::now(), Instant::now() + pause);
                    }
                }
            }
        }
        self.subscriber.emit(|| tracing::info!("the instance claims nothing more"));
        let limit = Instant::now() + FAREWELL;
        drop(beating);
        let (presence, core, drained) = (self.presence, self.core.clone(), self.drained.clone());
        // Tells the other instances that this one claims nothing more.
        let leaving = async move { presence.leave(&core, &drained).await };
        let leaving = AbortOnDropHandle::new(tokio::spawn(leaving.in_current_span()));
        while runs.join_next().await.is_some() {
            self.busy.freed.notify_one();
        }
        // A database that does not answer holds up no shutdown.
        let left = timeout_at(limit, leaving).await;
        if !matches!(left, Ok(Ok(Ok(())))) {
            tracing::warn!(?left, "the instance could not announce its end; others notice it when its beats stop");
        }
    }

    /// Instances do not all beat at the same moment.
    fn until_beat(&self) -> Duration {
        beat_pause(self.core.poll_interval).mul_f64(0.9 + fastrand::f64() / 10.0)
    }

    /// Tells the other instances that this one lives, and applies its times where that is due. Rows
    /// that others have locked hold up no poll, and no shutdown.
    fn begin_beat(&self) -> Beating {
        let (mut presence, core) = (self.presence.clone(), self.core.clone());
        let beat = async move {
            let beaten = presence.beat(&core).await;
            (presence, beaten)
        };
        Box::pin(apart(self.subscriber.clone(), beat))
    }

    /// Returns whether the beat has changed rows.
    fn end_beat(&mut self, beaten: Option<(Presence, Result<bool, Error>)>) -> bool {
        let Some((presence, beaten)) = beaten else { return false };
        self.presence = presence;
        if self.presence.is_drained {
            self.subscriber
                .emit(|| tracing::warn!("an operator has ordered that the instance ends: it claims nothing more"));
            self.drained.cancel();
            self.tokens.closed.cancel();
        }
        let changed = *beaten.as_ref().unwrap_or(&false);
        self.report_beat(beaten.map(drop));
        changed
    }

    /// Reports that beats fail, once: when the second one in a row does.
    fn report_beat(&mut self, beaten: Result<(), Error>) {
        let before = self.unheard;
        self.unheard = if beaten.is_err() { before.saturating_add(1) } else { 0 };
        let unheard = self.unheard;
        self.subscriber.emit(move || match beaten {
            Err(error) if unheard == REPORTED => {
                tracing::warn!(?error, "the instance could not announce that it is alive; trying until it can");
            }
            Err(error) => tracing::debug!(?error, "a beat of the instance failed; trying again"),
            Ok(()) if before >= REPORTED => {
                tracing::info!(target: RECOVERED, "the instance can announce again that it is alive");
            }
            Ok(()) => {}
        });
    }

    /// Reports that claims fail: as a warning when that begins, and when it has another reason.
    fn report(&mut self, failure: Failure) {
        // An outage shows itself in two ways, by turns.
        let fault = if failure.is_connection_failure() { Fault::Outage } else { failure.fault() };
        let is_known = [self.failing, self.fault.replace(fault)].contains(&Some(fault));
        self.subscriber.emit(move || {
            if is_known {
                tracing::debug!(%failure, "schedules still cannot be claimed; trying again");
            } else {
                tracing::warn!(%failure, "schedules could not be claimed; trying until they can");
            }
        });
    }

    /// Returns what may be claimed: sets of schedules, and how many of each. A group that has a
    /// limit is a set.
    fn claimable(&self, most: u32) -> Vec<(Vec<Known>, u32)> {
        let busy = self.busy.groups();
        let mut sets: HashMap<Option<&Key>, Vec<Known>> = HashMap::new();
        for (_, Job { schedule, .. }) in self.jobs.iter().filter(|(name, _)| !busy.contains_key(*name)) {
            sets.entry(schedule.group.as_ref()).or_default().push(self.core.known(schedule));
        }
        let room = |group: Option<&Key>| {
            let Some(limit) = group.and_then(|group| self.core.max_concurrent_runs_in.get(group)) else { return most };
            let runs = busy.values().filter(|busy| busy.as_ref() == group).count();
            most.min(limit.saturating_sub(u32::try_from(runs).unwrap_or(u32::MAX)))
        };
        let sets = sets.into_iter().map(|(group, known)| (known, room(group)));
        sets.filter(|(_, room)| *room > 0).collect()
    }

    /// Returns a schedule and its work, and marks it as busy until the run and the work have ended.
    fn job(&self, name: &Key, run_over: CancellationToken) -> Option<Job<DB>> {
        let Job { schedule, work } = self.jobs.get(name)?.clone();
        let mark = (self.busy.mark(name, schedule.group.as_ref(), run_over), self.works.clone());
        // The run has a copy of the work, and so has the task that does it.
        let work = move |tick| {
            let _ = &mark;
            work(tick)
        };
        Some(Job { schedule, work: Arc::new(work) })
    }

    /// Claims what is due and runs it. Returns the time until the next poll.
    async fn poll(&mut self, runs: &mut Runs, free: u32) -> Duration {
        let instances = self.presence.instances();
        let (mut most, mut next_in, mut failed) = (free.min(most_claims(instances)), Duration::MAX, None);
        let (sets, all) = (self.claimable(most), most);
        let asks = !sets.is_empty();
        for (known, room) in sets {
            if most == 0 {
                next_in = Duration::ZERO;
                break;
            }
            match self.claim(runs, known, room.min(most)).await {
                Ok((claimed, next)) => (most, next_in) = (most.saturating_sub(claimed), next_in.min(next)),
                // What is due is not known.
                Err(pause) => (failed, next_in) = (failed.max(Some(pause)), Duration::ZERO),
            }
            if self.fault == Some(Fault::Outage) || self.tokens.closed.is_cancelled() {
                break;
            }
        }
        self.failing = match (self.failing, self.fault.take()) {
            (Some(_), None) if asks && failed.is_none() => {
                self.subscriber.emit(|| tracing::info!(target: RECOVERED, "schedules can be claimed again"));
                None
            }
            (failing, fault) => fault.or(failing),
        };
        self.due_at = Instant::now() + next_in.min(FAR);
        if let Some(pause) = failed {
            return pause;
        }
        if next_in.is_zero() && most == all {
            return self.pauses.next();
        }
        self.pauses = poll_backoff(self.core.poll_interval);
        let pause = if next_in.is_zero() { next_in } else { poll_pause(next_in, self.core.poll_interval) };
        pause + precedence_of_others(u32::try_from(runs.len()).unwrap_or(u32::MAX), instances)
    }

    /// Claims at most so many of these schedules, and runs them. Returns their number, and how long
    /// from now until another of them is due; or the pause before the next poll.
    async fn claim(&mut self, runs: &mut Runs, known: Vec<Known>, most: u32) -> Result<(u32, Duration), Duration> {
        let (core, holder) = (self.core.clone(), Holder::unique());
        let claiming = async move { claim(&core, &known, holder, most).await };
        let Some(reply) = apart(self.subscriber.clone(), claiming).await else { return Err(self.pauses.next()) };
        let (claimed, reply) = match reply {
            Ok(reply) => reply,
            Err(failure) => {
                self.report(failure);
                return Err(self.pauses.next());
            }
        };
        if let Some(refused) = reply.refused {
            self.report(Failure::Failed(refused));
        }
        let number = u32::try_from(claimed.len()).unwrap_or(u32::MAX);
        for claimed in claimed {
            let run_over = CancellationToken::new();
            let Some(job) = self.job(&claimed.row.claim.key, run_over.clone()) else { continue };
            let in_group = job.schedule.group.is_some();
            let run = run::run(self.core.clone(), job, claimed, self.tokens.clone());
            runs.spawn(async move {
                let _over = run_over.drop_guard();
                (in_group, run.await.1)
            });
        }
        // Without a row that is known, one may come.
        Ok((number, reply.next_in.map_or(self.core.poll_interval, |next| next.to_std().unwrap_or_default())))
    }
}
