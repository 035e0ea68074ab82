//! The workers, and what they have recorded so far.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use harness::{PATIENCE, TestDb, database_of, eventually};
use rowlock::admin::ScheduleInfo;
use rustix::process::Signal;
use sqlx::Pool;
use tokio::{sync::watch, task::JoinSet, time::sleep};

use crate::{
    crew::{Books, Member},
    record::now,
    ticks::{
        gathered::{Effect, History},
        operator::{Log, OLD, Operator, next},
        record::{Entry, SECOND, Step},
        terms::{COUNT, Changes, POLL, Terms, word},
        worker::{self, pool_with},
    },
};

/// The isolation level of the application's sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// That of the server. Every other worker on PostgreSQL is SERIALIZABLE.
    Default,
    /// SERIALIZABLE: the default of the database on PostgreSQL, and of the sessions on MySQL and
    /// MariaDB.
    Serializable,
}

/// Nine polls, in which new times apply, with the first announcement and the reads of the operator.
const MOST_POLLS: Duration = POLL.saturating_mul(15);

pub struct Crew<'a, DB: Books> {
    pub db: &'a TestDb<DB>,
    /// One connection, the crew's own.
    pub pool: Pool<DB>,
    pub members: Vec<Member>,
    pub random: fastrand::Rng,
    pub operator: Arc<Operator<DB>>,
    /// The operator's work, and what stops it.
    operating: JoinSet<()>,
    stop: watch::Sender<bool>,
    level: Level,
    log: Log,
    started: usize,
    /// The version of the last deploy.
    version: u64,
    /// The version of each worker.
    versions: BTreeMap<usize, u64>,
    /// How many workers were killed while they ran something.
    pub interrupted: usize,
    /// The seconds of the slots after the registration.
    first: Vec<i64>,
}

impl<'a, DB: Books> Crew<'a, DB> {
    /// Starts the workers and the operator. The first worker registers the schedules.
    pub async fn new(db: &'a TestDb<DB>, level: Level, seed: u64, processes: usize) -> Self {
        worker::tables(db).await;
        if (level, db.server.name) == (Level::Serializable, "postgres") {
            let database = database_of(&db.url);
            db.execute(&format!("ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'")).await;
        }
        let (pool, random, log) = (db.pool_of(1).await, fastrand::Rng::with_seed(seed), Log::default());
        let own = pool_with(&db.url, 2, session(level, db.server.name).to_owned());
        let operator = Arc::new(Operator::new(own, log.clone()));
        let mut crew = Self {
            db,
            pool,
            members: Vec::new(),
            random,
            operator,
            operating: JoinSet::new(),
            stop: watch::Sender::new(false),
            level,
            log,
            started: 0,
            version: 0,
            versions: BTreeMap::new(),
            interrupted: 0,
            first: Vec::new(),
        };
        crew.start(0).await;
        eventually("the schedules are registered", async || crew.operator.list().await.len() == COUNT).await;
        crew.first = crew.operator.list().await.iter().map(|schedule| schedule.slot.timestamp()).collect();
        while crew.members.len() < processes {
            crew.start(0).await;
        }
        let random = crew.random.fork();
        crew.operating.spawn(crew.operator.clone().operate(random, crew.stop.subscribe()));
        crew
    }

    /// Starts a worker of this version.
    pub async fn start(&mut self, version: u64) {
        self.started += 1;
        let number = self.started;
        self.versions.insert(number, version);
        let proxy = if self.db.server.name == "sqlite" { None } else { Some(self.db.proxy().await) };
        let mut url = proxy.as_ref().map_or(&self.db.url, |proxy| &proxy.url).clone();
        if self.db.server.name == "postgres" && self.level == Level::Default && number.is_multiple_of(2) {
            url += "&options[default_transaction_isolation]=serializable";
        }
        let session = session(self.level, self.db.server.name);
        let (child, log) = (worker::start(self.db, &url, session, number, version), self.log.clone());
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

    /// Gives all workers a new version, one after the other, in the middle of triggered runs. A
    /// worker may be killed in between, and may restart with the version before.
    ///
    /// New times apply within nine polls of the first instance that has them. Times that come back
    /// apply when no living instance has newer ones, so they may need all workers.
    pub async fn deploy(&mut self) {
        self.version += 1;
        for terms in Terms::all().filter(|terms| terms.changes != Changes::Nothing) {
            self.operator.trigger(&terms.name).await;
        }
        sleep(Duration::from_millis(self.random.u64(..300))).await;
        let mut kills = self.random.u8(..3) == 0;
        while let Some(place) = self.outdated() {
            let number = self.members[place].number;
            self.members[place].order(format_args!("deploy {}", self.version)).await;
            self.versions.insert(number, self.version);
            self.applies(MOST_POLLS).await;
            if std::mem::take(&mut kills) {
                let place = self.random.usize(..self.members.len());
                self.kill(place).await;
            }
        }
        // An instance that was killed with newer times counts for as long as it may live without a
        // beat. Then the times need nine polls. How long that takes depends on the machine: what is
        // wrong are times that do not apply at all.
        self.applies(6 * PATIENCE).await;
        self.tell(0, Step::Deployed { version: self.version });
    }

    fn outdated(&self) -> Option<usize> {
        self.members.iter().position(|member| self.versions[&member.number] < self.version)
    }

    /// Waits until all rows have the times of the version, for this long at most. Some schedules
    /// are triggered at that time: the last run before the change may be one that was triggered.
    async fn applies(&mut self, within: Duration) {
        let until = now() + within;
        let times = |(terms, row): (Terms, &ScheduleInfo)| {
            terms.times(self.version) == word(&format!("{}|{}", row.times, row.zone))
        };
        while !Terms::all().zip(&self.operator.list().await).all(times) && now() < until {
            if self.random.u8(..3) == 0 {
                self.operator.trigger(&format!("s{}", self.random.usize(..COUNT))).await;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until each schedule goes on and no trigger waits, lets all workers end, and returns
    /// what happened.
    pub async fn ends(mut self) -> (Vec<History>, Vec<Entry>) {
        self.stop.send_replace(true);
        while let Some(ended) = self.operating.join_next().await {
            ended.unwrap();
        }
        // The operator may have forgotten nothing by chance.
        self.operator.forget(Duration::from_secs(OLD.start)).await;
        let before = self.operator.list().await;
        let waits = |(now, before): (&ScheduleInfo, &ScheduleInfo)| now.slot <= before.slot || now.triggered.is_some();
        let until = now() + 6 * PATIENCE;
        while self.operator.list().await.iter().zip(&before).any(waits) {
            assert!(now() < until, "they do not go on: {:#?}", self.operator.list().await);
            sleep(Duration::from_millis(100)).await;
        }
        for member in &mut self.members {
            member.order("quit").await;
        }
        for member in self.members.drain(..) {
            member.ends().await;
        }
        let schedules = self.operator.list().await;
        let (mut told, mut histories) = (self.operator.all_runs().await, Vec::new());
        let mut entries = std::mem::take(&mut *self.log.lock().unwrap());
        entries.sort_by_key(|entry| entry.at);
        let effects: Vec<Effect> = DB::lines(&self.pool).await.iter().map(|line| Effect::parse(line)).collect();
        let mut archive = self.operator.archive.lock().unwrap();
        for ((terms, schedule), first) in Terms::all().zip(schedules).zip(&self.first) {
            let name = terms.name.clone();
            histories.push(History {
                told: told.remove(&name).unwrap_or_default(),
                effects: effects.iter().filter(|effect| effect.name == name).cloned().collect(),
                forgettings: archive.forgettings.remove(&name).unwrap_or_default(),
                ..History::new(terms, (*first, next(&schedule) / SECOND), &entries)
            });
        }
        drop(archive);
        (histories, entries)
    }

    /// Ends a worker without a warning, and starts another: perhaps an old one, of the version
    /// before.
    pub async fn kill(&mut self, place: usize) -> (usize, BTreeSet<String>) {
        let member = self.members.remove(place);
        member.signal(Signal::KILL);
        let number = member.number;
        self.tell(number, Step::Killed);
        member.ends().await;
        let version = if self.random.u8(..4) == 0 { self.version.saturating_sub(1) } else { self.version };
        self.start(version).await;
        let running = self.running(number);
        self.interrupted += usize::from(!running.is_empty());
        (number, running)
    }
}

/// Returns what the sessions begin with.
fn session(level: Level, server: &str) -> &'static str {
    match (level, server) {
        (Level::Serializable, "mysql" | "mariadb") => "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        _ => "",
    }
}
