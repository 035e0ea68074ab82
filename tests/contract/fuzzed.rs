//! Any input is used as it is or refused, and nothing else happens. A failing input is reduced to a
//! minimal one and printed.

use std::{collections::HashSet, time::Duration};

use harness::{TestDatabase, TestDb, acquired, each};
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use rowlock::{
    Error, Key, LeaseLock, VersionedTable,
    admin::ListOptions,
    balances::{Columns, UpdateError},
};
use tokio::time::timeout;

harness::tests!(everywhere(
    any_text_is_a_key_of_its_own_or_refused,
    any_duration_is_kept_to_or_refused,
    any_name_is_a_plain_one_or_refused
));

/// Generates arbitrary text, and text with a special meaning in SQL or elsewhere.
fn text() -> impl Strategy<Value = String> {
    let signs = "['\"`;\\\\%_\\-/*\\[\\]{}()?$:@#&=+ \t\r\n\0.a]{0,40}";
    prop_oneof![".{0,20}", "\\PC{0,300}", signs, "[a-z]{0,3}", Just("' OR 1=1 --".to_owned()), Just("x".repeat(255))]
}

async fn any_text_is_a_key_of_its_own_or_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, mut keys) = (db.lock(), HashSet::new());
    each(200, text(), |text| {
        let (lock, new) = (lock.clone(), Key::new(&text).is_ok() && keys.insert(text.clone()));
        async move {
            match lock.try_acquire(&text).await {
                Ok(attempt) => {
                    let lease = attempt.acquired().expect("no other holder has it");
                    assert_eq!((lease.key().as_str(), lease.token().get() > 0), (text.as_str(), true));
                    lease.release().await.unwrap();
                    assert_eq!(lock.inspect(&text).await.unwrap().unwrap().key, text);
                }
                Err(Error::Invalid(_)) => assert!(!new && Key::new(&text).is_err()),
                Err(error) => panic!("{text:?}: {error}"),
            }
        }
    });
    let rows = lock.list(&ListOptions::default().limit(1000)).await.unwrap();
    assert_eq!(rows.into_iter().map(|row| row.key).collect::<HashSet<_>>(), keys, "one row a key, and no other");
}

/// Generates durations, short ones as often as endless ones.
fn duration() -> impl Strategy<Value = Duration> {
    let short = (0..100_000_u64).prop_map(Duration::from_millis);
    let any_at_all = (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(seconds, nanos)| Duration::new(seconds, nanos));
    prop_oneof![short, (0..400_000_000_u64).prop_map(Duration::from_secs), any_at_all, Just(Duration::MAX)]
}

async fn any_duration_is_kept_to_or_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let held = acquired(db.lock().try_acquire("held").await);
    let refused = |error: Error| assert!(matches!(error, Error::Invalid(_)), "{error:?}");
    let or = |lock: LeaseLock<DB>, set: LeaseLock<DB>| match set.check() {
        Ok(()) => set,
        Err(_) => lock,
    };
    let mut number = 0;
    each(100, (duration(), duration(), duration()), |(one, two, three)| {
        number += 1;
        let (lock, key) = (db.lock(), format!("key {number}"));
        let lock = or(lock.clone(), lock.lease(one));
        let lock = or(lock.clone(), lock.min_interval(two));
        async move {
            acquired(lock.try_acquire(&key).await).release().await.unwrap();
            // The key is not granted, whether or not the answer arrives in time.
            let waited = timeout(Duration::from_millis(2), lock.acquire("held", three)).await;
            assert!(!waited.is_ok_and(|attempt| attempt.is_ok()));
            lock.forget(one).await.map(drop).unwrap_or_else(refused);
            drop(LeaseLock::builder(lock.pool().clone()).time_limit(two).build().map_err(refused));
        }
    });
    held.release().await.unwrap();
}

async fn any_name_is_a_plain_one_or_refused<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let name = || prop_oneof![text(), "[a-z_][a-z0-9_]{0,70}(\\.[a-z]{1,3})?", Just("t_resource_lock".to_owned())];
    each(150, (name(), name(), name(), name()), |(table, key, value, version)| {
        let pool = db.pool.clone();
        async move {
            let columns = Columns { table: &table, key: &key, value: &value, version: &version };
            let accounts = VersionedTable::<_, i64>::new(pool, columns);
            let is_plain = accounts.check().is_ok();
            // The table does not exist, or has no such columns.
            let error = accounts.deduct("k", 1).await.unwrap_err();
            assert_eq!(matches!(error, UpdateError::Other(Error::Invalid(_))), !is_plain, "{error:?}");
        }
    });
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock WHERE status = 'S'").await, Some(1));
}
