//! Triggers, rules and row policies of the application's table: what stands after a change is what
//! is returned, and a change that they prevent is no conflict.

use std::convert::Infallible;

use harness::{DIRECT, TestDatabase, TestDb, between};
use rowlock::{
    Error, Retry, RunError, VersionLock, VersionedTable,
    balances::{Columns, UpdateError},
    errors::{Certainty, DatabaseFault, Setup},
};

use crate::{
    ledger::{COLUMNS, changed_nothing, ledger, outside, row, updated},
    versioned::PATIENT,
};

harness::tests!(
    everywhere(
        what_a_trigger_makes_of_a_change_is_returned,
        a_trigger_that_raises_the_version_too_is_no_conflict,
        a_trigger_that_keeps_the_version_is_named_and_nothing_is_changed,
        a_trigger_that_writes_elsewhere_runs_once_for_each_change,
        a_change_under_a_trigger_yields_to_the_one_that_was_first
    ),
    sqlite(
        an_update_that_is_suppressed_is_no_conflict,
        a_commit_that_is_refused_leaves_no_transaction_open,
        a_trigger_that_rolls_back_is_told
    ),
    postgres(
        an_update_that_is_suppressed_is_no_conflict,
        a_function_after_the_change_is_seen,
        a_commit_that_is_refused_leaves_no_transaction_open
    ),
    mysql_and_mariadb(a_commit_whose_error_may_come_after_it_is_unknown),
    postgres[DIRECT](a_row_policy_against_the_update_is_no_conflict)
);

/// Creates a trigger that assigns to columns of each changed row, in the database's own way.
async fn assigning<DB: TestDatabase>(db: &TestDb<DB>, column: &str, value: &str) {
    match db.server.name {
        "postgres" => before(db, &format!("NEW.{column} := {value}; RETURN NEW;")).await,
        "sqlite" => {
            // The row has the new values by then.
            let value = value.replace("NEW.", "");
            db.execute(&format!(
                "CREATE TRIGGER assigning AFTER UPDATE ON account BEGIN \
                 UPDATE account SET {column} = {value} WHERE id = NEW.id; END"
            ))
            .await;
        }
        _ => {
            let sql =
                format!("CREATE TRIGGER assigning BEFORE UPDATE ON account FOR EACH ROW SET NEW.{column} = {value}");
            db.execute(&sql).await;
        }
    }
}

/// Creates a trigger of PostgreSQL before each change of a row.
async fn before<DB: TestDatabase>(db: &TestDb<DB>, body: &str) {
    db.execute(&format!("CREATE FUNCTION assign() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$")).await;
    db.execute("CREATE TRIGGER assigning BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION assign()").await;
}

/// Makes all changes, each of which is altered by one less, and looks at the row after each.
pub async fn each_is_one_less<DB: TestDatabase>(db: &TestDb<DB>, table: &VersionedTable<DB>) {
    assert_eq!(table.update("a", |balance| Ok::<_, Infallible>(balance * 2)).await.unwrap(), updated(199, 1, 1));
    assert_eq!(row(db).await, (199, 1));
    for round in 0..6 {
        // The next one starts from the row that stands.
        let [left, more] = [188 - 2 * round, 197 - 2 * round];
        assert_eq!(table.deduct("a", 10).await.unwrap(), updated(left, 2 + 2 * round, 1));
        assert_eq!(row(db).await, (left, 2 + 2 * round));
        assert_eq!(table.deposit("a", 10).await.unwrap(), updated(more, 3 + 2 * round, 1));
        assert_eq!(row(db).await, (more, 3 + 2 * round));
    }
    let mut tx = db.pool.begin().await.unwrap();
    assert_eq!(table.deduct_in(&mut tx, "a", 6).await.unwrap(), updated(180, 14, 1));
    assert_eq!(table.deposit_in(&mut tx, "a", 6).await.unwrap(), updated(185, 15, 1));
    tx.commit().await.unwrap();
    assert_eq!(row(db).await, (185, 15));
}

async fn what_a_trigger_makes_of_a_change_is_returned<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    assigning(&db, "balance", "NEW.balance - 1").await;
    each_is_one_less(&db, &table).await;
}

/// UPDATE returns the row as it was before such a trigger.
async fn a_function_after_the_change_is_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    for sql in [
        "CREATE FUNCTION fee() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE account SET balance = balance - 1 WHERE id = NEW.id; RETURN NULL; END $$",
        "CREATE TRIGGER fee AFTER UPDATE ON account FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION fee()",
    ] {
        db.execute(sql).await;
    }
    each_is_one_less(&db, &table).await;
}

async fn a_trigger_that_raises_the_version_too_is_no_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    assigning(&db, "version", "NEW.version + 1").await;
    assert_eq!(table.update("a", |balance| Ok::<_, Infallible>(balance * 2)).await.unwrap(), updated(200, 2, 1));
    assert_eq!(table.deduct("a", 10).await.unwrap(), updated(190, 4, 1));
    assert_eq!(table.deposit("a", 10).await.unwrap(), updated(200, 6, 1));
    assert_eq!(row(&db).await, (200, 6));
    let lock = VersionLock::new(db.pool.clone(), "account", "id", "version");
    lock.transaction("a", async |_| Ok::<_, sqlx::Error>(())).await.unwrap();
    assert_eq!(row(&db).await, (200, 8));
}

/// Asserts that no change is made or repeated, and that each error says why.
async fn is_named<DB: TestDatabase>(db: &TestDb<DB>, table: &VersionedTable<DB>, pool: &sqlx::Pool<DB>) {
    let before = row(db).await;
    let tells = |error: &Error| {
        let text = error.to_string();
        matches!(error, Error::Setup(Setup::TableUnfit { .. }))
            && text.contains("key \"a\"")
            && text.contains("trigger")
    };
    let mut calls = 0;
    let update = table.update("a", |balance| {
        calls += 1;
        Ok::<_, Error>(balance + 1)
    });
    let mut errors = vec![changed_nothing(update.await), changed_nothing(table.deposit("a", 1).await)];
    assert!(calls <= 2, "{calls} attempts");
    let lock = VersionLock::new(pool.clone(), "account", "id", "version");
    let ran = lock.transaction("a", async |_| Ok::<_, sqlx::Error>(())).await;
    let Err(RunError::Other(error)) = ran else { panic!("{ran:?}") };
    errors.push(error);
    let deducted = table.deduct("a", 1).await;
    // InnoDB keeps the lock of a row whose change is undone, until the transaction ends.
    let mut tx = pool.begin().await.unwrap();
    DB::execute_on(&mut tx, "INSERT INTO account VALUES ('kept', 5, 0)").await.unwrap();
    errors.push(changed_nothing(table.deposit_in(&mut tx, "a", 1).await));
    for deducted in [deducted, table.deduct_in(&mut tx, "a", 1).await] {
        let Err(UpdateError::Other(error)) = deducted else { panic!("{deducted:?}") };
        errors.push(error);
    }
    for error in errors {
        assert!(tells(&error), "{error:?}");
    }
    // The caller's transaction goes on: nothing of the change is in it.
    tx.commit().await.unwrap();
    assert_eq!(db.number("SELECT balance FROM account WHERE id = 'kept'").await, Some(5));
    assert_eq!(row(db).await, before);
}

/// Otherwise two programs that read the same version would both write.
async fn a_trigger_that_keeps_the_version_is_named_and_nothing_is_changed<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    assigning(&db, "version", "OLD.version").await;
    is_named(&db, &table, &db.pool).await;
}

async fn an_update_that_is_suppressed_is_no_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    if db.server.name == "sqlite" {
        db.execute("CREATE TRIGGER never BEFORE UPDATE ON account BEGIN SELECT RAISE(IGNORE); END").await;
        return is_named(&db, &table, &db.pool).await;
    }
    before(&db, "RETURN NULL;").await;
    is_named(&db, &table, &db.pool).await;
    db.execute("DROP TRIGGER assigning ON account").await;
    db.execute("DELETE FROM account WHERE id = 'kept'").await;
    db.execute("CREATE RULE never AS ON UPDATE TO account DO INSTEAD NOTHING").await;
    let table = VersionedTable::new(db.pool.clone(), COLUMNS);
    is_named(&db, &table, &db.pool).await;
}

/// The user sees the row, and may not change it.
async fn a_row_policy_against_the_update_is_no_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let user = format!("rowlock_{:08x}", fastrand::u32(..));
    for sql in [
        format!("CREATE ROLE {user}"),
        format!("GRANT SELECT, INSERT, UPDATE ON account TO {user}"),
        "ALTER TABLE account ENABLE ROW LEVEL SECURITY".into(),
        format!("CREATE POLICY sees ON account FOR SELECT TO {user} USING (true)"),
        format!("CREATE POLICY adds ON account FOR INSERT TO {user} WITH CHECK (true)"),
        format!("CREATE POLICY changes ON account FOR UPDATE TO {user} USING (id <> 'a')"),
    ] {
        db.execute(&sql).await;
    }
    let role = format!("SET ROLE {user}");
    let options = sqlx::pool::PoolOptions::<DB>::new().max_connections(4).after_connect(move |conn, _| {
        let role = role.clone();
        Box::pin(async move { DB::execute_on(conn, &role).await.map(drop) })
    });
    let pool = options.connect(&db.url).await.unwrap();
    let table = VersionedTable::new(pool.clone(), COLUMNS);
    is_named(&db, &table, &pool).await;
    pool.close().await;
    db.execute(&format!("DROP OWNED BY {user}")).await;
    db.execute(&format!("DROP ROLE {user}")).await;
}

async fn journal<DB: TestDatabase>(db: &TestDb<DB>) -> VersionedTable<DB> {
    let table = ledger(db).await.retry(PATIENT);
    let sql: &[&str] = match db.server.name {
        "postgres" => &[
            "CREATE TABLE journal (left_over bigint)",
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO journal VALUES (NEW.balance); RETURN NULL; END $$",
            "CREATE TRIGGER note AFTER UPDATE ON account FOR EACH ROW EXECUTE FUNCTION note()",
        ],
        "sqlite" => &[
            "CREATE TABLE journal (left_over bigint)",
            "CREATE TRIGGER note AFTER UPDATE ON account BEGIN INSERT INTO journal VALUES (NEW.balance); END",
        ],
        _ => &[
            "CREATE TABLE journal (left_over bigint)",
            "CREATE TRIGGER note BEFORE UPDATE ON account FOR EACH ROW INSERT INTO journal VALUES (NEW.balance)",
        ],
    };
    for sql in sql {
        db.execute(sql).await;
    }
    table
}

async fn a_trigger_that_writes_elsewhere_runs_once_for_each_change<DB: TestDatabase>(db: TestDb<DB>) {
    let table = journal(&db).await;
    let other = VersionedTable::new(db.pool.clone(), COLUMNS).retry(PATIENT);
    let workers: Vec<_> = (0..8)
        .map(|worker| {
            let table = if worker % 2 == 0 { table.clone() } else { other.clone() };
            harness::spawn(async move {
                for _ in 0..5 {
                    table.deduct("a", 1).await.unwrap();
                    table.deposit("a", 2).await.unwrap();
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    assert_eq!(row(&db).await, (140, 80));
    assert_eq!(db.number("SELECT COUNT(*) FROM journal").await, Some(80));
    assert_eq!(db.number("SELECT COUNT(DISTINCT left_over) FROM journal").await.map(|count| count > 1), Some(true));
}

/// Another program changes the row between the read and the write.
async fn a_change_under_a_trigger_yields_to_the_one_that_was_first<DB: TestDatabase>(db: TestDb<DB>) {
    let table = journal(&db).await;
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
    assert_eq!(db.number("SELECT COUNT(*) FROM journal").await, Some(3));
    let few = Retry { attempts: 2, ..PATIENT };
    let table = VersionedTable::new(db.pool.clone(), Columns { ..COLUMNS }).retry(few);
    let update = table.update("a", |balance| {
        between(outside(&db, "version = version + 1"));
        Ok::<_, Infallible>(balance - 1)
    });
    let UpdateError::Other(error) = update.await.unwrap_err();
    assert!(matches!(error, Error::Conflict { attempts: 2, .. }), "{error:?}");
    assert_eq!(row(&db).await, (2099, 5));
}

/// What the pool's only connection writes next commits by itself.
async fn is_usable<DB: TestDatabase>(db: &TestDb<DB>, pool: &sqlx::Pool<DB>) {
    let before = db.number("SELECT COUNT(*) FROM parent").await.unwrap();
    assert_eq!(DB::execute(pool, &format!("INSERT INTO parent VALUES ({})", before + 10)).await.unwrap(), 1);
    assert_eq!(db.number("SELECT COUNT(*) FROM parent").await, Some(before + 1));
}

/// Returns a pool of one connection and a table that shares it. Each change runs the trigger.
async fn narrow<DB: TestDatabase>(db: &TestDb<DB>, trigger: &[&str]) -> (sqlx::Pool<DB>, VersionedTable<DB>) {
    ledger(db).await;
    db.execute("CREATE TABLE parent (id int PRIMARY KEY)").await;
    for sql in trigger {
        db.execute(sql).await;
    }
    let pool = db.pool_of(1).await;
    (pool.clone(), VersionedTable::new(pool, COLUMNS).share_pool())
}

/// SQLite keeps a transaction open whose COMMIT it refuses.
async fn a_commit_that_is_refused_leaves_no_transaction_open<DB: TestDatabase>(db: TestDb<DB>) {
    let child = "CREATE TABLE child (parent int REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)";
    let trigger: &[&str] = match db.server.name {
        "sqlite" => &[child, "CREATE TRIGGER note AFTER UPDATE ON account BEGIN INSERT INTO child VALUES (1); END"],
        _ => &[
            child,
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO child VALUES (1); RETURN NEW; END $$",
            "CREATE TRIGGER note BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION note()",
        ],
    };
    let (pool, table) = narrow(&db, trigger).await;
    for _ in 0..2 {
        let error = changed_nothing(table.deposit("a", 1).await);
        assert!(
            matches!(error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. })),
            "{error:?}"
        );
        is_usable(&db, &pool).await;
    }
    assert_eq!(row(&db).await, (100, 0));
}

/// The ROLLBACK that follows finds no transaction. Its error says nothing about the change.
async fn a_trigger_that_rolls_back_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let trigger = "CREATE TRIGGER never AFTER UPDATE ON account BEGIN SELECT RAISE(ROLLBACK, 'no more today'); END";
    let (pool, table) = narrow(&db, &[trigger]).await;
    let error = changed_nothing(table.deposit("a", 1).await);
    assert!(format!("{error:?}").contains("no more today"), "{error:?}");
    is_usable(&db, &pool).await;
    assert_eq!(row(&db).await, (100, 0));
}

/// MySQL and MariaDB report some errors after the engine has committed.
async fn a_commit_whose_error_may_come_after_it_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    narrow(&db, &["CREATE TRIGGER seen BEFORE UPDATE ON account FOR EACH ROW SET @seen = 1"]).await;
    let proxy = db.proxy().await;
    let table = VersionedTable::<DB>::new(proxy.pool(1), COLUMNS);
    table.deposit("a", 1).await.unwrap();
    proxy.replace("COMMIT AND NO CHAIN NO RELEASE", "SIGNAL SQLSTATE '45000'       ");
    let error = table.deposit("a", 1).await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::Failed { outcome: Certainty::Unknown, .. })), "{error:?}");
    assert!(format!("{error:?}").contains("45000"), "{error:?}");
}
