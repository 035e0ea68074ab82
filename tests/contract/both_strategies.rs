//! What both strategies guarantee through their common trait: code that is written against the
//! trait does not know which strategy it runs under.
//!
//! The checks return whether a guarantee held, so that a test can show that they detect a lock
//! which breaks it.

use std::{
    future::ready,
    sync::{Arc, Mutex},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired};
use rowlock::{
    Claim, Error, Key, ResourceLock, Retry, RunError, Status, Token,
    leases::Holder,
    strategy::{BoxFuture, CommitOutcome, Confirmation, Grant, ResourceLockExt, TransactionTerms},
};
use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    bank::{Lock, VERSION, accounts, balance, balance_in, deduct, locks, version, version_lock, write_in},
    child,
    isolation::pool_at,
};

harness::tests!(everywhere(
    no_update_is_lost_with_32_workers,
    no_update_is_lost_with_four_pools,
    no_update_is_lost_with_four_processes,
    a_stale_claim_cannot_commit,
    a_lock_that_confirms_nothing_is_caught,
    a_lock_of_the_applications_own_loses_no_update,
    a_claim_of_the_applications_own_lock_is_released_whatever_happens,
    work_that_raises_its_own_version_is_never_committed
));

/// Whether a guarantee held, and if not, what was observed.
pub type Verdict = Result<(), String>;

/// With 32 workers on one account, the balance contains exactly the deductions that were reported
/// as done. Contention is never reported as a database error.
pub async fn loses_no_update<DB: TestDatabase, L>(db: &TestDb<DB>, account: &'static str, locks: &[Arc<L>]) -> Verdict
where
    L: ResourceLock<DB> + ?Sized + 'static,
{
    let before = balance(db, account).await;
    let workers = (0..32).map(|worker| {
        let lock = locks[worker % locks.len()].clone();
        harness::spawn(async move { deduct(&*lock, account, 1).await })
    });
    let (mut done, mut wrong) = (0, Vec::new());
    for worker in workers.collect::<Vec<_>>() {
        match worker.await.unwrap() {
            Ok(_) => done += 1,
            Err(RunError::Other(Error::Conflict { .. })) => {}
            Err(error) => wrong.push(error),
        }
    }
    let left = balance(db, account).await;
    match (left == before - done, done > 0, wrong.is_empty()) {
        (true, true, true) => Ok(()),
        _ => Err(format!("{done} times 1 was taken from {before}, and {left} are left; {wrong:?}")),
    }
}

/// Of two claims on one key, the second is granted after the first has expired. Once the second has
/// committed, the first cannot commit.
pub async fn commits_no_stale_claim<DB: TestDatabase, L>(db: &TestDb<DB>, account: &str, lock: &L) -> Verdict
where
    L: ResourceLock<DB> + ?Sized,
{
    let before = balance(db, account).await;
    let first = acquired(lock.acquire(account, Duration::ZERO).await);
    db.execute(&format!("UPDATE t_resource_lock SET expires_at = {} WHERE key_resource = '{account}'", DB::ago(1)))
        .await;
    let second = acquired(lock.acquire(account, Duration::ZERO).await);
    deduct_under(db, lock, second.claim()).await.map_err(|error| format!("the second: {error:?}"))?;
    match deduct_under(db, lock, first.claim()).await {
        Err(Error::Lost { .. } | Error::Conflict { attempts: 1, .. }) => {}
        other => return Err(format!("the first: {other:?}")),
    }
    let left = balance(db, account).await;
    if left == before - 1 { Ok(()) } else { Err(format!("1 was taken from {before}, and {left} are left")) }
}

/// Deducts 1 in a transaction of the caller's own, which is rolled back if the claim is not
/// confirmed.
async fn deduct_under<DB: TestDatabase, L>(db: &TestDb<DB>, lock: &L, claim: &Claim) -> Result<Confirmation, Error>
where
    L: ResourceLock<DB> + ?Sized,
{
    let account = claim.key.as_str();
    let mut tx = db.pool.begin_with(DB::BEGIN).await.unwrap();
    let left = balance_in::<DB>(&mut tx, account).await.unwrap() - 1;
    write_in::<DB>(&mut tx, account, left).await.unwrap();
    let confirmation = lock.confirm(claim, &mut tx).await;
    if confirmation.is_ok() {
        tx.commit().await.unwrap()
    } else {
        tx.rollback().await.unwrap()
    }
    confirmation
}

async fn no_update_is_lost_with_32_workers<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        loses_no_update(&db, name, &[lock]).await.unwrap();
    }
}

async fn no_update_is_lost_with_four_pools<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let mut pools = Vec::new();
    for _ in 0..4 {
        pools.push(db.pool_of(3).await);
    }
    for strategy in 0..2 {
        let each: Vec<_> = pools.iter().map(|pool| locks(pool)[strategy].clone()).collect();
        let locks: Vec<Lock<DB>> = each.iter().map(|(_, lock)| lock.clone()).collect();
        loses_no_update(&db, each[0].0, &locks).await.unwrap();
    }
}

async fn no_update_is_lost_with_four_processes<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, _) in locks(&db.pool) {
        let before = balance(&db, name).await;
        let processes: Vec<_> = (0..4).map(|_| child::start(&db, "deduct", name, std::path::Path::new(""))).collect();
        for mut process in processes {
            assert!(timeout(3 * PATIENCE, process.wait()).await.unwrap().unwrap().success());
        }
        assert_eq!(balance(&db, name).await, before - 4 * 10, "{name}");
    }
}

async fn a_stale_claim_cannot_commit<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        commits_no_stale_claim(&db, name, &*lock).await.unwrap();
    }
}

/// A lock that confirms without a statement.
struct Unconfirmed<DB: TestDatabase>(Lock<DB>);

impl<DB: TestDatabase> ResourceLock<DB> for Unconfirmed<DB> {
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        self.0.acquire(key, wait)
    }

    fn confirm<'a>(&'a self, _: &'a Claim, _: &'a mut DB::Connection) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(ready(Ok(Confirmation(0))))
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        self.0.release(grant, status)
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        self.0.commit_outcome(claim, confirmation)
    }

    fn terms(&self) -> TransactionTerms {
        self.0.terms()
    }

    fn pool(&self) -> &Pool<DB> {
        self.0.pool()
    }
}

async fn a_lock_that_confirms_nothing_is_caught<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        let mutant = Unconfirmed(lock);
        let seen = commits_no_stale_claim(&db, name, &mutant).await.unwrap_err();
        assert!(seen.contains("the first: Ok"), "{name}: {seen}");
    }
    // A lease excludes other workers before they begin, and SQLite allows one writing transaction
    // at a time.
    if db.server.name != "sqlite" {
        let db = db.over(pool_at(&db, "read committed").await);
        let mutant = Arc::new(Unconfirmed(locks(&db.pool)[1].1.clone()));
        let seen = loses_no_update(&db, VERSION, &[mutant]).await.unwrap_err();
        assert!(seen.starts_with("32 times") && seen.ends_with("[]"), "{seen}");
    }
}

/// A lock of an application: it reads the version of an account and raises it in the transaction.
/// It implements what the trait requires, and no more.
struct Own<DB: TestDatabase>(Pool<DB>);

impl<DB: TestDatabase> ResourceLock<DB> for Own<DB> {
    fn acquire<'a>(&'a self, key: &'a str, _: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move {
            let key = Key::new(key)?;
            let sql = format!("SELECT CAST(version AS char(20)) FROM account WHERE id = '{key}'");
            let version = DB::text_on(&mut *self.0.acquire().await.unwrap(), &sql).await.unwrap().unwrap();
            let token = Token::new(version.trim().parse().unwrap());
            Ok(Claim { key, holder: Holder::unique(), token }.into())
        })
    }

    fn confirm<'a>(
        &'a self,
        Claim { key, token, .. }: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(async move {
            let next = token.get() + 1;
            let sql = format!("UPDATE account SET version = {next} WHERE id = '{key}' AND version = {token}");
            match DB::execute_on(tx, &sql).await {
                Ok(1) => Ok(Confirmation(next)),
                Ok(_) => Err(Error::Lost { key: key.clone(), token: *token }),
                Err(_) => Err(Error::conflict(key.clone(), 1)),
            }
        })
    }

    fn pool(&self) -> &Pool<DB> {
        &self.0
    }
}

async fn a_lock_of_the_applications_own_loses_no_update<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    loses_no_update(&db, VERSION, &[Arc::new(Own(db.pool.clone()))]).await.unwrap();
}

/// A lock of an application that grants every key, and records what is released.
struct Recording<DB: TestDatabase> {
    pool: Pool<DB>,
    terms: TransactionTerms,
    /// What the first confirmations return.
    unconfirmed: Mutex<Vec<Error>>,
    released: Mutex<Vec<Status>>,
}

impl<DB: TestDatabase> ResourceLock<DB> for Recording<DB> {
    fn acquire<'a>(&'a self, key: &'a str, _: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        let claim = Key::new(key).map(|key| Claim { key, holder: Holder::unique(), token: Token::new(1) });
        Box::pin(ready(Ok(claim.unwrap().into())))
    }

    fn confirm<'a>(&'a self, _: &'a Claim, _: &'a mut DB::Connection) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(ready(self.unconfirmed.lock().unwrap().pop().map_or(Ok(Confirmation(1)), Err)))
    }

    fn release(&self, _: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        self.released.lock().unwrap().push(status);
        Box::pin(ready(Ok(())))
    }

    fn terms(&self) -> TransactionTerms {
        self.terms
    }

    fn pool(&self) -> &Pool<DB> {
        &self.pool
    }
}

async fn a_claim_of_the_applications_own_lock_is_released_whatever_happens<DB: TestDatabase>(db: TestDb<DB>) {
    use Status::{Failed, Succeeded};
    let pool = db.pool_of(1).await;
    let lock = |unconfirmed: Vec<Error>, confirm_last| {
        let retry = Retry { attempts: 2, ..Retry::default() };
        let terms = TransactionTerms { confirm_last, retry, ..TransactionTerms::default() };
        Recording { pool: pool.clone(), terms, unconfirmed: Mutex::new(unconfirmed), released: Mutex::default() }
    };
    let done = async |lock: Recording<DB>, keeps: bool| {
        let kept = Mutex::new(None);
        let ended = lock.transaction("k", async |tx| {
            if keeps {
                *kept.lock().unwrap() = Some(tx);
            }
            Ok::<_, sqlx::Error>(())
        });
        let is_ok = ended.await.is_ok();
        (is_ok, lock.released.into_inner().unwrap())
    };
    let key = Key::new("k").unwrap();
    let conflict = || Error::conflict(key.clone(), 1);
    let lost = || Error::Lost { key: key.clone(), token: Token::new(1) };
    let failed = || Error::from(rowlock::errors::Setup::TableMissing);
    for last in [false, true] {
        assert_eq!(done(lock(vec![], last), false).await, (true, vec![Succeeded]));
        assert_eq!(done(lock(vec![failed()], last), false).await, (false, vec![Failed]), "confirmed last: {last}");
        assert_eq!(done(lock(vec![lost()], last), false).await, (true, vec![Failed, Succeeded]), "{last}");
        assert_eq!(done(lock(vec![], last), true).await, (false, vec![Failed]), "{last}");
    }
    // The claim stands after a conflict, unless it is confirmed last.
    assert_eq!(done(lock(vec![conflict()], false), false).await, (true, vec![Succeeded]));
    assert_eq!(done(lock(vec![conflict(), conflict()], false), false).await, (false, vec![Failed]));
    assert_eq!(done(lock(vec![conflict()], true), false).await, (true, vec![Failed, Succeeded]));
    assert_eq!(done(lock(vec![conflict(), conflict()], true), false).await, (false, vec![Failed, Failed]));
    // BEGIN cannot be sent.
    pool.close().await;
    assert_eq!(done(lock(vec![], false), false).await, (false, vec![Failed]));
}

async fn work_that_raises_its_own_version_is_never_committed<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let lock = version_lock::<DB>(&db.pool).retry(Retry { attempts: 3, ..Retry::default() });
    let done = lock.transaction(VERSION, async |mut tx| {
        DB::execute_on(&mut tx, &format!("UPDATE account SET version = version + 1 WHERE id = '{VERSION}'")).await
    });
    let done = done.await;
    assert!(matches!(done, Err(RunError::Other(Error::Conflict { attempts: 3, .. }))), "{done:?}");
    assert_eq!(version(&db, VERSION).await, 0);
}
