//! Histories of schedules under faults.

use std::{collections::BTreeMap, io::Write as _, time::Duration};

use harness::{Server, TestDb};
use tokio::time::sleep;

use crate::{
    crew::Books,
    history::number,
    record::now,
    ticks::{
        checker::{Operated, Seen, Verdict, check},
        crew::{Crew, Level},
        faults::Fault,
        gathered::{History, Suffered},
        record::Entry,
        terms::LEASE,
    },
};

harness::tests!(everywhere(each_tick_runs_once_under_faults), servers.long(each_tick_runs_once_at_serializable),);

const PROCESSES: usize = 3;
/// The least time of faults.
const SECONDS: u64 = 20;

async fn each_tick_runs_once_under_faults<DB: Books>(db: TestDb<DB>) {
    troubled(&db, Level::Default).await;
}

/// The same, while all sessions of the application are SERIALIZABLE.
async fn each_tick_runs_once_at_serializable<DB: Books>(db: TestDb<DB>) {
    troubled(&db, Level::Serializable).await;
}

/// Injects every fault once, in any order, and goes on with this until the time is over and kills
/// have interrupted runs. On a busy machine a run may end before its worker is killed.
async fn troubled<DB: Books>(db: &TestDb<DB>, level: Level) {
    let seed = number("ROWLOCK_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
    let long = Duration::from_secs(number("ROWLOCK_LONG").unwrap_or(SECONDS));
    let began = now();
    let mut crew = Crew::new(db, level, seed, PROCESSES).await;
    let mut faults: BTreeMap<Fault, usize> = BTreeMap::new();
    'faults: for round in 0.. {
        let mut all = Fault::all(&db.server);
        crew.random.shuffle(&mut all);
        for fault in all {
            if round > 0 && now() - began >= long && crew.interrupted > 1 {
                break 'faults;
            }
            sleep(Duration::from_millis(crew.random.u64(50..500))).await;
            crew.trouble(fault).await;
            *faults.entry(fault).or_default() += 1;
        }
    }
    let (histories, entries) = crew.ends().await;
    let verdict = check(&histories, &Suffered::new(LEASE, &entries));
    tell(&db.server, level, seed, now() - began, &faults, &verdict);
    let enough = enough(&verdict.seen);
    if !verdict.violations.is_empty() || !enough {
        let file = keep(&db.server, seed, &entries, &histories);
        let count = verdict.violations.len();
        let first: Vec<String> = verdict.violations.iter().take(20).map(ToString::to_string).collect();
        panic!("{count} violations, seed {seed}, enough happened: {enough}, history in {file}:\n{}", first.join("\n"));
    }
}

fn enough(seen: &Seen) -> bool {
    let Seen { crashes, losses, retried, missed, effects, operated, .. } = *seen;
    let worked = [crashes, losses, retried, missed, effects];
    let Operated { pauses, triggered, changes, returned, older, forgotten } = operated;
    let operated = [pauses, triggered, changes, returned, older, forgotten];
    worked.into_iter().chain(operated).all(|count| count > 0)
}

fn tell(
    server: &Server,
    level: Level,
    seed: u64,
    took: Duration,
    faults: &BTreeMap<Fault, usize>,
    Verdict { seen, violations }: &Verdict,
) {
    let faults: Vec<String> = faults.iter().map(|(fault, count)| format!("{fault:?} {count}")).collect();
    println!(
        "\nverdict: {}, {level:?}: {:.0} s, seed {seed}: {} slots, {} successes, {} of them after another attempt, {} effects; faults: {}; \
         {} crashes taken over, {} leases lost, {} runs stopped in time, {} ticks missed; {:?}; {} violations",
        server.name,
        took.as_secs_f64(),
        seen.slots,
        seen.successes,
        seen.retried,
        seen.effects,
        faults.join(", "),
        seen.crashes,
        seen.losses,
        seen.stopped,
        seen.missed,
        seen.operated,
        violations.len(),
    );
}

/// Writes the whole history to a file, and returns its path.
fn keep(server: &Server, seed: u64, entries: &[Entry], histories: &[History]) -> String {
    let path = std::env::temp_dir().join(format!("rowlock-ticks-{}-{seed}.txt", server.name));
    let mut text: String = entries.iter().map(|entry| format!("{entry}\n")).collect();
    for history in histories {
        text += &format!("{:?} {} {}\n", history.terms, history.first, history.next);
        for told in &history.told {
            text += &format!("{told:?}\n");
        }
        for forgetting in &history.forgettings {
            text += &format!("{forgetting:?}\n");
        }
    }
    std::fs::File::create(&path).and_then(|mut file| file.write_all(text.as_bytes())).unwrap();
    path.display().to_string()
}
