//! One run of a job of `rowlock cron`: its command, and the one that follows its end.
//!
//! The library drops the work of a run that is lost. The command has to be stopped then, which
//! takes time, so the command is in a task of its own and the work only waits for it.

use std::{
    ffi::OsString,
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::Utc;
use rowlock::{Database, Tick};
use rustix::process::Pid;
use tokio::{sync::oneshot, task::JoinHandle, time::sleep};

use crate::{
    format::{brief, precise},
    log::RUNS,
    out,
    process::{descendants::child_of, orphans::Mark, work::expired},
    schedule::{
        command::{Shared, Started, Variable},
        environment,
        file::Job,
    },
};

/// How long the database has to record, or to take back, runs whose commands were stopped.
pub const DATABASE: Duration = Duration::from_secs(10);
/// How long the command that follows the end of a tick may take.
const HOOK: Duration = Duration::from_secs(60);
/// A command that runs for longer is shown with the number of its process.
const MOMENT: Duration = Duration::from_secs(1);
/// Why a command was stopped, if its run was not lost.
pub const STOPPED: &str = "stopped by an operator";

/// The work of a tick: starts the command, and waits for its end.
pub async fn run<DB: Database>(job: Arc<Job>, tick: Tick<DB>, shared: Shared) -> Result<(), String> {
    let (reply, ended) = oneshot::channel();
    let counted = shared.commands.token();
    // The program waits for those that are counted, and drops this run after them.
    if shared.stop.is_cancelled() {
        drop(counted);
        return std::future::pending().await;
    }
    let recorded = tick.recorded();
    let run = Run { job, variables: environment(&tick).to_vec(), tick: tick.clone(), shared };
    let started = match run.start(&run.job.command) {
        Ok(started) => started,
        Err(error) => {
            let result = Err(error);
            let ends = Some(result.clone());
            tokio::spawn(async move {
                run.end(Duration::ZERO, ends, recorded).await;
                drop(counted);
            });
            return result;
        }
    };
    let taken_over_from = tick.taken_over_from().map(|lost| lost.label.as_str());
    let (slot, attempt) = (precise(tick.slot()), tick.attempt());
    tracing::info!(target: RUNS, job = run.name(), slot, attempt, taken_over_from, "started");
    // The run keeps its leases until the command has ended.
    let going_on = tick.going_on();
    let (mark, above) = (started.mark.clone(), started.pid);
    let watching = tokio::spawn(async move {
        let began = Instant::now();
        let result = run.watch(started, reply).await;
        let took = began.elapsed();
        drop(going_on);
        run.end(took, result, recorded).await;
        drop(counted);
    });
    let ended = tokio::select! {
        ended = ended => ended,
        () = note(&tick, above) => std::future::pending().await,
    };
    match ended {
        Ok(result) => result,
        Err(_) => without_reply(watching, &mark).await,
    }
}

/// Shows the number of a command's process, which is below another one, beside its run, once that
/// goes on for a moment. Never ends.
async fn note<DB: Database>(tick: &Tick<DB>, above: Option<Pid>) {
    loop {
        sleep(MOMENT).await;
        // On a busy machine the command may begin later. Without an answer it is noted again.
        let Some(pid) = above.and_then(child_of) else { continue };
        if tick.note(&format!("pid {}", pid.as_raw_nonzero())).await.is_ok() {
            return std::future::pending().await;
        }
    }
}

/// The command was stopped with the program: the run has not failed, and is handed back. Otherwise
/// the task that watched it has panicked.
async fn without_reply(watching: JoinHandle<()>, mark: &Mark) -> Result<(), String> {
    match watching.await {
        Ok(()) => std::future::pending().await,
        Err(error) => {
            mark.kill().await;
            Err(format!("the command was stopped: rowlock failed while it watched it: {error}"))
        }
    }
}

/// One attempt at a tick.
struct Run<DB: Database> {
    job: Arc<Job>,
    tick: Tick<DB>,
    variables: Vec<Variable>,
    shared: Shared,
}

impl<DB: Database> Run<DB> {
    fn name(&self) -> &str {
        self.job.schedule.name()
    }

    fn start(&self, words: &[OsString]) -> Result<Started, String> {
        Started::start(words, &self.job, &self.variables, &self.shared)
    }

    /// Waits for the command's end, and stops it when its run is lost, takes too long, or ends with
    /// the program. Returns the result that is to be recorded, if one is.
    async fn watch(
        &self,
        mut command: Started,
        mut reply: oneshot::Sender<Result<(), String>>,
    ) -> Option<Result<(), String>> {
        let name = self.name();
        let ended = tokio::select! {
            biased;
            ended = command.ended() => Ok(ended),
            // Without a reply, the run is not recorded.
            () = self.shared.stop.cancelled() => Ok(command.stop().await?),
            () = reply.closed() => {
                let is_stopped = self.tick.is_stopped();
                let why = if is_stopped { STOPPED } else { "lost" };
                out::print_error(format_args!("{name}: {why}; stopping the command"));
                command.stop().await;
                self.keep_output(&command);
                return is_stopped.then(|| Err(STOPPED.to_owned()));
            }
            limit = expired(self.job.terms.timeout) => {
                command.stop().await.ok_or_else(|| format!("stopped after its timeout of {limit:?}"))
            }
        };
        command.last_output().await;
        self.keep_output(&command);
        let (result, is_told) = match ended {
            Ok(ended) => (ended.result, ended.code.is_some()),
            Err(stopped) => (Err(stopped), false),
        };
        // Of a command that was stopped, the cause is known.
        let result = result.map_err(|error| if is_told { command.with_last_line(error) } else { error });
        match reply.send(result.clone()) {
            Ok(()) => Some(result),
            // The run was lost since, or stopped.
            Err(_) => self.tick.is_stopped().then(|| Err(STOPPED.to_owned())),
        }
    }

    fn keep_output(&self, command: &Started) {
        if let Some(output) = command.tail.take() {
            self.tick.keep_output(output);
        }
    }

    /// Logs how the run ended, and runs what follows, once its end is recorded: one that was lost may
    /// go on elsewhere. `None`: its run was lost or is handed back.
    async fn end(self, took: Duration, result: Option<Result<(), String>>, recorded: impl Future<Output = bool>) {
        let is_recorded = match &result {
            None => Some(false),
            Some(_) => tokio::select! {
                biased;
                is_recorded = recorded => Some(is_recorded),
                () = async {
                    self.shared.stop.cancelled().await;
                    sleep(DATABASE).await;
                } => None,
            },
        };
        self.tell_end(took, result.as_ref(), is_recorded);
        if let Some(result) = result.filter(|_| is_recorded == Some(true)) {
            self.follow(result).await;
        }
    }

    /// Logs how the command ended, and what comes next. `is_recorded` is `None` if that is not
    /// known.
    fn tell_end(&self, took: Duration, result: Option<&Result<(), String>>, is_recorded: Option<bool>) {
        let (job, slot, attempt, took) = (self.name(), precise(self.tick.slot()), self.tick.attempt(), brief(took));
        let result = result.map(|result| result.as_ref().map_err(String::as_str));
        let next = match result {
            _ if is_recorded != Some(true) => Some("the tick is run again, here or elsewhere".to_owned()),
            Some(Err(_)) if self.fails_again() => Some(format!("attempt {}", attempt.saturating_add(1))),
            // Of a fixed delay, only the row knows.
            _ => self.job.schedule.upcoming(Utc::now()).ok().and_then(|mut all| all.next()).map(precise),
        };
        match (result, is_recorded) {
            (Some(ended), None) => {
                let error = ended.err();
                tracing::warn!(target: RUNS, job, slot, attempt, took, error, "its end may not be recorded");
            }
            (Some(ended), Some(false)) => {
                let error = ended.err();
                let lost = "lost: its end is not recorded";
                tracing::warn!(target: RUNS, job, slot, attempt, took, error, next, "{lost}");
            }
            (Some(Ok(())), _) => tracing::info!(target: RUNS, job, slot, attempt, took, next, "succeeded"),
            (Some(Err(error)), _) if self.fails_again() => {
                tracing::info!(target: RUNS, job, slot, attempt, took, error, next, "failed");
            }
            (Some(Err(error)), _) => tracing::warn!(target: RUNS, job, slot, attempt, took, error, next, "failed"),
            (None, _) => tracing::info!(target: RUNS, job, slot, attempt, took, next, "stopped"),
        }
    }

    /// Returns whether the tick is run again after a failure.
    fn fails_again(&self) -> bool {
        self.tick.attempt() <= self.job.terms.retries && !self.tick.is_stopped()
    }

    /// Runs the command that follows the end of the tick. It changes nothing of how that ended.
    async fn follow(mut self, result: Result<(), String>) {
        let hooks = &self.job.terms.hooks;
        let (hook, words, outcome) = match &result {
            Ok(()) => ("on_success", &hooks.on_success, "succeeded"),
            // The tick is run again.
            Err(_) if self.fails_again() => return,
            Err(_) => ("on_failure", &hooks.on_failure, "failed"),
        };
        if words.is_empty() {
            return;
        }
        let words = words.clone();
        let error = result.err().unwrap_or_default();
        self.variables.extend([("ROWLOCK_OUTCOME", outcome.to_owned()), ("ROWLOCK_ERROR", error)]);
        let result = match self.start(&words) {
            Ok(command) => self.hook_to_its_end(command).await,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            out::print_error(format_args!("{}: {hook}: {error}", self.name()));
        }
    }

    async fn hook_to_its_end(&self, mut command: Started) -> Result<(), String> {
        let ended = tokio::select! {
            biased;
            ended = command.ended() => Some(ended),
            () = self.shared.stop.cancelled() => command.stop().await,
            () = sleep(HOOK) => command.stop().await,
        };
        command.last_output().await;
        let stopped = || Err(format!("stopped: it may take {HOOK:?}, and goes on no longer than the program"));
        ended.map_or_else(stopped, |ended| ended.result)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_run_that_is_not_watched_any_more_has_failed() {
        let watching = tokio::spawn(async { panic!("a fault") });
        let mark = Mark::new("none", None, vec!["ROWLOCK_JOB=none".to_owned()]);
        let failed = timeout(Duration::from_secs(20), without_reply(watching, &mark)).await.unwrap();
        assert!(failed.is_err_and(|error| error.contains("a fault")));
        let ended = tokio::spawn(async {});
        let handed_back = timeout(Duration::from_millis(50), without_reply(ended, &mark)).await;
        assert!(handed_back.is_err(), "it has no result");
    }
}
