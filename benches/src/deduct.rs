//! Deductions from accounts under contention from many tasks.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use clap::Args;
use rowlock::{
    Retry, VersionedTable,
    balances::{Columns, Insufficient, UpdateError, Value},
};
use sqlx::Pool;

use crate::{
    contest::{Contender, Contest, Cycling, Entry},
    database::{Kind, PATIENCE, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::Rounds,
    report::{Report, Shown},
    speak::{
        Bind::{Number, Text},
        Speak, fill,
    },
};

/// More than is ever deducted.
const START: i64 = 1_000_000_000_000;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
    #[arg(long, default_value_t = 64)]
    tasks: usize,
    /// How many accounts there are; each deduction takes from any of them.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 1000])]
    accounts: Vec<usize>,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown =
        Shown { counted: "deductions", size: Some("accounts"), attempts: true, base: "rowlock", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    println!("Deductions of 1 from accounts: medians of {} rounds.", options.rounds.rounds);
    println!(
        "rowlock: VersionedTable::deduct; single: one UPDATE that takes it if it is there; for-update: SELECT FOR UPDATE and UPDATE in a transaction."
    );
    for (kind, server) in options.rounds.common.on.servers() {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error>
where
    i64: Value<DB>,
{
    at_own_site::<DB>(server, async |site| {
        durability::show::<DB>(kind, site).await?;
        report.head();
        for &accounts in &options.accounts {
            contest::<DB>(kind, site, accounts, options, report).await?;
        }
        Ok(())
    })
    .await
}

async fn contest<DB: Speak>(
    kind: Kind,
    site: &Site,
    accounts: usize,
    options: &Options,
    report: &mut Report,
) -> Result<(), Error>
where
    i64: Value<DB>,
{
    let Options { rounds, tasks, .. } = options;
    let pool = patient_pool::<DB>(&site.url, rounds.connections).await?;
    let mut ledgers = Vec::new();
    for (name, table) in [("rowlock", "by_version"), ("single", "by_guard"), ("for-update", "by_lock")] {
        if rounds.wants(name) {
            ledgers.push((name, Ledger::new(&pool, table, accounts).await?));
        }
    }
    let mut entries = Vec::new();
    for (name, ledger) in &ledgers {
        let ledger = ledger.clone();
        let contender: Arc<dyn Contender> = match *name {
            "rowlock" => Arc::new(ByVersion::new(ledger)?),
            "single" => Arc::new(ByGuard(ledger)),
            _ => Arc::new(ByLock(ledger)),
        };
        entries.push(Entry::new(name, accounts, contender));
    }
    let contest = Contest { scenario: "deduct", server: kind.name(), tasks: *tasks, entries, rounds, wal: None };
    contest.run(report).await?;
    for (name, ledger) in &ledgers {
        ledger.check().await.map_err(|error| format!("{}: {name}: {error}", kind.name()))?;
    }
    Ok(())
}

/// A contender's own accounts, and the amount deducted from them.
struct Ledger<DB: Speak> {
    pool: Pool<DB>,
    table: &'static str,
    accounts: usize,
    taken: AtomicI64,
}

impl<DB: Speak> Ledger<DB> {
    async fn new(pool: &Pool<DB>, table: &'static str, accounts: usize) -> Result<Arc<Self>, Error> {
        let columns = "id VARCHAR(40) NOT NULL PRIMARY KEY, balance BIGINT NOT NULL, version INT NOT NULL DEFAULT 0";
        DB::script(pool, format!("DROP TABLE IF EXISTS {table}")).await?;
        DB::script(pool, format!("CREATE TABLE {table} ({columns})")).await?;
        let rows = (0..accounts).map(|account| format!("('{}', {START})", id(account)));
        fill(pool, &format!("{table} (id, balance)"), rows).await?;
        Ok(Arc::new(Self { pool: pool.clone(), table, accounts, taken: AtomicI64::new(0) }))
    }

    fn any(&self) -> String {
        id(fastrand::usize(..self.accounts))
    }

    fn took(&self) {
        self.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// The remaining sum must be the initial sum, less what was deducted.
    async fn check(&self) -> Result<(), Error> {
        let sql = match self.table {
            "by_version" => "SELECT CAST(SUM(balance) AS CHAR(30)) FROM by_version",
            "by_guard" => "SELECT CAST(SUM(balance) AS CHAR(30)) FROM by_guard",
            _ => "SELECT CAST(SUM(balance) AS CHAR(30)) FROM by_lock",
        };
        let row = DB::row(&mut *self.pool.acquire().await?, sql, &[]).await?.ok_or("no sum")?;
        let left: i64 = DB::text(&row, 0)?.trim().parse()?;
        let taken = self.taken.load(Ordering::Relaxed);
        match i64::try_from(self.accounts)? * START - left {
            gone if gone == taken => Ok(()),
            gone => Err(format!("WRONG: {taken} deductions were made, and {gone} is missing").into()),
        }
    }
}

fn id(account: usize) -> String {
    format!("account-{account}")
}

/// rowlock's way: reads the version, and writes if the version is unchanged.
struct ByVersion<DB: Speak> {
    ledger: Arc<Ledger<DB>>,
    table: VersionedTable<DB>,
}

impl<DB: Speak> ByVersion<DB> {
    fn new(ledger: Arc<Ledger<DB>>) -> Result<Self, Error> {
        let columns = Columns { table: ledger.table, key: "id", value: "balance", version: "version" };
        // A deduction that loses a hundred times still continues.
        let retry = Retry { attempts: 1_000_000, within: PATIENCE };
        let table = VersionedTable::new(ledger.pool.clone(), columns).retry(retry).time_limit(PATIENCE);
        Ok(Self { ledger, table })
    }
}

impl<DB: Speak> Contender for ByVersion<DB>
where
    i64: Value<DB>,
{
    fn cycle(&self, _: usize) -> Cycling<'_> {
        Box::pin(async {
            let updated = self.table.deduct(&self.ledger.any(), 1).await.map_err(plain)?;
            self.ledger.took();
            Ok(updated.attempts)
        })
    }
}

fn plain(error: UpdateError<Insufficient<i64>>) -> Error {
    error.to_string().into()
}

/// One statement, which deducts if the balance is sufficient.
struct ByGuard<DB: Speak>(Arc<Ledger<DB>>);

impl<DB: Speak> Contender for ByGuard<DB> {
    fn cycle(&self, _: usize) -> Cycling<'_> {
        Box::pin(async {
            let mut conn = self.0.pool.acquire().await?;
            let binds = [Number(1), Text(&self.0.any()), Number(1)];
            match DB::execute(&mut conn, DB::DEDUCT, &binds).await? {
                1 => self.0.took(),
                rows => return Err(format!("the deduction changed {rows} rows").into()),
            }
            Ok(1)
        })
    }
}

/// A transaction that locks the row, computes in the client, and writes.
struct ByLock<DB: Speak>(Arc<Ledger<DB>>);

impl<DB: Speak> Contender for ByLock<DB> {
    fn cycle(&self, _: usize) -> Cycling<'_> {
        Box::pin(async {
            let account = self.0.any();
            let mut tx = self.0.pool.begin_with(DB::BEGIN).await?;
            let row = DB::row(&mut tx, DB::BALANCE, &[Text(&account)]).await?.ok_or("no such account")?;
            let left = DB::number(&row, 0)?.checked_sub(1).filter(|left| *left >= 0).ok_or("nothing is left")?;
            DB::execute(&mut tx, DB::SET_BALANCE, &[Number(left), Text(&account)]).await?;
            tx.commit().await?;
            self.0.took();
            Ok(1)
        })
    }
}

#[cfg(test)]
mod tests {
    use sqlx::Sqlite;

    use super::*;

    #[tokio::test]
    async fn a_deduction_that_left_no_trace_is_told() -> Result<(), Error> {
        at_own_site::<Sqlite>("", async |site| {
            let pool = patient_pool::<Sqlite>(&site.url, 1).await?;
            let ledger = Ledger::new(&pool, "by_guard", 3).await?;
            ByGuard(ledger.clone()).cycle(0).await?;
            ledger.check().await?;
            ledger.took();
            let wrong = ledger.check().await.unwrap_err().to_string();
            assert_eq!(wrong, "WRONG: 2 deductions were made, and 1 is missing");
            Ok(())
        })
        .await
    }
}
