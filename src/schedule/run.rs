//! One run of a tick: what is skipped first, and the work.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::Instrument as _;

use crate::{
    action::{Action, Certainty},
    causes::DatabaseFault,
    error::Error,
    key::{Claim, Key},
    lease::guard::Lease,
    lock::BoxFuture,
    metrics,
    rules::Status,
    schedule::{
        core::{Core, answered, hand_back, undo},
        end::{Ended, TickOutcome, end, find_success},
        exclusive::{Exclusive, acquire_exclusive},
        keeper::{Claimed, Keeper},
        plan::{self, Row, Start},
        spec::Schedule,
        tick::{InTransaction, Inner, Tick},
    },
    session::{
        time::Instant,
        timers::{sleep, timeout},
    },
    spans,
    store::{
        Database, Reply,
        instances::{Given, What},
        schedule::{ClaimedRow, Pass},
    },
};

/// How long work that was cancelled may take to stop before its claim is handed back.
const STOPPING: Duration = Duration::from_secs(5);
const GIVEN_UP: &str = "given up: the processes that ran it died";

/// The work of a schedule. Its error is a text for the history.
pub type Work<DB> = Arc<dyn Fn(Tick<DB>) -> BoxFuture<'static, Result<(), String>> + Send + Sync>;

/// A schedule and its work.
pub struct Job<DB: Database> {
    pub schedule: Arc<Schedule>,
    pub work: Work<DB>,
}

impl<DB: Database> Clone for Job<DB> {
    fn clone(&self) -> Self {
        Self { schedule: self.schedule.clone(), work: self.work.clone() }
    }
}

/// How a run is ended from outside.
#[derive(Clone, Debug, Default)]
pub struct StopTokens {
    /// No run begins any more.
    pub closed: CancellationToken,
    /// Work is stopped.
    pub stopped: CancellationToken,
}

/// Runs a claimed tick.
pub async fn run<DB: Database>(
    core: Arc<Core<DB>>,
    job: Job<DB>,
    Claimed { row, sent, keeper }: Claimed,
    tokens: StopTokens,
) -> Ended {
    let &ClaimedRow { slot, own, attempt, missed, lost_since, skip, stopped, .. } = &row;
    let (kept, spent) = (keeper.kept(), spent(&core, &job.schedule, &row).await);
    let tick = Row { slot, own, attempt, missed, spent, lost_since, skip, stopped };
    let start = plan::start(&job.schedule, &tick, row.now);
    let (slot, attempt) = if let Start::Move { to, .. } = start { (to, 1) } else { (slot, attempt) };
    let span = spans::tick(&row.claim, slot, attempt);
    let ended = run_claimed(core, job, (row, sent), keeper, (tick, start), tokens).instrument(span.clone()).await;
    match &ended.0 {
        TickOutcome::Failed { error, .. } => drop(span.record("error", error.as_str())),
        TickOutcome::Lost => kept.tell_not_recorded(),
        _ => {}
    }
    span.record("outcome", ended.0.name());
    ended
}

/// Counts the earlier attempts at the tick that were not handed back. The history is asked only if
/// there were enough attempts to give up. If it cannot be read, the tick is run.
async fn spent<DB: Database>(core: &Core<DB>, schedule: &Schedule, row: &ClaimedRow) -> u32 {
    let most = row.attempt.saturating_sub(1);
    if most <= plan::most_spent(schedule) {
        return most;
    }
    let (name, slot) = (&row.claim.key, row.slot);
    match answered!(core, Action::Read, &name.quoted(), conn => DB::handed_back_runs(conn, name, slot)) {
        Ok(handed_back) => most.saturating_sub(u32::try_from(handed_back).unwrap_or(u32::MAX)),
        Err(error) => {
            tracing::warn!(schedule = %name, ?error, "the history could not be read; the tick is run");
            0
        }
    }
}

/// Skips the ticks that are not run, does the work, and records its end.
async fn run_claimed<DB: Database>(
    core: Arc<Core<DB>>,
    job: Job<DB>,
    claimed: (ClaimedRow, Instant),
    keeper: Keeper,
    (mut tick, start): (Row, Start),
    tokens: StopTokens,
) -> Ended {
    let row = &claimed.0;
    let claim = &row.claim;
    tracing::debug!(schedule = %claim.key, token = %claim.token, ?tick, ?start, "claimed");
    let keeper = match begin(&core, &job.schedule, row, keeper, (&mut tick, start)).await {
        Ok(keeper) => keeper,
        Err(ended) => return ended,
    };
    let (name, delay) = (claim.key.clone(), row.now - tick.slot);
    // Dropped without a value, also by a panic, it tells what follows the run that its end is not
    // recorded.
    let (recorded, receiver) = watch::channel(false);
    let of = |claimed, exclusive| Tick::new(core.clone(), job.schedule.clone(), claimed, tick, exclusive, receiver);
    let exclusive = match start {
        Start::GiveUp => Exclusive::Failed(GIVEN_UP.to_owned()),
        Start::Stop => Exclusive::Stopped,
        _ => acquire_exclusive(&core, &job.schedule, &keeper, &tokens.closed).await,
    };
    let mut lease = match exclusive {
        Exclusive::Acquired(lease) => lease,
        Exclusive::Failed(error) => {
            return end_without_work(keeper, &of(claimed, None), error, &tokens.stopped).await;
        }
        Exclusive::Stopped => {
            let (tick, error) = (of(claimed, None), by_order(&core, What::Stop, &name).await);
            tick.inner().stop();
            return end_without_work(keeper, &tick, error, &tokens.stopped).await;
        }
        Exclusive::Closed => {
            drop(keeper);
            // It may have been taken over by then.
            let stood = undo(&core, claim).await;
            return (if stood { TickOutcome::HandedBack } else { TickOutcome::Lost }, None);
        }
    };
    metrics::started(name.as_str(), delay.to_std().unwrap_or_default());
    let tick = of(claimed, lease.as_ref().map(|lease| lease.claim().clone()));
    let began = Instant::now();
    let ended = work_and_end(&tick, &job.work, keeper, &mut lease, &tokens.stopped).await;
    metrics::ran(name.as_str(), ended.0.name(), began.elapsed());
    if matches!(ended.0, TickOutcome::Succeeded | TickOutcome::Failed { .. }) {
        recorded.send_replace(true);
    }
    drop(recorded);
    release(lease, &ended.0).await;
    ended
}

/// Skips the ticks that are not run. Returns how the claim ended if none is left to run.
async fn begin<DB: Database>(
    core: &Core<DB>,
    schedule: &Schedule,
    row: &ClaimedRow,
    keeper: Keeper,
    (tick, start): (&mut Row, Start),
) -> Result<Keeper, Ended> {
    let claim = &row.claim;
    let passed = skip_ticks(core, schedule, claim, tick, start).await;
    if !matches!(passed, Ok(true)) {
        drop(keeper);
        if let Err(error) = &passed {
            tracing::error!(schedule = %claim.key, ?error, "the slot could not be moved");
        }
        let stood = match passed {
            // A pass that is refused is an attempt, so that it is not made for ever.
            Err(ref error) if is_refusal(error) => hand_back(core, claim).await == Some(true),
            // No work was begun. If other times are in effect by then, an instance that has them
            // runs the tick. A pass that had no reply may have ended the claim.
            passed => undo(core, claim).await && passed.is_ok(),
        };
        return Err((if stood { TickOutcome::HandedBack } else { TickOutcome::Lost }, None));
    }
    match start {
        Start::Skip { next, .. } => return Err((TickOutcome::Missed, (next - row.now).to_std().ok())),
        Start::Move { to, missed, .. } => (tick.slot, tick.missed, tick.attempt) = (to, missed, 1),
        Start::Run | Start::GiveUp | Start::Stop => {}
    }
    Ok(keeper)
}

/// Returns whether the server has refused a statement, and would refuse it again.
fn is_refusal(error: &Error) -> bool {
    let Error::Database(fault) = error else { return false };
    matches!(fault, DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. }) && !error.is_retryable()
}

/// Does the work of a tick, and records its end.
async fn work_and_end<DB: Database>(
    tick: &Tick<DB>,
    work: &Work<DB>,
    keeper: Keeper,
    lease: &mut Option<Lease<DB>>,
    stopped: &CancellationToken,
) -> Ended {
    let stop = work_until_stopped(tick, work, &keeper, lease.as_ref(), stopped).await;
    let inner = tick.inner();
    inner.cancel();
    // A command that is being stopped still runs. The leases are renewed until it has ended.
    inner.quiet().await;
    match stop {
        Stop::Ended(result) => {
            let result = match result {
                Err(_) if tick.is_stopped() => Err(by_order(&inner.core, What::Stop, &inner.claim.key).await),
                result => result,
            };
            // The run may have failed before its renewal would have told it.
            if result.is_err() && inner.row.attempt <= inner.schedule.retries.times && is_stopped(inner).await {
                inner.stop();
            }
            end_kept(keeper, inner, result, stopped).await
        }
        // The transaction that ends the tick may have been committed.
        Stop::Lost => find_success(inner).await,
        Stop::HandBack(_) if inner.in_transaction() == InTransaction::Committed => find_success(inner).await,
        Stop::HandBack(ended) => {
            drop(keeper);
            let stood = hand_back(&inner.core, &inner.claim).await == Some(true);
            if stood { (ended, None) } else { find_success(inner).await }
        }
        // The work still runs. Nothing else may, until the leases end.
        Stop::Unstoppable => {
            tracing::error!(schedule = tick.name(), "the work does not stop; its lease is no longer renewed");
            lease.take().map(Lease::detach);
            find_success(inner).await
        }
    }
}

/// Records that a tick has failed whose work was not begun.
async fn end_without_work<DB: Database>(
    keeper: Keeper,
    tick: &Tick<DB>,
    error: String,
    stopped: &CancellationToken,
) -> Ended {
    let ended = end_kept(keeper, tick.inner(), Err(error), stopped).await;
    if let TickOutcome::Failed { error, .. } = &ended.0 {
        tracing::warn!(schedule = tick.name(), slot = %tick.slot(), error, "the tick has failed without its work");
    }
    metrics::ran(tick.name(), ended.0.name(), Duration::ZERO);
    ended
}

/// Records the end of a run, whose lease is renewed until then.
async fn end_kept<DB: Database>(
    mut keeper: Keeper,
    tick: &Inner<DB>,
    result: Result<(), String>,
    stopped: &CancellationToken,
) -> Ended {
    keeper.leave_loss_to_end();
    let mut ended = end(tick, result, stopped).await;
    // The order may have been given while the end was recorded.
    if matches!(ended.0, TickOutcome::Failed { again: true, .. }) && is_stopped(tick).await {
        let (core, name) = (&tick.core, &tick.claim.key);
        match answered!(core, Action::Update, &name.quoted(), conn => DB::wake(conn, name)) {
            Ok(()) => ended.1 = Some(Duration::ZERO),
            Err(error) => tracing::debug!(schedule = %name, ?error, "a stopped tick ends after the pause"),
        }
    }
    ended
}

/// Returns what the history says of a tick that an operator stopped or had skipped.
async fn by_order<DB: Database>(core: &Core<DB>, what: What, name: &Key) -> String {
    let done = if what == What::Stop { "stopped" } else { "skipped" };
    match core.ordered(what, name).await {
        Ok(Some(Given { who, .. })) => format!("{done} by {who}"),
        Ok(None) | Err(_) => format!("{done} by an operator"),
    }
}

/// Returns whether an operator is known to have stopped the tick.
async fn is_stopped<DB: Database>(tick: &Inner<DB>) -> bool {
    let ordered = tick.core.ordered(What::Stop, &tick.claim.key).await;
    // If it is not known, the next claim obeys the order.
    ordered.is_ok_and(|given| given.is_some_and(|given| given.until == tick.row.slot))
}

/// Releases the key with the run's status. Work that was stopped abandons it.
async fn release<DB: Database>(lease: Option<Lease<DB>>, ended: &TickOutcome) {
    let Some(lease) = lease else { return };
    let status = match ended {
        TickOutcome::Succeeded => Status::Succeeded,
        TickOutcome::Failed { .. } => Status::Failed,
        TickOutcome::Missed | TickOutcome::Lost | TickOutcome::HandedBack | TickOutcome::NotDue { .. } => {
            return drop(lease.abandon().await);
        }
    };
    // A failure is logged, and the key ends with its lease.
    drop(lease.end(status).await);
}

/// Moves the slot, if ticks are skipped. Returns `false` if the claim does not stand, other times
/// are in effect, or an operator has given or taken back an order.
async fn skip_ticks<DB: Database>(
    core: &Core<DB>,
    schedule: &Schedule,
    claim: &Claim,
    row: &Row,
    start: Start,
) -> Result<bool, Error> {
    let (to, runs, missed, skipped) = match start {
        Start::Run | Start::GiveUp | Start::Stop => return Ok(true),
        Start::Move { to, missed, skipped } => (to, true, missed, skipped),
        Start::Skip { next, skipped } => (next, false, 0, skipped),
    };
    let (missed_now, times) = (missed.max(skipped), schedule.times());
    let error = if row.is_skipped() { Some(by_order(core, What::Skip, &claim.key).await) } else { None };
    match &error {
        Some(by) => {
            tracing::warn!(schedule = %claim.key, from = %row.slot, %to, missed = missed_now, by, "ticks are skipped")
        }
        None => tracing::warn!(schedule = %claim.key, from = %row.slot, %to, missed = missed_now, "ticks were missed"),
    }
    let pass = Pass { times: &times, from: row.slot, to, runs, missed, skipped, error: error.as_deref() };
    answered!(core, Action::Update, &claim.key.quoted(), conn => skip_once::<DB>(conn, claim, &pass))
}

/// Skips ticks. A pass that was sent before and ended the claim has the status `M` in the
/// history.
async fn skip_once<DB: Database>(conn: &mut DB::Connection, claim: &Claim, pass: &Pass<'_>) -> Reply<bool> {
    let passed = DB::skip_ticks(conn, claim, pass).await?;
    Ok(passed || (!pass.runs && DB::has_ended(conn, claim, pass.from, 0, "M").await?))
}

/// Why the work is over.
enum Stop {
    Ended(Result<(), String>),
    /// The tick was lost, and the work has stopped.
    Lost,
    /// The work has stopped, and another instance may take over.
    HandBack(TickOutcome),
    /// The work was told to stop, and goes on.
    Unstoppable,
}

/// Does the work until it ends, a lease is lost, its time is over, or the runner is stopped.
async fn work_until_stopped<DB: Database>(
    tick: &Tick<DB>,
    work: &Work<DB>,
    keeper: &Keeper,
    lease: Option<&Lease<DB>>,
    stopped: &CancellationToken,
) -> Stop {
    let limit = tick.inner().schedule.timeout;
    let losing = async {
        let stop = tokio::select! {
            () = keeper.lost() => Stop::Lost,
            () = wait_for(lease.map(Lease::lost)) => Stop::HandBack(TickOutcome::Lost),
        };
        // A commit in flight decides by itself whether the tick has ended. What is left of the
        // lease is waited for its reply: the next run cannot begin before.
        let inner = tick.inner();
        inner.cancel();
        drop(timeout(inner.core.reserve(&inner.schedule), inner.not_committing()).await);
        stop
    };
    let inner = tick.inner();
    let (work, own, kept, key) = (work.clone(), tick.clone(), keeper.kept(), lease.map(Lease::held));
    let begun = async move {
        // The thread may have been blocked since the leases were last known to stand.
        if !kept.stands() || key.is_some_and(|key| !key.is_held()) {
            std::future::pending::<()>().await;
        }
        work(own).await
    };
    // A task of its own, so that a panic of the work is a failure of the run.
    let mut task = AbortOnDropHandle::new(tokio::spawn(begun.in_current_span()));
    let stop = tokio::select! {
        biased;
        result = &mut task => {
            return Stop::Ended(result.unwrap_or_else(|panic| Err(format!("the work panicked: {panic}"))));
        }
        stop = losing => stop,
        () = stopped.cancelled() => Stop::HandBack(TickOutcome::HandedBack),
        () = keeper.stopped_by_an_operator() => {
            inner.stop();
            Stop::Ended(Err(String::new()))
        }
        () = wait_for(limit.map(sleep)) => {
            Stop::Ended(Err(format!("stopped: it took longer than its timeout of {:?}", limit.unwrap_or_default())))
        }
    };
    inner.cancel();
    task.abort();
    match timeout(STOPPING, task).await {
        // It succeeded before it could be dropped. Another run would repeat it.
        Ok(Ok(Ok(()))) if !matches!(stop, Stop::HandBack(TickOutcome::Lost)) => Stop::Ended(Ok(())),
        Ok(_) => stop,
        Err(_) => Stop::Unstoppable,
    }
}

/// Waits for a future, if there is one.
async fn wait_for(event: Option<impl Future<Output = ()>>) {
    match event {
        Some(event) => event.await,
        None => std::future::pending().await,
    }
}
