//! A migration that is printed first, that other programs on the table do not see, and that is
//! taken back.

use std::{convert::Infallible, time::Duration};

use harness::{DIRECT, TestDatabase, TestDb, acquired, eventually, pool, refused};
use rowlock::{
    Error, Reason, Schedule, Schedules, Status, Tick,
    errors::Setup,
    migration::{Functions, Migration, Plan},
};

use crate::{
    article::shapes,
    migrations::{drop_all, files_of},
    migrations_live::waiting,
    ticks::{due, instance},
    upgrade::{definitions, make, rows},
};

harness::tests!(
    everywhere(
        the_plan_is_what_is_done,
        each_way_leads_to_the_same_tables,
        undone_the_table_is_the_articles_again,
        what_is_in_use_is_not_taken_away,
        a_time_in_the_future_is_noted,
        a_column_of_the_article_is_not_added,
        a_column_of_another_program_is_not_taken
    ),
    everywhere(other_programs_do_not_see_what_is_added),
    servers[DIRECT](a_look_waits_for_no_lock),
    postgres(another_schemas_tables_are_not_taken_away),
    mysql_and_mariadb(other_procedures_are_not_taken_away),
    mysql_and_mariadb[DIRECT](
        a_right_that_is_missing_is_named_first,
        a_right_to_remove_that_is_missing_changes_nothing
    ),
    mysql_and_mariadb(a_table_without_row_locks_is_refused, a_table_that_is_compressed_is_completed)
);

/// Everything that the database tells of the tables.
pub async fn tables<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    let mut conn = db.pool_of(1).await.acquire().await.unwrap();
    if db.server.name.starts_with('m') {
        DB::execute_on(&mut conn, "SET SESSION group_concat_max_len = 1000000").await.unwrap();
    }
    let sql = match db.server.name {
        "sqlite" => {
            "SELECT group_concat(concat_ws(' ', m.name, c.cid, c.name, c.type, c.[notnull], c.dflt_value, c.pk), '; ' ORDER BY m.name, c.cid)
             FROM sqlite_schema m LEFT JOIN pragma_table_info(m.name) c WHERE m.name LIKE 't_resource%'"
        }
        "postgres" => {
            "SELECT string_agg(concat_ws(' ', relname, attnum, attname, format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid),
                attcollation::regcollation), '; ' ORDER BY relname, attnum)
             FROM pg_class c JOIN pg_attribute a ON attrelid = c.oid AND attnum > 0 AND NOT attisdropped LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
             WHERE relname LIKE 't_resource%' AND relnamespace = current_schema()::regnamespace"
        }
        _ => {
            "SELECT CONVERT(COALESCE(GROUP_CONCAT(CONCAT_WS(' ', table_name, ordinal_position, column_name, column_type, is_nullable, QUOTE(column_default),
                character_set_name, collation_name, column_key, extra) ORDER BY table_name, ordinal_position SEPARATOR '; '), '') USING utf8mb4)
             FROM information_schema.columns WHERE table_schema = DATABASE()"
        }
    };
    DB::text_on(&mut conn, sql).await.unwrap().unwrap_or_default()
}

fn statements(plan: &Plan) -> Vec<&str> {
    plan.steps().map(|step| step.sql.as_str()).collect()
}

fn migration<DB: TestDatabase>(db: &TestDb<DB>) -> Migration<DB> {
    Migration::new(db.pool.clone())
}

/// A person may carry the script out instead.
async fn the_plan_is_what_is_done<DB: TestDatabase>(db: TestDb<DB>) {
    for shape in shapes(db.server.name).iter().map(String::as_str).chain([""]) {
        let begin = async || {
            drop_all(&db).await;
            if !shape.is_empty() {
                db.execute(shape).await;
            }
            migration(&db).plan().await.unwrap()
        };
        let plan = begin().await;
        assert!(statements(&plan).iter().any(|sql| sql.starts_with("ALTER TABLE")) || db.server.name == "sqlite");
        let done = migration(&db).run().await.unwrap();
        assert_eq!(statements(&plan), statements(&done));
        let by_program = tables(&db).await;
        assert!(by_program.contains("t_resource_schedule_times"), "{by_program}");
        assert!(migration(&db).plan().await.unwrap().is_empty());
        let again = migration(&db).run().await.unwrap();
        assert!(again.is_empty() && again.to_string().is_empty());

        let plan = begin().await;
        let mut conn = db.pool_of(1).await.acquire().await.unwrap();
        DB::execute_on(&mut conn, &plan.to_string()).await.unwrap();
        assert_eq!(tables(&db).await, by_program, "{plan}");
        assert!(migration(&db).plan().await.unwrap().is_empty());
    }
}

/// The files for sqlx and the library's own statements.
async fn each_way_leads_to_the_same_tables<DB: TestDatabase>(db: TestDb<DB>) {
    drop_all(&db).await;
    rowlock::migrate(&db.pool).await.unwrap();
    let by_library = tables(&db).await;
    drop_all(&db).await;
    let mut conn = db.pool_of(1).await.acquire().await.unwrap();
    for file in files_of(&db) {
        DB::execute_on(&mut conn, &file).await.unwrap();
    }
    assert!(migration(&db).plan().await.unwrap().is_empty());
    assert_eq!(tables(&db).await, by_library);
}

async fn undone_the_table_is_the_articles_again<DB: TestDatabase>(db: TestDb<DB>) {
    for shape in shapes(db.server.name) {
        drop_all(&db).await;
        db.execute(&shape).await;
        let bare = tables(&db).await;
        make(&db, &shape).await;
        let before = (definitions(&db).await, rows(&db).await);
        rowlock::migrate(&db.pool).await.unwrap();
        let lease = acquired(db.lock().try_acquire("new").await);
        lease.release().await.unwrap();
        let planned = migration(&db).plan_undo().await.unwrap();
        let undone = migration(&db).undo().await.unwrap();
        assert_eq!(statements(&planned), statements(&undone));
        assert_eq!(tables(&db).await, bare);
        assert_eq!(db.execute("DELETE FROM t_resource_lock WHERE key_resource = 'new'").await, 1, "its row stays");
        assert_eq!((definitions(&db).await, rows(&db).await), before);
        assert!(migration(&db).undo().await.unwrap().is_empty());
        rowlock::migrate(&db.pool).await.unwrap();
        acquired(db.lock().try_acquire("new").await).release().await.unwrap();

        // As a removal that was killed leaves it, where each statement commits.
        let mut conn = db.pool_of(1).await.acquire().await.unwrap();
        DB::execute_on(&mut conn, "DROP TABLE t_resource_lock_queue").await.unwrap();
        for column in ["holder", "token"] {
            DB::execute_on(&mut conn, &format!("ALTER TABLE t_resource_lock DROP COLUMN {column}")).await.unwrap();
        }
        migration(&db).undo().await.unwrap();
        assert_eq!(tables(&db).await, bare);

        // As a migration that was killed leaves it there: no claim has been made.
        rowlock::migrate(&db.pool).await.unwrap();
        DB::execute_on(&mut conn, "ALTER TABLE t_resource_lock DROP COLUMN claimed_at").await.unwrap();
        migration(&db).undo().await.unwrap();
        assert_eq!(tables(&db).await, bare);
    }
}

async fn what_is_in_use_is_not_taken_away<DB: TestDatabase>(db: TestDb<DB>) {
    let has_functions = db.server.name != "sqlite";
    if has_functions {
        rowlock::migration::migrate_functions(&db.pool).await.unwrap();
    }
    let before = tables(&db).await;
    let used = async || match migration(&db).undo().await {
        Err(Error::Setup(Setup::StillUsed { by, .. })) => {
            assert!(!has_functions || migration(&db).installed_functions().await.unwrap() == Functions::Current);
            by
        }
        other => panic!("{other:?}"),
    };
    let lease = acquired(db.builder().label("a holder").build().unwrap().try_acquire("k").await);
    let by = used().await;
    assert!(by.contains("\"k\"") && by.contains("a holder"), "{by}");
    // No other claim has taken it over yet.
    lease.abandon().await.unwrap();
    assert!(used().await.contains("\"k\""));
    db.lock().force_release("k", Status::Failed).await.unwrap().unwrap();
    // An instance of an older version does not announce itself.
    let mut conn = db.pool_of(1).await.acquire().await.unwrap();
    let of_run = |holder: &str, due: &str| {
        format!("UPDATE t_resource_schedule SET holder = {holder}, client_ip = 'an old instance', due_at = {due}")
    };
    let due = due(&db, "old").await;
    assert_eq!(due.name(), "old");
    DB::execute_on(&mut conn, "DELETE FROM t_resource_schedule_instance").await.unwrap();
    DB::execute_on(&mut conn, &of_run(&DB::uuid("0123456789abcdef0123456789abcdef"), &DB::ago(-60_000))).await.unwrap();
    assert!(used().await.contains("an old instance"));
    DB::execute_on(&mut conn, &of_run("NULL", &DB::ago(0))).await.unwrap();
    let job = Schedule::every("job", Duration::from_secs(60));
    let running =
        instance(&db, "an instance").on(job, async |_: Tick<DB>| Ok::<_, Infallible>(())).start().await.unwrap();
    eventually("the instance announces itself", || async {
        Schedules::new(db.pool.clone()).instances().await.unwrap().iter().any(|instance| instance.alive)
    })
    .await;
    assert!(used().await.contains("an instance"));
    assert_eq!(tables(&db).await, before);
    running.shutdown(Duration::ZERO).await;
    eventually("the instance is gone", || async {
        !Schedules::new(db.pool.clone()).instances().await.unwrap().iter().any(|instance| instance.alive)
    })
    .await;
    assert!(!migration(&db).undo().await.unwrap().is_empty());
}

/// The article's clients, in statements without a list of columns.
async fn other_programs_do_not_see_what_is_added<DB: TestDatabase>(db: TestDb<DB>) {
    let shape = &shapes(db.server.name)[0];
    drop_all(&db).await;
    db.execute(shape).await;
    let insert = |key: &str| {
        format!("INSERT INTO t_resource_lock VALUES ('{key}', 'S', 0, '2020-01-01 00:00:00', NULL, '10.0.0.7', 60)")
    };
    db.execute(&insert("before")).await;
    let plan = migration(&db).plan().await.unwrap();
    if db.server.name == "sqlite" {
        let note = &plan.notes()[0];
        assert!(note.contains("INSERT") && note.contains("list of columns"), "{note}");
        return;
    }
    assert!(plan.notes().is_empty(), "{:?}", plan.notes());
    rowlock::migrate(&db.pool).await.unwrap();
    for key in ["a", "b"] {
        db.execute(&insert(key)).await;
        let lease = acquired(db.lock().try_acquire(key).await);
        assert_eq!(refused(db.lock().try_acquire(key).await).reason, Reason::Held);
        lease.release().await.unwrap();
    }
    if db.server.name != "postgres" {
        let seen = "CREATE TABLE seen AS SELECT * FROM t_resource_lock";
        db.execute(seen).await;
        let count =
            "SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 'seen'";
        assert_eq!(db.number(count).await, Some(7));
    }
}

async fn a_time_in_the_future_is_noted<DB: TestDatabase>(db: TestDb<DB>) {
    for shape in shapes(db.server.name) {
        make(&db, &shape).await;
        assert!(migration(&db).plan().await.unwrap().notes().iter().all(|note| !note.contains("future")));
        // As a program writes it that has local time at +08:00.
        let ahead = DB::begun(harness::Table::Articles, -8 * 3_600_000);
        db.execute(&format!("UPDATE t_resource_lock SET begin_time = {ahead} WHERE key_resource = 'fine'")).await;
        let plan = migration(&db).plan().await.unwrap();
        let note = plan.notes().iter().find(|note| note.contains("future")).expect("a note");
        assert!(note.contains("\"fine\"") && note.contains("--article-clients"), "{note}");
    }
}

async fn a_column_of_the_article_is_not_added<DB: TestDatabase>(db: TestDb<DB>) {
    let shape = &shapes(db.server.name)[0];
    drop_all(&db).await;
    db.execute(&shape.replace("client_ip", "label")).await;
    let before = tables(&db).await;
    for error in [migration(&db).plan().await.unwrap_err(), rowlock::migrate(&db.pool).await.unwrap_err()] {
        assert!(
            matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains("client_ip"),
            "{error}"
        );
    }
    let claimed = db.lock().try_acquire("k").await.unwrap_err().to_string();
    assert!(claimed.contains("client_ip") && !claimed.contains("migrate"), "{claimed}");
    assert_eq!(tables(&db).await, before);
}

/// It has the name of one of rowlock's.
async fn a_column_of_another_program_is_not_taken<DB: TestDatabase>(db: TestDb<DB>) {
    drop_all(&db).await;
    db.execute(&shapes(db.server.name)[0]).await;
    db.execute("ALTER TABLE t_resource_lock ADD COLUMN token varchar(64)").await;
    let before = tables(&db).await;
    for done in [
        migration(&db).plan().await.map(drop),
        rowlock::migrate(&db.pool).await,
        migration(&db).plan_undo().await.map(drop),
        migration(&db).undo().await.map(drop),
        db.lock().try_acquire("k").await.map(drop),
    ] {
        let is_told = |error: &Error| {
            matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains("column token")
        };
        assert!(done.as_ref().is_err_and(is_told), "{done:?}");
    }
    assert_eq!(tables(&db).await, before);
}

/// Returns the error of a migration by a user who has only these rights.
async fn error_of<DB: TestDatabase>(
    db: &TestDb<DB>,
    granted: &str,
    work: impl AsyncFnOnce(Migration<DB>) -> Result<Plan, Error>,
) -> String {
    let user = db.user("hunter2", &[(granted, "*")]).await;
    let own = pool::<DB>(&user.url, 2).await;
    let error = work(Migration::new(own.clone())).await.unwrap_err();
    own.close().await;
    user.remove(db).await;
    format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string))
}

async fn a_right_that_is_missing_is_named_first<DB: TestDatabase>(db: TestDb<DB>) {
    let shape = shapes(db.server.name).swap_remove(0);
    let cases =
        [("SELECT, ALTER", "CREATE", true), ("SELECT, CREATE", "ALTER", true), ("SELECT, CREATE", "ALTER", false)];
    for (granted, missing, exists) in cases {
        drop_all(&db).await;
        if exists {
            db.execute(&shape).await;
        }
        let before = tables(&db).await;
        let text = error_of(&db, granted, async |migration| migration.run().await).await;
        assert!(text.contains(&format!("{missing} command denied")) && text.contains("nothing was changed"), "{text}");
        assert_eq!(tables(&db).await, before);
    }
}

async fn a_right_to_remove_that_is_missing_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    rowlock::migration::migrate_functions(&db.pool).await.unwrap();
    let before = tables(&db).await;
    for granted in [
        "SELECT, DROP, LOCK TABLES, ALTER ROUTINE",
        "SELECT, ALTER, DROP, ALTER ROUTINE",
        "SELECT, ALTER, LOCK TABLES, ALTER ROUTINE",
        "SELECT, ALTER, DROP, LOCK TABLES",
    ] {
        let text = error_of(&db, &format!("{granted}, EXECUTE"), async |migration| migration.undo().await).await;
        assert!(text.contains("nothing was changed") && text.contains("ALTER, DROP and"), "{granted}: {text}");
        assert_eq!(tables(&db).await, before, "{granted}");
        assert_eq!(migration(&db).installed_functions().await.unwrap(), Functions::Current);
    }
}

/// A hint that is not found in a moment is not waited for, and nothing stays behind on the server.
async fn a_look_waits_for_no_lock<DB: TestDatabase>(db: TestDb<DB>) {
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    let lock = match db.server.name {
        "postgres" => "BEGIN; LOCK TABLE t_resource_lock",
        _ => "LOCK TABLES t_resource_lock WRITE",
    };
    DB::execute_on(&mut other, lock).await.unwrap();
    let plan = tokio::time::timeout(Duration::from_secs(20), migration(&db).plan()).await.unwrap().unwrap();
    assert!(plan.is_empty() && plan.notes().is_empty());
    tokio::time::timeout(Duration::from_secs(20), rowlock::migrate(&db.pool)).await.unwrap().unwrap();
    eventually("nothing waits", || async { waiting(&db).await == 0 }).await;
}

async fn another_schemas_tables_are_not_taken_away<DB: TestDatabase>(db: TestDb<DB>) {
    let before = tables(&db).await;
    let mut conn = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut conn, "CREATE SCHEMA nearer").await.unwrap();
    let url = format!("{}{}options[search_path]=nearer,public", db.url, if db.url.contains('?') { "&" } else { "?" });
    let both = pool::<DB>(&url, 2).await;
    DB::execute_on(&mut conn, "CREATE TABLE nearer.t_resource_lock AS SELECT * FROM t_resource_lock").await.unwrap();
    DB::execute_on(&mut conn, "CREATE TABLE nearer.t_resource_lock_queue AS SELECT * FROM t_resource_lock_queue")
        .await
        .unwrap();
    let plan = Migration::new(both.clone()).plan_undo().await.unwrap();
    assert!(statements(&plan).iter().all(|sql| !sql.contains("t_resource_schedule")), "{plan}");
    Migration::new(both).undo().await.unwrap();
    assert_eq!(tables(&db).await, before);
    let left = "SELECT COUNT(*) FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid WHERE relnamespace = 'nearer'::regnamespace
                AND relkind = 'r' AND attnum > 0 AND NOT attisdropped";
    assert_eq!(db.number(left).await, Some(7));
}

async fn other_procedures_are_not_taken_away<DB: TestDatabase>(db: TestDb<DB>) {
    rowlock::migration::migrate_functions(&db.pool).await.unwrap();
    db.execute("CREATE PROCEDURE rowlock_report() SELECT 1").await;
    migration(&db).undo().await.unwrap();
    let left = "SELECT COUNT(*) FROM information_schema.routines WHERE routine_schema = DATABASE()";
    assert_eq!(db.number(left).await, Some(1));
    db.execute("CALL rowlock_report()").await;
}

async fn a_table_without_row_locks_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let shape = &shapes(db.server.name)[0];
    let by_a_part = shape
        .replace("NOT NULL PRIMARY KEY", "NOT NULL")
        .replace("time int(10)", "PRIMARY KEY (key_resource(9)), time int(10)");
    for (shape, wrong) in [(shape.replace("InnoDB", "MyISAM"), "MyISAM"), (by_a_part, "primary key")] {
        drop_all(&db).await;
        db.execute(&shape).await;
        let error = rowlock::migrate(&db.pool).await.unwrap_err();
        assert!(
            matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains(wrong),
            "{error}"
        );
    }
    drop_all(&db).await;
    db.execute("CREATE VIEW t_resource_lock AS SELECT 'k' AS key_resource, 'S' AS status, 0 AS lock_flag, NOW() AS begin_time, NOW() AS end_time, '' AS client_ip, 60 AS time").await;
    let error = rowlock::migrate(&db.pool).await.unwrap_err();
    assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })), "{error:?}");
}

/// MySQL adds no column to such a table by a change of the definition alone.
async fn a_table_that_is_compressed_is_completed<DB: TestDatabase>(db: TestDb<DB>) {
    drop_all(&db).await;
    db.execute(&format!("{} ROW_FORMAT=COMPRESSED", shapes(db.server.name)[0])).await;
    let plan = migration(&db).plan().await.unwrap();
    assert_eq!(plan.to_string().contains("INPLACE, LOCK = NONE"), db.server.name == "mysql", "{plan}");
    rowlock::migrate(&db.pool).await.unwrap();
    acquired(db.lock().try_acquire("k").await);
}
