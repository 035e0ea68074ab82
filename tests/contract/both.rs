//! What both strategies promise, through the one trait: code that is written against it does not know which it runs under.

use std::{sync::Arc, time::Duration};

use rowlock::{ResourceLock, ResourceLockExt, VersionLock};
use tokio::time::sleep;

use crate::bed::{Bed, Site};

/// Both strategies on the table `account`, by their names.
pub fn locks<DB: Bed>(site: &Site<DB>) -> [(&'static str, Arc<dyn ResourceLock<DB>>); 2] {
    let version = VersionLock::new(site.pool.clone(), "account", "id", "version").unwrap();
    [("lease", Arc::new(site.lock())), ("version", Arc::new(version))]
}

/// The application's table, with one account for each strategy.
pub async fn accounts<DB: Bed>(site: &Site<DB>) {
    let table = "CREATE TABLE account (id varchar(40) PRIMARY KEY, balance bigint NOT NULL, version int NOT NULL)";
    site.execute(table).await;
    site.execute("INSERT INTO account VALUES ('lease', 1000, 0), ('version', 1000, 0)").await;
}

pub async fn no_update_is_lost_with_32_workers<DB: Bed>(site: Site<DB>) {
    accounts(&site).await;
    for (name, lock) in locks(&site) {
        let workers = (0..32).map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move { deduct(&*lock, name, 1).await })
        });
        for worker in workers.collect::<Vec<_>>() {
            worker.await.unwrap().unwrap();
        }
        let balance = site.number(&format!("SELECT balance FROM account WHERE id = '{name}'")).await;
        assert_eq!(balance, Some(1000 - 32), "{name}");
    }
}

/// Reads, sleeps, and writes what it made of what it read.
async fn deduct<DB: Bed, L: ResourceLock<DB> + ?Sized>(
    lock: &L,
    account: &str,
    amount: i64,
) -> Result<i64, rowlock::TransactionError<sqlx::Error>> {
    let deducted = lock.transaction(account, |mut tx, _| async move {
        let sql = format!("SELECT CAST(balance AS char(20)) FROM account WHERE id = '{account}'");
        let balance: i64 = DB::text_on(&mut tx, &sql).await?.unwrap().trim().parse().unwrap();
        sleep(Duration::from_millis(2)).await;
        let left = balance - amount;
        DB::execute_on(&mut tx, &format!("UPDATE account SET balance = {left} WHERE id = '{account}'")).await?;
        Ok(left)
    });
    deducted.await
}
