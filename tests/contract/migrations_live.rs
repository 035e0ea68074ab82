//! A table that is completed while clients use it.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use chrono::TimeDelta;
use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually};
use rowlock::{
    Error,
    errors::DatabaseFault,
    migration::{Migration, migrate_functions},
};
use sqlx::Transaction;
use tokio::time::{sleep, timeout};

use crate::{
    article::{Answer, Program, shapes},
    child,
    migrations::drop_all,
    migrations_planned::tables,
    upgrade::make,
};

harness::tests!(
    servers[DIRECT](
        clients_go_on_while_a_transaction_is_in_the_way,
        a_program_that_is_killed_leaves_nothing_that_waits
    ),
    everywhere(
        a_program_that_is_killed_at_any_moment_leaves_what_can_be_completed,
        a_removal_that_is_killed_can_be_repeated
    ),
    mysql_and_mariadb(what_is_done_before_a_transaction_in_the_way_is_told),
    mysql_and_mariadb.each(functions_in_use_are_waited_for_a_second_at_most),
    servers[DIRECT].long(a_transaction_that_stays_in_the_way_is_named, a_large_table_is_completed_beside_its_clients)
);

/// How long a client waits at most behind a statement that waits for a lock: a second, and the time
/// of a busy machine.
const BEARABLE: Duration = Duration::from_secs(3);

/// The number of statements that wait for a lock on a table.
pub async fn waiting<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    let count = match db.server.name {
        "postgres" => {
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        }
        "mysql" => {
            "SELECT COUNT(*) FROM performance_schema.threads WHERE processlist_db = DATABASE() AND processlist_state LIKE 'Waiting for %lock'"
        }
        _ => {
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state LIKE 'Waiting for %lock'"
        }
    };
    db.number(count).await.unwrap()
}

/// Takes a column from the table, and begins a transaction that has read a row and does no more.
async fn in_the_way<DB: TestDatabase>(db: &TestDb<DB>) -> Transaction<'static, DB> {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    db.execute("ALTER TABLE t_resource_lock DROP COLUMN confirms").await;
    let mut tx = db.pool_of(1).await.begin().await.unwrap();
    DB::execute_on(&mut tx, "SELECT key_resource FROM t_resource_lock").await.unwrap();
    tx
}

async fn is_complete<DB: TestDatabase>(db: &TestDb<DB>) -> bool {
    let columns = "SELECT COUNT(*) FROM information_schema.columns WHERE table_name = 't_resource_lock' AND column_name = 'confirms'";
    let place = if db.server.name == "postgres" { "current_schema()" } else { "DATABASE()" };
    db.number(&format!("{columns} AND table_schema = {place}")).await == Some(1)
}

async fn clients_go_on_while_a_transaction_is_in_the_way<DB: TestDatabase>(db: TestDb<DB>) {
    let tx = in_the_way(&db).await;
    let pool = db.pool_of(2).await;
    let migrating = harness::spawn(async move { rowlock::migrate(&pool).await });
    // A client of the article. While an attempt waits, it waits behind that.
    let client = async {
        let (mut conn, mut longest) = (db.pool_of(1).await.acquire().await.unwrap(), Duration::ZERO);
        let update = "UPDATE t_resource_lock SET client_ip = 'another' WHERE key_resource = 'k'";
        loop {
            let began = Instant::now();
            assert_eq!(DB::execute_on(&mut conn, update).await.unwrap(), 1);
            longest = longest.max(began.elapsed());
            assert!(longest < BEARABLE, "a client waited for {longest:?}");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let attempts = async {
        for _ in 0..3 {
            eventually("an attempt waits", || async { waiting(&db).await > 0 }).await;
            eventually("it gives up", || async { waiting(&db).await == 0 }).await;
        }
    };
    tokio::select! {
        never = client => never,
        () = attempts => {}
    }
    assert!(!migrating.is_finished() && !is_complete(&db).await);
    tx.rollback().await.unwrap();
    timeout(PATIENCE, migrating).await.unwrap().unwrap().unwrap();
    assert!(is_complete(&db).await);
}

async fn a_program_that_is_killed_leaves_nothing_that_waits<DB: TestDatabase>(db: TestDb<DB>) {
    let tx = in_the_way(&db).await;
    let mut program = child::start(&db, "migrate", "", Path::new(""));
    eventually("it waits", || async { waiting(&db).await > 0 }).await;
    program.kill().await.unwrap();
    let began = Instant::now();
    eventually("nothing waits", || async { waiting(&db).await == 0 }).await;
    assert!(began.elapsed() < BEARABLE, "{:?}", began.elapsed());
    tx.rollback().await.unwrap();
    rowlock::migrate(&db.pool).await.unwrap();
    assert!(is_complete(&db).await);
}

/// The table of the queue is created before the statement that waits in vain.
async fn what_is_done_before_a_transaction_in_the_way_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let tx = in_the_way(&db).await;
    db.execute("DROP TABLE t_resource_lock_queue").await;
    let migration = Migration::new(db.pool_of(2).await);
    let migrating = harness::spawn(async move { migration.run().await });
    eventually("an attempt waits", || async { waiting(&db).await > 0 }).await;
    eventually("it gives up", || async { waiting(&db).await == 0 }).await;
    tx.rollback().await.unwrap();
    let done = timeout(PATIENCE, migrating).await.unwrap().unwrap().unwrap();
    let told = |part: &str| done.steps().filter(|step| step.sql.starts_with(part)).count();
    assert_eq!((told("CREATE TABLE"), told("ALTER TABLE")), (1, 1), "{done}");
}

/// MariaDB replaces a procedure while it is called.
async fn functions_in_use_are_waited_for_a_second_at_most<DB: TestDatabase>(db: TestDb<DB>) {
    migrate_functions(&db.pool).await.unwrap();
    db.execute("DROP PROCEDURE rowlock_version").await;
    db.execute("CREATE PROCEDURE rowlock_version() SELECT 20200101 AS version").await;
    let mut tx = db.pool_of(1).await.begin().await.unwrap();
    DB::execute_on(&mut tx, "CALL rowlock_list()").await.unwrap();
    let pool = db.pool_of(2).await;
    let migrating = harness::spawn(async move { migrate_functions(&pool).await });
    if db.server.name == "mysql" {
        eventually("an attempt waits", || async { waiting(&db).await > 0 }).await;
        let began = Instant::now();
        eventually("it gives up", || async { waiting(&db).await == 0 }).await;
        assert!(began.elapsed() < BEARABLE && !migrating.is_finished(), "{:?}", began.elapsed());
        tx.rollback().await.unwrap();
    }
    timeout(PATIENCE, migrating).await.unwrap().unwrap().unwrap();
}

async fn a_transaction_that_stays_in_the_way_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    let tx = in_the_way(&db).await;
    let error = rowlock::migrate(&db.pool).await.unwrap_err();
    let Error::Database(DatabaseFault::InUse { by, .. }) = &error else { panic!("{error:?}") };
    assert!(by.contains(" of user "), "{by}");
    assert!(db.server.name == "mariadb" || by.contains("SELECT key_resource FROM t_resource_lock"), "{by}");
    tx.rollback().await.unwrap();
    rowlock::migrate(&db.pool).await.unwrap();
}

async fn a_program_that_is_killed_at_any_moment_leaves_what_can_be_completed<DB: TestDatabase>(db: TestDb<DB>) {
    let shape = &shapes(db.server.name)[0];
    let begin = async || {
        drop_all(&db).await;
        db.execute(shape).await;
    };
    kill_in_the_midst(&db, "migrate", begin, async |whole| {
        rowlock::migrate(&db.pool).await.unwrap();
        assert_eq!(tables(&db).await, whole);
        acquired(db.lock().try_acquire("k").await);
    })
    .await;
}

async fn a_removal_that_is_killed_can_be_repeated<DB: TestDatabase>(db: TestDb<DB>) {
    let shape = &shapes(db.server.name)[0];
    // MariaDB's rows keep room for each column that was ever removed, so the table is a new one.
    let begin = async || {
        drop_all(&db).await;
        db.execute(shape).await;
        rowlock::migrate(&db.pool).await.unwrap();
        if db.server.name != "sqlite" {
            rowlock::migration::migrate_functions(&db.pool).await.unwrap();
        }
    };
    kill_in_the_midst(&db, "undo", begin, async |bare| {
        Migration::new(db.pool.clone()).undo().await.unwrap();
        assert_eq!(tables(&db).await, bare);
        assert!(Migration::new(db.pool.clone()).plan_undo().await.unwrap().is_empty());
    })
    .await;
}

/// Kills programs that do `job`, at least eight, earlier after one that was done and later after
/// one that had not begun. On MySQL and MariaDB, where each statement is a transaction, one of them
/// was killed between two; elsewhere one before and one after a transaction. `complete` gets the
/// tables as they are after a job that is not killed.
async fn kill_in_the_midst<DB: TestDatabase>(
    db: &TestDb<DB>,
    job: &str,
    begin: impl AsyncFn(),
    complete: impl AsyncFn(&str),
) {
    begin().await;
    let began = Instant::now();
    child::start(db, job, "", Path::new("")).wait().await.unwrap();
    let (mut delay, after) = (began.elapsed() / 2, tables(db).await);
    let (mut early, mut late, mut midst) = (0, 0, 0);
    let few = !db.server.name.starts_with('m');
    while early + late + midst < 8 || midst == 0 && !(few && early > 0 && late > 0) {
        begin().await;
        let before = tables(db).await;
        let mut program = child::start(db, job, "", Path::new(""));
        sleep(delay).await;
        program.kill().await.unwrap();
        // What the server had received when the program died, it carries out.
        eventually("the server is done with it", || async { db.server.name == "sqlite" || working(db).await == 0 })
            .await;
        let left = tables(db).await;
        if left == before {
            early += 1;
            delay = delay.mul_f64(1.25);
        } else if left == after {
            late += 1;
            delay = delay.mul_f64(0.85);
        } else {
            midst += 1;
        }
        assert!(early + late + midst < 100, "{early} early, {late} late, {midst} in the midst");
        complete(&after).await;
    }
}

/// The number of connections of other programs with a statement in flight.
async fn working<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    let count = match db.server.name {
        "postgres" => {
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()"
        }
        // Its view of processes fails where the statement of any client is not text.
        "mysql" => {
            "SELECT COUNT(*) FROM performance_schema.threads
             WHERE processlist_db = DATABASE() AND processlist_command NOT IN ('Sleep', 'Daemon') AND processlist_id <> CONNECTION_ID()"
        }
        _ => {
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND command NOT IN ('Sleep', 'Daemon') AND id <> CONNECTION_ID()"
        }
    };
    db.number(count).await.unwrap()
}

/// The article's own clients, in local time, beside a transaction that ends after a while. With
/// `ROWLOCK_ROWS`, the table has as many rows.
async fn a_large_table_is_completed_beside_its_clients<DB: TestDatabase>(db: TestDb<DB>) {
    let rows: u64 = std::env::var("ROWLOCK_ROWS").map_or(100_000, |rows| rows.parse().unwrap());
    make(&db, &shapes(db.server.name)[0]).await;
    for batch in 0..rows / 1_000 {
        let values = (0..1_000).map(|row| format!("('row {}', 'S', 0)", batch * 1_000 + row)).collect::<Vec<_>>();
        let insert = "INSERT INTO t_resource_lock (key_resource, status, lock_flag) VALUES";
        db.execute(&format!("{insert} {}", values.join(", "))).await;
    }
    let mut idle = db.pool_of(1).await.begin().await.unwrap();
    DB::execute_on(&mut idle, "SELECT key_resource FROM t_resource_lock WHERE key_resource = 'fine'").await.unwrap();
    let ends = AtomicBool::new(false);
    let client = async |first: u32| {
        let program = Program::new(db.pool_of(1).await, db.server.name, TimeDelta::hours(8)).await;
        let (mut longest, mut taken) = (Duration::ZERO, 0_u32);
        while !ends.load(Ordering::Relaxed) {
            let (began, key) = (Instant::now(), format!("row {}", first + taken));
            assert_eq!(program.take(&key).await, Answer::Taken);
            program.give(&key, "S").await;
            longest = longest.max(began.elapsed());
            taken += 1;
        }
        (longest, taken)
    };
    let migrating = async {
        sleep(Duration::from_secs(1)).await;
        let (began, migration) = (Instant::now(), Migration::new(db.pool_of(2).await));
        let (done, ()) = tokio::join!(migration.run(), async {
            sleep(Duration::from_secs(5)).await;
            idle.rollback().await.unwrap();
        });
        let took = began.elapsed();
        sleep(Duration::from_secs(1)).await;
        ends.store(true, Ordering::Relaxed);
        (done.unwrap(), took)
    };
    let ((done, took), a, b, c) = tokio::join!(migrating, client(1_000), client(20_000), client(40_000));
    println!("{} with {rows} rows: migrated in {took:?}, clients waited {:?} {:?} {:?}", db.server.name, a, b, c);
    assert!(!done.is_empty() && is_complete(&db).await);
    for (longest, taken) in [a, b, c] {
        assert!(longest < BEARABLE && taken > 10, "a client waited for {longest:?} once in {taken}");
    }
    acquired(db.lock().try_acquire("row 77").await).release().await.unwrap();
}
