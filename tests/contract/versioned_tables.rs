//! Tables of versions that only a closer look tells apart: an index that is no key, and a trigger
//! or a rule that is not the table's own.

use harness::{TestDatabase, TestDb};
use rowlock::{VersionedTable, balances::Columns};

use crate::{
    ledger::{COLUMNS, insert, ledger},
    versioned_invalid_input::refused,
    versioned_triggers::each_is_one_less,
};

harness::tests!(
    everywhere.each(an_index_of_other_columns_makes_no_key),
    sqlite(a_trigger_of_the_connection_is_seen, a_trigger_is_seen_whatever_the_case_of_the_tables_name),
    postgres(an_index_that_failed_makes_no_key, a_trigger_of_a_partition_is_seen, a_rule_that_alters_values_is_seen)
);

/// The key is the first of two columns, and then another column has an index of its own.
async fn an_index_of_other_columns_makes_no_key<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute(
        "CREATE TABLE account (id varchar(40) NOT NULL, balance bigint, version int, PRIMARY KEY (id, version))",
    )
    .await;
    db.execute("INSERT INTO account VALUES ('a', 100, 0), ('a', 200, 1)").await;
    is_no_key(&db, "the first of two").await;
    db.execute("CREATE UNIQUE INDEX other ON account (balance)").await;
    is_no_key(&db, "another column").await;
}

/// A key that means two rows is refused, and neither of them changes.
async fn is_no_key<DB: TestDatabase>(db: &TestDb<DB>, what: &str) {
    let says = refused(db, COLUMNS).await;
    assert!(says.contains("column id (") && says.contains("unique index"), "{what}: {says}");
    assert_eq!(db.number("SELECT COUNT(*) FROM account WHERE balance IN (100, 200)").await, Some(2), "{what}");
}

/// The server leaves such an index behind, invalid.
async fn an_index_that_failed_makes_no_key<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE account (id varchar(40) NOT NULL, balance bigint, version bigint)").await;
    db.execute("INSERT INTO account VALUES ('a', 100, 0), ('a', 200, 0)").await;
    DB::execute(&db.pool, "CREATE UNIQUE INDEX CONCURRENTLY failed ON account (id)").await.unwrap_err();
    let left = "SELECT COUNT(*) FROM pg_index WHERE indexrelid = 'failed'::regclass AND indisunique AND NOT indisvalid";
    assert_eq!(db.number(left).await, Some(1));
    is_no_key(&db, "an invalid index").await;
}

/// The ledger as a partitioned table, whose rows are in the partition `account_rest`.
async fn partitioned<DB: TestDatabase>(db: &TestDb<DB>) -> VersionedTable<DB> {
    for sql in [
        "CREATE TABLE account (id varchar(40) PRIMARY KEY, balance bigint, version bigint) PARTITION BY LIST (id)",
        "CREATE TABLE account_rest PARTITION OF account DEFAULT",
    ] {
        db.execute(sql).await;
    }
    insert(db, COLUMNS.table, "'a'", 100).await;
    insert(db, COLUMNS.table, "'other'", 1).await;
    VersionedTable::new(db.pool.clone(), COLUMNS)
}

async fn a_trigger_of_a_partition_is_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let table = partitioned(&db).await;
    for sql in [
        "CREATE FUNCTION less() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN NEW.balance := NEW.balance - 1; RETURN NEW; END $$",
        "CREATE TRIGGER less BEFORE UPDATE ON account_rest FOR EACH ROW EXECUTE FUNCTION less()",
    ] {
        db.execute(sql).await;
    }
    each_is_one_less(&db, &table).await;
}

/// A rule cannot update its own table, but a partition of it.
async fn a_rule_that_alters_values_is_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let table = partitioned(&db).await;
    let rule = "CREATE RULE less AS ON UPDATE TO account DO INSTEAD
                UPDATE account_rest SET balance = NEW.balance - 1, version = NEW.version WHERE id = OLD.id";
    db.execute(rule).await;
    each_is_one_less(&db, &table).await;
}

fn less(kind: &str) -> String {
    format!(
        "CREATE {kind} less AFTER UPDATE ON account
         BEGIN UPDATE account SET balance = balance - 1 WHERE id = NEW.id; END"
    )
}

/// A temporary trigger is in no table of the file's own schema.
async fn a_trigger_of_the_connection_is_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let db = db.over(db.pool_of(1).await);
    let table = ledger(&db).await;
    db.execute(&less("TEMP TRIGGER")).await;
    each_is_one_less(&db, &table).await;
}

async fn a_trigger_is_seen_whatever_the_case_of_the_tables_name<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    db.execute(&less("TRIGGER")).await;
    let table = VersionedTable::new(db.pool.clone(), Columns { table: "Account", ..COLUMNS });
    each_is_one_less(&db, &table).await;
}
