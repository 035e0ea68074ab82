//! The end of a run, and its record.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    action::Action,
    key::Claim,
    pacing::Backoff,
    rules::Status,
    schedule::{
        core::answered,
        tick::{InTransaction, Inner},
    },
    session::time::Instant,
    store::{
        Database, Reply,
        failure::{Failure, Remedy, remedy},
        fault::Fault,
        schedule::End,
    },
};

const UNCOMMITTED: &str = "its transaction was not committed";
/// The longest pause between two attempts to record an end. It is shorter than those of instances
/// that cannot claim, which would run the tick again.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// The most characters of an error that the history keeps.
const ERROR: usize = 1_000;

/// How [`Schedules::try_tick`](crate::Schedules::try_tick) ended.
///
/// ```
/// # async fn example(jobs: rowlock::Schedules<impl rowlock::Database>) -> Result<(), rowlock::Error> {
/// use rowlock::jobs::TickOutcome;
///
/// match jobs.try_tick("report").await? {
///     TickOutcome::Succeeded => println!("done"),
///     TickOutcome::Failed { error, again } => println!("failed ({error}); again: {again}"),
///     TickOutcome::NotDue { retry_after } => println!("not due; ask again in {retry_after:?}"),
///     other => println!("{other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TickOutcome {
    /// The tick was run and succeeded.
    Succeeded,
    /// The tick was run and failed.
    Failed {
        /// The error of the work.
        error: String,
        /// Whether the tick is due again, after the back-off.
        again: bool,
    },
    /// All pending ticks were older than the grace, and nothing was run.
    Missed,
    /// The run lost its lease or its key, or its end, or that it was stopped, could not be
    /// recorded. Another instance may run the tick.
    Lost,
    /// The work was stopped, or did not begin: the schedule was paused while the run waited for its
    /// key, earlier ticks could not be skipped, an operator or a deploy changed the schedule just
    /// before that, or the lease of the claim was over by then. Another instance may run the tick
    /// at once, or when the schedule is resumed.
    HandedBack,
    /// Nothing was run: the tick is not due, another instance runs it, or the schedule is paused.
    NotDue {
        /// How long until the schedule is due, or until the lease of the instance that runs it
        /// ends. `None` if it is paused, or other times are in effect, or a schedule whose name it
        /// had still runs.
        retry_after: Option<Duration>,
    },
}

impl TickOutcome {
    /// Returns a short name for programs. It never changes.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed { .. } => "failed",
            Self::Missed => "missed",
            Self::Lost => "lost",
            Self::HandedBack => "handed_back",
            Self::NotDue { .. } => "not_due",
        }
    }
}

/// How a run ended, and how long from now until its schedule is due again.
pub(super) type Ended = (TickOutcome, Option<Duration>);

/// Records the end of the run, until the instance is stopped.
pub(super) async fn end<DB: Database>(
    tick: &Inner<DB>,
    result: Result<(), String>,
    stopped: &CancellationToken,
) -> Ended {
    let ended = match tick.in_transaction() {
        InTransaction::None => return record_end(tick, result, stopped).await.unwrap_or((TickOutcome::Lost, None)),
        InTransaction::Committed => find_success(tick).await,
        InTransaction::Tried | InTransaction::Committing => {
            // The tick has ended with its transaction if, and only if, that was committed. Then its
            // claim does not stand.
            let failed = result.as_ref().err().map_or(UNCOMMITTED, String::as_str);
            match record_end(tick, Err(failed.to_owned()), stopped).await {
                Ok((TickOutcome::Lost, _)) => find_success(tick).await,
                ended => ended.unwrap_or((TickOutcome::Lost, None)),
            }
        }
    };
    if let (TickOutcome::Succeeded, Err(error)) = (&ended.0, &result) {
        tracing::warn!(schedule = %tick.claim.key, error, "the work failed after the commit that ended its tick");
    }
    ended
}

/// Looks for the success that a transaction of the work may have committed. Unless the commit had a
/// reply, it is read, and not recorded: the server that showed no claim may be behind, and another
/// one may show that the claim stands.
pub(super) async fn find_success<DB: Database>(tick: &Inner<DB>) -> Ended {
    let end = tick.end(Status::Succeeded, None);
    let (core, claim) = (&tick.core, &tick.claim);
    let End { slot, attempt, status, .. } = end;
    let found = match tick.in_transaction() {
        InTransaction::None => Ok(false),
        InTransaction::Committed => Ok(true),
        InTransaction::Tried | InTransaction::Committing => {
            let name = claim.key.quoted();
            answered!(core, Action::Read, &name, conn => DB::has_ended(conn, claim, slot, attempt, status))
        }
    };
    match found {
        Ok(true) => {
            report(tick, &end);
            (TickOutcome::Succeeded, Some(due_in(tick, &end)))
        }
        Ok(false) => (TickOutcome::Lost, None),
        Err(error) => {
            tracing::error!(schedule = %claim.key, ?error, "it is unknown whether a run has succeeded");
            (TickOutcome::Lost, None)
        }
    }
}

/// Emits the event of a run whose end is in the history.
fn report<DB: Database>(tick: &Inner<DB>, end: &End<'_>) {
    let (schedule, slot) = (tick.claim.key.as_str(), end.slot);
    tracing::info!(schedule, %slot, attempt = end.attempt, status = end.status, error = end.error, "run");
}

/// Returns the time until the schedule is due again.
fn due_in<DB: Database>(tick: &Inner<DB>, end: &End<'_>) -> Duration {
    end.next.map_or(end.pause, |next| next - tick.now()).to_std().unwrap_or_default()
}

/// Records the end of the run as `S` or `F`. An error was logged.
async fn record_end<DB: Database>(
    tick: &Inner<DB>,
    result: Result<(), String>,
    stopped: &CancellationToken,
) -> Result<Ended, Failure> {
    let error: Option<String> = result.err().map(|error| error.chars().take(ERROR).collect());
    let status = if error.is_some() { Status::Failed } else { Status::Succeeded };
    let end = tick.end(status, error.as_deref());
    if !send_end(tick, &end, stopped).await? {
        return Ok((TickOutcome::Lost, None));
    }
    report(tick, &end);
    let (again, due_in) = (end.next.is_none(), due_in(tick, &end));
    Ok((error.map_or(TickOutcome::Succeeded, |error| TickOutcome::Failed { error, again }), Some(due_in)))
}

/// Returns whether the server refused the statement for what it says.
fn is_refused(failure: &Failure) -> bool {
    remedy(failure, 1) == Remedy::Apart && failure.fault() == Fault::Other
}

/// Ends the run. An end that was sent before has the same status in the history.
async fn end_run<DB: Database>(conn: &mut DB::Connection, claim: &Claim, end: &End<'_>) -> Reply<bool> {
    let ended = DB::end_run(conn, claim, end, false).await?;
    Ok(ended || DB::has_ended(conn, claim, end.slot, end.attempt, end.status).await?)
}

/// Sends the end until there is a reply, also after the lease: while the database cannot be
/// reached, or takes no writes, no other instance takes over. What it refuses, and an end after the
/// instance was stopped, is sent for the time limit and a lease. An end that is sent again is
/// recognized by its row in the history.
async fn send_end<DB: Database>(tick: &Inner<DB>, end: &End<'_>, stopped: &CancellationToken) -> Result<bool, Failure> {
    let (core, schedule) = (&tick.core, &tick.claim.key);
    let some_time = || core.limit() + core.lease(&tick.schedule).to_std().unwrap_or_default();
    let (mut limit, mut pauses, mut is_late) = (some_time(), Backoff::up_to(LONGEST_PAUSE), false);
    let plain = end.error.map(|error| error.escape_default().take(ERROR).collect::<String>());
    let mut end = end.clone();
    let renewals = core.renewals();
    let (mut sessions, mut others) = (&renewals, &core.requests);
    loop {
        let send = async |conn: &mut _| end_run::<DB>(conn, &tick.claim, &end).await;
        // The sessions that renew may be the only ones that are left.
        (sessions, others) = (others, sessions);
        let failure = match sessions.send(core.limit(), send).await {
            Err(failure) => failure,
            stands => return stands,
        };
        // The database may not hold the characters of the error.
        if is_refused(&failure) && end.error != plain.as_deref() {
            tracing::warn!(%schedule, %failure, "the end of a run was refused; sent with its error in ASCII");
            end.error = plain.as_deref();
            continue;
        }
        // The end is more than what was printed.
        if end.output.is_some() && (is_refused(&failure) || failure.fault() == Fault::Denied) {
            tracing::warn!(%schedule, %failure, "the end of a run was refused; sent without its output");
            end.output = None;
            continue;
        }
        let takes_no_writes = failure.fault() == Fault::ReadOnly;
        if (takes_no_writes || failure.fault().is_transient()) && !stopped.is_cancelled() {
            limit = some_time();
        }
        let End { slot, attempt, status, error, .. } = end;
        if Instant::now() >= limit || (!takes_no_writes && remedy(&failure, 1) == Remedy::Nothing) {
            tracing::error!(%schedule, %slot, attempt, status, error, %failure, "the end of a run could not be recorded");
            return Err(failure);
        }
        if !std::mem::replace(&mut is_late, true) {
            tracing::warn!(%schedule, %slot, attempt, status, error, %failure, "the end of a run is not recorded yet; trying until it is");
        }
        pauses.pause(Duration::MAX).await;
    }
}
