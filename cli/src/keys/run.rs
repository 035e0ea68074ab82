//! `rowlock run`: a command that runs while its key is held.

use std::{
    ffi::OsString,
    fmt,
    path::PathBuf,
    time::{Duration, Instant},
};

use rowlock::{Claim, Database, Error, Key, Lease, LeaseLock, Status};
use rustix::process::Pid;
use serde_json::Value;

use crate::{
    args::{
        claims::{RuleSet, Run},
        process::Beginning,
    },
    exit::{self, Failure},
    keys::{
        beside::refuse_beside_readers,
        waiting::{Wait, Waited},
    },
    out,
    process::{
        find::find,
        signals::StopSignals,
        work::{End, Limits, Work},
    },
};

pub async fn run<DB: Database>(lock: LeaseLock<DB>, run: Run, front: Option<Pid>) -> Result<u8, Failure> {
    // The command is looked up first: a claim for a command that cannot run would use up the
    // minimum interval.
    let (words, wait) = (run.words(), run.terms.wait_of_work()?);
    let program = find(&words)?;
    let mut stop = StopSignals::listen()?;
    let (grace, timeout, lock_delay) = (run.grace, run.timeout, run.lock_delay);
    let job = Job { key: run.key.as_str(), grace, timeout, lock_delay, rules: run.terms.rules };
    let begun = Begun { lock: &lock, job: &job, program, words: &words, front };
    let waits = |keys| Wait { keys, grace: run.grace, refused: run.refused() };
    if !run.also.is_empty() {
        let keys: Vec<&str> = std::iter::once(&run.key).chain(&run.also).map(Key::as_str).collect();
        return match waits(keys.clone()).for_request(&lock, &mut stop, lock.acquire_all(&keys, wait)).await? {
            Waited::Granted(lease) => {
                if let Err(failure) = refuse_beside_readers(&lock, &keys, run.refused()).await {
                    return Err(job.put_back(&lock, lease, &mut stop, failure).await);
                }
                begun.run_command(&environment_of_all(job.key, lease.claims()), lease, &mut stop).await
            }
            Waited::Over(code) => Ok(code),
        };
    }
    let permits = run.permits.map(|permits| lock.semaphore(job.key, permits));
    let access = match &permits {
        Some(permits) => Some(permits.clone()),
        None if run.shared => Some(lock.read_write(job.key).readers().clone()),
        None if run.exclusive => Some(lock.read_write(job.key).writer().clone()),
        None => None,
    };
    let request = async {
        match &access {
            Some(access) => access.acquire(wait).await,
            None => lock.acquire(job.key, wait).await,
        }
    };
    let lease = match waits(vec![job.key]).for_request(&lock, &mut stop, request).await? {
        Waited::Granted(lease) => lease,
        Waited::Over(code) => return Ok(code),
    };
    if access.is_none()
        && let Err(failure) = refuse_beside_readers(&lock, &[job.key], run.refused()).await
    {
        return Err(job.put_back(&lock, lease, &mut stop, failure).await);
    }
    let mut environment = environment(lease.claim());
    let number = permits.and_then(|permits| permits.number(lease.key()));
    environment.extend(number.map(|number| ("ROWLOCK_PERMIT", number.to_string())));
    environment.extend(lease.writer_token().map(|token| ("ROWLOCK_WRITER_TOKEN", token.to_string())));
    begun.run_command(&environment, lease, &mut stop).await
}

/// A command whose keys are held, with what it is started with.
struct Begun<'r, DB: Database> {
    lock: &'r LeaseLock<DB>,
    job: &'r Job<'r>,
    program: PathBuf,
    words: &'r [OsString],
    front: Option<Pid>,
}

impl<DB: Database> Begun<'_, DB> {
    async fn run_command<K>(
        self,
        environment: &[(&str, String)],
        lease: Lease<DB, K>,
        stop: &mut StopSignals,
    ) -> Result<u8, Failure> {
        let Self { lock, job, program, words, front } = self;
        // The process may have been suspended between the grant and this check.
        if !lease.is_held() {
            return Err(lost_before(job.key));
        }
        let started = Instant::now();
        let work = match Work::start(program, words, environment, &Beginning::default(), front) {
            Ok(work) => work,
            Err(failure) => return Err(job.put_back(lock, lease, stop, failure).await),
        };
        let (code, outcome) = job.supervise(lock, lease, work, stop).await?;
        tracing::info!(key = %job.key, outcome = outcome.name(), code, wall = ?started.elapsed(), "command");
        Ok(code)
    }
}

fn lost_before(key: &str) -> Failure {
    Failure::new(exit::LOST, format_args!("{key}: lost before the command began"))
}

/// The variables of a command under several keys. All of their claims have one holder.
fn environment_of_all(key: &str, claims: &[Claim]) -> Vec<(&'static str, String)> {
    let first = claims.iter().find(|claim| claim.key.as_str() == key).map(environment);
    let tokens: serde_json::Map<String, Value> =
        claims.iter().map(|claim| (claim.key.as_str().to_owned(), claim.token.get().into())).collect();
    let mut environment = first.unwrap_or_default();
    environment.push(("ROWLOCK_TOKENS", Value::Object(tokens).to_string()));
    environment
}

pub fn environment(claim: &Claim) -> Vec<(&'static str, String)> {
    vec![
        ("ROWLOCK_KEY", claim.key.as_str().to_owned()),
        ("ROWLOCK_TOKEN", claim.token.to_string()),
        ("ROWLOCK_HOLDER", claim.holder.to_string()),
    ]
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Succeeded,
    Failed,
    /// It was asked to stop.
    Stopped,
    /// It took longer than it may, and was stopped.
    TooLong,
    /// The claim was lost, and the command was stopped.
    Lost,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
            Self::TooLong => "stopped after its timeout",
            Self::Lost => "lost",
        }
    }
}

/// A command that runs under a claim.
pub struct Job<'a> {
    /// The key, as messages name it.
    pub key: &'a str,
    pub grace: Duration,
    /// How long the command may run.
    pub timeout: Option<Duration>,
    pub lock_delay: Duration,
    pub rules: RuleSet,
}

impl<'a> Job<'a> {
    /// Returns a claim under which no command runs.
    pub fn without_command(key: &'a str, grace: Duration, rules: RuleSet) -> Self {
        Self { key, grace, timeout: None, lock_delay: Duration::ZERO, rules }
    }

    /// Waits until the command has ended or was stopped, and ends its claim accordingly. Returns
    /// the exit code and the outcome.
    pub async fn supervise<DB: Database, K>(
        &self,
        lock: &LeaseLock<DB>,
        lease: Lease<DB, K>,
        mut work: Work,
        stop: &mut StopSignals,
    ) -> Result<(u8, Outcome), Failure> {
        let limits = Limits { grace: self.grace, timeout: self.timeout, too_long };
        let lost = async {
            lease.lost().await;
            "lost"
        };
        Ok(match work.until_end(self.key, stop, limits, lost).await? {
            End::Exited(exit::OK) => {
                self.record(lease, Status::Succeeded, stop).await?;
                (exit::OK, Outcome::Succeeded)
            }
            End::Exited(code) => {
                self.record(lease, Status::Failed, stop).await?;
                (code, Outcome::Failed)
            }
            End::NotStarted(failure) => return Err(self.put_back(lock, lease, stop, failure).await),
            End::Stopped(code) => {
                self.abandon(lock, lease, stop).await;
                (code, Outcome::Stopped)
            }
            End::TooLong(_) => {
                self.record(lease, Status::Failed, stop).await?;
                (exit::TOO_LONG, Outcome::TooLong)
            }
            End::Lost => {
                if !self.lock_delay.is_zero() {
                    // The command has stopped, so that nothing is left to wait for.
                    let _ = stop.within(self.grace, lease.abandon()).await;
                }
                (exit::LOST, Outcome::Lost)
            }
        })
    }

    /// Records how the command has ended. A claim that was lost is an error; whatever else goes
    /// wrong is only told, since the command has ended. The next claim waits for the end of the
    /// lease at most.
    pub async fn record<DB: Database, K>(
        &self,
        lease: Lease<DB, K>,
        status: Status,
        stop: &mut StopSignals,
    ) -> Result<(), Failure> {
        match stop.within(self.grace, lease.end(status)).await {
            Ok(Ok(())) => {}
            Ok(Err(error @ Error::Lost { .. })) => return Err(error.into()),
            Ok(Err(error)) => print_not_recorded(self.key, format_args!("{error:?}")),
            Err(why) => print_not_recorded(self.key, why),
        }
        Ok(())
    }

    /// Abandons the claim of a command that was asked to stop. Another instance may run the command
    /// at once.
    async fn abandon<DB: Database, K>(&self, lock: &LeaseLock<DB>, lease: Lease<DB, K>, stop: &mut StopSignals) {
        if let Err(why) = stop.within(self.grace, abandon_and_settle(lock, lease)).await {
            print_not_recorded(self.key, why);
        }
    }

    /// Ends a claim under which no work was begun. Under the article's rules it is released as
    /// succeeded, since they refuse every claim after an apparent crash.
    pub async fn put_back<DB: Database, K>(
        &self,
        lock: &LeaseLock<DB>,
        lease: Lease<DB, K>,
        stop: &mut StopSignals,
        failure: Failure,
    ) -> Failure {
        let put_back = async {
            match self.rules {
                RuleSet::Recover => abandon_and_settle(lock, lease).await,
                RuleSet::Article => {
                    drop(lease.release().await);
                    lock.shutdown(Duration::MAX).await;
                }
            }
        };
        if let Err(why) = stop.within(self.grace, put_back).await {
            print_not_recorded(self.key, why);
        }
        failure
    }
}

/// Abandons the claim of a command that has stopped, so that no lock-delay is kept, and waits until
/// that is settled.
async fn abandon_and_settle<DB: Database, K>(lock: &LeaseLock<DB>, lease: Lease<DB, K>) {
    drop(lease.abandon().await); // an outcome that is unknown ends with the lease
    lock.shutdown(Duration::MAX).await;
}

fn too_long(limit: Duration) -> String {
    format!("not ended within {limit:?}, its --timeout: stopping the command")
}

fn print_not_recorded(key: &str, why: impl fmt::Display) {
    out::print_error(format_args!("{key}: its end was not recorded: {why}"));
}
