//! Names, tables and columns that cannot be used for versions: a clear error, and nothing is
//! changed.

use std::time::Duration;

use harness::{TestDatabase, TestDb, pool};
use rowlock::{
    Error, ResourceLock, VersionLock, VersionedTable,
    balances::Columns,
    errors::{Invalid, Setup},
};
use sqlx::pool::PoolOptions;

use crate::ledger::{COLUMNS, changed_nothing, create, insert, ledger, outside, row, updated};

harness::tests!(
    everywhere(
        only_plain_names_become_part_of_a_statement,
        one_column_is_not_taken_for_two,
        reserved_words_are_names_as_well,
        a_table_in_a_named_schema_is_found,
        the_case_of_names_matters_where_the_database_says_so,
        a_misspelt_column_is_named,
        a_column_or_table_that_goes_away_is_named,
        a_missing_table_says_so,
        a_key_column_without_a_unique_index_of_its_own_is_refused,
        columns_of_another_type_are_refused_with_their_type,
        a_value_of_another_type_is_an_error_that_changes_nothing
    ),
    mysql_and_mariadb(
        a_table_of_another_engine_is_refused,
        a_session_that_is_not_strict_is_refused,
        a_table_is_not_taken_for_its_namesake
    ),
    postgres(a_key_that_means_several_rows_in_spite_of_an_index_is_refused)
);

/// The error of the table and of the lock at their first use, which must be the same.
pub async fn refused<DB: TestDatabase>(db: &TestDb<DB>, columns: Columns<'_>) -> String {
    let table = VersionedTable::new(db.pool.clone(), columns);
    let error = changed_nothing(table.read("a").await);
    assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })), "{error:?}");
    let update = table.update("a", |balance| Ok::<_, Error>(balance + 1)).await;
    assert_eq!(update.unwrap_err().to_string(), error.to_string());
    if columns.value == COLUMNS.value {
        let Columns { table, key, version, .. } = columns;
        let lock = VersionLock::new(db.pool.clone(), table, key, version);
        assert_eq!(lock.acquire("a", Duration::ZERO).await.unwrap_err().to_string(), error.to_string());
    }
    error.to_string()
}

fn quoted<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> String {
    let quote = if db.server.name == "postgres" { '"' } else { '`' };
    format!("{quote}{name}{quote}")
}

async fn only_plain_names_become_part_of_a_statement<DB: TestDatabase>(db: TestDb<DB>) {
    let long = "x".repeat(64);
    let bad = [
        "", " ", "a b", "a\"b", "a`b", "a'b", "[a]", "a;b", "a--", "a/*", "a\\", "a\0", "a\n", "1a", "ä", "ａ", "a(b)",
        "$1", "?", "*", &long,
    ];
    let refused = |checked: Result<(), Invalid>, bad: &str| assert!(checked.is_err(), "{bad:?}");
    let table = |columns: Columns<'_>| VersionedTable::new(db.pool.clone(), columns).check();
    let lock = |table: &str, key: &str, version: &str| VersionLock::new(db.pool.clone(), table, key, version).check();
    for bad in bad {
        let tables = [bad.to_owned(), format!("s.{bad}"), format!("{bad}.t"), format!("s.t.{bad}")];
        for name in tables.iter().map(String::as_str) {
            refused(table(Columns { table: name, ..COLUMNS }), name);
            refused(lock(name, "id", "version"), name);
        }
        let columns = [bad.to_owned(), format!("t.{bad}"), "t.a".into()];
        for name in columns.iter().map(String::as_str) {
            refused(table(Columns { key: name, ..COLUMNS }), name);
            refused(table(Columns { value: name, ..COLUMNS }), name);
            refused(table(Columns { version: name, ..COLUMNS }), name);
            refused(lock("account", name, "version"), name);
            refused(lock("account", "id", name), name);
        }
    }
}

/// One column cannot have two of the three roles: a change would overwrite its own version, or its
/// key.
async fn one_column_is_not_taken_for_two<DB: TestDatabase>(db: TestDb<DB>) {
    let exact = db.server.name == "postgres";
    let table = |columns: Columns<'_>| VersionedTable::new(db.pool.clone(), columns).check();
    let id = if exact { "id" } else { "Id" };
    let doubled = [
        Columns { value: id, ..COLUMNS },
        Columns { version: id, ..COLUMNS },
        Columns { value: COLUMNS.version, ..COLUMNS },
    ];
    for columns in doubled {
        assert!(table(columns).is_err(), "{columns:?}");
    }
    let lock = VersionLock::new(db.pool.clone(), "account", "id", id);
    assert!(matches!(lock.acquire("a", Duration::ZERO).await, Err(Error::Invalid(_))));
    if exact {
        table(Columns { value: "ID", ..COLUMNS }).unwrap();
    }
}

async fn reserved_words_are_names_as_well<DB: TestDatabase>(db: TestDb<DB>) {
    let name = |name| quoted(&db, name);
    let columns = [name("key"), name("select"), name("where")];
    let [key, value, version] = &columns;
    let table = name("order");
    db.execute(&format!("CREATE TABLE {table} ({key} varchar(9) PRIMARY KEY, {value} int, {version} int)")).await;
    db.execute(&format!("INSERT INTO {table} VALUES ('a', 100, 0)")).await;
    let columns = Columns { table: "order", key: "key", value: "select", version: "where" };
    let orders = VersionedTable::new(db.pool.clone(), columns);
    assert_eq!(orders.deduct("a", 1).await.unwrap(), updated(99, 1, 1));
    assert_eq!(orders.read("a").await.unwrap().unwrap().value, 99);
    let lock = VersionLock::new(db.pool.clone(), "order", "key", "where");
    assert_eq!(lock.acquire("a", Duration::ZERO).await.unwrap().token().get(), 1);
}

/// A table of the same name that the connection would otherwise find is left unchanged.
async fn a_table_in_a_named_schema_is_found<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let schema = match db.server.name {
        "sqlite" => "main".to_owned(),
        "postgres" => {
            db.execute("CREATE SCHEMA bank").await;
            create(&db, "bank.account", "varchar(40)", "bigint", "bigint").await;
            insert(&db, "bank.account", "'a'", 500).await;
            "bank".into()
        }
        _ => db.text("SELECT CONVERT(DATABASE() USING utf8mb4)").await.unwrap(),
    };
    let elsewhere = pool::<DB>(&DB::from_elsewhere(&db.url), 1).await;
    let name = format!("{schema}.account");
    let table = VersionedTable::new(elsewhere.clone(), Columns { table: &name, ..COLUMNS });
    let before = table.read("a").await.unwrap().unwrap().value;
    assert_eq!(table.deduct("a", 30).await.unwrap(), updated(before - 30, 1, 1));
    assert_eq!(db.cell("balance", &format!("{name} WHERE id = 'a'")).await, Some((before - 30).to_string()));
    if db.server.name == "postgres" {
        assert_eq!((before, row(&db).await), (500, (100, 0)));
    }
    let lock = VersionLock::new(elsewhere, &name, "id", "version");
    assert_eq!(lock.acquire("a", Duration::ZERO).await.unwrap().token().get(), 1);
    let nowhere = refused(&db, Columns { table: "nowhere.account", ..COLUMNS }).await;
    assert!(nowhere.contains("table nowhere.account") && nowhere.contains("does not exist"), "{nowhere}");
}

/// By the database's own rules for the case of names.
async fn the_case_of_names_matters_where_the_database_says_so<DB: TestDatabase>(db: TestDb<DB>) {
    if db.server.name == "postgres" {
        db.execute(r#"CREATE TABLE "Account" ("Id" text PRIMARY KEY, "Balance" int, "Version" int)"#).await;
        db.execute(r#"INSERT INTO "Account" VALUES ('a', 100, 0)"#).await;
        let columns = Columns { table: "Account", key: "Id", value: "Balance", version: "Version" };
        let table = VersionedTable::new(db.pool.clone(), columns);
        assert_eq!(table.deduct("a", 1).await.unwrap(), updated(99, 1, 1));
        assert!(refused(&db, COLUMNS).await.contains("does not exist"));
        assert!(refused(&db, Columns { version: "version", ..columns }).await.contains("no column version"));
    } else {
        ledger(&db).await;
        let columns = Columns { key: "ID", value: "Balance", version: "VERSION", ..COLUMNS };
        let table = VersionedTable::new(db.pool.clone(), columns);
        assert_eq!(table.deduct("a", 1).await.unwrap(), updated(99, 1, 1));
    }
}

async fn a_misspelt_column_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    for columns in [
        Columns { key: "misspelt", ..COLUMNS },
        Columns { value: "misspelt", ..COLUMNS },
        Columns { version: "misspelt", ..COLUMNS },
    ] {
        let says = refused(&db, columns).await;
        assert!(says.contains("table account") && says.contains("no column misspelt"), "{says}");
    }
    assert_eq!(row(&db).await, (100, 0));
}

/// The name existed when the table was checked. (SQLite would read a missing name within double
/// quotes as a text.)
async fn a_column_or_table_that_goes_away_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let lock = VersionLock::new(db.pool.clone(), "account", "id", "version");
    table.deposit("a", 1).await.unwrap();
    lock.acquire("a", Duration::ZERO).await.unwrap();
    // The connection that makes the changes also made those before: SQLite's ALTER TABLE uses the
    // schema that its connection saw last.
    let owner = db.pool_of(1).await;
    for (statement, gone) in [
        ("ALTER TABLE account RENAME COLUMN version TO moved", "version"),
        ("ALTER TABLE account RENAME COLUMN moved TO version", ""),
        ("ALTER TABLE account RENAME COLUMN balance TO moved", "balance"),
        ("ALTER TABLE account RENAME COLUMN moved TO balance", ""),
        ("ALTER TABLE account RENAME TO moved", "account"),
    ] {
        DB::execute(&owner, statement).await.unwrap();
        if gone.is_empty() {
            continue;
        }
        let mut errors = vec![changed_nothing(table.read("a").await), changed_nothing(table.deposit("a", 1).await)];
        if gone != "balance" {
            errors.push(changed_nothing(lock.acquire("a", Duration::ZERO).await));
        }
        for error in errors {
            let says = format!("{error:?}");
            assert!(says.contains(gone) && !says.contains("t_resource_lock"), "{statement}: {says}");
        }
    }
    DB::execute(&owner, "ALTER TABLE moved RENAME TO account").await.unwrap();
    assert_eq!(row(&db).await, (101, 1));
}

async fn a_missing_table_says_so<DB: TestDatabase>(db: TestDb<DB>) {
    let says = refused(&db, COLUMNS).await;
    assert!(says.contains("table account") && says.contains("does not exist"), "{says}");
    // The table is looked for again.
    assert_eq!(ledger(&db).await.deduct("a", 1).await.unwrap(), updated(99, 1, 1));
}

/// Without such an index, a key could match several rows, now or later.
async fn a_key_column_without_a_unique_index_of_its_own_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let mut indexes =
        vec!["CREATE INDEX plain ON account (id)", "CREATE UNIQUE INDEX both_of_them ON account (id, balance)"];
    if ["sqlite", "postgres"].contains(&db.server.name) {
        indexes.push("CREATE UNIQUE INDEX partial ON account (id) WHERE balance > 0");
        indexes.push("CREATE UNIQUE INDEX computed ON account (lower(id))");
    }
    if db.server.name == "mysql" {
        indexes.push("CREATE UNIQUE INDEX computed ON account ((lower(id)))");
        indexes.push("CREATE UNIQUE INDEX computed_too ON account (id, (lower(id)))");
    }
    db.execute(
        "CREATE TABLE account (id varchar(40) NOT NULL, balance bigint, version int, PRIMARY KEY (version, id))",
    )
    .await;
    insert(&db, "account", "'a'", 100).await;
    let is_refused = async |db| {
        let says = refused(db, COLUMNS).await;
        assert!(says.contains("column id (") && says.contains("unique index"), "{says}");
    };
    is_refused(&db).await;
    for index in indexes {
        db.execute(index).await;
        is_refused(&db).await;
    }
    db.execute("CREATE UNIQUE INDEX single ON account (id)").await;
    let table = VersionedTable::new(db.pool.clone(), COLUMNS);
    assert_eq!(table.deduct("a", 1).await.unwrap(), updated(99, 1, 1));
}

/// A collation may take texts that differ for equal, and an index covers its own table only.
async fn a_key_that_means_several_rows_in_spite_of_an_index_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let is_refused = async |table| {
        let says = refused(&db, Columns { table, ..COLUMNS }).await;
        assert!(says.contains("column id (") && says.contains("unique index"), "{says}");
    };
    let is_used = async |table| {
        let table = VersionedTable::new(db.pool.clone(), Columns { table, ..COLUMNS });
        assert_eq!(table.deduct("a", 1).await.unwrap(), updated(99, 1, 1));
    };
    db.execute("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)").await;
    for (name, column, index, is_fit) in [
        ("loose_exact", "loose", "\"C\"", false),
        ("loose", "loose", "loose", true),
        ("exact_loose", "\"C\"", "loose", true),
        ("exact", "\"POSIX\"", "\"C\"", true),
    ] {
        db.execute(&format!("CREATE TABLE {name} (id text COLLATE {column}, balance bigint, version int)")).await;
        insert(&db, name, "'a'", 100).await;
        db.execute(&format!("CREATE UNIQUE INDEX ON {name} (id COLLATE {index})")).await;
        if is_fit { is_used(name).await } else { is_refused(name).await }
    }
    create(&db, "parent", "text", "bigint", "int").await;
    insert(&db, "parent", "'a'", 100).await;
    db.execute("CREATE TABLE child () INHERITS (parent)").await;
    is_refused("parent").await;
    db.execute("DROP TABLE child").await;
    is_used("parent").await;
}

async fn columns_of_another_type_are_refused_with_their_type<DB: TestDatabase>(db: TestDb<DB>) {
    let (keys, versions): (&[&str], &[&str]) = match db.server.name {
        "sqlite" => (&["REAL", "NUMERIC", ""], &["TEXT", "REAL", "NUMERIC", "BLOB"]),
        "postgres" => (
            &["numeric(12,2)", "boolean", "timestamp with time zone", "bytea", "double precision"],
            &["text", "numeric(12,0)", "double precision", "boolean"],
        ),
        _ => (
            &["decimal(12,2)", "double", "datetime", "binary(15)", "enum('a')"],
            &["varchar(9)", "decimal(12,0)", "double", "datetime"],
        ),
    };
    let create = async |number: usize, key: &str, version: &str| {
        let table = format!("account_{number}");
        create(&db, &table, key, "bigint", version).await;
        table
    };
    let is_refused = async |table: &str, column: &str, column_type: &str| {
        let says = refused(&db, Columns { table, ..COLUMNS }).await;
        assert!(says.contains(&format!("column {column} ({column_type})")), "{says}");
    };
    for (number, key) in keys.iter().enumerate() {
        is_refused(&create(number, key, "bigint").await, "id", key).await;
    }
    for (number, version) in versions.iter().enumerate() {
        is_refused(&create(100 + number, "varchar(9)", version).await, "version", version).await;
    }
}

/// The key and version columns are suitable. The value has another type.
async fn a_value_of_another_type_is_an_error_that_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    create(&db, "account", "varchar(40)", "varchar(40)", "bigint").await;
    insert(&db, "account", "'a'", "'much'").await;
    let table = VersionedTable::new(db.pool.clone(), COLUMNS);
    for _ in 0..3 {
        changed_nothing(table.read("a").await);
        changed_nothing(table.deposit("a", 1).await);
        let update = table.update("a", |balance| Ok::<_, Error>(balance + 1)).await;
        changed_nothing(update);
    }
    assert_eq!(db.cell("balance", "account").await.as_deref(), Some("much"));
    assert_eq!(db.cell("version", "account").await.as_deref(), Some("0"));
}

/// A table without transactions cannot be rolled back.
async fn a_table_of_another_engine_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    db.execute("ALTER TABLE account ENGINE = MyISAM").await;
    let says = refused(&db, COLUMNS).await;
    assert!(says.contains("MyISAM") && says.contains("InnoDB"), "{says}");
    assert_eq!(row(&db).await, (100, 0));
}

/// Such a session silently cuts numbers that are too large.
async fn a_session_that_is_not_strict_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let options = PoolOptions::<DB>::new().max_connections(1).after_connect(|conn, _| {
        Box::pin(async { DB::execute_on(conn, "SET sql_mode = 'NO_ENGINE_SUBSTITUTION'").await.map(drop) })
    });
    let lax = options.connect(&db.url).await.unwrap();
    let table = VersionedTable::new(lax.clone(), COLUMNS);
    let error = changed_nothing(table.deposit("a", 1).await);
    assert!(
        matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains("STRICT_TRANS_TABLES"),
        "{error}"
    );
    let lock = VersionLock::new(lax, "account", "id", "version");
    assert!(matches!(lock.acquire("a", Duration::ZERO).await, Err(Error::Setup(Setup::TableUnfit { .. }))));
    assert_eq!(row(&db).await, (100, 0));
}

/// Two tables whose names differ only by case are not confused.
async fn a_table_is_not_taken_for_its_namesake<DB: TestDatabase>(db: TestDb<DB>) {
    let Ok(_) = DB::execute(&db.pool, "CREATE TABLE ACCOUNT (id datetime, balance int, version double)").await else {
        return;
    };
    let table = ledger(&db).await;
    assert_eq!(table.deduct("a", 1).await.unwrap(), updated(99, 1, 1));
    outside(&db, "version = 7").await;
    assert_eq!(row(&db).await, (99, 7));
}
