//! Spans: what lies within an attempt to acquire, a transaction and a run, and with which fields.

use std::{io, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, events, eventually};
use rowlock::{Error, Key, Retry, RunError, Schedule, errors::AnyError, jobs::TickOutcome};
use tracing::Instrument as _;

use crate::ticks::{LONG, due, instance, runs};

harness::tests!(everywhere(
    a_request_for_keys_is_a_span,
    a_run_has_its_request_and_its_work_within,
    a_transaction_has_its_attempts_within,
    a_run_of_a_schedule_has_its_work_within,
    a_tick_that_is_run_by_hand_is_in_the_callers_span
));

/// Returns a key that no other test of this process has.
fn unique<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> String {
    format!("{name}-{}-{}", db.server.name, fastrand::u64(..))
}

/// Returns the end of the only span whose name and first field are these.
async fn span(begins: &str) -> String {
    let ended = || events::in_spans(begins).into_iter().filter(|line| line.contains(": close "));
    let is_last = |line: &String| line.split(begins).nth(1).is_some_and(|rest| !rest.contains(":acquire{"));
    eventually(begins, || async { ended().any(|line| is_last(&line)) }).await;
    let mut ended: Vec<String> = ended().filter(is_last).collect();
    assert_eq!(ended.len(), 1, "{ended:?}");
    ended.remove(0)
}

/// Emits an event of the work.
fn works(key: &str) {
    tracing::info!(target: events::WORK, "{key} works");
}

#[track_caller]
fn has(line: &str, parts: &[&str]) {
    for part in parts {
        assert!(line.contains(part), "no {part:?}: {line}");
    }
}

async fn a_request_for_keys_is_a_span<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, key) = (db.lock(), unique(&db, "one"));
    let lease = acquired(lock.try_acquire(&key).await);
    let (token, holder) = (format!("token={}", lease.token()), format!("holder={}", lease.claim().holder));
    let line = span(&format!("acquire{{key={key} ")).await;
    has(&line, &["rowlock::spans", "keys=1", &token, &holder, "outcome=\"acquired\""]);
    let event = events::in_spans(&format!("acquired key={key} "));
    has(&event[0], &[&format!("acquire{{key={key} keys=1}}")]);

    let other = unique(&db, "other");
    let _other = acquired(lock.try_acquire(&other).await);
    let taken = unique(&db, "a");
    let refusal = lock.try_acquire_all([&taken, &other]).await.unwrap().refused().unwrap();
    assert_eq!(refusal.key.as_str(), other);
    has(&span(&format!("acquire{{key={taken} ")).await, &["keys=2", "outcome=\"refused\"", "reason=\"held\""]);

    let name = unique(&db, "permits");
    let permit = acquired(lock.semaphore(&name, 3).try_acquire().await);
    let line = span(&format!("key={} token={}", permit.key(), permit.token())).await;
    has(&line, &["acquire{keys=3", "outcome=\"acquired\""]);

    db.execute("DROP TABLE t_resource_lock").await;
    let gone = unique(&db, "gone");
    let error = db.lock().try_acquire(&gone).await.unwrap_err();
    has(&span(&format!("acquire{{key={gone} ")).await, &["outcome=\"error\"", &format!("error={error}")]);
}

async fn a_run_has_its_request_and_its_work_within<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, key) = (db.lock(), unique(&db, "run"));
    let mut token = None;
    let ran = lock.run(&key, Duration::ZERO, async |held| {
        token = Some(held.token());
        works(&key);
        Ok::<_, io::Error>(())
    });
    ran.await.unwrap();
    let token = token.unwrap();
    let line = span(&format!("run{{key=\"{key}\"")).await;
    has(&line, &[&format!("token={token}"), "outcome=\"succeeded\""]);
    let work = events::in_spans(&format!("{key} works"));
    has(&work[0], &[&format!("run{{key=\"{key}\" token={token}}}: work: ")]);
    let request = events::in_spans(&format!("acquired key={key} "));
    has(&request[0], &[&format!("run{{key=\"{key}\"}}:acquire{{key={key} keys=1}}: ")]);
    let release = events::in_spans(&format!("released key={key} "));
    has(&release[0], &[&format!("run{{key=\"{key}\" token={token}")]);

    let key = unique(&db, "fails");
    let failed = lock.run(&key, Duration::ZERO, async |_| Err::<(), _>(io::Error::other("no"))).await;
    assert!(matches!(failed, Err(RunError::Work(_))), "{failed:?}");
    has(&span(&format!("run{{key=\"{key}\"")).await, &["outcome=\"failed\""]);
    let key = unique(&db, "held");
    let _held = acquired(lock.try_acquire(&key).await);
    let refused = lock.run(&key, Duration::ZERO, async |_| Ok::<_, io::Error>(())).await;
    assert!(matches!(refused, Err(RunError::Refused(_))), "{refused:?}");
    has(&span(&format!("run{{key=\"{key}\"")).await, &["reason=\"held\"", "outcome=\"refused\""]);
}

async fn a_transaction_has_its_attempts_within<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, key) = (db.lock(), unique(&db, "tx"));
    let attempts = std::sync::atomic::AtomicU32::new(0);
    let paid = lock.transaction(&key, |tx| {
        let first = attempts.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
        let key = &key;
        async move {
            drop(tx);
            works(key);
            if first { Err(Error::conflict(Key::new(key)?, 1).into()) } else { Ok::<_, AnyError>(()) }
        }
    });
    paid.await.unwrap();
    let line = span(&format!("transaction{{key=\"{key}\"")).await;
    has(&line, &["token=", "attempts=2", "outcome=\"committed\""]);
    let work = events::in_spans(&format!("{key} works"));
    assert_eq!(work.len(), 2);
    has(&work[1], &[&format!("transaction{{key=\"{key}\" token="), "attempts=2}: work: "]);

    let key = unique(&db, "broke");
    let failed = lock.transaction(&key, |_tx| async { Err::<(), _>(io::Error::other("no")) }).await;
    assert!(matches!(failed, Err(RunError::Work(_))));
    has(&span(&format!("transaction{{key=\"{key}\"")).await, &["outcome=\"failed\""]);
    let key = unique(&db, "held");
    let _held = acquired(lock.try_acquire(&key).await);
    let hurried = lock.retry(Retry { attempts: 1, within: std::time::Duration::from_millis(300) });
    let refused = hurried.transaction(&key, |_tx| async { Ok::<_, io::Error>(()) }).await;
    assert!(matches!(refused, Err(RunError::Refused(_))), "{refused:?}");
    has(&span(&format!("transaction{{key=\"{key}\"")).await, &["reason=\"held\"", "outcome=\"refused\""]);
}

async fn a_run_of_a_schedule_has_its_work_within<DB: TestDatabase>(db: TestDb<DB>) {
    let (name, key) = (unique(&db, "job"), unique(&db, "needed"));
    let schedule = Schedule::every(&name, LONG).exclusive_with(&key);
    let job = name.clone();
    let schedules = instance(&db, "me").on(schedule, move |_| {
        let job = job.clone();
        async move {
            works(&job);
            Err::<(), _>(io::Error::other("out of paper"))
        }
    });
    let running = schedules.start().await.unwrap();
    schedules.trigger(&name).await.unwrap();
    eventually("it has run", async || !runs(&db, &name).await.is_empty()).await;
    assert!(running.shutdown(PATIENCE).await);
    let run = &runs(&db, &name).await[0];
    let line = span(&format!("run{{schedule={name} ")).await;
    let token = format!("attempt=1 token={}", run.token);
    has(&line, &["slot=", &token, "error=\"out of paper\"", "outcome=\"failed\""]);
    let of = format!("run{{schedule={name} slot=");
    has(&events::in_spans(&format!("{name} works"))[0], &[&of, &token]);
    has(&events::in_spans(&format!("acquired key={key} "))[0], &[&of, &format!(":acquire{{key={key} ")]);
    has(&events::in_spans(&format!("released key={key} "))[0], &[&of]);
}

async fn a_tick_that_is_run_by_hand_is_in_the_callers_span<DB: TestDatabase>(db: TestDb<DB>) {
    let name = unique(&db, "tick");
    let schedule = due(&db, &name).await;
    let job = name.clone();
    let schedules = instance(&db, "me").on(schedule, move |_| {
        let job = job.clone();
        async move {
            works(&job);
            Ok::<_, Error>(())
        }
    });
    let outer = tracing::info_span!(target: "work", "outer", of = name);
    assert_eq!(schedules.try_tick(&name).instrument(outer).await.unwrap(), TickOutcome::Succeeded);
    let work = events::in_spans(&format!("{name} works"));
    has(&work[0], &[&format!("outer{{of=\"{name}\"}}:run{{schedule={name} slot=")]);
    let line = span(&format!("outer{{of=\"{name}\"}}:run{{schedule={name} ")).await;
    has(&line, &["outcome=\"succeeded\""]);
    assert_eq!(runs(&db, &name).await[0].attempt, 1);
}
