//! The current holder of each key, recorded outside the databases: at most one, under a token
//! higher than any before.

use std::{
    collections::{BTreeMap, HashMap},
    error::Error as StdError,
    fmt::Display,
    sync::{Arc, Mutex},
    time::Duration,
};

use rowlock::{Attempt, Error, LeaseLock, Status};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

#[derive(Default)]
struct Seen {
    inside: HashMap<String, String>,
    last: HashMap<String, i64>,
    wrong: Vec<String>,
    entered: BTreeMap<String, u64>,
    errors: BTreeMap<String, u64>,
    over: bool,
}

const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<Seen>>);

impl Watch {
    pub fn enter(&self, key: &str, token: i64, who: &str) {
        let mut seen = self.0.lock().unwrap();
        if let Some(other) = seen.inside.insert(key.into(), who.into()) {
            seen.wrong.push(format!("{key}: {who} came in under {token} while {other} was there"));
        }
        if let Some(last) = seen.last.insert(key.into(), token)
            && token <= last
        {
            seen.wrong.push(format!("{key}: {who} has token {token} after {last}"));
        }
        *seen.entered.entry(who.into()).or_default() += 1;
    }

    pub fn leave(&self, key: &str) {
        self.0.lock().unwrap().inside.remove(key);
    }

    /// While servers end and restart, each call fails with a retryable error, or has lost its
    /// claim.
    pub fn failed(&self, who: &str, error: &Error) {
        let name = format!("{who}: {}", summary(error));
        let mut seen = self.0.lock().unwrap();
        if !error.is_retryable() && !matches!(error, Error::Lost { .. }) {
            seen.wrong.push(format!("{who}: {error}"));
        }
        *seen.errors.entry(name).or_default() += 1;
    }

    /// Ends all workers.
    pub async fn end(&self, workers: Vec<JoinHandle<()>>) {
        self.0.lock().unwrap().over = true;
        for worker in workers {
            worker.await.unwrap();
        }
    }

    fn is_over(&self) -> bool {
        self.0.lock().unwrap().over
    }

    fn entered(&self, who: &str) -> u64 {
        self.0.lock().unwrap().entered.get(who).copied().unwrap_or_default()
    }

    /// Waits until this worker has acquired a few more keys.
    pub async fn goes_on(&self, who: &str, when: &str) {
        let (before, since) = (self.entered(who), Instant::now());
        while self.entered(who) < before + 3 {
            assert!(since.elapsed() < PATIENCE, "{who} does not go on {when}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// The highest token that was granted.
    #[cfg(feature = "mysql")]
    pub fn last(&self, key: &str) -> i64 {
        self.0.lock().unwrap().last.get(key).copied().unwrap_or_default()
    }

    pub fn tell(&self, what: impl Display) {
        let seen = self.0.lock().unwrap();
        println!("{what}: entered {:?}, errors {:#?}", seen.entered, seen.errors);
    }

    #[track_caller]
    pub fn assert_right(&self) {
        let seen = self.0.lock().unwrap();
        assert!(seen.wrong.is_empty(), "{:#?}", seen.wrong);
    }
}

/// The texts of the error and of the server's error, without keys and times.
fn summary(error: &(dyn StdError + 'static)) -> String {
    let text = error.to_string();
    let mut name = text
        .split(' ')
        .filter(|word| !word.contains(|c: char| c == '"' || c.is_ascii_digit()))
        .collect::<Vec<_>>()
        .join(" ");
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(sqlx::Error::Database(error)) = error.downcast_ref() {
            name += &format!(" {}: {}", error.code().unwrap_or_default(), error.message());
        } else if error.is::<sqlx::Error>() {
            name += &format!(" {error}");
        }
        cause = error.source();
    }
    name
}

/// Acquires these keys one after the other, in random order, until it is stopped.
pub async fn work<DB: rowlock::Database>(
    lock: LeaseLock<DB>,
    who: String,
    keys: &'static [&'static str],
    watch: Watch,
) {
    while !watch.is_over() {
        let key = keys[fastrand::usize(..keys.len())];
        match lock.acquire(key, Duration::from_secs(2)).await {
            Ok(Attempt::Acquired(lease)) => {
                watch.enter(key, lease.token().get(), &who);
                sleep(Duration::from_millis(fastrand::u64(1..10))).await;
                watch.leave(key);
                if let Err(error) = lease.release(Status::Succeeded).await {
                    watch.failed(&who, &error);
                }
            }
            Ok(Attempt::Refused(_)) => {}
            Err(error) => {
                watch.failed(&who, &error);
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
