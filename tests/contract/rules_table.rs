//! Every cell of the rules table, on the server and in `rules.rs`.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, FixedOffset, TimeDelta, Utc};
use harness::{Table, TestDatabase, TestDb};
use rowlock::{Attempt, Lease, LeaseLock, Reason, Rules};

use crate::{
    article,
    batched::{Asking, all, names, numbered},
    rules::{self, Row, Terms, Verdict, judge},
};

harness::tests!(
    everywhere(every_cell_of_the_rules_table, every_cell_on_the_articles_own_table),
    sqlite(the_cells_of_the_python_client_are_these)
);

pub const HOLDER: &str = "00112233445566778899aabbccddeeff";
pub const HOUR: i64 = 3_600_000;
const RECENT: i64 = HOUR / 6;

/// A row as a test writes it. Times are in milliseconds before now, in UTC.
#[derive(Clone, Debug)]
pub struct Cell {
    locked: bool,
    status: &'static str,
    begin: Option<i64>,
    holder: bool,
    claimed: Option<i64>,
    expires: Option<i64>,
    ended: bool,
}

pub fn cells() -> Vec<Option<Cell>> {
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
                    let builder = match offset {
                        Some(seconds) => db.builder().article_clients(FixedOffset::east_opt(seconds).unwrap()),
                        None => db.builder(),
                    };
                    let lock = builder.build().unwrap().rules(rules);
                    let mut lock = lock.min_interval(Duration::from_millis(min_interval as u64));
                    if retry_failed {
                        lock = lock.retry_failed_at_once();
                    }
                    let terms = Terms {
                        rules: if rules == Rules::Article { rules::Rules::Article } else { rules::Rules::Recover },
                        min_interval: TimeDelta::milliseconds(min_interval),
                        retry_failed,
                        article_clients: offset.map(|seconds| TimeDelta::seconds(seconds.into())),
                        ..Terms::default()
                    };
                    all.push((lock, terms));
                }
            }
        }
    }
    all
}

async fn every_cell_of_the_rules_table<DB: TestDatabase>(db: TestDb<DB>) {
    every_cell(db, Table::Ours).await;
}

async fn every_cell_on_the_articles_own_table<DB: TestDatabase>(db: TestDb<DB>) {
    article::put(&db, Table::Articles).await;
    every_cell(db, Table::Articles).await;
}

/// Each of the settings has a key of its own. All of them try at once, each with a statement of its
/// own.
async fn every_cell<DB: TestDatabase>(db: TestDb<DB>, table: Table) {
    let settings = settings(&db);
    let keys = numbered(settings.len());
    let mut of_offset = BTreeMap::<TimeDelta, Vec<&str>>::new();
    for ((_, terms), key) in settings.iter().zip(&keys) {
        of_offset.entry(terms.offset()).or_default().push(key);
    }
    let holder = another_holder(&db).await;
    let mut seen = BTreeMap::<String, usize>::new();
    for cell in cells() {
        let now = Utc::now();
        let row = cell.as_ref().map(|cell| row_of(cell, now));
        db.execute("DELETE FROM t_resource_lock").await;
        if let Some(cell) = &cell {
            for (offset, keys) in &of_offset {
                write(&db, keys, cell, *offset, table).await;
            }
        }
        let locks = settings.iter().map(|(lock, _)| lock);
        let tries = locks.zip(names(&keys)).map(|(lock, key)| -> Asking<'_, _> { Box::pin(tried(lock, key)) });
        let attempts: Vec<Attempt<Lease<DB>>> = all(tries.collect()).await;
        for ((_, terms), attempt) in settings.iter().zip(attempts) {
            let verdict = judge(row.as_ref(), now, holder, terms);
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
            if let Attempt::Acquired(lease) = attempt {
                lease.detach(); // the row is deleted
            }
        }
    }
    assert_eq!(seen.len(), 9, "every verdict and every reason that a row can give came up: {seen:?}");
}

/// Tries until no other try has the file of SQLite locked.
async fn tried<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str) -> Attempt<Lease<DB>> {
    loop {
        match lock.try_acquire(key).await.unwrap() {
            Attempt::Refused(refusal) if refusal.reason == Reason::Busy => {}
            attempt => return attempt,
        }
    }
}

/// The row of a cell in the form that `rules.rs` takes.
pub fn row_of(cell: &Cell, now: DateTime<Utc>) -> Row {
    let ago = |millis: Option<i64>| millis.map(|millis| now - TimeDelta::milliseconds(millis));
    Row {
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
    }
}

/// A holder id that no row has: it belongs to another client for both `rules.rs` and the database.
async fn another_holder<DB: TestDatabase>(db: &TestDb<DB>) -> rowlock::leases::Holder {
    harness::acquired(db.lock().try_acquire("elsewhere").await).detach().holder
}

/// Writes the cell's row for each of the keys.
pub async fn write<DB: TestDatabase>(db: &TestDb<DB>, keys: &[&str], cell: &Cell, offset: TimeDelta, table: Table) {
    let local = |millis: Option<i64>| {
        millis.map_or("NULL".into(), |millis| DB::begun(table, millis - offset.num_milliseconds()))
    };
    let (begin, claimed, ended) = (local(cell.begin), local(cell.claimed), local(cell.ended.then_some(1)));
    let expires = cell.expires.map_or("NULL".into(), DB::ago);
    let holder = if cell.holder { DB::uuid(HOLDER) } else { "NULL".into() };
    let (status, locked) = (cell.status, i32::from(cell.locked));
    let row = |key| format!("('{key}', '{status}', {locked}, {begin}, {ended}, 'other', {holder}, 7, {expires})");
    db.execute(&format!(
        "INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, end_time, client_ip, holder, token, expires_at)
         VALUES {}",
        keys.iter().map(row).collect::<Vec<_>>().join(", ")
    ))
    .await;
    let same = cell.claimed.is_some() && cell.claimed == cell.begin;
    let claimed = if same { "begin_time" } else { &claimed };
    let of_keys = format!("key_resource IN ('{}')", keys.join("', '"));
    let rows = db.execute(&format!("UPDATE t_resource_lock SET claimed_at = {claimed} WHERE {of_keys}")).await;
    assert_eq!(usize::try_from(rows).unwrap(), keys.len(), "each key has one row");
}

/// The Python client has the rules for SQLite, and its tests check them against this file. To write
/// the file, the test runs with the variable `WRITE_RULES` set.
async fn the_cells_of_the_python_client_are_these<DB: TestDatabase>(_: TestDb<DB>) {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../clients/python/tests/rules.json");
    let now = chrono::DateTime::from_timestamp(1_800_000_000, 0).unwrap();
    let number = |value: Option<i64>| value.map_or("null".into(), |value| value.to_string());
    let mut lines = Vec::new();
    for cell in cells().iter().flatten() {
        for (rules, name) in [(rules::Rules::Article, "article"), (rules::Rules::Recover, "recover")] {
            for min_interval in [0, HOUR / 2] {
                let terms = Terms { rules, min_interval: TimeDelta::milliseconds(min_interval), ..Terms::default() };
                let row = row_of(cell, now);
                let (verdict, until) = match judge(Some(&row), now, rowlock::leases::Holder::unique(), &terms) {
                    Verdict::Acquire => ("acquired", None),
                    Verdict::TakeOver => ("taken over", None),
                    Verdict::Refuse(reason, until) => (reason.name(), until),
                    other => panic!("{other:?}"),
                };
                let until = number(until.map(|until| (now - until).num_milliseconds()));
                lines.push(format!(
                    r#"{{"locked": {}, "status": "{}", "begin": {}, "holder": {}, "claimed": {}, "expires": {}, "ended": {}, "rules": "{name}", "min_interval": {min_interval}, "verdict": "{verdict}", "until": {until}}}"#,
                    cell.locked, cell.status, number(cell.begin), cell.holder, number(cell.claimed), number(cell.expires), cell.ended
                ));
            }
        }
    }
    let text = format!("[\n{}\n]\n", lines.join(",\n"));
    if std::env::var_os("WRITE_RULES").is_some() {
        std::fs::write(file, &text).unwrap();
    }
    assert!(
        std::fs::read_to_string(file).unwrap_or_default() == text,
        "{file} is not what rules.rs says: run this test with WRITE_RULES=1"
    );
}
