//! A process that asks for keys, holds them, writes under them, and records what it does.

use std::{
    io::Write as _,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use harness::{TestDatabase, TestDb};
use rowlock::{
    Claim, Error, Lease, LeaseLock, Retry, RunError, Status,
    errors::{Certainty, DatabaseFault, TransactionFault},
    leases::PreviousClaim,
    strategy::ResourceLockExt as _,
};
use sqlx::{Pool, pool::PoolOptions};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    sync::{Notify, mpsc},
    time::sleep,
};

use crate::{
    asking::Asking,
    leading::lead,
    record::{Entry, How, Kind, Outcome, Step, now},
    telling::Telling,
    used::{KEYS, LEASE, Used, pick},
};

const JOB: &str = "ROWLOCK_HISTORY";
/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(1);
/// Longer than any process has to wait, whatever faults the processes before it suffer.
pub const WAIT: Duration = Duration::from_secs(15);
const CONNECTIONS: u32 = 3;

/// The application's table, a record of each write that was accepted, and a row to measure the
/// database by.
pub async fn tables<DB: TestDatabase>(db: &TestDb<DB>) {
    db.execute("CREATE TABLE work (id varchar(10) PRIMARY KEY, number bigint NOT NULL)").await;
    db.execute("CREATE TABLE work_done (line varchar(100) NOT NULL)").await;
    db.execute("CREATE TABLE watched (number bigint NOT NULL)").await;
    db.execute("INSERT INTO watched VALUES (0)").await;
    for key in KEYS {
        db.execute(&format!("INSERT INTO work VALUES ('{key}', 0)")).await;
    }
}

pub fn was_asked_for() -> bool {
    std::env::var_os(JOB).is_some()
}

/// Starts this program again, with its database at this URL. With a seed the worker acts at random,
/// without one on orders.
pub fn start<DB: TestDatabase>(db: &TestDb<DB>, used: Used, url: &str, number: usize, seed: Option<u64>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let seed = seed.map(|seed| seed.to_string()).unwrap_or_default();
    command.env(JOB, db.server.name).env("JOB_URL", url).env("JOB_NUMBER", number.to_string()).env("JOB_SEED", seed);
    command.env("JOB_USES", format!("{used:?}"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

pub fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        match var(JOB).as_str() {
            "sqlite" => work::<sqlx::Sqlite>().await,
            "postgres" => work::<sqlx::Postgres>().await,
            _ => work::<sqlx::MySql>().await,
        }
    });
}

fn var(name: &str) -> String {
    std::env::var(name).unwrap()
}

async fn work<DB: TestDatabase>() {
    let number: usize = var("JOB_NUMBER").parse().unwrap();
    let options = PoolOptions::new().max_connections(CONNECTIONS).test_before_acquire(false);
    let pool: Pool<DB> = options.connect_lazy(&var("JOB_URL")).unwrap();
    let seed: Option<u64> = var("JOB_SEED").parse().ok();
    // A worker on orders does each job once, so its limit is longer.
    let limit = if seed.is_some() { LIMIT } else { 10 * LIMIT };
    let builder = LeaseLock::builder(pool.clone()).label(number.to_string()).time_limit(limit);
    // Without sessions of its own, a lock loses its leases while the application uses its whole
    // pool.
    let shares = var("JOB_URL").starts_with("sqlite") && !number.is_multiple_of(3);
    let lock = if shares { builder.share_pool() } else { builder }.build().unwrap();
    let used = Used::named(&var("JOB_USES"));
    let lock = lock.lock_delay(used.promised().delay);
    let lock = lock.lease(LEASE).retry(Retry { attempts: 100, within: WAIT.max(limit) });
    let (told, jobs) = mpsc::unbounded_channel();
    let orders = Arc::new(Orders::default());
    tokio::spawn(orders.clone().take(pool.clone(), told));
    let random = fastrand::Rng::with_seed(seed.unwrap_or_default());
    let worker = Worker { lock, used, pool, number, orders, random, op: 0 };
    tokio::spawn(watch(move |since| tell(number, 0, Step::HeldUp { since })));
    match seed {
        Some(_) => worker.please_itself().await,
        None => worker.obey(jobs).await,
    }
}

/// Reports when the runtime was stalled, for any reason: guarantees about time apply only to a
/// process that is scheduled.
pub async fn watch(held_up: impl Fn(Duration)) {
    loop {
        let before = now();
        sleep(Duration::from_millis(5)).await;
        if now() - before > LEASE / 40 {
            held_up(before);
        }
    }
}

pub fn tell(process: usize, op: u64, step: Step) {
    tell_of(now(), process, op, step);
}

/// Writes a whole line at a time, so that no line is torn when the process is killed.
pub fn tell_of(at: Duration, process: usize, op: u64, step: Step) {
    let line = format!("{}\n", Entry { at, process, op, step });
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).unwrap();
}

pub fn tell_grant(claim: &Claim, left: Duration, prior: Option<&PreviousClaim>, process: usize, op: u64) {
    let at = now();
    tell_of(at, process, op, Step::Permit { key: claim.key.to_string() });
    let prior = prior.map(|prior| (prior.token.get(), prior.label.parse().unwrap()));
    tell_of(at, process, op, Step::Granted { token: claim.token.get(), left, prior });
}

/// The orders of the process.
#[derive(Default)]
pub struct Orders {
    /// The point at which to wait for the order to continue.
    pause: Mutex<String>,
    go: Notify,
    /// How long to hold the next claim, in milliseconds, and of what kind it must be.
    hold: AtomicU64,
    hold_kind: Mutex<String>,
    quit: AtomicBool,
}

impl Orders {
    async fn take<DB: TestDatabase>(self: Arc<Self>, pool: Pool<DB>, jobs: mpsc::UnboundedSender<String>) {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["pause", place] => *self.pause.lock().unwrap() = place.to_owned(),
                ["go"] => self.go.notify_one(),
                ["hold", millis, kind] => {
                    *self.hold_kind.lock().unwrap() = kind.to_owned();
                    self.hold.store(millis.parse().unwrap(), SeqCst);
                }
                ["exhaust", millis] => {
                    tokio::spawn(exhaust(pool.clone(), Duration::from_millis(millis.parse().unwrap())));
                }
                ["do", job] => jobs.send(job.to_owned()).unwrap(),
                ["quit"] => self.quit.store(true, SeqCst),
                _ => panic!("no order {line}"),
            }
        }
        // The process that gives the orders has ended.
        if !self.quit.load(SeqCst) {
            std::process::exit(1);
        }
    }

    pub async fn pause(&self, place: &str, process: usize, op: u64) {
        let here = std::mem::take(&mut *self.pause.lock().unwrap());
        if here == place {
            tell(process, op, Step::Paused);
            self.go.notified().await;
        } else if !here.is_empty() {
            *self.pause.lock().unwrap() = here;
        }
    }

    /// How long the worker was ordered to hold a claim of this kind.
    pub fn hold(&self, kind: Kind, process: usize, op: u64) -> Option<Duration> {
        let meant = *self.hold_kind.lock().unwrap() == format!("{kind:?}");
        let millis = if meant { self.hold.swap(0, SeqCst) } else { 0 };
        if millis == 0 {
            return None;
        }
        tell(process, op, Step::Paused);
        Some(Duration::from_millis(millis))
    }
}

/// Holds every connection of the pool.
async fn exhaust<DB: TestDatabase>(pool: Pool<DB>, long: Duration) {
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS {
        all.extend(pool.acquire().await.ok());
    }
    sleep(long).await;
}

struct Worker<DB: TestDatabase> {
    lock: LeaseLock<DB>,
    used: Used,
    pool: Pool<DB>,
    number: usize,
    orders: Arc<Orders>,
    random: fastrand::Rng,
    op: u64,
}

impl<DB: TestDatabase> Worker<DB> {
    async fn please_itself(mut self) {
        while !self.orders.quit.load(SeqCst) {
            let key = pick(self.used.names(), &mut self.random);
            match self.used {
                Used::Election => self.leads(key).await,
                used if used.has_transactions() && self.random.u8(..10) < 4 => self.transaction(key).await,
                _ => self.lease(key).await,
            }
            sleep(Duration::from_millis(self.random.u64(..20))).await;
        }
        self.lock.shutdown(Duration::from_secs(60)).await;
    }

    async fn obey(mut self, mut jobs: mpsc::UnboundedReceiver<String>) {
        while let Some(job) = jobs.recv().await {
            match job.as_str() {
                "transaction" => self.transaction(KEYS[0]).await,
                _ => self.bare(KEYS[0]).await,
            }
        }
    }

    fn tell(&self, step: Step) {
        tell(self.number, self.op, step);
    }

    /// Begins an operation: records the request.
    async fn asks(&mut self, key: &str, kind: Kind) {
        self.op += 1;
        self.orders.pause("acquire", self.number, self.op).await;
        self.tell(Step::Ask { key: key.to_owned(), kind });
    }

    async fn acquire(&mut self, key: &str) -> Option<Lease<DB>> {
        let asking = Asking::any(self.used, &mut self.random);
        self.asks(key, asking.kind()).await;
        let lease = match asking.on(&self.lock, key).await {
            Ok(lease) => lease,
            Err(Error::Refused(_)) => {
                self.tell(Step::Done(Outcome::Refused));
                return None;
            }
            Err(error) => {
                self.tell(Step::Done(outcome(&error)));
                return None;
            }
        };
        tell_grant(lease.claim(), lease.time_left(), lease.taken_over_from(), self.number, self.op);
        if let Some(token) = lease.writer_token() {
            self.tell(Step::Fence { token: token.get() });
        }
        Some(lease)
    }

    /// How long to work under the next claim: as ordered, or rarely long enough to be renewed.
    fn work_time(&mut self) -> Duration {
        let most = [60, 60, 60, 300, 300, 1200][self.random.usize(..6)];
        Duration::from_millis(self.random.u64(..most))
    }

    async fn lease(&mut self, key: &str) {
        let Some(lease) = self.acquire(key).await else { return };
        let hold = self.work_time();
        let hold = self.orders.hold(Kind::Lease, self.number, self.op).unwrap_or(hold);
        self.keep(&lease, hold).await;
        self.orders.pause("release", self.number, self.op).await;
        let (how, status) = match self.random.u8(..10) {
            0..6 => (How::Release, Status::Succeeded),
            6 => (How::Release, Status::Failed),
            7..9 => (How::Abandon, Status::Failed),
            _ => (How::Drop, Status::Failed),
        };
        self.tell(Step::End(how));
        let ended = match how {
            How::Release => lease.end(status).await,
            How::Abandon => lease.abandon().await,
            How::Drop => {
                drop(lease);
                return;
            }
        };
        self.tell(Step::Done(ended.map_or_else(|error| outcome(&error), |()| Outcome::Done)));
    }

    /// Holds the lease, checks it continuously, and stops when it is lost.
    async fn keep(&mut self, lease: &Lease<DB>, long: Duration) {
        let until = now() + long;
        while now() < until {
            tokio::select! {
                () = lease.lost() => return self.tell(Step::Lost),
                () = sleep(Duration::from_millis(25).min(long)) => {}
            }
            let (at, left) = (now(), lease.time_left());
            tell_of(at, self.number, self.op, Step::Sure { left });
            if self.random.u8(..20) == 0 {
                let lost = tokio::select! {
                    () = lease.lost() => true,
                    renewed = lease.renew() => matches!(renewed, Err(Error::Lost { .. })),
                };
                if lost {
                    return self.tell(Step::Lost);
                }
            }
        }
    }

    /// Leads until the work is done.
    async fn leads(&mut self, name: &str) {
        self.asks(name, Kind::Lease).await;
        let work = self.work_time();
        let election = self.lock.election(name);
        self.op = lead(&election, &self.orders, self.number, self.op, work).await;
    }

    /// Reads, waits, and writes a value computed from what it read, all under a lease. Only its own
    /// check of the lease could stop it.
    async fn bare(&mut self, key: &str) {
        let Some(lease) = self.acquire(key).await else { return };
        let mut conn = self.pool.acquire().await.unwrap();
        let number = number::<DB>(&mut conn, key).await.unwrap() + 1;
        if lease.is_held() {
            self.orders.pause("write", self.number, self.op).await;
            let sign = (self.number, self.op, 0);
            write::<DB>(&mut conn, key, number, lease.token().get(), sign).await.unwrap();
        }
        drop(conn);
        self.tell(Step::End(How::Release));
        let ended = lease.release().await;
        self.tell(Step::Done(ended.map_or_else(|error| outcome(&error), |()| Outcome::Done)));
    }

    /// The same in a transaction that depends on the claim.
    async fn transaction(&mut self, key: &str) {
        self.asks(key, Kind::Transaction).await;
        let (process, op, orders, runs) = (self.number, self.op, &self.orders, AtomicUsize::new(0));
        let think = Duration::from_millis(self.random.u64(..40));
        let telling = Telling { lock: self.lock.clone(), orders: orders.clone(), process, op };
        let committed = telling.transaction(key, |mut tx| {
            let sign = (process, op, runs.fetch_add(1, SeqCst));
            async move {
                let token = tx.claim().token.get();
                tell(process, op, Step::Working { token });
                let number = number::<DB>(&mut tx, key).await? + 1;
                sleep(orders.hold(Kind::Transaction, process, op).unwrap_or(think)).await;
                orders.pause("write", process, op).await;
                write::<DB>(&mut tx, key, number, token, sign).await?;
                orders.pause("commit", process, op).await;
                tell(process, op, Step::Worked);
                Ok::<_, sqlx::Error>(())
            }
        });
        let outcome = match committed.await {
            Ok(()) => Outcome::Done,
            Err(RunError::Refused(_)) => Outcome::Refused,
            Err(RunError::Other(Error::Transaction(TransactionFault::CommitUnknown { .. }))) => Outcome::Unknown,
            Err(_) => Outcome::Nothing,
        };
        self.tell(Step::Done(outcome));
    }
}

async fn number<DB: TestDatabase>(conn: &mut DB::Connection, key: &str) -> Result<i64, sqlx::Error> {
    let sql = format!("SELECT CAST(number AS char(20)) FROM work WHERE id = '{key}'");
    Ok(DB::text_on(conn, &sql).await?.unwrap().trim().parse().unwrap())
}

/// Signed by process, operation and run.
async fn write<DB: TestDatabase>(
    conn: &mut DB::Connection,
    key: &str,
    number: i64,
    token: i64,
    (process, op, run): (usize, u64, usize),
) -> Result<(), sqlx::Error> {
    DB::execute_on(conn, &format!("UPDATE work SET number = {number} WHERE id = '{key}'")).await?;
    let line = format!("{key} {number} {token} {process} {op} {run}");
    DB::execute_on(conn, &format!("INSERT INTO work_done VALUES ('{line}')")).await?;
    Ok(())
}

pub fn outcome(error: &Error) -> Outcome {
    match error {
        Error::Lost { .. } => Outcome::Lost,
        Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. })
        | Error::Database(DatabaseFault::NoConnection { outcome: Certainty::Unknown, .. })
        | Error::Database(DatabaseFault::Failed { outcome: Certainty::Unknown, .. })
        | Error::Database(DatabaseFault::ReadOnly { outcome: Certainty::Unknown, .. }) => Outcome::Unknown,
        _ => Outcome::Nothing,
    }
}
