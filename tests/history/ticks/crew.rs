//! The workers, and what they have recorded so far.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use harness::{PATIENCE, TestDb, eventually};
use rowlock::{RunInfo, RunStatus, ScheduleInfo, Schedules};
use rustix::process::Signal;
use sqlx::Pool;
use tokio::time::sleep;

use crate::{
    crew::{Books, Member},
    record::now,
    ticks::{
        record::{Effect, Entry, History, Step, Told, runs},
        terms::{COUNT, Terms},
        worker,
    },
};

pub struct Crew<'a, DB: Books> {
    pub db: &'a TestDb<DB>,
    /// One connection, the crew's own.
    pub pool: Pool<DB>,
    pub members: Vec<Member>,
    pub random: fastrand::Rng,
    log: Arc<Mutex<Vec<Entry>>>,
    started: usize,
    /// How many workers were killed while they ran something.
    pub interrupted: usize,
    /// The slots after the registration.
    first: Vec<i64>,
}

impl<'a, DB: Books> Crew<'a, DB> {
    /// Starts the workers. The first one registers the schedules.
    pub async fn new(db: &'a TestDb<DB>, seed: u64, processes: usize) -> Self {
        worker::tables(db).await;
        let (pool, random) = (db.pool_of(1).await, fastrand::Rng::with_seed(seed));
        let (log, members) = (Arc::default(), Vec::new());
        let mut crew = Self { db, pool, members, random, log, started: 0, interrupted: 0, first: Vec::new() };
        crew.start().await;
        eventually("the schedules are registered", async || crew.list().await.len() == COUNT).await;
        crew.first = crew.list().await.iter().map(|schedule| schedule.slot.timestamp()).collect();
        while crew.members.len() < processes {
            crew.start().await;
        }
        crew
    }

    pub async fn start(&mut self) {
        self.started += 1;
        let number = self.started;
        let proxy = if self.db.server.name == "sqlite" { None } else { Some(self.db.proxy().await) };
        let mut url = proxy.as_ref().map_or(&self.db.url, |proxy| &proxy.url).clone();
        if self.db.server.name == "postgres" && number.is_multiple_of(2) {
            url += "&options[default_transaction_isolation]=serializable";
        }
        let (child, log) = (worker::start(self.db, &url, number), self.log.clone());
        let said = move |line: &str| log.lock().unwrap().push(Entry::parse(line, 1));
        self.members.push(Member::new(number, child, proxy, said));
    }

    pub fn tell(&self, process: usize, step: Step) {
        self.log.lock().unwrap().push(Entry { at: now(), process, step });
    }

    /// Returns the schedules that the process runs at the moment.
    pub fn running(&self, process: usize) -> BTreeSet<String> {
        let mut running = BTreeSet::new();
        for entry in self.log.lock().unwrap().iter().filter(|entry| entry.process == process) {
            match &entry.step {
                Step::Run { name, .. } => drop(running.insert(name.clone())),
                Step::End { name, .. } => drop(running.remove(name)),
                _ => {}
            }
        }
        running
    }

    /// Waits until the process runs something. There is a tick each second.
    pub async fn busy(&self, process: usize) {
        let until = now() + Duration::from_secs(3);
        while self.running(process).is_empty() && now() < until {
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until other processes have run all these schedules since then.
    pub async fn runs_elsewhere(&self, names: BTreeSet<String>, process: usize, since: Duration, within: Duration) {
        let ran = |name: &String| {
            let log = self.log.lock().unwrap();
            let is = |entry: &Entry| matches!(&entry.step, Step::Run { name: of, .. } if of == name);
            log.iter().any(|entry| entry.process != process && entry.at > since && is(entry))
        };
        let until = now() + within;
        while !names.iter().all(ran) && now() < until {
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn schedules(&self) -> Schedules<DB> {
        Schedules::new(self.pool.clone()).share_pool()
    }

    /// Lists the schedules, in the order of [`Terms::all`].
    pub async fn list(&self) -> Vec<ScheduleInfo> {
        let mut all = self.schedules().list().await.unwrap();
        all.sort_by_key(|schedule| schedule.name[1..].parse::<usize>().unwrap());
        all
    }

    /// Waits until each schedule has caught up, lets all workers end, and returns what happened.
    pub async fn ends(mut self) -> (Vec<History>, Vec<Entry>) {
        let last = self.list().await.iter().map(|schedule| schedule.slot).max().unwrap();
        let until = now() + 6 * PATIENCE;
        while self.list().await.iter().any(|schedule| schedule.slot <= last) {
            assert!(now() < until, "they do not catch up: {:#?}", self.list().await);
            sleep(Duration::from_millis(100)).await;
        }
        for member in &mut self.members {
            member.order("quit").await;
        }
        for member in self.members.drain(..) {
            member.ends().await;
        }
        let mut entries = std::mem::take(&mut *self.log.lock().unwrap());
        entries.sort_by_key(|entry| entry.at);
        let effects: Vec<Effect> = DB::lines(&self.pool).await.iter().map(|line| Effect::parse(line)).collect();
        let (schedules, mut histories) = (self.list().await, Vec::new());
        for ((terms, schedule), first) in Terms::all().zip(schedules).zip(&self.first) {
            let told = self.schedules().history(&terms.name, 100_000).await.unwrap();
            let mine = |effect: &&Effect| effect.name == terms.name;
            histories.push(History {
                first: *first,
                next: next(&schedule),
                runs: runs(&terms.name, &entries),
                told: told.iter().map(|told| told_of(&terms.name, told)).collect(),
                effects: effects.iter().filter(mine).cloned().collect(),
                terms,
            });
        }
        (histories, entries)
    }

    /// Ends a worker without a warning, and starts another.
    pub async fn kill(&mut self, place: usize) -> (usize, BTreeSet<String>) {
        let member = self.members.remove(place);
        member.signal(Signal::KILL);
        let number = member.number;
        self.tell(number, Step::Killed);
        member.ends().await;
        self.start().await;
        let running = self.running(number);
        self.interrupted += usize::from(!running.is_empty());
        (number, running)
    }
}

/// Returns the first slot that has not come to its end. A tick that waits for its next attempt
/// stands for those that it missed.
fn next(schedule: &ScheduleInfo) -> i64 {
    let waits = schedule.run_slot == Some(schedule.slot);
    schedule.slot.timestamp() - if waits { i64::from(schedule.missed) } else { 0 }
}

fn told_of(name: &str, told: &RunInfo) -> Told {
    let status = match told.status {
        RunStatus::Succeeded => 'S',
        RunStatus::Failed => 'F',
        RunStatus::Lost => 'L',
        _ => 'M',
    };
    let process = told.by.parse().expect("the label of a worker");
    let (slot, token) = (told.slot.timestamp(), told.token.get());
    Told { name: name.to_owned(), slot, attempt: told.attempt, token, process, status, missed: told.missed }
}
