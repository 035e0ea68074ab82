//! Columns of every type that a key, a value and a version may have.

use std::{convert::Infallible, time::Duration};

use harness::{TestDatabase, TestDb};
use rowlock::{
    Error, ResourceLock, VersionLock, VersionedTable,
    balances::{Columns, UpdateError},
};

use crate::ledger::{COLUMNS, changed_nothing, create, insert, updated};

harness::tests!(
    everywhere(
        a_key_may_be_a_text_an_integer_or_a_uuid,
        a_uuid_is_the_same_in_capitals_and_without_hyphens,
        a_key_that_its_column_cannot_hold_is_refused_unseen,
        a_value_and_a_version_may_be_integers_of_any_width,
        a_value_may_be_of_any_type_that_the_driver_knows
    ),
    mysql_and_mariadb(what_64_bits_with_a_sign_do_not_hold_is_an_error)
);

/// One table with one row of 100.
struct Case<'a, DB: TestDatabase> {
    db: &'a TestDb<DB>,
    table: String,
    key: &'a str,
}

impl<'a, DB: TestDatabase> Case<'a, DB> {
    /// `literal` is the key in SQL.
    async fn new(
        db: &'a TestDb<DB>,
        number: usize,
        types: [&str; 3],
        key: &'a str,
        literal: &str,
        value: &str,
    ) -> Self {
        let table = format!("account_{number}");
        create(db, &table, types[0], types[1], types[2]).await;
        insert(db, &table, literal, value).await;
        Self { db, table, key }
    }

    fn columns(&self) -> Columns<'_> {
        Columns { table: &self.table, ..COLUMNS }
    }

    async fn stands(&self, value: impl std::fmt::Display, version: i64) {
        let cell = async |column| self.db.cell(column, &self.table).await;
        assert_eq!(cell("balance").await, Some(value.to_string()), "{}", self.table);
        assert_eq!(cell("version").await, Some(version.to_string()), "{}", self.table);
    }

    /// Every operation that changes a row, and the contents of the row after it.
    async fn works(&self) {
        let table = VersionedTable::new(self.db.pool.clone(), self.columns());
        let read = table.read(self.key).await.unwrap_or_else(|error| panic!("{}: {error}", self.table)).unwrap();
        assert_eq!((read.value, read.version), (100, 0));
        let update = table.update(self.key, |balance| Ok::<_, Infallible>(balance + 5)).await;
        assert_eq!(update.unwrap(), updated(105, 1, 1));
        self.stands(105, 1).await;
        assert_eq!(table.deduct(self.key, 30).await.unwrap(), updated(75, 2, 1));
        self.stands(75, 2).await;
        assert_eq!(table.deposit(self.key, 25).await.unwrap(), updated(100, 3, 1));
        self.stands(100, 3).await;
        let lock = VersionLock::new(self.db.pool.clone(), &self.table, "id", "version");
        let ran = lock.transaction(self.key, async |tx| Ok::<_, sqlx::Error>(tx.claim().token.get())).await;
        assert_eq!(ran.unwrap(), 3);
        self.stands(100, 4).await;
    }
}

const UUID: &str = "67e55044-10b1-426f-9247-bb680e5fe0c8";
const UUID_HEX: &str = "67e5504410b1426f9247bb680e5fe0c8";

async fn a_key_may_be_a_text_an_integer_or_a_uuid<DB: TestDatabase>(db: TestDb<DB>) {
    let in_quotes = format!("'{UUID}'");
    let blob = DB::uuid(UUID_HEX);
    let mut keys: Vec<(&str, &str, &str)> = vec![
        ("varchar(40)", "it's; a -- \"key\"", "'it''s; a -- \"key\"'"),
        ("char(40)", "ä€", "'ä€'"),
        ("char(36)", UUID, &in_quotes),
        ("smallint", "-7", "-7"),
        ("int", "2147483647", "2147483647"),
        ("bigint", "-9223372036854775808", "-9223372036854775808"),
    ];
    keys.extend(match db.server.name {
        "sqlite" => [("TEXT", "a", "'a'"), ("INTEGER", "7", "7"), ("BLOB", UUID, blob.as_str())],
        "postgres" => [("text", "a", "'a'"), ("name_of_account", "a", "'a'"), ("uuid", UUID, &blob)],
        "mysql" => [("varbinary(40)", "a", "'a'"), ("bigint unsigned", "7", "7"), ("binary(16)", UUID, &blob)],
        _ => [("binary(16)", UUID, &*blob), ("int unsigned", "7", "7"), ("uuid", UUID, &in_quotes)],
    });
    if db.server.name == "postgres" {
        db.execute("CREATE DOMAIN name_of_account AS varchar(40)").await;
    }
    for (number, (column, key, literal)) in keys.into_iter().enumerate() {
        Case::new(&db, number, [column, "bigint", "bigint"], key, literal, "100").await.works().await;
    }
}

/// In any notation.
async fn a_uuid_is_the_same_in_capitals_and_without_hyphens<DB: TestDatabase>(db: TestDb<DB>) {
    let column = match db.server.name {
        "sqlite" => "BLOB",
        "mysql" => "binary(16)",
        _ => "uuid",
    };
    let literal = if db.server.name == "mariadb" { format!("'{UUID}'") } else { DB::uuid(UUID_HEX) };
    let capitals = UUID_HEX.to_uppercase();
    Case::new(&db, 1, [column, "bigint", "bigint"], &capitals, &literal, "100").await.works().await;
}

async fn a_key_that_its_column_cannot_hold_is_refused_unseen<DB: TestDatabase>(db: TestDb<DB>) {
    let uuid = match db.server.name {
        "sqlite" => "BLOB",
        "mysql" => "binary(16)",
        _ => "uuid",
    };
    create(&db, "numbered", "bigint", "bigint", "bigint").await;
    create(&db, "identified", uuid, "bigint", "bigint").await;
    insert(&db, "numbered", "0", 100).await;
    for (table, holds, bad) in [
        (
            "numbered",
            "integers",
            &["zero", "0x0", "0.0", "00", "+0", "-0", "9223372036854775808", "0; DROP TABLE numbered"][..],
        ),
        ("identified", "UUIDs", &["a", "0", UUID.split_at(35).0, "67e55044-10b1-426f-9247-bb680e5fe0cg", "'"]),
    ] {
        let pool = db.pool_of(1).await;
        let values = VersionedTable::new(pool.clone(), Columns { table, ..COLUMNS });
        let lock = VersionLock::new(pool.clone(), table, "id", "version");
        values.read(if table == "numbered" { "7" } else { UUID }).await.unwrap();
        assert!(
            lock.transaction(if table == "numbered" { "7" } else { UUID }, async |_| Ok::<_, sqlx::Error>(()))
                .await
                .is_err()
        );
        pool.close().await; // from now on no statement can be sent
        for key in bad {
            let is_unfit = |error: &Error| {
                let text = error.to_string();
                matches!(error, Error::Invalid(_)) && text.contains(&format!("{table}.id holds {holds}"))
            };
            let error = values.read(key).await.unwrap_err();
            assert!(is_unfit(&error), "{key}: {error:?}");
            let update = values.update(key, |_| -> Result<i64, Infallible> { panic!("there is no value") }).await;
            assert!(matches!(&update, Err(UpdateError::Other(error)) if is_unfit(error)), "{key}: {update:?}");
            let claim = ResourceLock::acquire(&lock, key, Duration::ZERO).await.unwrap_err();
            assert!(is_unfit(&claim), "{key}: {claim:?}");
        }
    }
}

async fn a_value_and_a_version_may_be_integers_of_any_width<DB: TestDatabase>(db: TestDb<DB>) {
    let mut integers = vec!["smallint", "int", "bigint"];
    match db.server.name {
        "sqlite" => integers.extend(["INTEGER", "TINYINT", "UNSIGNED BIG INT"]),
        "postgres" => {
            db.execute("CREATE DOMAIN positive AS int CHECK (value >= 0)").await;
            db.execute("CREATE DOMAIN small AS positive CHECK (value < 1000)").await;
            integers.extend(["positive", "small"]);
        }
        _ => integers.extend([
            "tinyint",
            "tinyint unsigned",
            "smallint unsigned",
            "mediumint",
            "mediumint unsigned",
            "int unsigned",
            "bigint unsigned",
            "bigint(20) unsigned zerofill",
        ]),
    }
    for (number, column) in integers.iter().enumerate() {
        let width = if column.contains("zerofill") { "int unsigned" } else { column };
        Case::new(&db, number, ["varchar(9)", column, width], "a", "'a'", "100").await.works_if_plain(column).await;
    }
}

impl<DB: TestDatabase> Case<'_, DB> {
    /// A ZEROFILL column shows its number with zeros, and it is the same number.
    async fn works_if_plain(&self, column: &str) {
        if !column.contains("zerofill") {
            return self.works().await;
        }
        let table = VersionedTable::new(self.db.pool.clone(), self.columns());
        assert_eq!(table.deduct("a", 30).await.unwrap(), updated(70, 1, 1));
        assert_eq!(table.read("a").await.unwrap().unwrap().value, 70);
    }
}

/// An unsigned column may hold a number that does not fit into an `i64`. It is never read as
/// another number, and never goes below zero.
async fn what_64_bits_with_a_sign_do_not_hold_is_an_error<DB: TestDatabase>(db: TestDb<DB>) {
    let most = "9223372036854775808";
    let case = Case::new(&db, 1, ["varchar(9)", "bigint unsigned", "bigint"], "a", "'a'", most).await;
    let table = VersionedTable::new(db.pool.clone(), case.columns());
    for error in [changed_nothing(table.read("a").await), changed_nothing(table.deposit("a", 1).await)] {
        let text = error.to_string();
        assert!(text.contains("account_1.balance") && text.contains(most), "{text}");
    }
    case.stands(most, 0).await;
    db.execute("UPDATE account_1 SET balance = 5").await;
    let below = table.update("a", |balance| Ok::<_, Error>(balance - 6)).await;
    changed_nothing(below);
    case.stands(5, 0).await;
    assert_eq!(table.deduct("a", 5).await.unwrap(), updated(0, 1, 1));
}

async fn a_value_may_be_of_any_type_that_the_driver_knows<DB: TestDatabase>(db: TestDb<DB>) {
    let case = Case::new(&db, 1, ["varchar(9)", "varchar(40)", "int"], "a", "'a'", "'one'").await;
    let texts = VersionedTable::new(db.pool.clone(), case.columns()).of::<String>();
    assert_eq!(texts.read("a").await.unwrap().unwrap().value, "one");
    let text = "it's; \"two\" -- ä€";
    let update = texts.update("a", |old| Ok::<_, Infallible>(format!("{text} after {old}"))).await;
    assert_eq!(update.unwrap(), updated(format!("{text} after one"), 1, 1));
    case.stands(format!("{text} after one"), 1).await;
    let too_long = texts.update("a", |_| Ok::<_, Error>("x".repeat(41))).await;
    if db.server.name == "sqlite" {
        assert_eq!(too_long.unwrap().version, 2); // its columns have no width
    } else {
        changed_nothing(too_long);
        case.stands(format!("{text} after one"), 1).await;
    }

    let case = Case::new(&db, 2, ["varchar(9)", "boolean", "int"], "a", "'a'", "false").await;
    let flags = VersionedTable::new(db.pool.clone(), case.columns()).of::<bool>();
    assert_eq!(flags.update("a", |flag| Ok::<_, Infallible>(!flag)).await.unwrap(), updated(true, 1, 1));
    assert!(flags.read("a").await.unwrap().unwrap().value);
    assert_eq!(db.cell("version", "account_2 WHERE balance").await.as_deref(), Some("1"));
}
