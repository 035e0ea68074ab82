//! The application's table of accounts, and both strategies on it.

use std::{sync::Arc, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{LeaseLock, ResourceLock, Retry, RunError, VersionLock, strategy::ResourceLockExt};
use sqlx::Pool;
use tokio::time::sleep;

pub type Lock<DB> = Arc<dyn ResourceLock<DB>>;

/// The names of the strategies, which are also the names of their accounts.
pub const LEASE: &str = "lease";
pub const VERSION: &str = "version";

/// The initial balance of an account.
pub const OPENING: i64 = 1000;

/// Creates the application's table, with one account for each strategy and one for neither.
pub async fn accounts<DB: TestDatabase>(db: &TestDb<DB>) {
    let table = "CREATE TABLE account (id varchar(40) PRIMARY KEY, balance bigint NOT NULL, version int NOT NULL)";
    db.execute(table).await;
    for account in [LEASE, VERSION, "other"] {
        db.execute(&format!("INSERT INTO account VALUES ('{account}', {OPENING}, 0)")).await;
    }
}

/// Longer than 32 workers take on a busy machine.
pub const PATIENT: Retry = Retry { attempts: 100_000, within: Duration::from_secs(6 * PATIENCE.as_secs()) };

/// Returns both strategies as trait objects, as an application has them that chooses one by
/// configuration.
pub fn locks<DB: TestDatabase>(pool: &Pool<DB>) -> [(&'static str, Lock<DB>); 2] {
    locks_with(pool, PATIENT)
}

pub fn locks_with<DB: TestDatabase>(pool: &Pool<DB>, retry: Retry) -> [(&'static str, Lock<DB>); 2] {
    let lease = LeaseLock::new(pool.clone()).retry(retry);
    [(LEASE, Arc::new(lease)), (VERSION, Arc::new(version_lock(pool).retry(retry)))]
}

pub fn version_lock<DB: TestDatabase>(pool: &Pool<DB>) -> VersionLock<DB> {
    VersionLock::new(pool.clone(), "account", "id", "version")
}

pub async fn balance<DB: TestDatabase>(db: &TestDb<DB>, account: &str) -> i64 {
    db.number(&format!("SELECT balance FROM account WHERE id = '{account}'")).await.unwrap()
}

pub async fn version<DB: TestDatabase>(db: &TestDb<DB>, account: &str) -> i64 {
    db.number(&format!("SELECT version FROM account WHERE id = '{account}'")).await.unwrap()
}

pub async fn balance_in<DB: TestDatabase>(tx: &mut DB::Connection, account: &str) -> Result<i64, sqlx::Error> {
    let sql = format!("SELECT CAST(balance AS char(20)) FROM account WHERE id = '{account}'");
    Ok(DB::text_on(tx, &sql).await?.unwrap().trim().parse().unwrap())
}

pub async fn write_in<DB: TestDatabase>(
    tx: &mut DB::Connection,
    account: &str,
    balance: i64,
) -> Result<u64, sqlx::Error> {
    DB::execute_on(tx, &format!("UPDATE account SET balance = {balance} WHERE id = '{account}'")).await
}

/// Reads the balance, sleeps, and writes the difference.
pub async fn deduct<DB: TestDatabase, L: ResourceLock<DB> + ?Sized>(
    lock: &L,
    account: &str,
    amount: i64,
) -> Result<i64, RunError<sqlx::Error>> {
    let deducted = lock.transaction(account, |mut tx| async move {
        let left = balance_in::<DB>(&mut tx, account).await? - amount;
        sleep(Duration::from_millis(2)).await;
        write_in::<DB>(&mut tx, account, left).await?;
        Ok(left)
    });
    deducted.await
}
