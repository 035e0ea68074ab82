//! The current holder of each key, recorded outside the databases: at most one, under a token
//! higher than any before.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    error::Error as StdError,
    fmt::Display,
    sync::{Arc, Mutex},
    time::Duration,
};

use rowlock::{Access, Database, Election, Error, Lease, LeaseLock, ReadWriteLock, Token, errors::DatabaseFault};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::nodes::{Cluster, Kind};

#[derive(Default)]
struct Seen {
    inside: HashMap<String, String>,
    readers: HashMap<String, BTreeSet<String>>,
    last: HashMap<String, i64>,
    wrong: Vec<String>,
    entered: BTreeMap<String, u64>,
    errors: BTreeMap<String, u64>,
    over: bool,
    may_be_read_only: bool,
}

const PATIENCE: Duration = Duration::from_secs(90);

/// Renews a lease that stood while servers ended. The first renewals may use connections that ended
/// with their server: their outcome is unknown, and they are sent again.
pub async fn renew<DB: Database>(lease: &Lease<DB>) {
    let since = Instant::now();
    while let Err(error) = lease.renew().await {
        assert!(lease.is_held() && error.is_retryable() && since.elapsed() < PATIENCE, "{error:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<Seen>>);

impl Watch {
    pub fn enter(&self, key: &str, token: i64, who: &str) {
        let mut seen = self.0.lock().unwrap();
        if let Some(other) = seen.inside.insert(key.into(), who.into()) {
            seen.wrong.push(format!("{key}: {who} came in under {token} while {other} was there"));
        }
        if let Some(readers) = seen.readers.get(key).filter(|readers| !readers.is_empty()) {
            let text = format!("{key}: {who} came in under {token} while {readers:?} read");
            seen.wrong.push(text);
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

    /// A reader comes in. The token is that of the last writer before it.
    pub fn enter_as_reader(&self, key: &str, writer_token: Option<i64>, who: &str) {
        let mut seen = self.0.lock().unwrap();
        if let Some(writer) = seen.inside.get(key) {
            let text = format!("{key}: {who} reads while {writer} writes");
            seen.wrong.push(text);
        }
        let last = seen.last.get(key).copied();
        if writer_token < last {
            seen.wrong.push(format!("{key}: {who} reads under {writer_token:?} after {last:?}"));
        }
        seen.readers.entry(key.into()).or_default().insert(who.into());
        *seen.entered.entry(who.into()).or_default() += 1;
    }

    pub fn leave_as_reader(&self, key: &str, who: &str) {
        self.0.lock().unwrap().readers.get_mut(key).unwrap().remove(who);
    }

    /// Watches the clients of a cluster. A member of a group takes no writes until it has joined.
    pub fn of(cluster: &Cluster) -> Self {
        let watch = Self::default();
        watch.0.lock().unwrap().may_be_read_only = cluster.kind == Kind::Group;
        watch
    }

    /// Watches clients that may reach a server which is not the primary any more.
    pub fn of_clients_of_a_primary() -> Self {
        let watch = Self::default();
        watch.0.lock().unwrap().may_be_read_only = true;
        watch
    }

    /// While servers end and restart, each call fails with a retryable error, or has lost its
    /// claim.
    pub fn failed(&self, who: &str, error: &Error) {
        let name = format!("{who}: {}", summary(error));
        let mut seen = self.0.lock().unwrap();
        let expected = match error {
            Error::Lost { .. } => true,
            Error::Database(DatabaseFault::ReadOnly { .. }) => seen.may_be_read_only,
            _ => error.is_retryable(),
        };
        if !expected {
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

    /// How often this worker has acquired a key.
    pub fn entered(&self, who: &str) -> u64 {
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

    /// The same for all that [`everything`] has started.
    pub async fn all_go_on(&self, when: &str) {
        for who in KINDS {
            self.goes_on(who, when).await;
        }
    }

    /// All keys that were granted.
    pub fn keys(&self) -> BTreeSet<String> {
        self.0.lock().unwrap().last.keys().cloned().collect()
    }

    /// The highest token that was granted.
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

/// What a worker acquires.
pub enum Wanted<DB: Database> {
    /// One of these keys.
    Key(LeaseLock<DB>, &'static [&'static str]),
    Permit(Access<DB>),
}

impl<DB: Database> Wanted<DB> {
    async fn acquire(&self) -> Result<Lease<DB>, Error> {
        let wait = Duration::from_secs(2);
        match self {
            Self::Key(lock, keys) => lock.acquire(keys[fastrand::usize(..keys.len())], wait).await,
            Self::Permit(permits) => permits.acquire(wait).await,
        }
    }
}

/// Acquires what it wants one time after the other, until it is stopped.
pub async fn work<DB: Database>(wanted: Wanted<DB>, who: String, watch: Watch) {
    while !watch.is_over() {
        match wanted.acquire().await {
            Ok(lease) => {
                let key = lease.key().to_string();
                watch.enter(&key, lease.token().get(), &who);
                sleep(Duration::from_millis(fastrand::u64(1..10))).await;
                watch.leave(&key);
                if let Err(error) = lease.release().await {
                    watch.failed(&who, &error);
                }
            }
            Err(Error::Refused(_)) => {}
            Err(error) => {
                watch.failed(&who, &error);
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// What [`everything`] enters as.
const KINDS: [&str; 6] = ["worker", "permit", "leader", "reader 1", "reader 3", "writer"];

/// Starts six workers on three keys, four that want one of two permits, three candidates of an
/// election, two readers and two writers.
pub fn everything<DB: Database>(lock: impl Fn() -> LeaseLock<DB>, watch: &Watch) -> Vec<JoinHandle<()>> {
    let mut tasks = Vec::new();
    for _ in 0..6 {
        tasks.push(tokio::spawn(work(Wanted::Key(lock(), &["one", "two", "three"]), "worker".into(), watch.clone())));
    }
    for _ in 0..4 {
        let permits = lock().semaphore("permits", 2);
        tasks.push(tokio::spawn(work(Wanted::Permit(permits), "permit".into(), watch.clone())));
    }
    for _ in 0..3 {
        tasks.push(tokio::spawn(lead(lock().election("leader"), "leader".into(), watch.clone())));
    }
    for number in 0..4 {
        let (shared, writes) = (lock().read_write("shared"), number % 2 == 0);
        let who = if writes { "writer".into() } else { format!("reader {number}") };
        tasks.push(tokio::spawn(share(shared, writes, who, watch.clone())));
    }
    tasks
}

/// Reads or writes, until it is stopped.
pub async fn share<DB: Database>(lock: ReadWriteLock<DB>, writes: bool, who: String, watch: Watch) {
    let (name, wait) = (lock.name().to_string(), Duration::from_secs(2));
    while !watch.is_over() {
        let attempt = if writes { lock.writer().acquire(wait).await } else { lock.readers().acquire(wait).await };
        match attempt {
            Ok(lease) => {
                match writes {
                    true => watch.enter(&name, lease.token().get(), &who),
                    false => watch.enter_as_reader(&name, lease.writer_token().map(Token::get), &who),
                }
                sleep(Duration::from_millis(fastrand::u64(1..10))).await;
                match writes {
                    true => watch.leave(&name),
                    false => watch.leave_as_reader(&name, &who),
                }
                if let Err(error) = lease.release().await {
                    watch.failed(&who, &error);
                }
            }
            Err(Error::Refused(_)) => {}
            Err(error) => {
                watch.failed(&who, &error);
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Leads for short terms, until it is stopped.
pub async fn lead<DB: Database>(election: Election<DB>, who: String, watch: Watch) {
    struct Inside(Watch, String);
    impl Drop for Inside {
        fn drop(&mut self) {
            self.0.leave(&self.1);
        }
    }
    while !watch.is_over() {
        let (name, inside, label) = (election.name().to_string(), watch.clone(), who.clone());
        let led = election.lead(async move |held| {
            inside.enter(&name, held.token().get(), &label);
            let _inside = Inside(inside.clone(), name.clone());
            sleep(Duration::from_millis(fastrand::u64(1..10))).await;
        });
        if let Ok(Err(error)) = timeout(Duration::from_secs(2), led).await {
            watch.failed(&who, &error);
        }
    }
}
