//! Columns whose values a change cannot read, or cannot write as they were computed: the first call
//! names the column, and nothing is changed.

use std::{convert::Infallible, time::Duration};

use harness::{TestDatabase, TestDb};
use rowlock::{
    Error, ResourceLock, VersionLock, VersionedTable,
    balances::{Columns, UpdateError},
    errors::Setup,
};

use crate::ledger::{COLUMNS, changed_nothing, create, insert, updated};

harness::tests!(
    everywhere(
        a_column_that_holds_no_integers_is_named_with_its_key,
        a_generated_column_is_refused,
        a_number_that_the_database_does_not_have_is_not_written,
        a_fraction_is_changed_by_its_version,
    ),
    sqlite(a_cell_of_another_type_than_its_column_is_named),
    postgres(an_identity_that_is_always_generated_is_refused)
);

/// Runs every call, and returns their errors.
async fn errors<DB: TestDatabase>(db: &TestDb<DB>, table: &str) -> Vec<Error> {
    let values = VersionedTable::new(db.pool.clone(), Columns { table, ..COLUMNS });
    let deducted = values.deduct("a", 1).await.map_err(|error| match error {
        UpdateError::Other(error) => error,
        other => panic!("{other:?}"),
    });
    vec![
        changed_nothing(values.read("a").await),
        changed_nothing(values.deposit("a", 1).await),
        changed_nothing(values.update("a", |_| Ok::<_, Error>(7)).await),
        changed_nothing(deducted),
    ]
}

async fn a_column_that_holds_no_integers_is_named_with_its_key<DB: TestDatabase>(db: TestDb<DB>) {
    let columns: &[(&str, &str)] = match db.server.name {
        "sqlite" => &[("REAL", "100.5"), ("REAL", "100"), ("TEXT", "'100'"), ("NUMERIC", "100.5"), ("BLOB", "x'31'")],
        "postgres" => &[
            ("double precision", "100.5"),
            ("real", "100"),
            ("text", "'100'"),
            ("numeric(12,2)", "100"),
            ("money", "'1.00'"),
        ],
        _ => &[("double", "100.5"), ("float", "100"), ("varchar(9)", "'100'"), ("decimal(12,2)", "100")],
    };
    for (number, (column, value)) in columns.iter().enumerate() {
        let name = format!("account_{number}");
        create(&db, &name, "varchar(9)", column, "int").await;
        insert(&db, &name, "'a'", value).await;
        let before = db.cell("balance", &name).await;
        for text in errors(&db, &name).await.iter().map(Error::to_string) {
            assert!(text.contains(&format!("{name}.balance")) && text.contains("key \"a\""), "{column}: {text}");
            assert!(text.contains("i64"), "{column}: {text}");
        }
        assert_eq!(db.cell("balance", &name).await, before, "{column}");
        assert_eq!(db.cell("version", &name).await.as_deref(), Some("0"), "{column}");
    }
}

/// SQLite keeps in any column what was written there.
async fn a_cell_of_another_type_than_its_column_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    create(&db, "account", "varchar(9)", "INTEGER", "INTEGER").await;
    insert(&db, "account", "'a'", "100").await;
    for (column, cell) in
        [("balance", "'much'"), ("balance", "1.5"), ("balance", "9223372036854775808"), ("version", "'x'")]
    {
        db.execute("UPDATE account SET balance = 100, version = 0").await;
        db.execute(&format!("UPDATE account SET {column} = {cell}")).await;
        let before = db.cell(column, "account").await;
        for text in errors(&db, "account").await.iter().map(Error::to_string) {
            assert!(text.contains(&format!("account.{column}")) && text.contains("key \"a\""), "{cell}: {text}");
        }
        assert_eq!(db.cell(column, "account").await, before, "{cell}");
    }
}

/// Nothing can be written to such a column. A read of it is refused too: a table whose values never
/// change has no use for a version.
async fn a_generated_column_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let kinds: &[&str] = match db.server.name {
        "postgres" => &["STORED"],
        _ => &["STORED", "VIRTUAL"],
    };
    for (number, kind) in kinds.iter().enumerate() {
        for (place, column) in ["balance", "version"].into_iter().enumerate() {
            let name = format!("account_{number}_{place}");
            let other = if place == 0 { "version" } else { "balance" };
            db.execute(&format!(
                "CREATE TABLE {name} (id varchar(9) PRIMARY KEY, {other} bigint, cents bigint, \
                 {column} bigint GENERATED ALWAYS AS (cents / 100) {kind})"
            ))
            .await;
            db.execute(&format!("INSERT INTO {name} (id, {other}, cents) VALUES ('a', 0, 700)")).await;
            let mut refused = errors(&db, &name).await;
            if column == "version" {
                let lock = VersionLock::new(db.pool.clone(), &name, "id", "version");
                let error = lock.acquire("a", Duration::ZERO).await.unwrap_err();
                refused.push(error);
            }
            for error in refused {
                let text = error.to_string();
                assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })), "{text}");
                assert!(
                    text.contains(&format!("table {name}")) && text.contains(&format!("column {column} (")),
                    "{text}"
                );
                assert!(text.contains("generated"), "{text}");
            }
            assert_eq!(db.cell(column, &name).await.as_deref(), Some("7"), "{name}");
        }
    }
}

async fn an_identity_that_is_always_generated_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    create(&db, "account", "varchar(9)", "bigint GENERATED ALWAYS AS IDENTITY", "int").await;
    db.execute("INSERT INTO account (id, version) VALUES ('a', 0)").await;
    for error in errors(&db, "account").await {
        let text = error.to_string();
        assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })) && text.contains("generated"), "{text}");
    }
    assert_eq!(db.cell("version", "account").await.as_deref(), Some("0"));
}

/// SQLite writes NULL in place of NaN, MySQL and MariaDB have none, and PostgreSQL keeps it.
async fn a_number_that_the_database_does_not_have_is_not_written<DB: TestDatabase>(db: TestDb<DB>) {
    create(&db, "account", "varchar(9)", DOUBLE, "int").await;
    insert(&db, "account", "'a'", "1.5").await;
    let table = VersionedTable::new(db.pool.clone(), COLUMNS).of::<f64>();
    let written = table.update("a", |_| Ok::<_, Error>(f64::NAN)).await;
    if db.server.name == "postgres" {
        assert!(written.unwrap().value.is_nan());
        assert!(table.read("a").await.unwrap().unwrap().value.is_nan());
    } else {
        let error = changed_nothing(written);
        assert_eq!(db.cell("balance", "account").await.as_deref(), Some("1.5"), "{error:?}");
        assert_eq!(db.cell("version", "account").await.as_deref(), Some("0"), "{error:?}");
    }
}

const DOUBLE: &str = "double precision";

/// A fraction is not compared with the one that was read, which may be rounded.
async fn a_fraction_is_changed_by_its_version<DB: TestDatabase>(db: TestDb<DB>) {
    create(&db, "account", "varchar(9)", DOUBLE, "int").await;
    insert(&db, "account", "'a'", "0.1").await;
    let table = VersionedTable::new(db.pool.clone(), COLUMNS).of::<f64>();
    let third = |value: &f64| Ok::<_, Infallible>(value / 3.0);
    assert_eq!(table.update("a", third).await.unwrap(), updated(0.1 / 3.0, 1, 1));
    assert_eq!(table.update("a", |_| Ok::<_, Infallible>(-0.0)).await.unwrap(), updated(0.0, 2, 1));
    assert_eq!(table.update("a", |value| Ok::<_, Infallible>(value + 0.1)).await.unwrap(), updated(0.1, 3, 1));
    assert_eq!(table.read("a").await.unwrap().unwrap().value, 0.1);
}
