//! The possible outcomes of a read, an update, a deduction and a deposit.

use std::{convert::Infallible, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, between};
use rowlock::{
    Error, Retry, RunError, VersionLock, VersionedTable,
    balances::{Insufficient, UpdateError},
    errors::{Certainty, DatabaseFault, NotFound},
};

use crate::ledger::{COLUMNS, at_every_point, changed_nothing, create, insert, ledger, outside, row, updated};

harness::tests!(
    everywhere(
        a_row_that_is_not_there_is_none_and_is_not_made,
        an_update_writes_value_and_version_and_says_so,
        an_error_of_the_computation_comes_back_as_it_is_at_once_with_nothing_written,
        an_update_computes_anew_after_a_conflict,
        attempts_that_are_used_up_are_a_conflict_that_counts_them,
        a_balance_that_does_not_cover_the_amount_says_both,
        amounts_that_are_not_positive_or_do_not_fit_are_refused,
        a_program_that_forgets_the_version_is_not_overwritten,
        a_program_that_forgets_the_version_leaves_no_balance_below_zero,
        a_balance_that_came_back_is_another_one,
        a_version_or_value_of_null_is_an_error_that_changes_nothing,
        a_version_that_cannot_grow_is_an_error_that_changes_nothing,
        no_deduction_is_lost_with_32_workers,
        a_balance_never_falls_below_zero_with_32_workers
    ),
    servers(a_sum_that_the_column_cannot_hold_is_an_error_that_changes_nothing)
);

/// Long enough for any number of conflicts.
pub const PATIENT: Retry = Retry { attempts: 1_000_000, within: Duration::from_secs(120) };

async fn a_row_that_is_not_there_is_none_and_is_not_made<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    assert_eq!(table.read("b").await.unwrap(), None);
    let update = table.update("b", |_| -> Result<i64, Infallible> { panic!("there is nothing to compute with") }).await;
    let error = match update {
        Err(UpdateError::Other(error)) => error,
        other => panic!("{other:?}"),
    };
    assert!(
        matches!(&error, Error::NotFound(NotFound::Row { table, key, .. }) if table == "account" && key.as_str() == "b"),
        "{error:?}"
    );
    assert!(matches!(table.deduct("b", 1).await, Err(UpdateError::Other(Error::NotFound(NotFound::Row { .. })))));
    assert!(matches!(table.deposit("b", 1).await, Err(Error::NotFound(NotFound::Row { .. }))));
    assert!(matches!(table.deposit("", 1).await, Err(Error::Invalid(_))));
    assert_eq!(db.number("SELECT COUNT(*) FROM account").await, Some(2));
    assert_eq!(row(&db).await, (100, 0));
}

async fn an_update_writes_value_and_version_and_says_so<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    assert_eq!(table.update("a", |balance| Ok::<_, Infallible>(balance * 2)).await.unwrap(), updated(200, 1, 1));
    assert_eq!(row(&db).await, (200, 1));
    let read = table.read("a").await.unwrap().unwrap();
    assert_eq!((read.value, read.version), (200, 1));
    // Writing the same value again is a change too: a caller that read the value before must detect
    // it.
    assert_eq!(table.update("a", |balance| Ok::<_, Infallible>(*balance)).await.unwrap(), updated(200, 2, 1));
    assert_eq!(row(&db).await, (200, 2));
}

async fn an_error_of_the_computation_comes_back_as_it_is_at_once_with_nothing_written<DB: TestDatabase>(
    db: TestDb<DB>,
) {
    #[derive(Debug, PartialEq)]
    struct Frozen(i64);
    let table = ledger(&db).await;
    let mut calls = 0;
    let update = table.update("a", |balance| {
        calls += 1;
        Err(Frozen(*balance))
    });
    assert!(matches!(update.await, Err(UpdateError::Computation(Frozen(100)))));
    assert_eq!((calls, row(&db).await), (1, (100, 0)));
}

async fn an_update_computes_anew_after_a_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let mut seen = Vec::new();
    let update = table.update("a", |balance| {
        seen.push(*balance);
        if seen.len() < 3 {
            between(outside(&db, "balance = balance + 1000, version = version + 1"));
        }
        Ok::<_, Infallible>(balance - 1)
    });
    assert_eq!(update.await.unwrap(), updated(2099, 3, 3));
    assert_eq!((seen, row(&db).await), (vec![100, 1100, 2100], (2099, 3)));
}

/// An update during each of whose attempts another client writes first. Returns the number of
/// attempts and the error.
async fn always_overtaken<DB: TestDatabase>(db: &TestDb<DB>, table: &VersionedTable<DB>, retry: Retry) -> (u32, Error) {
    let table = table.clone().retry(retry);
    let (before, mut calls) = (row(db).await, 0);
    let update = table.update("a", |balance| {
        calls += 1;
        between(outside(db, "version = version + 1"));
        Ok::<_, Infallible>(balance - 1)
    });
    let UpdateError::Other(error) = update.await.unwrap_err();
    assert_eq!(row(db).await, (before.0, before.1 + i64::from(calls)));
    (calls, error)
}

async fn attempts_that_are_used_up_are_a_conflict_that_counts_them<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    for most in [1, 3] {
        let (calls, error) = always_overtaken(&db, &table, Retry { attempts: most, ..PATIENT }).await;
        assert!(calls == most && matches!(error, Error::Conflict { attempts, .. } if attempts == most), "{error:?}");
        assert!(error.is_retryable() && error.to_string().contains("nothing was changed"), "{error}");
    }
    // The time may also be over in the middle of an attempt.
    let short = Retry { within: Duration::from_millis(300), ..PATIENT };
    let started = tokio::time::Instant::now();
    loop {
        let (calls, error) = always_overtaken(&db, &table, short).await;
        if let Error::Conflict { attempts, .. } = error {
            break assert_eq!(attempts, calls);
        }
        assert!(started.elapsed() < PATIENCE, "{error:?}");
    }
    for bad in [Retry { attempts: 0, ..PATIENT }, Retry { within: Duration::ZERO, ..PATIENT }] {
        let table = table.clone().retry(bad);
        assert!(table.check().is_err(), "{bad:?}");
        assert!(matches!(table.deposit("a", 1).await, Err(Error::Invalid(_))), "{bad:?}");
    }
}

async fn a_balance_that_does_not_cover_the_amount_says_both<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    for amount in [101, i64::MAX] {
        let error = table.deduct("a", amount).await.unwrap_err();
        let insufficient = Insufficient { balance: 100, amount };
        assert!(matches!(&error, UpdateError::Computation(told) if *told == insufficient), "{error:?}");
    }
    assert_eq!(row(&db).await, (100, 0));
    assert_eq!(table.deduct("a", 100).await.unwrap(), updated(0, 1, 1));
    assert!(matches!(
        table.deduct("a", 1).await,
        Err(UpdateError::Computation(Insufficient { balance: 0, amount: 1 }))
    ));
    outside(&db, "balance = -5").await;
    assert!(matches!(table.deduct("a", 1).await, Err(UpdateError::Computation(Insufficient { balance: -5, .. }))));
    assert_eq!(table.deposit("a", 3).await.unwrap(), updated(-2, 2, 1));
    assert_eq!(row(&db).await, (-2, 2));
}

async fn amounts_that_are_not_positive_or_do_not_fit_are_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let closed = db.pool_of(1).await;
    closed.close().await;
    let nowhere = VersionedTable::new(closed, COLUMNS);
    for amount in [0, -1, i64::MIN] {
        let refused =
            |error: &Error| matches!(error, Error::Invalid(wrong) if wrong.to_string().contains("for key \"a\""));
        let deposit = nowhere.deposit("a", amount).await.unwrap_err();
        assert!(refused(&deposit) && deposit.to_string().contains("more than zero"), "{amount}: {deposit:?}");
        let deduct = nowhere.deduct("a", amount).await.unwrap_err();
        assert!(matches!(&deduct, UpdateError::Other(error) if refused(error)), "{amount}: {deduct:?}");
    }
    assert!(
        matches!(changed_nothing(table.deposit("a", i64::MAX).await), Error::Invalid(ref wrong) if wrong.to_string().contains("an amount of"))
    );
    outside(&db, "balance = 9223372036854775806").await;
    assert_eq!(table.deposit("a", 1).await.unwrap(), updated(i64::MAX, 1, 1));
    assert!(
        matches!(changed_nothing(table.deposit("a", 1).await), Error::Invalid(ref wrong) if wrong.to_string().contains("an amount of"))
    );
    assert_eq!(row(&db).await, (i64::MAX, 1));
    assert_eq!(table.deduct("a", i64::MAX).await.unwrap(), updated(0, 2, 1));
}

/// SQLite's integers all have 64 bits.
async fn a_sum_that_the_column_cannot_hold_is_an_error_that_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    create(&db, "account", "varchar(40)", "int", "int").await;
    insert(&db, "account", "'a'", 2_147_483_600).await;
    insert(&db, "account", "'other'", 1).await;
    let table = VersionedTable::new(db.pool.clone(), COLUMNS);
    for _ in 0..3 {
        let error = changed_nothing(table.deposit("a", 100).await);
        assert!(
            matches!(error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. })),
            "{error:?}"
        );
        changed_nothing(table.update("a", |_| Ok::<_, Error>(i64::MIN)).await);
    }
    assert_eq!(row(&db).await, (2_147_483_600, 0));
    assert_eq!(table.deposit("a", 47).await.unwrap(), updated(2_147_483_647, 1, 1));
}

/// The version alone would not show the change. The update also compares the value that was read.
async fn a_program_that_forgets_the_version_is_not_overwritten<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let prepare = async || outside(&db, "balance = 100, version = 0").await;
    let spends = async || outside(&db, "balance = balance - 15").await;
    at_every_point(
        prepare,
        async || table.deduct("a", 10).await.unwrap(),
        spends,
        async |deducted| {
            assert_eq!(row(&db).await, (75, 1));
            deducted == updated(75, 1, 2)
        },
    )
    .await;
    at_every_point(
        prepare,
        async || table.deposit("a", 10).await.unwrap(),
        spends,
        async |deposited| {
            assert_eq!(row(&db).await, (95, 1));
            deposited == updated(95, 1, 2)
        },
    )
    .await;
}

async fn a_program_that_forgets_the_version_leaves_no_balance_below_zero<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let prepare = async || outside(&db, "balance = 100, version = 0").await;
    // The program checks the balance.
    let spends = async || {
        db.execute("UPDATE account SET balance = balance - 95 WHERE id = 'a' AND balance >= 95").await;
    };
    at_every_point(
        prepare,
        async || table.deduct("a", 10).await,
        spends,
        async |deducted| match deducted {
            Err(UpdateError::Computation(insufficient)) => {
                assert_eq!((insufficient.balance, row(&db).await), (5, (5, 0)));
                true
            }
            other => {
                assert_eq!((other.unwrap(), row(&db).await), (updated(90, 1, 1), (90, 1)));
                false
            }
        },
    )
    .await;
}

/// The value alone would not show the change.
async fn a_balance_that_came_back_is_another_one<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let prepare = async || outside(&db, "balance = 100, version = 0").await;
    let there_and_back = async || outside(&db, "version = version + 2").await;
    at_every_point(
        prepare,
        async || table.deduct("a", 10).await.unwrap(),
        there_and_back,
        async |deducted| {
            assert_eq!(row(&db).await, (90, 3));
            deducted == updated(90, 3, 2)
        },
    )
    .await;
}

async fn a_version_or_value_of_null_is_an_error_that_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let lock = VersionLock::new(db.pool.clone(), "account", "id", "version");
    for column in ["balance", "version"] {
        outside(&db, "balance = 100, version = 0").await;
        outside(&db, &format!("{column} = NULL")).await;
        let tells = |error: &Error| {
            let text = error.to_string();
            [&format!("account.{column}"), "key \"a\"", "NULL"].into_iter().all(|part| text.contains(part))
        };
        for error in [
            changed_nothing(table.read("a").await),
            changed_nothing(table.deposit("a", 1).await),
            changed_nothing(table.update("a", |_| Ok::<_, Error>(7)).await),
        ] {
            assert!(tells(&error), "{error:?}");
        }
        let deducted = table.deduct("a", 1).await;
        assert!(matches!(&deducted, Err(UpdateError::Other(error)) if tells(error)), "{deducted:?}");
        let ran = lock.transaction("a", async |_| Ok::<_, sqlx::Error>(())).await;
        let is_told = matches!(&ran, Err(RunError::Other(error)) if tells(error));
        assert!(if column == "version" { is_told } else { ran.is_ok() }, "{ran:?}");
        assert_eq!(db.cell(&format!("COALESCE({column}, -1)"), "account WHERE id = 'a'").await.as_deref(), Some("-1"));
    }
    outside(&db, "balance = 100, version = 0").await;
    assert_eq!(row(&db).await, (100, 0));
}

/// The version never wraps: neither at the end of the column nor at that of 64 bits.
async fn a_version_that_cannot_grow_is_an_error_that_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let ends: &[(&str, &str)] = match db.server.name {
        "sqlite" => &[("INTEGER", "9223372036854775807")],
        "postgres" => &[("smallint", "32767"), ("int", "2147483647"), ("bigint", "9223372036854775807")],
        _ => &[
            ("tinyint", "127"),
            ("smallint unsigned", "65535"),
            ("int", "2147483647"),
            ("bigint", "9223372036854775807"),
            ("bigint unsigned", "9223372036854775807"),
            ("bigint unsigned", "18446744073709551615"),
        ],
    };
    for (number, (column, end)) in ends.iter().enumerate() {
        let name = format!("account_{number}");
        create(&db, &name, "varchar(40)", "bigint", column).await;
        insert(&db, &name, "'a'", 100).await;
        db.execute(&format!("UPDATE {name} SET version = {end}")).await;
        let table = VersionedTable::new(db.pool.clone(), rowlock::balances::Columns { table: &name, ..COLUMNS });
        changed_nothing(table.deposit("a", 1).await);
        changed_nothing(table.update("a", |_| Ok::<_, Error>(7)).await);
        let lock = VersionLock::new(db.pool.clone(), &name, "id", "version");
        let ran = lock.transaction("a", async |_| Ok::<_, sqlx::Error>(())).await;
        assert!(matches!(ran, Err(RunError::Other(_))), "{column}: {ran:?}");
        assert_eq!(db.cell("balance", &name).await.as_deref(), Some("100"), "{column}");
        assert_eq!(db.cell("version", &name).await.as_deref(), Some(*end), "{column}");
    }
}

async fn no_deduction_is_lost_with_32_workers<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await.retry(PATIENT);
    outside(&db, "balance = 1000").await;
    let workers: Vec<_> = (0..32)
        .map(|_| {
            let table = table.clone();
            harness::spawn(async move {
                for _ in 0..5 {
                    table.deduct("a", 3).await.unwrap();
                    table.update("a", |balance| Ok::<_, Infallible>(balance - 1)).await.unwrap();
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    assert_eq!(row(&db).await, (1000 - 32 * 5 * 4, 32 * 5 * 2));
}

async fn a_balance_never_falls_below_zero_with_32_workers<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await.retry(PATIENT);
    let workers: Vec<_> = (0..32)
        .map(|_| {
            let table = table.clone();
            harness::spawn(async move { table.deduct("a", 7).await })
        })
        .collect();
    let mut deducted = 0;
    for worker in workers {
        match worker.await.unwrap() {
            Ok(updated) => {
                assert_eq!(updated.value, 100 - 7 * updated.version);
                deducted += 1;
            }
            Err(UpdateError::Computation(Insufficient { balance, amount: 7 })) => assert_eq!(balance, 2),
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_eq!((deducted, row(&db).await), (100 / 7, (100 % 7, 100 / 7)));
}
