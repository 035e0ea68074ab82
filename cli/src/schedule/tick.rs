//! `rowlock run --cron`: the tick that is due, for crontab and systemd.

use std::{
    path::PathBuf,
    pin::{Pin, pin},
    time::Duration,
};

use jiff::{
    Timestamp,
    tz::{Offset, TimeZone},
};
use rowlock::{Database, Error, Schedules, Tick, jobs::TickOutcome};
use rustix::process::Pid;
use sqlx::Pool;
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};

use crate::{
    args::{claims::Run, process::Beginning},
    database::lock_of_schedules,
    exit::{self, Failure},
    format::clock,
    keys::run::lost_before,
    out,
    process::{
        find::find,
        signals::{StopSignals, exit_code},
        work::{End, Work},
    },
    schedule::{environment, job::STOPPED, show},
};

/// By how much the clock of this machine may be ahead of the database's. crontab and systemd start
/// the program by the former.
const AHEAD: Duration = Duration::from_secs(5);
/// The longest pause between two looks while another instance runs the tick.
const LOOK: Duration = Duration::from_secs(2);
const SHORT: Duration = Duration::from_millis(100);

/// How a command ended, with its exit code.
enum Ran {
    /// The tick is over.
    Recorded(u8),
    /// A signal stopped the command, and the tick is run again.
    Stopped(u8),
}

/// A tick that was claimed. The work of the library waits for the command's end.
struct Claimed<DB: Database> {
    tick: Tick<DB>,
    reply: oneshot::Sender<Result<(), String>>,
}

pub async fn run<DB: Database>(pool: Pool<DB>, run: Run, front: Option<Pid>) -> Result<u8, Failure> {
    let program = find(&run.words())?;
    if run.tick.zone.is_none() {
        warn_of_zone(run.key.as_str());
    }
    let mut stop = StopSignals::listen()?;
    let (ticks, mut claimed) = mpsc::channel(1);
    let schedules = schedules(pool, &run, ticks)?;
    let name = run.key.as_str();
    let (mut ran, mut locked) = (false, Duration::ZERO);
    loop {
        let (hand_back, asked) = oneshot::channel::<()>();
        let stopped = async { drop(asked.await) };
        let mut attempt = pin!(schedules.try_tick_until(name, stopped));
        let outcome = tokio::select! {
            biased;
            Some(claimed) = claimed.recv() => {
                let command = (&run, program.clone(), front);
                match run_command(command, claimed, attempt.as_mut(), &mut stop).await? {
                    Ran::Recorded(exit::OK) if run.tick.catches_up_on_all() && stop.asked().is_none() => ran = true,
                    Ran::Recorded(code) => return Ok(code),
                    Ran::Stopped(code) => {
                        drop(hand_back);
                        if let Err(why) = stop.within(run.stop_timeout, attempt).await {
                            out::print_error(format_args!("{name}: not handed back: {why}; its lease ends by itself"));
                        }
                        return Ok(code);
                    }
                }
                continue;
            }
            outcome = &mut attempt => outcome?,
            signal = stop.next() => {
                // A claim that is in flight is undone.
                drop(hand_back);
                let _ = stop.within(run.stop_timeout, attempt).await;
                return Ok(exit_code(signal));
            }
        };
        if ran && matches!(outcome, TickOutcome::NotDue { .. }) {
            return Ok(exit::OK);
        }
        let Some(pause) = pause(&schedules, &run, &outcome, &mut locked).await? else {
            return refuse(&schedules, &run, outcome).await;
        };
        tracing::debug!(schedule = name, ?pause, "waiting");
        tokio::select! {
            () = sleep(pause) => {}
            signal = stop.next() => return Ok(exit_code(signal)),
        }
    }
}

/// Says that the pattern is read in UTC, if the crontab or the timer that starts the program is
/// read in another zone.
fn warn_of_zone(name: &str) {
    let Ok(zone) = TimeZone::try_system() else { return };
    let now = Timestamp::now();
    if zone.to_offset(now) == Offset::UTC && zone.following(now).next().is_none() {
        return;
    }
    let (of_machine, zone) = match zone.iana_name() {
        Some(zone) => (zone, zone),
        None => ("another one", "NAME"),
    };
    out::print_warning(format_args!(
        "{name}: warning: the cron pattern is read in UTC, and this machine's time zone is {of_machine}: add --zone {zone}, or --zone UTC if UTC is meant"
    ));
}

fn schedules<DB: Database>(
    pool: Pool<DB>,
    run: &Run,
    ticks: mpsc::Sender<Claimed<DB>>,
) -> Result<Schedules<DB>, Failure> {
    let lock = lock_of_schedules(&pool, run.terms.label.as_deref())?;
    let mut schedules = Schedules::new(pool).lease(run.terms.lease);
    if let Some(label) = &run.terms.label {
        schedules = schedules.label(label);
    }
    if let Some(lock) = lock {
        schedules = schedules.lock(lock);
    }
    Ok(schedules.on(run.tick.schedule(&run.key), move |tick| {
        let ticks = ticks.clone();
        async move {
            let (reply, ended) = oneshot::channel();
            let _ = ticks.send(Claimed { tick, reply }).await;
            match ended.await {
                Ok(result) => result,
                // The command is being stopped; its end is not recorded.
                Err(_) => std::future::pending().await,
            }
        }
    }))
}

/// Returns how long to wait before another look: while another instance runs the tick, if it is due
/// in a moment, and while another transaction has locked its row: for a lease at most. `locked` is
/// how long it was waited for since that has been so.
async fn pause<DB: Database>(
    schedules: &Schedules<DB>,
    run: &Run,
    outcome: &TickOutcome,
    locked: &mut Duration,
) -> Result<Option<Duration>, Failure> {
    let TickOutcome::NotDue { retry_after } = outcome else { return Ok(None) };
    let name = run.key.as_str();
    let info = show::find(schedules, name).await?;
    if info.running || info.paused || *retry_after != Some(Duration::ZERO) {
        *locked = Duration::ZERO;
        return Ok(match info.running {
            true => Some(retry_after.unwrap_or(LOOK).clamp(SHORT, LOOK)),
            false => retry_after.filter(|left| !info.paused && *left <= AHEAD).map(|left| left.max(SHORT)),
        });
    }
    if *locked >= run.terms.lease {
        let text =
            format_args!("{name}: another transaction has its row locked for {locked:?}; end it, and run it again");
        return Err(Failure::new(exit::UNAVAILABLE, text));
    }
    let (pause, is_new) = ((*locked).clamp(SHORT, LOOK), *locked < LOOK);
    *locked += pause;
    if is_new && *locked >= LOOK {
        out::print_info(format_args!(
            "{name}: it is due, and another transaction has locked its row; checking again every {LOOK:?}"
        ));
    }
    Ok(Some(pause))
}

/// Says why nothing was run.
async fn refuse<DB: Database>(schedules: &Schedules<DB>, run: &Run, outcome: TickOutcome) -> Result<u8, Failure> {
    let name = run.key.as_str();
    let info = show::find(schedules, name).await?;
    let why = match outcome {
        TickOutcome::Lost => return Err(lost_before(name)),
        TickOutcome::Failed { error, .. } => {
            return Err(Failure::new(exit::GIVEN_UP, format_args!("{name}: {error}")));
        }
        // There was no signal.
        TickOutcome::HandedBack => {
            let text = format_args!(
                "{name}: handed back before the command began: the database failed, or an operator or a deploy has changed the schedule; run it again"
            );
            return Err(Failure::new(exit::UNAVAILABLE, text));
        }
        TickOutcome::Missed => "its ticks were too old, and were skipped".to_owned(),
        _ if info.paused => format!("paused: `rowlock resume {name}` ends that"),
        TickOutcome::NotDue { retry_after: None } if info.is_removed() => {
            "instances that are alive declare it as removed: `rowlock instances --json` shows which".to_owned()
        }
        // Only other times leave no time to wait for.
        TickOutcome::NotDue { retry_after: None } => format!(
            "other times are in effect, which are newer: {}; the next tick is at {}; `rowlock instances` lists the instances that declare them, and `rowlock instances --forget ID` removes one",
            show::times(&info),
            clock(info.slot)
        ),
        _ if info.since.is_none() => format!("registered, and not run yet: the first tick is at {}", clock(info.slot)),
        _ => format!("done, or not due: the next tick is at {}", clock(info.slot)),
    };
    out::print_refusal(format_args!("{name}: {why}"), run.refused());
    Ok(run.refused())
}

/// Runs the command of a claimed tick. The lease is renewed while `attempt` exists.
async fn run_command<DB: Database>(
    (run, program, front): (&Run, PathBuf, Option<Pid>),
    Claimed { tick, reply }: Claimed<DB>,
    attempt: Pin<&mut impl Future<Output = Result<TickOutcome, Error>>>,
    stop: &mut StopSignals,
) -> Result<Ran, Failure> {
    let (name, lost) = (run.key.as_str(), tick.cancellation_token());
    if lost.is_cancelled() {
        return Err(lost_before(name));
    }
    // After a stop or a loss, the run keeps its leases until the command has ended.
    let going_on = tick.going_on();
    let (words, variables, beginning) = (run.words(), environment(&tick), Beginning::default());
    let lost = async {
        lost.cancelled().await;
        if tick.is_stopped() { STOPPED } else { "lost" }
    };
    // Signals are passed on until the end is recorded.
    let mut work;
    let ended = match Work::start(name, run.stop_timeout, program, &words, &variables, &beginning, front) {
        Ok(started) => {
            work = started;
            work.until_end(stop, run.timeout, too_long, lost).await?
        }
        Err(failure) => End::NotStarted(failure),
    };
    drop(going_on);
    let (result, code) = match ended {
        End::Exited(exit::OK) => (Ok(()), Ok(exit::OK)),
        End::Exited(code) => (Err(format!("exit code {code}")), Ok(code)),
        End::TooLong(limit) => (Err(too_long(limit)), Ok(exit::TOO_LONG)),
        End::NotStarted(failure) => (Err(failure.to_string()), Err(failure)),
        End::Stopped(code) => return Ok(Ran::Stopped(code)),
        // Its end is not recorded: another instance may have the run by now.
        End::Lost => return Ok(Ran::Stopped(exit::LOST)),
    };
    record(reply, result, attempt, stop, run).await?;
    code.map(Ran::Recorded)
}

/// Says that a command took too long, in the message and in the history.
fn too_long(limit: Duration) -> String {
    format!("stopped after its timeout of {limit:?}")
}

/// Records the end of the run. The command has ended, so its exit code is returned even if the end
/// cannot be recorded; another instance then runs the tick again.
async fn record(
    reply: oneshot::Sender<Result<(), String>>,
    result: Result<(), String>,
    attempt: Pin<&mut impl Future<Output = Result<TickOutcome, Error>>>,
    stop: &mut StopSignals,
    run: &Run,
) -> Result<(), Failure> {
    let name = run.key.as_str();
    let _ = reply.send(result);
    let why = match stop.within(run.stop_timeout, attempt).await {
        Ok(Ok(TickOutcome::Lost)) => {
            let text = format_args!(
                "{name}: the run was lost, or its end was not recorded: another instance runs the tick again"
            );
            return Err(Failure::new(exit::LOST, text));
        }
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => format!("{error:?}"),
        Err(why) => why,
    };
    out::print_error(format_args!("{name}: its end was not recorded: {why}; the tick is run again"));
    Ok(())
}
