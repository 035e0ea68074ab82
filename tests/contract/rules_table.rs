//! Every cell of the rules table, on the server and in `rules.rs`.

use std::time::Duration;

use chrono::{FixedOffset, TimeDelta, Utc};
use rowlock::{Attempt, LeaseLock, Rules};

use crate::{
    article::{self, Table},
    harness::{TestDatabase, TestDb},
    rules::{self, Row, Terms, Verdict, judge},
};

const HOLDER: &str = "00112233445566778899aabbccddeeff";
const HOUR: i64 = 3_600_000;
const RECENT: i64 = HOUR / 6;

/// A row as a test writes it. Times are in milliseconds before now, in UTC.
#[derive(Clone, Debug)]
struct Cell {
    locked: bool,
    status: &'static str,
    begin: Option<i64>,
    holder: bool,
    claimed: Option<i64>,
    expires: Option<i64>,
    ended: bool,
}

fn cells() -> Vec<Option<Cell>> {
    let mut cells = vec![None];
    let cell =
        Cell { locked: false, status: "P", begin: None, holder: false, claimed: None, expires: None, ended: false };
    // A time in the future: rounded up by its column, or written by a clock that was set back.
    let begins = [None, Some(-HOUR), Some(RECENT), Some(3 * HOUR)];
    for begin in begins {
        for status in ["S", "F", "P", "X", "s", "f", ""] {
            cells.push(Some(Cell { status, begin, ..cell.clone() }));
        }
        for (holder, claimed) in [(false, None), (true, None), (true, Some(5 * HOUR)), (false, begin)] {
            cells.push(Some(Cell { locked: true, begin, holder, claimed, expires: Some(1), ..cell.clone() }));
        }
    }
    for begin in [RECENT, 3 * HOUR] {
        for expires in [None, Some(HOUR), Some(-HOUR)] {
            cells.push(Some(Cell {
                locked: true,
                begin: Some(begin),
                holder: true,
                claimed: Some(begin),
                expires,
                ..cell.clone()
            }));
            // Unlocked and locked again by another program, within one second.
            cells.push(Some(Cell { ended: true, ..cells.last().cloned().flatten().unwrap() }));
        }
    }
    cells
}

/// The lock, and the same settings in the form that `rules.rs` takes.
fn settings<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<(LeaseLock<DB>, Terms)> {
    let mut all = Vec::new();
    for rules in [Rules::Article, Rules::Recover] {
        for min_interval in [0, HOUR / 2] {
            for retry_failed in [false, true] {
                for offset in [None, Some(0), Some(8 * 3600), Some(-5 * 3600)] {
                    let mut lock =
                        db.lock().rules(rules).min_interval(Duration::from_millis(min_interval as u64)).unwrap();
                    if retry_failed {
                        lock = lock.retry_failed_at_once();
                    }
                    if let Some(seconds) = offset {
                        lock = lock.article_clients(FixedOffset::east_opt(seconds).unwrap());
                    }
                    let terms = Terms {
                        rules: if rules == Rules::Article { rules::Rules::Article } else { rules::Rules::Recover },
                        min_interval: TimeDelta::milliseconds(min_interval),
                        lease: TimeDelta::seconds(30),
                        retry_failed,
                        article_clients: offset.map(|seconds| TimeDelta::seconds(seconds.into())),
                        label: String::new(),
                    };
                    all.push((lock, terms));
                }
            }
        }
    }
    all
}

pub async fn every_cell_of_the_rules_table<DB: TestDatabase>(db: TestDb<DB>) {
    every_cell(db, Table::Ours).await;
}

pub async fn every_cell_on_the_articles_own_table<DB: TestDatabase>(db: TestDb<DB>) {
    article::put(&db, Table::Articles).await;
    every_cell(db, Table::Articles).await;
}

async fn every_cell<DB: TestDatabase>(db: TestDb<DB>, table: Table) {
    let settings = settings(&db);
    let holder = acquired_holder(&db).await;
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for cell in cells() {
        for (number, (lock, terms)) in settings.iter().enumerate() {
            let now = Utc::now();
            let ago = |millis: Option<i64>| millis.map(|millis| now - TimeDelta::milliseconds(millis));
            let row = cell.as_ref().map(|cell| Row {
                locked: cell.locked,
                status: cell.status.into(),
                begin_time: ago(cell.begin),
                minutes: Some(60),
                client_ip: "other".into(),
                holder: cell.holder.then(|| uuid::Uuid::parse_str(HOLDER).unwrap()),
                token: 7,
                expires_at: ago(cell.expires),
                claimed_at: ago(cell.claimed),
                ended: cell.ended,
                awaited: false,
            });
            let verdict = judge(row.as_ref(), now, holder, terms);
            let key = format!("{number}");
            db.execute(&format!("DELETE FROM t_resource_lock WHERE key_resource = '{key}'")).await;
            if let Some(cell) = &cell {
                write(&db, &key, cell, terms.offset(), table).await;
            }
            // On SQLite the abandonment of the previous cell's lease may lock the file for a
            // moment.
            let attempt = loop {
                match lock.try_acquire(&key).await.unwrap() {
                    Attempt::Refused(refusal) if refusal.reason == rowlock::Reason::Busy => {}
                    attempt => break attempt,
                }
            };
            let context = format!("{cell:?} under {terms:?}: rules.rs says {verdict:?}, the database {attempt:?}");
            match (&verdict, &attempt) {
                (Verdict::Create | Verdict::Acquire, Attempt::Acquired(lease)) => {
                    assert!(lease.taken_over_from().is_none(), "{context}")
                }
                (Verdict::TakeOver, Attempt::Acquired(lease)) => {
                    let prior = lease.taken_over_from().unwrap_or_else(|| panic!("{context}"));
                    assert_eq!((prior.token.get(), prior.label.as_str()), (7, "other"), "{context}");
                }
                (Verdict::Refuse(reason, until), Attempt::Refused(refusal)) => {
                    assert_eq!(format!("{reason:?}"), format!("{:?}", refusal.reason), "{context}");
                    assert_eq!(until.is_some(), refusal.until.is_some(), "{context}");
                    if let (Some(expected), Some(got)) = (until, refusal.until) {
                        assert!((*expected - got).num_seconds().abs() < 120, "{context}");
                    }
                }
                _ => panic!("{context}"),
            }
            let kind = format!("{verdict:?}").split(['(', ',']).take(2).collect::<Vec<_>>().join(" ");
            *seen.entry(kind).or_default() += 1;
        }
    }
    assert_eq!(seen.len(), 9, "every verdict and every reason that a row can give came up: {seen:?}");
}

/// A holder id that no row has: it belongs to another client for both `rules.rs` and the database.
async fn acquired_holder<DB: TestDatabase>(db: &TestDb<DB>) -> rowlock::Holder {
    crate::harness::acquired(db.lock().try_acquire("elsewhere").await).claim().holder
}

async fn write<DB: TestDatabase>(db: &TestDb<DB>, key: &str, cell: &Cell, offset: TimeDelta, table: Table) {
    let local = |millis: Option<i64>| {
        millis.map_or("NULL".into(), |millis| DB::begun(table, millis - offset.num_milliseconds()))
    };
    let (begin, claimed, ended) = (local(cell.begin), local(cell.claimed), local(cell.ended.then_some(1)));
    let expires = cell.expires.map_or("NULL".into(), DB::ago);
    let holder = if cell.holder { DB::uuid(HOLDER) } else { "NULL".into() };
    db.execute(&format!(
        "INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, end_time, client_ip, holder, token, expires_at)
         VALUES ('{key}', '{}', {}, {begin}, {ended}, 'other', {holder}, 7, {expires})",
        cell.status,
        i32::from(cell.locked)
    ))
    .await;
    let same = cell.claimed.is_some() && cell.claimed == cell.begin;
    let claimed = if same { "begin_time" } else { &claimed };
    db.set(key, &format!("claimed_at = {claimed}")).await;
}
