//! `rowlock run`: a command that runs while its key is held.

use std::{
    ffi::OsString,
    path::PathBuf,
    time::{Duration, Instant},
};

use rowlock::{Claim, Database, Key, Lease, LeaseLock, Status};
use rustix::process::Pid;
use serde_json::Value;

use crate::{
    args::{claims::Run, process::Beginning},
    exit::{self, Failure},
    keys::claiming::Claiming,
    process::{
        find::find,
        signals::StopSignals,
        work::{End, Work},
    },
};

pub async fn run<DB: Database>(lock: LeaseLock<DB>, run: Run, front: Option<Pid>) -> Result<u8, Failure> {
    // The command is looked up first: a claim for a command that cannot run would use up the
    // minimum interval.
    let (words, wait) = (run.words(), run.terms.wait_of_work()?);
    let program = find(&words)?;
    let mut stop = StopSignals::listen()?;
    let (key, refused) = (run.key.as_str(), run.refused());
    let keys: Vec<&str> = std::iter::once(&run.key).chain(&run.also).map(Key::as_str).collect();
    let claiming = Claiming { lock: &lock, keys, stop_timeout: run.stop_timeout, rules: run.terms.rules, refused };
    let (timeout, lock_delay) = (run.timeout, run.lock_delay);
    let job = Job { claiming: &claiming, program, words: &words, front, timeout, lock_delay };
    if !run.also.is_empty() {
        let lease = claiming.wait_for(lock.acquire_all(&claiming.keys, wait), &mut stop).await?;
        let lease = claiming.beside_no_reader(lease, &mut stop).await?;
        return job.run(&environment_of_all(key, lease.claims()), lease, &mut stop).await;
    }
    let permits = run.permits.map(|permits| lock.semaphore(key, permits));
    let access = match &permits {
        Some(permits) => Some(permits.clone()),
        None if run.shared => Some(lock.read_write(key).readers().clone()),
        None if run.exclusive => Some(lock.read_write(key).writer().clone()),
        None => None,
    };
    let lease = match &access {
        Some(access) => claiming.wait_for(access.acquire(wait), &mut stop).await?,
        None => {
            let lease = claiming.wait_for(lock.acquire(key, wait), &mut stop).await?;
            claiming.beside_no_reader(lease, &mut stop).await?
        }
    };
    let mut environment = environment(lease.claim());
    let number = permits.and_then(|permits| permits.number(lease.key()));
    environment.extend(number.map(|number| ("ROWLOCK_PERMIT", number.to_string())));
    environment.extend(lease.writer_token().map(|token| ("ROWLOCK_WRITER_TOKEN", token.to_string())));
    job.run(&environment, lease, &mut stop).await
}

/// Says that a claim ended while its process was suspended after the grant.
pub fn lost_before(key: &str) -> Failure {
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

/// What is said of a command whose claim was lost.
pub const LOST: &str = "lost";

/// A command that runs under a claim.
pub struct Job<'a, DB: Database> {
    pub claiming: &'a Claiming<'a, DB>,
    pub program: PathBuf,
    pub words: &'a [OsString],
    pub front: Option<Pid>,
    /// How long the command may run.
    pub timeout: Option<Duration>,
    pub lock_delay: Duration,
}

impl<DB: Database> Job<'_, DB> {
    async fn run<K>(
        &self,
        environment: &[(&str, String)],
        lease: Lease<DB, K>,
        stop: &mut StopSignals,
    ) -> Result<u8, Failure> {
        let key = self.claiming.key();
        // The process may have been suspended between the grant and this check.
        if !lease.is_held() {
            return Err(lost_before(key));
        }
        let started = Instant::now();
        let (code, outcome) = self.supervise(environment, lease, stop).await?;
        tracing::info!(%key, outcome, code, wall = ?started.elapsed(), "command");
        Ok(code)
    }

    /// Starts the command, waits until it has ended or was stopped, and ends its claim accordingly.
    /// Returns the exit code, and how it ended, in words.
    pub async fn supervise<K>(
        &self,
        environment: &[(&str, String)],
        lease: Lease<DB, K>,
        stop: &mut StopSignals,
    ) -> Result<(u8, &'static str), Failure> {
        let Self { claiming, program, words, front, timeout, lock_delay } = self;
        let (key, stop_timeout) = (claiming.key(), claiming.stop_timeout);
        let work = Work::start(key, stop_timeout, program.clone(), words, environment, &Beginning::default(), *front);
        let mut work = match work {
            Ok(work) => work,
            Err(failure) => return Err(claiming.put_back(lease, stop, failure).await),
        };
        let lost = async {
            lease.lost().await;
            LOST
        };
        Ok(match work.until_end(stop, *timeout, too_long, lost).await? {
            End::Exited(exit::OK) => {
                claiming.record(lease, Status::Succeeded, stop).await?;
                (exit::OK, "succeeded")
            }
            End::Exited(code) => {
                claiming.record(lease, Status::Failed, stop).await?;
                (code, "failed")
            }
            End::NotStarted(failure) => return Err(claiming.put_back(lease, stop, failure).await),
            End::Stopped(code) => {
                claiming.abandon(lease, stop).await;
                (code, "stopped")
            }
            End::TooLong(_) => {
                claiming.record(lease, Status::Failed, stop).await?;
                (exit::TOO_LONG, "stopped after its timeout")
            }
            End::Lost => {
                if !lock_delay.is_zero() {
                    // The command has stopped, so that nothing is left to wait for.
                    let _ = stop.within(stop_timeout, lease.abandon()).await;
                }
                (exit::LOST, LOST)
            }
        })
    }
}

fn too_long(limit: Duration) -> String {
    format!("not ended within {limit:?}, its --timeout: stopping the command")
}
