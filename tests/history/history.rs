//! Histories of processes under faults.

use std::{collections::BTreeMap, io::Write as _, time::Duration};

use harness::{PATIENCE, Server, TestDb};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::{
    checker::{Rule, Seen, Verdict, check},
    crew::{Books, Crew},
    faults::{Fault, kill_connections},
    record::{Entry, Step, now},
    used::{LEASE, Used},
};

harness::tests!(
    everywhere(
        promises_hold_under_faults,
        a_stopped_holders_unfenced_write_overwrites_the_next_ones,
        a_stopped_holders_fenced_write_loses_nothing,
        a_stopped_transaction_that_is_cut_off_writes_nothing,
    ),
    everywhere.long(
        promises_of_keys_with_a_lock_delay_hold,
        promises_of_permits_hold,
        promises_of_leaders_hold,
        promises_of_readers_and_writers_hold,
    ),
);

const PROCESSES: usize = 4;
/// How many times each fault is injected at most, unless a longer time is asked for.
const ROUNDS: usize = 8;

pub fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|number| number.parse().ok())
}

/// Injects every fault once, in any order, and repeats this until the time is over.
async fn promises_hold_under_faults<DB: Books>(db: TestDb<DB>) {
    troubled(&db, Used::Keys).await;
}

async fn promises_of_keys_with_a_lock_delay_hold<DB: Books>(db: TestDb<DB>) {
    troubled(&db, Used::Delayed).await;
}

async fn promises_of_permits_hold<DB: Books>(db: TestDb<DB>) {
    troubled(&db, Used::Permits).await;
}

async fn promises_of_leaders_hold<DB: Books>(db: TestDb<DB>) {
    troubled(&db, Used::Election).await;
}

async fn promises_of_readers_and_writers_hold<DB: Books>(db: TestDb<DB>) {
    troubled(&db, Used::ReadWrite).await;
}

async fn troubled<DB: Books>(db: &TestDb<DB>, used: Used) {
    let seed = number("ROWLOCK_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
    let long = Duration::from_secs(number("ROWLOCK_LONG").unwrap_or_default());
    let began = now();
    let mut crew = Crew::new(db, used, seed).await;
    for _ in 0..PROCESSES {
        crew.start(true).await;
    }
    let mut faults: BTreeMap<Fault, usize> = BTreeMap::new();
    // Two rounds contain enough events, unless the machine was stalled.
    for round in 1.. {
        let mut all = Fault::all(&db.server, used);
        crew.random.shuffle(&mut all);
        for fault in all {
            sleep(Duration::from_millis(crew.random.u64(50..300))).await;
            crew.trouble(fault).await;
            *faults.entry(fault).or_default() += 1;
        }
        if round > 1 && now() - began >= long && (enough(used, check(&crew.so_far().await.0).seen) || round >= ROUNDS) {
            break;
        }
    }
    let (history, entries) = crew.ends().await;
    let verdict = check(&history);
    tell(&db.server, used, seed, now() - began, &faults, &verdict);
    let enough = enough(used, verdict.seen);
    if !verdict.violations.is_empty() || !enough {
        let file = keep(&db.server, used, seed, &entries, &history.writes);
        let count = verdict.violations.len();
        panic!(
            "{count} violations, seed {seed}, enough happened: {enough}, history in {file}: {:#?}",
            verdict.violations
        );
    }
}

/// Whether the history contains each event that its rules judge.
fn enough(used: Used, seen: Seen) -> bool {
    (seen.writes > 0 || !used.has_transactions())
        && (seen.waits > 0 || used != Used::ReadWrite)
        && seen.crashes > 0
        && seen.losses > 0
}

fn tell(server: &Server, used: Used, seed: u64, took: Duration, faults: &BTreeMap<Fault, usize>, verdict: &Verdict) {
    let faults: Vec<String> = faults.iter().map(|(fault, count)| format!("{fault:?} {count}")).collect();
    let seen = &verdict.seen;
    let [done, not] = seen.unknown;
    println!(
        "\nverdict: {}, {used:?}: {:.0} s, seed {seed}: {} operations, {} grants, {} fenced writes, {} waits for readers alone; \
         faults: {}; {} crashes of holders, {} losses told, {} unknown outcomes ({done} had taken effect); {} violations",
        server.name,
        took.as_secs_f64(),
        seen.operations,
        seen.grants,
        seen.writes,
        seen.waits,
        faults.join(", "),
        seen.crashes,
        seen.losses,
        done + not,
        verdict.violations.len(),
    );
}

/// Writes the whole history to a file, and returns its path.
fn keep(server: &Server, used: Used, seed: u64, entries: &[Entry], writes: &[crate::record::Write]) -> String {
    let path = std::env::temp_dir().join(format!("rowlock-history-{}-{used:?}-{seed}.txt", server.name));
    let mut text: String = entries.iter().map(|entry| format!("{entry}\n")).collect();
    text += &format!("{writes:#?}\n");
    std::fs::File::create(&path).and_then(|mut file| file.write_all(text.as_bytes())).unwrap();
    path.display().to_string()
}

/// Stops one of two workers at this point, between its grant and its write, for longer than its
/// lease, while the other goes on. Returns the verdict, and the numbers that they wrote.
async fn one_is_stopped<DB: Books>(db: &TestDb<DB>, job: &str, place: &str) -> (Verdict, Vec<i64>) {
    let mut crew = Crew::new(db, Used::Keys, 0).await;
    for _ in 0..2 {
        crew.start(false).await;
    }
    let paused = |entry: &Entry| entry.process == 1 && entry.step == Step::Paused;
    let ended = |process| move |entry: &Entry| entry.process == process && matches!(entry.step, Step::Done(_));
    crew.members[0].order(format_args!("pause {place}")).await;
    crew.members[0].order(format_args!("do {job}")).await;
    assert!(crew.comes(0, PATIENCE, paused).await, "it comes to {place}");
    crew.tell(1, 0, Step::Stopped);
    crew.members[0].signal(Signal::STOP);
    // Its transaction keeps the row locked until its connection ends. On SQLite no other process
    // can take the file from it.
    let (in_transaction, on_a_file) = (job == "transaction" && place == "write", db.server.name == "sqlite");
    if in_transaction && !on_a_file {
        kill_connections::<DB>(&crew.pool, db.server.name).await;
    }
    crew.members[1].order(format_args!("do {job}")).await;
    if in_transaction && on_a_file {
        sleep(LEASE * 5 / 4).await;
    } else {
        assert!(crew.comes(0, PATIENCE, ended(2)).await, "the other gets in");
    }
    crew.members[0].order("go").await;
    crew.members[0].signal(Signal::CONT);
    crew.tell(1, 0, Step::Continued);
    for process in [1, 2] {
        assert!(crew.comes(0, PATIENCE, ended(process)).await, "{process} ends");
    }
    let (history, _) = crew.ends().await;
    let mut numbers: Vec<i64> = history.writes.iter().map(|write| write.number).collect();
    numbers.sort_unstable();
    (check(&history), numbers)
}

/// The control: the writer only checks the lease before it writes, and an update is lost.
async fn a_stopped_holders_unfenced_write_overwrites_the_next_ones<DB: Books>(db: TestDb<DB>) {
    let (verdict, numbers) = one_is_stopped(&db, "bare", "write").await;
    assert_eq!(numbers, [1, 1], "both made 1 of 0");
    let rules: Vec<Rule> = verdict.violations.iter().map(|violation| violation.rule).collect();
    assert!(!rules.is_empty() && rules.iter().all(|rule| *rule == Rule::FencedWrites), "{:?}", verdict.violations);
}

/// The holder detects the loss when its transaction begins, and retries.
async fn a_stopped_holders_fenced_write_loses_nothing<DB: Books>(db: TestDb<DB>) {
    let (verdict, numbers) = one_is_stopped(&db, "transaction", "granted").await;
    assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
    assert_eq!(numbers, [1, 2]);
}

/// The stopped worker's connection is ended, so that the other is granted the key. On SQLite the
/// other writes after it.
async fn a_stopped_transaction_that_is_cut_off_writes_nothing<DB: Books>(db: TestDb<DB>) {
    let (verdict, numbers) = one_is_stopped(&db, "transaction", "write").await;
    assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
    let accepted: &[i64] = if db.server.name == "sqlite" { &[1, 2] } else { &[1] };
    assert_eq!(numbers, accepted);
}
