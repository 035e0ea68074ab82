//! Balances as decimals, exact to the last digit or refused.

use std::convert::Infallible;

use harness::{Holds, TestDatabase, TestDb};
use rowlock::{
    Error, VersionedTable,
    balances::{Columns, Insufficient, UpdateError, Value},
};
use rust_decimal::Decimal;

use crate::ledger::{COLUMNS, changed_nothing, create, insert, updated};

/// A database with decimals. SQLite has none.
pub trait HasDecimals: TestDatabase + Holds<Decimal, Is: Value<Self>> {}
impl HasDecimals for sqlx::Postgres {}
impl HasDecimals for sqlx::MySql {}

harness::tests!(
    servers(
        a_balance_of_cents_is_exact,
        more_decimals_than_the_column_keeps_are_refused,
        a_sum_of_too_many_digits_changes_nothing,
        a_balance_of_more_digits_than_the_type_has_is_told_at_the_first_read,
        zeros_around_a_number_do_not_count,
        zero_has_no_sign,
    ),
    postgres(a_column_without_a_limit_keeps_every_decimal, what_is_no_number_is_told_at_the_first_read),
);

fn d(text: &str) -> Decimal {
    Decimal::from_str_exact(text).unwrap()
}

/// Creates a table with the account `a`, whose balance has this column type.
async fn account<DB: HasDecimals>(
    db: &TestDb<DB>,
    table: &str,
    column: &str,
    balance: &str,
) -> VersionedTable<DB, Decimal> {
    create(db, table, "varchar(9)", column, "int").await;
    insert(db, table, "'a'", balance).await;
    VersionedTable::new(db.pool.clone(), Columns { table, ..COLUMNS }).of::<Decimal>()
}

async fn stands<DB: HasDecimals>(db: &TestDb<DB>, table: &str, balance: &str, version: i64) {
    assert_eq!(db.cell("balance", table).await.as_deref(), Some(balance), "{table}");
    assert_eq!(db.cell("version", table).await, Some(version.to_string()), "{table}");
}

async fn a_balance_of_cents_is_exact<DB: HasDecimals>(db: TestDb<DB>) {
    let table = account(&db, "account", "decimal(12,2)", "100.00").await;
    assert_eq!(table.read("a").await.unwrap().unwrap().value, d("100"));
    assert_eq!(table.deduct("a", d("0.10")).await.unwrap(), updated(d("99.9"), 1, 1));
    stands(&db, "account", "99.90", 1).await;
    assert_eq!(table.deposit("a", d("0.2")).await.unwrap(), updated(d("100.1"), 2, 1));
    // Trailing zeros do not count as decimals.
    assert_eq!(table.deposit("a", d("1.000000")).await.unwrap(), updated(d("101.1"), 3, 1));
    let double = table.update("a", |balance| Ok::<_, Infallible>(balance * Decimal::TWO)).await;
    assert_eq!(double.unwrap(), updated(d("202.2"), 4, 1));
    stands(&db, "account", "202.20", 4).await;
    let error = table.deduct("a", d("202.21")).await.unwrap_err();
    let insufficient = Insufficient { balance: d("202.20"), amount: d("202.21") };
    assert!(matches!(error, UpdateError::Computation(told) if told == insufficient));
    for amount in [d("0.00"), d("-0.01")] {
        assert!(
            matches!(table.deposit("a", amount).await, Err(Error::Invalid(ref wrong)) if wrong.to_string().contains("an amount of"))
        );
    }
    assert_eq!(table.deduct("a", d("202.20")).await.unwrap(), updated(d("0"), 5, 1));
    stands(&db, "account", "0.00", 5).await;
}

/// The databases would round the amount without an error.
async fn more_decimals_than_the_column_keeps_are_refused<DB: HasDecimals>(db: TestDb<DB>) {
    let mut columns = vec![("decimal(12,2)", "100.00", "0.001"), ("decimal(12,0)", "100", "0.5")];
    if db.server.name == "postgres" {
        db.execute("CREATE DOMAIN money_of_ours AS numeric(12,2) CHECK (value >= 0)").await;
        db.execute("CREATE DOMAIN money_of_mine AS money_of_ours").await;
        columns.extend([("money_of_ours", "100.00", "0.001"), ("money_of_mine", "100.00", "0.009")]);
        if db.number("SELECT current_setting('server_version_num')::int").await >= Some(150_000) {
            columns.push(("numeric(9,-2)", "100", "10"));
        }
    }
    for (number, (column, balance, amount)) in columns.into_iter().enumerate() {
        let name = format!("account_{number}");
        let table = account(&db, &name, column, balance).await;
        let says = changed_nothing(table.deposit("a", d(amount)).await).to_string();
        assert!(says.contains("balance") && says.contains("keeps"), "{column}: {says}");
        let deduct = table.deduct("a", d(amount)).await;
        assert!(
            matches!(deduct, Err(UpdateError::Other(Error::Invalid(ref wrong))) if wrong.to_string().contains("an amount of")),
            "{column}: {deduct:?}"
        );
        let update = table.update("a", |balance| Ok::<_, Error>(balance + d(amount))).await;
        assert!(
            matches!(changed_nothing(update), Error::Invalid(ref wrong) if wrong.to_string().contains("an amount of")),
            "{column}"
        );
        stands(&db, &name, balance, 0).await;
        assert_eq!(table.deposit("a", d("100")).await.unwrap(), updated(d(balance) + d("100"), 1, 1), "{column}");
    }
}

/// The column keeps all decimals that are written to it.
async fn a_column_without_a_limit_keeps_every_decimal<DB: HasDecimals>(db: TestDb<DB>) {
    let table = account(&db, "account", "numeric", "100").await;
    let amount = d("0.0000000000000000000001");
    let left = d("99.9999999999999999999999");
    assert_eq!(table.deduct("a", amount).await.unwrap(), updated(left, 1, 1));
    stands(&db, "account", &left.to_string(), 1).await;
    // The sum of this amount and the balance does not fit into 96 bits.
    let error = changed_nothing(table.deposit("a", d("1000000000000")).await);
    assert!(matches!(error, Error::Invalid(ref wrong) if wrong.to_string().contains("an amount of")), "{error:?}");
    stands(&db, "account", &left.to_string(), 1).await;
}

async fn a_sum_of_too_many_digits_changes_nothing<DB: HasDecimals>(db: TestDb<DB>) {
    let table = account(&db, "account", "decimal(5,2)", "999.98").await;
    changed_nothing(table.deposit("a", d("0.02")).await);
    stands(&db, "account", "999.98", 0).await;
    let table = account(&db, "wide", "decimal(30,0)", &Decimal::MAX.to_string()).await;
    let error = changed_nothing(table.deposit("a", d("1")).await);
    assert!(matches!(error, Error::Invalid(ref wrong) if wrong.to_string().contains("an amount of")), "{error:?}");
    stands(&db, "wide", &Decimal::MAX.to_string(), 0).await;
    // The column can store the sum. `Decimal` cannot, and would round it.
    let balance = "1234567890123456789.0123456789";
    let table = account(&db, "fine", "decimal(40,10)", balance).await;
    let error = changed_nothing(table.deposit("a", d("10000000000000000000")).await);
    assert!(matches!(error, Error::Invalid(ref wrong) if wrong.to_string().contains("an amount of")), "{error:?}");
    stands(&db, "fine", balance, 0).await;
}

/// The driver would return another number. A call that computes from the row says which one it has,
/// at its first read.
async fn a_balance_of_more_digits_than_the_type_has_is_told_at_the_first_read<DB: HasDecimals>(db: TestDb<DB>) {
    let balances = [
        ("decimal(40,20)", "12345678901234567890.12345678901234567890"),
        ("decimal(40,20)", "-12345678901234567890.12345678901234567890"),
        ("decimal(38,30)", "1.000000000000000000000000000001"),
        ("decimal(38,30)", "0.000000000000000000000000000001"),
        ("decimal(38,2)", "1234567890123456789012345678.01"),
        ("decimal(30,0)", "79228162514264337593543950336"),
    ];
    for (number, (column, balance)) in balances.into_iter().enumerate() {
        let name = format!("account_{number}");
        let table = account(&db, &name, column, balance).await;
        is_told(&db, &table, &name, balance).await;
        stands(&db, &name, balance, 0).await;
    }
}

/// PostgreSQL's numbers are more than numbers.
async fn what_is_no_number_is_told_at_the_first_read<DB: HasDecimals>(db: TestDb<DB>) {
    let mut balances = vec!["NaN"];
    if db.number("SELECT current_setting('server_version_num')::int").await >= Some(140_000) {
        balances.extend(["Infinity", "-Infinity"]);
    }
    for (number, balance) in balances.into_iter().enumerate() {
        let name = format!("account_{number}");
        let table = account(&db, &name, "numeric", &format!("'{balance}'")).await;
        is_told(&db, &table, &name, balance).await;
        stands(&db, &name, balance, 0).await;
    }
}

/// Every call returns an error that names the column, the key and the number, without a computation
/// or a repetition.
async fn is_told<DB: HasDecimals>(db: &TestDb<DB>, table: &VersionedTable<DB, Decimal>, name: &str, balance: &str) {
    let tells = |error: &Error| {
        let text = error.to_string();
        [&format!("{name}.balance"), "key \"a\"", balance, "Decimal"].into_iter().all(|part| text.contains(part))
    };
    let compute = |_: &Decimal| -> Result<Decimal, Error> { panic!("computed from another number than {balance}") };
    let read = changed_nothing(table.read("a").await);
    assert!(tells(&read), "{balance}: {read:?}");
    let mut tx = db.pool.begin().await.unwrap();
    for error in [
        changed_nothing(table.deposit("a", d("1")).await),
        changed_nothing(table.update("a", compute).await),
        changed_nothing(table.update_in(&mut tx, "a", compute).await),
        changed_nothing(table.deposit_in(&mut tx, "a", d("1")).await),
    ] {
        assert!(tells(&error), "{balance}: {error:?}");
    }
    for deducted in [table.deduct("a", d("0.1")).await, table.deduct_in(&mut tx, "a", d("0.1")).await] {
        assert!(matches!(&deducted, Err(UpdateError::Other(error)) if tells(error)), "{balance}: {deducted:?}");
    }
    tx.commit().await.unwrap();
}

/// A number that fits is not refused for the zeros around it, whatever the width of its column.
async fn zeros_around_a_number_do_not_count<DB: HasDecimals>(db: TestDb<DB>) {
    let mut columns = vec!["decimal(60,30)", "decimal(38,10)"];
    if db.server.name != "postgres" {
        columns.push("decimal(60,30) unsigned zerofill");
    }
    let most = Decimal::MAX.to_string();
    for (number, column) in columns.into_iter().enumerate() {
        for (at, balance) in ["5", "0", "0.5", "100", &most].into_iter().enumerate() {
            if column == "decimal(38,10)" && balance == most {
                continue;
            }
            let name = format!("account_{number}_{at}");
            let table = account(&db, &name, column, balance).await;
            let read = table.read("a").await.unwrap_or_else(|error| panic!("{column}: {balance}: {error:?}"));
            assert_eq!(read.unwrap().value, d(balance), "{column}");
            if balance == most {
                continue;
            }
            assert_eq!(table.deposit("a", d("0.25")).await.unwrap(), updated(d(balance) + d("0.25"), 1, 1));
            assert_eq!(table.read("a").await.unwrap().unwrap().value, d(balance) + d("0.25"), "{column}");
        }
    }
}

/// Zero with a sign is zero.
async fn zero_has_no_sign<DB: HasDecimals>(db: TestDb<DB>) {
    let table = account(&db, "account", "decimal(12,2)", "3").await;
    let zero = -Decimal::ZERO;
    assert!(zero.is_sign_negative());
    assert_eq!(table.update("a", |_| Ok::<_, Infallible>(zero)).await.unwrap(), updated(d("0"), 1, 1));
    stands(&db, "account", "0.00", 1).await;
    assert!(
        matches!(table.deposit("a", zero).await, Err(Error::Invalid(ref wrong)) if wrong.to_string().contains("an amount of"))
    );
    assert_eq!(table.deposit("a", d("1")).await.unwrap(), updated(d("1"), 2, 1));
}
