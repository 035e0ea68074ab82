//! The operator: pauses, resumes and triggers schedules, and forgets old runs, while the workers
//! run them; and what it read of their rows.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use harness::PATIENCE;
use rowlock::{
    Schedules,
    admin::{RunInfo, RunStatus, ScheduleInfo},
};
use sqlx::Pool;
use tokio::{sync::watch, time::sleep};

use crate::{
    crew::Books,
    record::{DATABASE, now},
    ticks::{
        gathered::{Forgetting, Told},
        record::{Entry, Micros, SECOND, Seen, Step},
        terms::{Terms, word},
    },
};

/// How old runs are when they are forgotten, in seconds. It is more than a statement and the
/// requests that read the history after it may take.
pub const OLD: std::ops::Range<u64> = 4..8;
/// A read of all rows that takes longer than this is recorded: promises about time hold for a
/// database that executes statements.
const SLOW: Duration = Duration::from_millis(100);
const MOST_RUNS: u32 = 100_000;
const TIMES_SINCE: &str =
    "SELECT CAST(concat(name, ' ', times_at) AS char(100)) FROM t_resource_schedule_times WHERE times_at IS NOT NULL";

/// Sends a request until it is answered: faults end the operator's connections too.
macro_rules! answered {
    ($request:expr) => {{
        let until = now() + PATIENCE;
        loop {
            match $request.await {
                Ok(reply) => break reply,
                Err(error) => assert!(now() < until, "not answered: {error}"),
            }
            sleep(Duration::from_millis(20)).await;
        }
    }};
}

pub type Log = Arc<Mutex<Vec<Entry>>>;

/// What was forgotten of each schedule.
#[derive(Default)]
pub struct Archive {
    pub told: BTreeMap<String, Vec<Told>>,
    pub forgettings: BTreeMap<String, Vec<Forgetting>>,
}

pub struct Operator<DB: Books> {
    schedules: Schedules<DB>,
    pool: Pool<DB>,
    log: Log,
    /// Rows are read one after the other, in the order in which the log has them.
    reading: tokio::sync::Mutex<()>,
    pub archive: Mutex<Archive>,
}

impl<DB: Books> Operator<DB> {
    pub fn new(pool: Pool<DB>, log: Log) -> Self {
        let schedules = Schedules::new(pool.clone()).share_pool();
        Self { schedules, pool, log, reading: tokio::sync::Mutex::default(), archive: Mutex::default() }
    }

    fn tell(&self, step: Step) {
        self.log.lock().unwrap().push(Entry { at: now(), process: 0, step });
    }

    /// Lists the schedules, in the order of [`Terms::all`].
    pub async fn list(&self) -> Vec<ScheduleInfo> {
        let _turn = self.reading.lock().await;
        let mut before = self.times_since().await;
        loop {
            let since = now();
            let mut all = answered!(self.schedules.list());
            if now() - since > SLOW {
                self.log.lock().unwrap().push(Entry { at: now(), process: DATABASE, step: Step::HeldUp { since } });
            }
            let after = self.times_since().await;
            if after != before {
                // Some times changed, before the rows were read or after.
                before = after;
                continue;
            }
            all.sort_by_key(|schedule| schedule.name[1..].parse::<usize>().unwrap());
            for schedule in &all {
                self.tell(Step::Seen(Seen {
                    name: schedule.name.clone(),
                    times: word(&format!("{}|{}", schedule.times, schedule.zone)),
                    since: before.get(&schedule.name).cloned().unwrap_or_else(|| "never".to_owned()),
                    token: schedule.token.get(),
                }));
            }
            return all;
        }
    }

    /// Reads when the times of each schedule took effect, as one word.
    async fn times_since(&self) -> BTreeMap<String, String> {
        let read = answered!(DB::texts(&self.pool, TIMES_SINCE));
        let split = |line: &String| line.trim().split_once(' ').map(|(name, since)| (name.to_owned(), word(since)));
        read.iter().filter_map(split).collect()
    }

    async fn token(&self, name: &str) -> i64 {
        let row = answered!(self.schedules.inspect(name));
        row.expect("it is registered").token.get()
    }

    /// Acts at random until it is told to stop. Nothing is paused then.
    pub async fn operate(self: Arc<Self>, mut random: fastrand::Rng, stop: watch::Receiver<bool>) {
        let names: Vec<String> = Terms::all().map(|terms| terms.name).collect();
        while !*stop.borrow() {
            sleep(Duration::from_millis(random.u64(50..300))).await;
            match random.u8(..10) {
                0..4 => self.pause_some(&names, &mut random, &stop).await,
                4..8 => self.trigger(&names[random.usize(..names.len())]).await,
                _ => self.forget(Duration::from_secs(random.u64(OLD))).await,
            }
            self.list().await;
        }
    }

    /// Pauses some schedules when they are due: an instance may have looked, and not claimed yet.
    async fn pause_some(&self, names: &[String], random: &mut fastrand::Rng, stop: &watch::Receiver<bool>) {
        let mut paused = names.to_vec();
        random.shuffle(&mut paused);
        paused.truncate(random.usize(1..5));
        let second = u64::from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_millis());
        sleep(Duration::from_millis(1_000 - second + random.u64(..30))).await;
        for name in &paused {
            self.tell(Step::Pauses { name: name.clone() });
            answered!(self.schedules.pause(name));
            let token = self.token(name).await;
            self.tell(Step::Paused { name: name.clone(), token });
        }
        let until = now() + Duration::from_millis(random.u64(500..2_500));
        while now() < until && !*stop.borrow() {
            if random.u8(..4) == 0 {
                self.trigger(&paused[0]).await;
            }
            sleep(Duration::from_millis(100)).await;
        }
        for name in &paused {
            let token = self.token(name).await;
            self.tell(Step::Resumes { name: name.clone(), token });
            answered!(self.schedules.resume(name));
            self.tell(Step::Resumed { name: name.clone() });
        }
    }

    /// A trigger without a reply may have been carried out.
    pub async fn trigger(&self, name: &str) {
        self.tell(Step::Triggers { name: name.to_owned() });
        if self.schedules.trigger(name).await.is_ok() {
            self.tell(Step::Triggered { name: name.to_owned() });
        }
    }

    pub async fn forget(&self, age: Duration) {
        let (before, had) = (self.list().await, self.runs().await);
        answered!(self.schedules.forget_history(age));
        let (left, after) = (self.runs().await, self.list().await);
        let age = i64::try_from(age.as_secs()).unwrap() * SECOND;
        let limit = |rows: &[ScheduleInfo]| rows[0].now.timestamp_micros() - age;
        let mut archive = self.archive.lock().unwrap();
        for Terms { name, .. } in Terms::all() {
            let of = |runs: &BTreeMap<String, Vec<Told>>| runs.get(&name).cloned().unwrap_or_default();
            let slot = |rows: &[ScheduleInfo]| {
                let row = rows.iter().find(|row| row.name == name)?;
                row.run_slot.map(|slot| slot.timestamp_micros())
            };
            let (limits, under_way) = ((limit(&before), limit(&after)), (slot(&before), slot(&after)));
            let forgetting = Forgetting { had: of(&had), left: of(&left), limits, under_way };
            archive.told.entry(name.clone()).or_default().extend(forgetting.had.iter().cloned());
            archive.forgettings.entry(name).or_default().push(forgetting);
        }
    }

    /// Reads the runs of all schedules.
    async fn runs(&self) -> BTreeMap<String, Vec<Told>> {
        let mut runs = BTreeMap::new();
        for Terms { name, .. } in Terms::all() {
            let told = answered!(self.schedules.history(&name, MOST_RUNS));
            runs.insert(name.clone(), told.iter().map(|told| told_of(&name, told)).collect());
        }
        runs
    }

    /// Returns all runs that the table has, and those that were forgotten.
    pub async fn all_runs(&self) -> BTreeMap<String, Vec<Told>> {
        let mut runs = self.runs().await;
        for (name, told) in &self.archive.lock().unwrap().told {
            let all = runs.entry(name.clone()).or_default();
            all.extend(told.iter().cloned());
            all.sort_by_key(|told| (told.slot, told.attempt, told.token));
            // If the claim that took a run over is put back, the run is lost again, and recorded
            // again once it was forgotten.
            all.dedup_by(|later, one| later == one || (is_lost_again(later, one)));
        }
        runs
    }
}

fn is_lost_again(later: &Told, one: &Told) -> bool {
    let lost = |told: &Told| (told.slot, told.attempt, told.process, told.status == 'L');
    one.status == 'L'
        && lost(later) == lost(one)
        && later.ended - one.ended >= i64::try_from(OLD.start).unwrap() * SECOND
}

/// Returns the first slot that has not come to its end. A tick that waits for its next attempt
/// stands for those that it missed. Under other times, the row has a later slot by then.
pub fn next(schedule: &ScheduleInfo) -> Micros {
    let run_slot = schedule.run_slot.map(|slot| slot.timestamp_micros()).filter(|slot| slot % SECOND == 0);
    let first = run_slot.map(|slot| slot - i64::from(schedule.missed) * SECOND);
    first.unwrap_or(schedule.slot.timestamp_micros())
}

fn told_of(name: &str, told: &RunInfo) -> Told {
    let status = match told.status {
        RunStatus::Succeeded => 'S',
        RunStatus::Failed => 'F',
        RunStatus::Lost => 'L',
        _ => 'M',
    };
    let process = told.by.parse().expect("the label of a worker");
    Told {
        name: name.to_owned(),
        slot: told.slot.timestamp_micros(),
        attempt: told.attempt,
        token: told.token.get(),
        process,
        status,
        missed: told.missed,
        ended: told.ended.timestamp_micros(),
    }
}
