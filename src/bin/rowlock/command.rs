//! `rowlock run`: a command that runs while its key is held.

use std::{
    fmt,
    time::{Duration, Instant},
};

use rowlock::{Attempt, Database, Error, Lease, LeaseLock, Status};
use rustix::process::{Pid, Signal};
use tokio::time::timeout;

use crate::{
    args::{RuleSet, Run},
    exit::{self, Failure},
    find::find,
    out,
    signals::{Asked, number},
    work::{Work, code},
};

/// How much later than the command this program may receive a signal that is sent to both.
const WORD_OF_KEYS: Duration = Duration::from_millis(250);

pub async fn run<DB: Database>(lock: LeaseLock<DB>, run: Run, front: Option<Pid>) -> Result<u8, Failure> {
    // The command is looked up first: a claim for a command that cannot run would use up the
    // minimum interval.
    let program = find(&run.command)?;
    let mut asked = Asked::listen()?;
    let attempt = tokio::select! {
        attempt = lock.acquire(run.key.as_str(), run.terms.wait) => attempt?,
        signal = asked.next() => {
            let _ = asked.within(run.grace, lock.shutdown(Duration::MAX)).await;
            return Ok(exit::SIGNAL + number(signal));
        }
    };
    let lease = match attempt {
        Attempt::Acquired(lease) => lease,
        Attempt::Refused(refusal) => {
            out::complain(format_args!("refused: {refusal}"));
            return Ok(if run.skip_ok { exit::OK } else { exit::REFUSED });
        }
    };
    if !lease.is_held() {
        // The process was suspended between the grant and this check.
        return Err(Failure::new(exit::LOST, format_args!("{}: lost before the command began", run.key.as_str())));
    }
    let started = Instant::now();
    let work = match Work::start(program, &run, lease.claim(), front) {
        Ok(work) => work,
        Err(failure) => return Err(put_back(&lock, lease, &mut asked, &run, failure).await),
    };
    let (code, outcome) = supervise(&lock, lease, work, &mut asked, &run).await?;
    tracing::info!(key = %run.key, outcome, code, wall = ?started.elapsed(), "command");
    Ok(code)
}

/// Waits for the command's end, a signal, or the loss of the lease. Returns the exit code and the
/// name of the outcome.
async fn supervise<DB: Database>(
    lock: &LeaseLock<DB>,
    lease: Lease<DB>,
    mut work: Work,
    asked: &mut Asked,
    run: &Run,
) -> Result<(u8, &'static str), Failure> {
    let key = run.key.as_str();
    tokio::select! {
        biased;
        status = work.ended(key, run.grace) => {
            let code = code(status?);
            if let Some(failure) = work.failure() {
                return Err(put_back(lock, lease, asked, run, failure).await);
            }
            // On a terminal, the signals of its keys may reach the command first, and the command
            // may have ended because of them.
            if code != exit::OK && timeout(WORD_OF_KEYS, asked.next()).await.is_ok() {
                abandon(lock, lease, asked, run).await;
                return Ok((code, "stopped"));
            }
            let (status, outcome) = if code == exit::OK { (Status::Succeeded, "succeeded") } else { (Status::Failed, "failed") };
            match asked.within(run.grace, lease.release(status)).await {
                Ok(Ok(())) => {}
                Ok(Err(error @ Error::Lost { .. })) => return Err(error.into()),
                // The command has ended, and its exit code is returned. The next claim waits for
                // the end of the lease at most.
                Ok(Err(error)) => not_recorded(key, format_args!("{error:?}")),
                Err(why) => not_recorded(key, why),
            }
            Ok((code, outcome))
        }
        signal = asked.next() => {
            // The lease is still renewed while the command stops.
            work.pass_on(signal);
            let status = work.stopped(key, asked, run.grace).await?;
            abandon(lock, lease, asked, run).await;
            Ok((code(status), "stopped"))
        }
        () = lease.lost() => {
            // The signal is sent before the message, since a stderr that is not read would block
            // this process.
            work.pass_on(Signal::TERM);
            out::complain(format_args!("{key}: lost; stopping the command"));
            work.stopped(key, asked, run.grace).await?;
            Ok((exit::LOST, "lost"))
        }
    }
}

/// Abandons the claim of a command that was asked to stop. Another instance may run the command at
/// once.
async fn abandon<DB: Database>(lock: &LeaseLock<DB>, lease: Lease<DB>, asked: &mut Asked, run: &Run) {
    drop(lease);
    if let Err(why) = asked.within(run.grace, lock.shutdown(Duration::MAX)).await {
        not_recorded(run.key.as_str(), why);
    }
}

fn not_recorded(key: &str, why: impl fmt::Display) {
    out::complain(format_args!("{key}: its end was not recorded: {why}"));
}

/// Ends a claim under which no work was begun. Under the article's rules it is released as
/// succeeded, since they refuse every claim after an apparent crash.
async fn put_back<DB: Database>(
    lock: &LeaseLock<DB>,
    lease: Lease<DB>,
    asked: &mut Asked,
    run: &Run,
    failure: Failure,
) -> Failure {
    let put_back = async {
        match run.terms.rules {
            RuleSet::Recover => drop(lease),
            RuleSet::Article => drop(lease.release(Status::Succeeded).await),
        }
        lock.shutdown(Duration::MAX).await;
    };
    if let Err(why) = asked.within(run.grace, put_back).await {
        not_recorded(run.key.as_str(), why);
    }
    failure
}
