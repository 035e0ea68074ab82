//! Processes that wait for keys on command, and their grants, timed by a clock that all processes
//! share.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{LeaseLock, LeaseSet};
use rustix::{
    process::{Pid, Signal, kill_process},
    time::{ClockId, clock_gettime},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin},
    sync::mpsc,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::child::{self, say};

/// The duration of a continuous test: 6 s, or the value of the variable.
pub fn seconds() -> Duration {
    let set = std::env::var("ROWLOCK_LONG").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(set.unwrap_or(6))
}

/// Time since the machine was started, the same in every process.
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// What a waiter was granted, and when.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The number under which the process was started.
    pub process: usize,
    pub called: Duration,
    pub granted: Duration,
    /// Just before it was released.
    pub freed: Duration,
    /// One for each key, in the order of keys.
    pub tokens: Vec<i64>,
}

impl Turn {
    pub fn waited(&self) -> Duration {
        self.granted - self.called
    }

    fn parse(process: usize, line: &str) -> Self {
        let mut numbers = line.split(' ').map(|number| number.parse::<i64>().unwrap());
        let mut time = || Duration::from_nanos(numbers.next().unwrap().try_into().unwrap());
        let (called, granted, freed) = (time(), time(), time());
        Self { process, called, granted, freed, tokens: numbers.collect() }
    }
}

/// A process that waits for keys, for all of them at once.
pub struct Process {
    child: Child,
    orders: ChildStdin,
    turns: mpsc::UnboundedReceiver<Turn>,
}

impl Process {
    /// The keys are separated by commas. A `#` in them stands for the number of previous orders.
    /// The process asks only when it is ordered to.
    pub async fn start<DB: TestDatabase>(db: &TestDb<DB>, number: usize, job: &str, keys: &str) -> Self {
        let mut child = child::start(db, job, keys, std::path::Path::new(""));
        let orders = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
        assert_eq!(ready.as_deref(), Some("ready"));
        let (told, turns) = mpsc::unbounded_channel();
        harness::spawn(async move {
            // The output is read as it arrives, so that no write of the process blocks on a full
            // pipe.
            while let Ok(Some(line)) = lines.next_line().await {
                let _ = told.send(Turn::parse(number, &line));
            }
        });
        Self { child, orders, turns }
    }

    /// One more task asks once, and holds the grant for this long.
    pub async fn ask(&mut self, hold: Duration) {
        self.order(format!("0 {} 0", hold.as_millis())).await;
    }

    /// One more task asks repeatedly, with pauses of at most `pause`, until `most` is over.
    pub async fn go_on(&mut self, most: Duration, hold: Duration, pause: Duration) {
        self.order(format!("{} {} {}", most.as_millis(), hold.as_millis(), pause.as_millis())).await;
    }

    async fn order(&mut self, line: String) {
        self.orders.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// Waits for the next grant that was released.
    pub async fn turn(&mut self) -> Turn {
        timeout(2 * PATIENCE, self.turns.recv()).await.expect("it is granted its key").expect("it is there")
    }

    /// All remaining grants, once every task of the process has ended.
    pub async fn ended(mut self, within: Duration) -> Vec<Turn> {
        drop(self.orders);
        let mut turns = Vec::new();
        let all = async {
            while let Some(turn) = self.turns.recv().await {
                turns.push(turn);
            }
            assert!(self.child.wait().await.unwrap().success());
        };
        timeout(within, all).await.expect("it ends");
        turns
    }

    pub fn signal(&self, signal: Signal) {
        let id = self.child.id().expect("it has not been waited for");
        kill_process(Pid::from_raw(i32::try_from(id).unwrap()).unwrap(), signal).unwrap();
    }
}

/// The number of tickets in the queue table, including lapsed ones.
pub async fn places<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    db.number("SELECT COUNT(*) FROM t_resource_lock_queue").await.unwrap()
}

/// The side of the process: it asks as it is ordered to, and reports each grant after its release.
pub async fn work<DB: TestDatabase>(lock: LeaseLock<DB>, keys: &str) {
    // When the first order arrives, the table has been checked and the connection is open.
    lock.inspect("no-one's").await.unwrap();
    say("ready");
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    let mut tasks = JoinSet::new();
    for number in 0.. {
        let Some(order) = orders.next_line().await.unwrap() else { break };
        let keys = keys.replace('#', &format!("{number}")).split(',').map(str::to_owned).collect();
        let [most, hold, pause] =
            <[u64; 3]>::try_from(order.split(' ').map(|word| word.parse().unwrap()).collect::<Vec<_>>()).unwrap();
        tasks.spawn(harness::task(go_on(lock.clone(), keys, now() + Duration::from_millis(most), hold, pause)));
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert!(lock.shutdown(PATIENCE).await);
}

async fn go_on<DB: TestDatabase>(lock: LeaseLock<DB>, keys: Vec<String>, until: Duration, hold: u64, pause: u64) {
    loop {
        sleep(Duration::from_millis(fastrand::u64(..=pause))).await;
        once(&lock, &keys, Duration::from_millis(hold)).await;
        if now() >= until {
            return;
        }
    }
}

async fn once<DB: TestDatabase>(lock: &LeaseLock<DB>, keys: &[String], hold: Duration) {
    let called = now();
    let (granted, freed, tokens);
    if let [key] = keys {
        let lease = lock.acquire(key, Duration::MAX).await.unwrap();
        granted = now();
        sleep(hold).await;
        (freed, tokens) = (now(), vec![lease.token().get()]);
        lease.release().await.unwrap();
    } else {
        let set: LeaseSet<DB> = lock.acquire_all(keys, Duration::MAX).await.unwrap();
        granted = now();
        sleep(hold).await;
        (freed, tokens) = (now(), set.claims().iter().map(|claim| claim.token.get()).collect());
        set.release().await.unwrap();
    }
    let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    say(format_args!("{} {} {} {}", called.as_nanos(), granted.as_nanos(), freed.as_nanos(), tokens.join(" ")));
}
