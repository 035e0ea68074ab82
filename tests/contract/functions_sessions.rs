//! The functions in SQL with the rights of their caller, and under what its session has set.

use harness::{DIRECT, TestDb, pool, refused};
use rowlock::Reason;

use crate::{
    durability::{self, assert_committed},
    functions::{Ask, Functions},
    functions_promises::{ask, change, installed},
};

harness::tests!(
    servers[DIRECT](the_callers_rights_are_enough),
    servers(newer_functions_stay),
    postgres(isolation_levels_grant_once, a_session_that_reads_uncommitted_rows_reads_committed_ones),
    mariadb[DIRECT](a_default_label_keeps_the_id_of_its_session),
    postgres[DIRECT](
        the_table_is_found_on_any_path,
        a_default_label_keeps_the_id_of_its_session,
        a_renewal_adds_its_lease_in_utc,
        a_month_is_thirty_days,
        what_a_claim_rests_on_waits_for_the_disk
    )
);

async fn the_table_is_found_on_any_path<DB: Functions>(db: TestDb<DB>) {
    db.execute("CREATE SCHEMA \"An app\"").await;
    let path = |path: &str| format!("{}?options[search_path]={path}", db.url);
    let app = pool::<DB>(&path("\"An app\""), 2).await;
    rowlock::migration::migrate_functions(&app).await.unwrap();
    let conn = &mut *db.pool.acquire().await.unwrap();
    // Temporary tables and the caller's path mislead no function, and a session's time zone
    // neither.
    for misleading in [
        "CREATE TEMP TABLE t_resource_lock (LIKE public.t_resource_lock INCLUDING ALL)",
        "SET search_path = pg_temp, public, \"An app\"; SET TimeZone = 'Asia/Kolkata'",
    ] {
        DB::execute_on(conn, misleading).await.unwrap();
    }
    let answer = DB::call_try_acquire(conn, &Ask::of("k")).await.unwrap();
    assert!(answer.granted);
    assert_eq!(refused(rowlock::LeaseLock::new(app).try_acquire("k").await).reason, Reason::Held);
    assert_eq!(db.number("SELECT count(*) FROM public.t_resource_lock").await, Some(0));
    assert_eq!(DB::text_on(conn, "SHOW search_path").await.unwrap().as_deref(), Some("pg_temp, public, \"An app\""));
}

/// A day of 23 hours in the session's time zone is 24 hours for a lease.
async fn a_renewal_adds_its_lease_in_utc<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let conn = &mut *db.pool.acquire().await.unwrap();
    // The clock of this zone is put forward within an hour.
    let zone = "SELECT set_config('TimeZone', 'A0B,' || extract(doy FROM t) - 1 || '/' || extract(hour FROM t) + 1 || ',J1/0', false)
                FROM (SELECT now() AT TIME ZONE 'UTC' AS t) AS utc";
    DB::execute_on(conn, zone).await.unwrap();
    let claim = DB::call_try_acquire(conn, &Ask::of("k")).await.unwrap();
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let renewed = DB::call_change(conn, "renew", "k", holder, token, Some("1 day")).await.unwrap();
    assert_eq!(renewed.as_deref(), Some("done"));
    let left = "SELECT round(extract(epoch FROM expires_at - clock_timestamp()) / 3600)::bigint FROM t_resource_lock";
    assert_eq!(db.number(left).await, Some(24));
}

/// In a session that commits asynchronously too. What else it has set stays.
async fn what_a_claim_rests_on_waits_for_the_disk<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    for sql in durability::TRIGGER {
        db.execute(sql).await;
    }
    db.execute("INSERT INTO t_resource_lock (key_resource) VALUES ('k')").await;
    let conn = &mut *db.pool.acquire().await.unwrap();
    for (session, committed) in [("off", "on"), ("local", "local")] {
        DB::execute_on(conn, &format!("SET synchronous_commit = {session}")).await.unwrap();
        for ends in [["renew", "release"], ["renew", "put_back"]] {
            let claim = DB::call_try_acquire(conn, &Ask::of("k")).await.unwrap();
            assert_committed(&db, &["k"], committed, "a claim").await;
            for what in ends {
                let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
                let outcome = DB::call_change(conn, what, "k", holder, token, None).await.unwrap();
                assert_eq!(outcome.as_deref(), Some("done"));
                assert_committed(&db, &["k"], committed, what).await;
            }
        }
        // A refusal writes nothing, and what follows a call commits as the session does.
        let claim = DB::call_try_acquire(conn, &Ask::of("k")).await.unwrap();
        DB::execute_on(conn, "BEGIN").await.unwrap();
        assert!(!DB::call_try_acquire(conn, &Ask::of("k")).await.unwrap().granted);
        assert_eq!(DB::text_on(conn, "SHOW synchronous_commit").await.unwrap().as_deref(), Some(session));
        DB::execute_on(conn, "COMMIT").await.unwrap();
        let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
        DB::call_change(conn, "abandon", "k", holder, token, None).await.unwrap();
        assert_committed(&db, &["k"], session, "an abandonment").await;
        assert_eq!(DB::text_on(conn, "SHOW synchronous_commit").await.unwrap().as_deref(), Some(session));
    }
}

/// The rights that `docs/functions.md` states.
async fn the_callers_rights_are_enough<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let row = ("SELECT, INSERT, UPDATE", "t_resource_lock");
    let user = match db.server.name {
        "postgres" => db.user("hunter2", &[row]).await,
        // MySQL takes no password without TLS.
        _ => db.user("", &[row, ("EXECUTE", "*")]).await,
    };
    let own = pool::<DB>(&user.url, 2).await;
    let used = harness::spawn(async move {
        let claim = ask(&own, &Ask::of("k")).await;
        assert_eq!(ask(&own, &Ask::of("k")).await.reason.as_deref(), Some("held"));
        assert_eq!(change(&own, "renew", "k", &claim, None).await, "done");
        change(&own, "confirm", "k", &claim, None).await;
        assert_eq!(change(&own, "release", "k", &claim, None).await, "done");
        assert_eq!(DB::call_list(&mut *own.acquire().await.unwrap()).await.unwrap().len(), 1);
        own.close().await;
    });
    let used = used.await;
    user.remove(&db).await;
    used.unwrap();
}

/// A transaction that fails for contention is repeated, as at any other statement.
async fn isolation_levels_grant_once<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let mut old = db.pool.acquire().await.unwrap();
        let begin = format!("BEGIN ISOLATION LEVEL {level}");
        DB::execute_on(&mut old, &begin).await.unwrap();
        DB::text_on(&mut old, "SELECT 'a snapshot' FROM t_resource_lock UNION SELECT 'is taken'").await.unwrap();
        // Keys that are claimed and freed, or created, after the snapshot was taken.
        let claim = ask(&db.pool, &Ask::of(level)).await;
        let error = DB::call_try_acquire(&mut old, &Ask::of(level)).await.unwrap_err();
        assert_eq!(
            error.as_database_error().and_then(|error| error.code().map(|c| c.to_string())).as_deref(),
            Some("40001")
        );
        DB::execute_on(&mut old, "ROLLBACK; ").await.unwrap();

        DB::execute_on(&mut old, &begin).await.unwrap();
        assert!(!DB::call_try_acquire(&mut old, &Ask::of(level)).await.unwrap().granted);
        assert_eq!(change(&db.pool, "release", level, &claim, None).await, "done");
        // Refused, by the old snapshot: never granted by it.
        assert!(!DB::call_try_acquire(&mut old, &Ask::of(level)).await.is_ok_and(|answer| answer.granted));
        DB::execute_on(&mut old, "ROLLBACK").await.unwrap();

        DB::execute_on(&mut old, &begin).await.unwrap();
        DB::text_on(&mut old, "SELECT status FROM t_resource_lock LIMIT 1").await.unwrap();
        let claim = ask(&db.pool, &Ask::of(level)).await;
        let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
        let error = DB::call_change(&mut old, "confirm", level, holder, token, None).await.unwrap_err();
        assert_eq!(
            error.as_database_error().and_then(|error| error.code().map(|c| c.to_string())).as_deref(),
            Some("40001")
        );
        DB::execute_on(&mut old, "ROLLBACK").await.unwrap();
        DB::execute_on(&mut old, &begin).await.unwrap();
        DB::call_change(&mut old, "confirm", level, holder, token, None).await.unwrap();
        assert_eq!(
            DB::call_change(&mut old, "release", level, holder, token, None).await.unwrap().as_deref(),
            Some("done")
        );
        let again = DB::call_try_acquire(&mut old, &Ask::of(level)).await.unwrap();
        assert!(again.granted && again.token > Some(token));
        DB::execute_on(&mut old, "COMMIT").await.unwrap();
        assert_eq!(ask(&db.pool, &Ask::of(level)).await.reason.as_deref(), Some("held"));
    }
}

/// PostgreSQL treats the two levels alike. A claim whose row does not exist is lost.
async fn a_session_that_reads_uncommitted_rows_reads_committed_ones<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let conn = &mut *db.pool.acquire().await.unwrap();
    DB::execute_on(conn, "BEGIN ISOLATION LEVEL READ UNCOMMITTED").await.unwrap();
    let renewed = DB::call_change(conn, "renew", "none", holder, token, None).await.unwrap();
    assert_eq!(renewed.as_deref(), Some("lost"));
    DB::execute_on(conn, "ROLLBACK").await.unwrap();
}

/// A year is 365.25 days. By the calendar, what is subtracted from one time may be another length
/// than what is added to the other: `until` would be a time that has passed.
async fn a_month_is_thirty_days<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    change(&db.pool, "release", "k", &claim, None).await;
    for (interval, seconds, ago) in [
        ("1 year", 31_557_600, "8760 hours"),
        ("1 month", 2_592_000, "719 hours"),
        ("2 months", 5_184_000, "1439 hours"),
    ] {
        db.set("k", &format!("begin_time = now() - interval '{ago}'")).await;
        let until = format!(
            "SELECT reason || ' ' || (until - since = interval '{seconds} seconds')
             FROM rowlock_try_acquire('k', min_interval => '{interval}')"
        );
        assert_eq!(db.text(&until).await.as_deref(), Some("within_min_interval true"), "{interval}");
    }
}

/// The end of a long name is kept, as in the labels of locks.
async fn a_default_label_keeps_the_id_of_its_session<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let (user, id) = if db.server.name == "postgres" {
        (None, "SELECT pg_backend_pid()::text")
    } else {
        let rights = ("SELECT, INSERT, UPDATE", "t_resource_lock");
        (Some(db.long_user(&[rights, ("EXECUTE", "*")]).await), "SELECT CAST(CONNECTION_ID() AS CHAR)")
    };
    let own = pool::<DB>(user.as_ref().map_or(&db.url, |user| &user.url), 1).await;
    let claimed = harness::spawn(async move {
        let mut conn = own.acquire().await.unwrap();
        if id.contains("pg_") {
            DB::execute_on(&mut conn, &format!("SET application_name = '{}end'", "x".repeat(60))).await.unwrap();
        }
        assert!(DB::call_try_acquire(&mut conn, &Ask::of("k")).await.unwrap().granted);
        let id = DB::text_on(&mut conn, id).await.unwrap().unwrap();
        drop(conn);
        own.close().await;
        id
    });
    let claimed = claimed.await;
    let label = db.column("k", "client_ip").await.unwrap();
    if let Some(user) = user {
        user.remove(&db).await;
    }
    assert!(label.ends_with(&format!("/{}", claimed.unwrap())) && label.chars().count() == 45, "{label}");
}

/// A file that is older installs nothing, and says so.
async fn newer_functions_stay<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let (folder, kind) = if db.server.name == "postgres" { ("postgres", "FUNCTION") } else { ("mysql", "PROCEDURE") };
    for what in ["version", "list"] {
        db.execute(&format!("DROP {kind} rowlock_{what}")).await;
    }
    db.execute(match folder {
        "postgres" => "CREATE FUNCTION rowlock_version() RETURNS integer LANGUAGE sql AS 'SELECT 99991231'",
        _ => "CREATE PROCEDURE rowlock_version() BEGIN SELECT 99991231 AS version; END",
    })
    .await;
    let files = std::fs::read_dir(format!("{}/../../functions/{folder}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let conn = &mut *db.pool.acquire().await.unwrap();
    for file in files {
        let installed = DB::execute_on(conn, &std::fs::read_to_string(file.unwrap().path()).unwrap()).await;
        match installed {
            Ok(_) => assert_eq!(folder, "postgres"),
            Err(error) => assert!(folder == "mysql" && error.to_string().contains("newer functions"), "{error}"),
        }
    }
    assert!(DB::call_list(conn).await.is_err(), "nothing was created");
}
