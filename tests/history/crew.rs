//! The worker processes: started, given orders, and subjected to faults; and what they have
//! recorded so far.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, proxy::Proxy};
use rowlock::LeaseLock;
use rustix::process::{Pid, Signal, kill_process};
use sqlx::Pool;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin},
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use crate::{
    record::{DATABASE, Entry, History, How, Kind, Outcome, Step, Write, now},
    used::Used,
    worker,
};

/// A write that takes longer than this is recorded.
const SLOW: Duration = Duration::from_millis(40);

pub struct Member {
    pub number: usize,
    child: Child,
    orders: ChildStdin,
    reading: JoinHandle<()>,
    /// Between the worker and its server.
    pub proxy: Option<Proxy>,
}

impl Member {
    /// Reads each line that the worker writes.
    pub fn new(
        number: usize,
        mut child: Child,
        proxy: Option<Proxy>,
        mut said: impl FnMut(&str) + Send + 'static,
    ) -> Self {
        let (orders, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let reading = tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                said(&line);
            }
        });
        Self { number, child, orders, reading, proxy }
    }

    pub async fn order(&mut self, order: impl std::fmt::Display) {
        // A worker that has just been killed cannot read the order.
        let _ = self.orders.write_all(format!("{order}\n").as_bytes()).await;
    }

    pub fn signal(&self, signal: Signal) {
        let id = self.child.id().expect("it has not been waited for");
        kill_process(Pid::from_raw(i32::try_from(id).unwrap()).unwrap(), signal).unwrap();
    }

    /// Closes the orders, and waits until the worker ends.
    pub async fn ends(mut self) {
        drop(self.orders);
        timeout(PATIENCE, self.child.wait()).await.expect("it ends").unwrap();
        timeout(PATIENCE, self.reading).await.expect("it has said all").unwrap();
    }
}

/// What a process is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
enum About {
    Trying(String),
    Asking(String),
    Holding(String),
    Nothing,
}

#[derive(Default)]
struct Log {
    entries: Vec<Entry>,
    about: HashMap<usize, About>,
    grants: HashMap<String, usize>,
}

impl Log {
    fn add(&mut self, entry: Entry) {
        let key = match self.about.get(&entry.process) {
            Some(About::Trying(key) | About::Asking(key) | About::Holding(key)) => Some(key.clone()),
            _ => None,
        };
        let about = match (&entry.step, key) {
            (Step::Ask { kind: Kind::Try, key }, _) => Some(About::Trying(key.clone())),
            (Step::Ask { key, .. }, _) => Some(About::Asking(key.clone())),
            (Step::Granted { .. }, Some(key)) => {
                *self.grants.entry(key.clone()).or_default() += 1;
                Some(About::Holding(key))
            }
            (Step::End(_) | Step::Done(_) | Step::Killed, _) => Some(About::Nothing),
            _ => None,
        };
        about.and_then(|about| self.about.insert(entry.process, about));
        self.entries.push(entry);
    }
}

pub struct Crew<'a, DB: TestDatabase> {
    pub db: &'a TestDb<DB>,
    /// One connection, the crew's own.
    pub pool: Pool<DB>,
    pub members: Vec<Member>,
    pub random: fastrand::Rng,
    pub used: Used,
    log: Arc<Mutex<Log>>,
    started: usize,
    /// Ends with the crew.
    watch: JoinSet<()>,
}

impl<'a, DB: TestDatabase> Crew<'a, DB> {
    pub async fn new(db: &'a TestDb<DB>, used: Used, seed: u64) -> Self {
        worker::tables(db).await;
        let (pool, random, log) = (db.pool_of(1).await, fastrand::Rng::with_seed(seed), Arc::default());
        let watch = JoinSet::from_iter([watch(db.pool_of(1).await, Arc::clone(&log))]);
        Self { db, pool, members: Vec::new(), random, used, log, started: 0, watch }
    }

    /// Starts one more worker, which acts at random or on orders.
    pub async fn start(&mut self, as_it_pleases: bool) {
        self.started += 1;
        let (number, seed) = (self.started, as_it_pleases.then(|| self.random.u64(..)));
        let proxy = if self.db.server.name == "sqlite" { None } else { Some(self.db.proxy().await) };
        let mut url = proxy.as_ref().map_or(&self.db.url, |proxy| &proxy.url).clone();
        if self.db.server.name == "postgres" && number.is_multiple_of(2) {
            url += "&options[default_transaction_isolation]=serializable";
        }
        let (child, log) = (worker::start(self.db, self.used, &url, number, seed), self.log.clone());
        let said = move |line: &str| log.lock().unwrap().add(Entry::parse(line, Duration::from_micros(1)));
        self.members.push(Member::new(number, child, proxy, said));
    }

    pub fn tell(&self, process: usize, op: u64, step: Step) {
        self.log.lock().unwrap().add(Entry { at: now(), process, op, step });
    }

    pub fn said(&self) -> usize {
        self.log.lock().unwrap().entries.len()
    }

    /// Returns whether such a step is recorded within this time, after the given number of entries.
    pub async fn comes(&self, after: usize, within: Duration, is: impl Fn(&Entry) -> bool) -> bool {
        let until = now() + within;
        loop {
            if self.log.lock().unwrap().entries[after..].iter().any(&is) {
                return true;
            }
            if now() >= until {
                return false;
            }
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Lets one worker hold a key for this long, and returns the key. `None` if another fault
    /// prevents this.
    pub async fn hold(&mut self, place: usize, kind: Kind, long: Duration) -> Option<String> {
        let (after, number) = (self.said(), self.members[place].number);
        self.members[place].order(format_args!("hold {} {kind:?}", long.as_millis())).await;
        let holds = self.comes(after, PATIENCE, |entry| entry.process == number && entry.step == Step::Paused).await;
        let about = self.log.lock().unwrap().about.get(&number).cloned();
        match about {
            Some(About::Holding(key)) if holds => Some(key),
            _ => None,
        }
    }

    /// Waits until another process asks for the key.
    pub async fn asked_for(&self, key: &str) {
        let asks = || self.log.lock().unwrap().about.values().any(|about| *about == About::Asking(key.to_owned()));
        let until = now() + PATIENCE;
        while !asks() && now() < until {
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// How many times a key has been granted so far.
    pub fn grants(&self, key: &str) -> usize {
        self.log.lock().unwrap().grants.get(key).copied().unwrap_or_default()
    }

    /// Waits until a key has been granted more times than `before`.
    pub async fn granted(&self, key: &str, before: usize, within: Duration) {
        let until = now() + within;
        while self.grants(key) <= before && now() < until {
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Lets all workers end, claims each key once more, and returns the whole history.
    pub async fn ends(mut self) -> (History, Vec<Entry>)
    where
        DB: Books,
    {
        for member in &mut self.members {
            member.order("quit").await;
        }
        for member in self.members.drain(..) {
            member.ends().await;
        }
        let lock = LeaseLock::builder(self.pool.clone()).label("0").build().unwrap();
        for (op, key) in self.used.rows().iter().enumerate() {
            let op = u64::try_from(op).unwrap();
            let name = key.split('#').next().unwrap().to_owned();
            let kind = if self.used == Used::ReadWrite { Kind::Write } else { Kind::Lease };
            self.tell(0, op, Step::Ask { key: name.clone(), kind });
            let lease = match self.used {
                Used::ReadWrite => acquired(lock.read_write(&name).writer().acquire(PATIENCE).await),
                _ => acquired(lock.acquire(key, PATIENCE).await),
            };
            let prior = lease.taken_over_from().map(|prior| (prior.token.get(), prior.label.parse().unwrap()));
            let (token, left) = (lease.token().get(), lease.time_left());
            self.tell(0, op, Step::Permit { key: lease.key().to_string() });
            self.tell(0, op, Step::Granted { token, left, prior });
            self.tell(0, op, Step::End(How::Release));
            lease.release().await.unwrap();
            self.tell(0, op, Step::Done(Outcome::Done));
        }
        self.watch.shutdown().await;
        self.so_far().await
    }

    /// The history as it was recorded until now.
    pub async fn so_far(&self) -> (History, Vec<Entry>)
    where
        DB: Books,
    {
        let mut entries = self.log.lock().unwrap().entries.clone();
        // The lines of one process are in order; those of several are in the order in which they
        // were read.
        entries.sort_by_key(|entry| entry.at);
        let writes = DB::lines(&self.pool).await;
        let writes = writes.iter().map(|line| Write::parse(line)).collect();
        (History::new(self.used.promised(), &entries, writes), entries)
    }
}

/// Records when the database is slow: promises about the time of a grant hold for a database that
/// executes statements.
async fn watch<DB: TestDatabase>(pool: Pool<DB>, log: Arc<Mutex<Log>>) {
    loop {
        let since = now();
        // A fault may have ended its connection.
        let _ = DB::execute(&pool, "UPDATE watched SET number = number + 1").await;
        let at = now();
        if at - since > SLOW {
            log.lock().unwrap().add(Entry { at, process: DATABASE, op: 0, step: Step::HeldUp { since } });
        }
        sleep(SLOW).await;
    }
}

/// Reads texts, such as the lines of the application's record of accepted writes.
pub trait Books: TestDatabase {
    /// Reads the only column of a query.
    fn texts(pool: &Pool<Self>, sql: &'static str) -> impl Future<Output = Result<Vec<String>, sqlx::Error>> + Send;

    async fn lines(pool: &Pool<Self>) -> Vec<String> {
        Self::texts(pool, "SELECT line FROM work_done").await.unwrap()
    }
}

macro_rules! books {
    ($database:ty) => {
        impl Books for $database {
            async fn texts(pool: &Pool<Self>, sql: &'static str) -> Result<Vec<String>, sqlx::Error> {
                sqlx::query_scalar(sql).fetch_all(pool).await
            }
        }
    };
}

books!(sqlx::Sqlite);
books!(sqlx::Postgres);
books!(sqlx::MySql);
