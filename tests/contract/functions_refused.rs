//! What the functions in SQL refuse with an error, and that a claim leaves the settings of the
//! caller's transaction as they are.

use harness::{DIRECT, TestDb, pool};
use sqlx::mysql::MySqlDatabaseError;

use crate::{
    functions::{Ask, Functions},
    functions_promises::{ask, change, installed},
    neighbours::whole,
    rows_not_visible::vanishing,
};

harness::tests!(
    servers[DIRECT](a_user_without_rights_on_the_table_is_denied),
    servers(
        a_renewal_has_the_limits_of_a_lease,
        a_release_writes_no_other_status,
        a_confirmation_beside_another_one_is_to_be_repeated
    ),
    postgres(
        a_claim_leaves_the_lock_timeout_of_its_transaction,
        a_claim_on_a_key_that_is_younger_than_the_snapshot_is_to_be_repeated,
        a_row_that_vanishes_is_told
    ),
    mysql_and_mariadb(a_claim_that_is_younger_than_the_snapshot_is_to_be_repeated)
);

/// The number of the error on MySQL and MariaDB, its SQLSTATE on PostgreSQL.
fn code(error: &sqlx::Error) -> String {
    let error = error.as_database_error().unwrap_or_else(|| panic!("{error}"));
    match error.try_downcast_ref::<MySqlDatabaseError>() {
        Some(error) => error.number().to_string(),
        None => error.code().unwrap_or_default().into_owned(),
    }
}

/// Each function has the rights of its caller, not those of its owner. On PostgreSQL, every role
/// may call it.
async fn a_user_without_rights_on_the_table_is_denied<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let before = whole(&db, "k").await;
    let id = DB::uuid(&holder.as_uuid().simple().to_string());
    let (user, unmatched) = if db.server.name == "postgres" {
        (db.user("hunter2", &[]).await, format!("SELECT rowlock_unmatched('release', 'k', {id}, {token})"))
    } else {
        // MySQL takes no password without TLS.
        let user = db.user("", &[("EXECUTE", "*")]).await;
        (user, format!("CALL rowlock_unmatched('release', 'k', {id}, {token}, NULL, @outcome)"))
    };
    let own = pool::<DB>(&user.url, 1).await;
    let tried = harness::spawn(async move {
        let mut conn = own.acquire().await.unwrap();
        let mut tried = Vec::new();
        for key in ["k", "new"] {
            tried.push(("try_acquire", DB::call_try_acquire(&mut conn, &Ask::of(key)).await.map(drop)));
        }
        for what in ["renew", "confirm", "release", "abandon", "put_back"] {
            tried.push((what, DB::call_change(&mut conn, what, "k", holder, token, None).await.map(drop)));
        }
        tried.push(("unmatched", DB::execute_on(&mut conn, &unmatched).await.map(drop)));
        tried.push(("list", DB::call_list(&mut conn).await.map(drop)));
        drop(conn);
        own.close().await;
        tried
    });
    let tried = tried.await;
    user.remove(&db).await;
    for (what, result) in tried.unwrap() {
        let error = result.expect_err(what).to_string();
        assert!(error.contains("denied") && error.contains("t_resource_lock"), "{what}: {error}");
    }
    assert_eq!(whole(&db, "k").await, before);
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(1));
}

async fn a_renewal_has_the_limits_of_a_lease<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let before = whole(&db, "k").await;
    let mut conn = db.pool.acquire().await.unwrap();
    for (interval, seconds) in
        [("-1 hour", "-3600"), ("99 milliseconds", "0.099"), ("31 days", "2678400"), ("100 years", "3155760000")]
    {
        let lease = if db.server.name == "postgres" { interval } else { seconds };
        let renewed = DB::call_change(&mut conn, "renew", "k", holder, token, Some(lease)).await;
        assert!(renewed.as_ref().is_err_and(|error| error.to_string().contains("lease")), "{interval}: {renewed:?}");
    }
    assert_eq!(whole(&db, "k").await, before);
}

async fn a_release_writes_no_other_status<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let before = whole(&db, "k").await;
    let mut conn = db.pool.acquire().await.unwrap();
    for status in ["X", "P", "s", ""] {
        let released = DB::call_change(&mut conn, "release", "k", holder, token, Some(status)).await;
        assert!(released.as_ref().is_err_and(|error| error.to_string().contains("status")), "{status}: {released:?}");
    }
    assert_eq!(whole(&db, "k").await, before);
    assert_eq!(change(&db.pool, "release", "k", &claim, Some("F")).await, "done");
}

/// With an error that drivers repeat.
async fn a_confirmation_beside_another_one_is_to_be_repeated<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let mut one = db.pool.acquire().await.unwrap();
    let mut two = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut one, DB::BEGIN).await.unwrap();
    DB::call_change(&mut one, "confirm", "k", holder, token, None).await.unwrap();
    DB::execute_on(&mut two, DB::BEGIN).await.unwrap();
    let error = DB::call_change(&mut two, "confirm", "k", holder, token, None).await.unwrap_err();
    assert_eq!(code(&error), if db.server.name == "postgres" { "40001" } else { "1205" }, "{error}");
    DB::execute_on(&mut two, "ROLLBACK").await.unwrap();
    DB::execute_on(&mut one, "COMMIT").await.unwrap();
    DB::execute_on(&mut two, DB::BEGIN).await.unwrap();
    DB::call_change(&mut two, "confirm", "k", holder, token, None).await.unwrap();
    DB::execute_on(&mut two, "COMMIT").await.unwrap();
}

/// Also if the row is one that another transaction is creating.
async fn a_claim_leaves_the_lock_timeout_of_its_transaction<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let mut other = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut other, "INSERT INTO t_resource_lock (key_resource) VALUES ('created')").await.unwrap();
    let mut conn = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut conn, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut conn, "SET LOCAL lock_timeout = '7s'").await.unwrap();
    for (key, granted) in [("new", true), ("created", false)] {
        assert_eq!(DB::call_try_acquire(&mut conn, &Ask::of(key)).await.unwrap().granted, granted, "{key}");
        assert_eq!(DB::text_on(&mut conn, "SHOW lock_timeout").await.unwrap().as_deref(), Some("7s"), "{key}");
    }
    DB::execute_on(&mut conn, "COMMIT").await.unwrap();
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
}

async fn a_claim_on_a_key_that_is_younger_than_the_snapshot_is_to_be_repeated<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let mut old = db.pool.acquire().await.unwrap();
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        DB::execute_on(&mut old, &format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
        let rows = "SELECT count(*)::text FROM t_resource_lock WHERE key_resource = 'none'";
        assert_eq!(DB::text_on(&mut old, rows).await.unwrap().as_deref(), Some("0"));
        let claim = ask(&db.pool, &Ask::of(level)).await;
        let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
        let error = DB::call_change(&mut old, "confirm", level, holder, token, None).await.unwrap_err();
        assert_eq!(code(&error), "40001", "{error}");
        DB::execute_on(&mut old, "ROLLBACK").await.unwrap();
    }
}

/// While the row is locked by a third transaction. MariaDB with `innodb_snapshot_isolation` has an
/// error of its own for a row that is younger.
async fn a_claim_that_is_younger_than_the_snapshot_is_to_be_repeated<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let former = ask(&db.pool, &Ask::of("k")).await;
    assert_eq!(change(&db.pool, "release", "k", &former, None).await, "done");
    let mut old = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut old, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    DB::execute_on(&mut old, "START TRANSACTION WITH CONSISTENT SNAPSHOT").await.unwrap();
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let mut third = db.row_locked().await;
    let error = DB::call_change(&mut old, "confirm", "k", holder, token, None).await.unwrap_err();
    assert!(["1205", "1020"].contains(&code(&error).as_str()), "{error}");
    DB::execute_on(&mut old, "ROLLBACK").await.unwrap();
    DB::execute_on(&mut third, "ROLLBACK").await.unwrap();
    DB::call_change(&mut old, "confirm", "k", holder, token, None).await.unwrap();
}

/// It is created again for a number of times, and not for as long as the caller waits.
async fn a_row_that_vanishes_is_told<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    vanishing(&db).await;
    let mut conn = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut conn, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut conn, "SET LOCAL statement_timeout = '20s'").await.unwrap();
    let error = DB::call_try_acquire(&mut conn, &Ask::of("k")).await.unwrap_err().to_string();
    assert!(error.contains("'k'") && error.contains("not visible"), "{error}");
    DB::execute_on(&mut conn, "ROLLBACK").await.unwrap();
}
