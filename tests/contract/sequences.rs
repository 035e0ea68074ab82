//! Random sequences of changes, against a plain model of a balance and its version.
//!
//! A failure prints the seed. `ROWLOCK_SEED` set to it repeats that sequence.

use harness::{TestDatabase, TestDb, between};
use rowlock::{
    Error, VersionedTable,
    balances::{Insufficient, UpdateError, Updated},
};

use crate::ledger::{ledger, outside, row, updated};

harness::tests!(everywhere(random_sequences_end_as_their_model_does));

const SEQUENCES: usize = 12;
const LENGTH: usize = 40;

#[derive(Clone, Copy, Debug)]
enum Step {
    Deposit(i64),
    Deduct(i64),
    Update(i64),
    /// A computation that fails.
    Fail(i64),
    /// Another client writes this between the read and the write, the given number of times.
    Overtaken(i64, u32),
    /// The same in a transaction, which is rolled back.
    OvertakenIn(i64),
    /// The given number of changes in a transaction, which is committed or rolled back.
    In(i64, u32, bool),
    Outside(i64),
}

impl Step {
    fn random(random: &mut fastrand::Rng) -> Self {
        let amount = random.i64(1..60);
        match random.u8(0..9) {
            0 => Self::Deposit(amount),
            1 | 2 => Self::Deduct(amount),
            3 => Self::Update(amount - 30),
            4 => Self::Fail(amount),
            5 => Self::Overtaken(amount, random.u32(1..4)),
            6 => Self::OvertakenIn(amount),
            7 => Self::In(amount - 30, random.u32(1..4), random.bool()),
            _ => Self::Outside(amount),
        }
    }
}

/// The expected state of the account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Model {
    balance: i64,
    version: i64,
}

impl Model {
    fn set(&mut self, balance: i64) {
        *self = Self { balance, version: self.version + 1 };
    }

    fn add(&mut self, amount: i64) -> Updated<i64> {
        self.set(self.balance + amount);
        updated(self.balance, self.version, 1)
    }
}

async fn random_sequences_end_as_their_model_does<DB: TestDatabase>(db: TestDb<DB>) {
    let told = std::env::var("ROWLOCK_SEED").ok().map(|seed| seed.parse().expect("ROWLOCK_SEED is a number"));
    let seeds = told.map_or_else(|| (0..SEQUENCES).map(|_| fastrand::u64(..)).collect(), |seed| vec![seed]);
    let table = ledger(&db).await;
    for seed in seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut model = Model { balance: 100, version: 0 };
        outside(&db, "balance = 100, version = 0").await;
        for number in 0..LENGTH {
            let step = Step::random(&mut random);
            let before = model;
            if let Err(wrong) = take(&db, &table, step, &mut model).await {
                panic!("seed {seed}, step {number}, {step:?} on {before:?}: {wrong}");
            }
            let read = table.read("a").await.unwrap().unwrap();
            let (balance, version) = row(&db).await;
            let (reads, stands) = (Model { balance: read.value, version: read.version }, Model { balance, version });
            assert!(
                reads == model && stands == model,
                "seed {seed}, step {number}, {step:?}: {stands:?}, not {model:?}"
            );
        }
    }
}

/// Applies the step to the table and to the model. The error describes a wrong answer.
async fn take<DB: TestDatabase>(
    db: &TestDb<DB>,
    table: &VersionedTable<DB>,
    step: Step,
    model: &mut Model,
) -> Result<(), String> {
    match step {
        Step::Deposit(amount) => same(table.deposit("a", amount).await, model.add(amount)),
        Step::Deduct(amount) if model.balance >= amount => same(table.deduct("a", amount).await, model.add(-amount)),
        Step::Deduct(amount) => match table.deduct("a", amount).await {
            Err(UpdateError::Computation(Insufficient { balance, .. })) if balance == model.balance => Ok(()),
            other => Err(format!("{other:?}")),
        },
        Step::Update(change) => {
            same(table.update("a", |balance| Ok::<_, Error>(balance + change)).await, model.add(change))
        }
        Step::Fail(code) => match table.update("a", |_| Err(code)).await {
            Err(UpdateError::Computation(told)) if told == code => Ok(()),
            other => Err(format!("{other:?}")),
        },
        Step::Overtaken(amount, times) => overtaken(db, table, amount, times, model).await,
        Step::OvertakenIn(balance) => {
            let mut tx = db.pool.begin().await.unwrap();
            let update = table.update_in(&mut tx, "a", |old| {
                between(write(db, balance));
                Ok::<_, Error>(old + 1)
            });
            let result = update.await;
            tx.rollback().await.unwrap();
            model.set(balance);
            match result {
                Err(UpdateError::Other(Error::Conflict { attempts: 1, .. })) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        }
        Step::In(change, times, commits) => {
            let mut inside = *model;
            let mut tx = db.pool.begin().await.unwrap();
            for _ in 0..times {
                let update = table.update_in(&mut tx, "a", |balance| Ok::<_, Error>(balance + change)).await;
                same(update, inside.add(change))?;
            }
            if commits {
                tx.commit().await.unwrap();
                *model = inside;
            } else {
                tx.rollback().await.unwrap();
            }
            Ok(())
        }
        Step::Outside(balance) => {
            write(db, balance).await;
            model.set(balance);
            Ok(())
        }
    }
}

async fn overtaken<DB: TestDatabase>(
    db: &TestDb<DB>,
    table: &VersionedTable<DB>,
    balance: i64,
    times: u32,
    model: &mut Model,
) -> Result<(), String> {
    let mut calls = 0;
    let update = table.update("a", |old| {
        calls += 1;
        if calls <= times {
            between(write(db, balance));
        }
        Ok::<_, Error>(old + 1)
    });
    let result = update.await;
    (0..times).for_each(|_| model.set(balance));
    same(result, Updated { attempts: times + 1, ..model.add(1) })
}

/// A write by another program that increments the version.
async fn write<DB: TestDatabase>(db: &TestDb<DB>, balance: i64) {
    outside(db, &format!("balance = {balance}, version = version + 1")).await;
}

fn same<E: std::fmt::Debug>(result: Result<Updated<i64>, E>, expected: Updated<i64>) -> Result<(), String> {
    match result {
        Ok(updated) if updated == expected => Ok(()),
        other => Err(format!("{other:?}, not {expected:?}")),
    }
}
