//! A table that existed before, in the article's own shape: it is completed in place, and works
//! like the library's own.

use std::time::Duration;

use harness::{Table, TestDatabase, TestDb, acquired, refused};
use rowlock::{Error, LeaseLock, Reason, Rules, Status, errors::Setup};
use sqlx::pool::PoolOptions;
use tokio::time::Instant;

use crate::article::{put, shapes};

harness::tests!(
    everywhere(
        the_articles_table_is_upgraded_in_place,
        a_lease_lives_on_the_articles_table,
        times_of_any_kind_stand_in_the_row,
        a_column_that_does_not_fit_is_refused,
        a_key_of_the_articles_table_is_found_by_its_index
    ),
    postgres(a_session_in_another_time_zone_is_refused)
);

const MINUTE: Duration = Duration::from_secs(60);
const THEIRS: [&str; 7] = ["key_resource", "status", "lock_flag", "begin_time", "end_time", "client_ip", "time"];
const OURS: [&str; 10] = [
    "holder",
    "token",
    "expires_at",
    "claimed_at",
    "confirms",
    "prior_token",
    "prior_client_ip",
    "prior_status",
    "prior_begin_time",
    "prior_end_time",
];

/// These columns of a row as one text, NULLs included.
fn columns(server: &str, columns: &[&str]) -> String {
    let each = |wrap: &str| columns.iter().map(|column| wrap.replace('?', column)).collect::<Vec<_>>().join(", ");
    match server {
        "sqlite" => format!("concat_ws('|', {})", each("quote(?)")),
        "postgres" => format!("concat_ws('|', {}) COLLATE \"C\"", each("coalesce(?::text, 'NULL')")),
        _ => format!("CONVERT(CONCAT_WS('|', {}) USING utf8mb4)", each("COALESCE(HEX(?), 'NULL')")),
    }
}

pub fn all_columns(server: &str) -> String {
    columns(server, &[&THEIRS[..], &OURS[..]].concat())
}

pub async fn rows<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    let row = columns(db.server.name, &THEIRS);
    let group = match db.server.name {
        "sqlite" => format!("group_concat({row}, ';' ORDER BY key_resource)"),
        "postgres" => format!("string_agg({row}, ';' ORDER BY key_resource)"),
        _ => format!("GROUP_CONCAT({row} ORDER BY key_resource SEPARATOR ';')"),
    };
    db.text(&format!("SELECT {group} FROM t_resource_lock")).await.unwrap()
}

/// The definitions of the article's columns, with every property that the database reports.
pub async fn definitions<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    let theirs = THEIRS.map(|column| format!("'{column}'")).join(", ");
    db.text(&match db.server.name {
        "sqlite" => format!(
            "SELECT group_concat(concat_ws(' ', cid, name, type, [notnull], quote(dflt_value), pk), '; ' ORDER BY cid)
             FROM pragma_table_info('t_resource_lock') WHERE name IN ({theirs})"
        ),
        "postgres" => format!(
            "SELECT string_agg(concat_ws(' ', attnum, attname, format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid),
                attcollation::regcollation), '; ' ORDER BY attnum)
             FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
             WHERE attrelid = 't_resource_lock'::regclass AND attname IN ({theirs})"
        ),
        _ => format!(
            "SELECT CONVERT(GROUP_CONCAT(CONCAT_WS(' ', ordinal_position, column_name, column_type, is_nullable, QUOTE(column_default),
                character_set_name, collation_name, column_key, extra) ORDER BY ordinal_position SEPARATOR '; ') USING utf8mb4)
             FROM information_schema.columns
             WHERE table_schema = DATABASE() AND table_name = 't_resource_lock' AND column_name IN ({theirs})"
        ),
    })
    .await
    .unwrap()
}

pub async fn make<DB: TestDatabase>(db: &TestDb<DB>, shape: &str) {
    db.execute("DROP TABLE t_resource_lock").await;
    db.execute(shape).await;
    let ago = |minutes: i64| DB::begun(Table::Articles, minutes * 60_000);
    for (key, status, flag, begin, end) in [
        ("fine", "S", 0, ago(10), ago(9)),
        ("failed", "F", 0, ago(10), ago(9)),
        ("running", "P", 1, ago(10), "NULL".into()),
        ("stuck", "P", 1, ago(120), ago(1500)),
        ("unused", "S", 0, "NULL".into(), "NULL".into()),
    ] {
        db.execute(&format!(
            "INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, end_time, client_ip, time)
             VALUES ('{key}', '{status}', {flag}, {begin}, {end}, '10.0.0.7', 60)"
        ))
        .await;
    }
}

async fn the_articles_table_is_upgraded_in_place<DB: TestDatabase>(db: TestDb<DB>) {
    for shape in shapes(db.server.name) {
        make(&db, &shape).await;
        let before = (definitions(&db).await, rows(&db).await);
        assert_eq!(before.0.matches("; ").count(), 6, "{}", before.0);
        assert!(matches!(db.lock().try_acquire("fine").await, Err(Error::Setup(Setup::ColumnMissing { .. }))));
        for _ in 0..2 {
            let mut instances = tokio::task::JoinSet::new();
            for _ in 0..4 {
                let pool = db.pool_of(1).await;
                instances.spawn(harness::task(async move { rowlock::migrate(&pool).await.unwrap() }));
            }
            instances.join_all().await;
            assert_eq!((definitions(&db).await, rows(&db).await), before, "{shape}");
        }
        // The meaning of a row is unchanged.
        let hour = db.lock().min_interval(60 * MINUTE);
        for key in ["fine", "failed"] {
            let refusal = refused(hour.try_acquire(key).await);
            assert_eq!((refusal.reason, refusal.by.as_str()), (Reason::WithinMinInterval, "10.0.0.7"));
            let left = refusal.retry_after.unwrap();
            assert!(left > 49 * MINUTE && left < 51 * MINUTE, "{left:?} of {shape}");
        }
        let article = db.lock().rules(Rules::Article);
        assert_eq!(refused(article.try_acquire("failed").await).reason, Reason::LastRunFailed);
        let aware = db.builder().article_clients(chrono::FixedOffset::east_opt(0).unwrap()).build().unwrap();
        assert_eq!(refused(db.lock().try_acquire("stuck").await).reason, Reason::HeldByAnotherProgram);
        assert_eq!(refused(aware.try_acquire("running").await).reason, Reason::HeldByAnotherProgram);
        assert_eq!(rows(&db).await, before.1, "a refusal changes nothing: {shape}");
        let stuck = acquired(aware.try_acquire("stuck").await);
        assert_eq!(stuck.taken_over_from().unwrap().label, "10.0.0.7");
        acquired(hour.try_acquire("unused").await);
        acquired(hour.retry_failed_at_once().try_acquire("failed").await);
        acquired(article.try_acquire("fine").await);
        assert_eq!(definitions(&db).await, before.0);
        // The other program continues to work.
        db.execute("INSERT INTO t_resource_lock (key_resource, status, lock_flag) VALUES ('theirs', 'S', 0)").await;
        acquired(db.lock().try_acquire("theirs").await).release().await.unwrap();
    }
}

async fn a_lease_lives_on_the_articles_table<DB: TestDatabase>(db: TestDb<DB>) {
    for shape in shapes(db.server.name) {
        make(&db, &shape).await;
        rowlock::migrate(&db.pool).await.unwrap();
        let lock = db.builder().label("gerät 7, 東京").build().unwrap();
        // Columns of whole seconds, rounded up or cut, must not make a free key unavailable to the
        // lock.
        let mut last = 0;
        for round in 0..12 {
            let lease = acquired(lock.try_acquire("new").await);
            assert!(lease.token().get() > last);
            last = lease.token().get();
            lease.renew().await.unwrap();
            assert_eq!(refused(lock.try_acquire("new").await).reason, Reason::Held);
            let status = if round % 2 == 0 { Status::Succeeded } else { Status::Failed };
            lease.end(status).await.unwrap();
            assert_eq!(db.column("new", "status").await.as_deref(), Some(status.letter()));
            tokio::time::sleep(Duration::from_millis(90)).await;
        }
        let lease = acquired(lock.try_acquire("new").await);
        let token = lease.token();
        assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock WHERE claimed_at = begin_time").await, Some(1));
        lease.abandon().await.unwrap();
        let next = acquired(lock.try_acquire("new").await);
        let prior = next.taken_over_from().unwrap();
        assert_eq!((prior.token, prior.label.as_str()), (token, "gerät 7, 東京"));
        next.release().await.unwrap();
    }
}

/// Other programs may write any time and any duration, up to the limits of the columns.
async fn times_of_any_kind_stand_in_the_row<DB: TestDatabase>(db: TestDb<DB>) {
    for table in Table::BOTH {
        put(&db, table).await;
        let lock = db.lock().min_interval(MINUTE);
        let aware = |hours: i32| {
            let offset = chrono::FixedOffset::east_opt(hours * 3600).unwrap();
            db.builder().article_clients(offset).build().unwrap().min_interval(MINUTE)
        };
        let time = |text: &str| match (db.server.name, table) {
            ("sqlite", Table::Ours) => format!("unixepoch('{text}') * 1000000"),
            _ => format!("'{text}'"),
        };
        let longest = match (db.server.name, table) {
            ("mysql" | "mariadb", Table::Articles) => u32::MAX,
            _ => i32::MAX as u32,
        };
        acquired(lock.try_acquire("k").await).release().await.unwrap();
        for hours in [-5, 0, 8] {
            for (flag, begin, minutes) in [
                (1, "9999-12-31 23:59:59", 60),
                (0, "9999-12-31 23:59:59", 60),
                (1, "2020-01-01 00:00:00", longest),
                (1, "9999-12-31 23:59:59", longest),
            ] {
                let begin = time(begin);
                db.set("k", &format!("lock_flag = {flag}, status = 'S', begin_time = {begin}, time = {minutes}")).await;
                let refusal = refused(aware(hours).try_acquire("k").await);
                let reason = if flag == 1 { Reason::HeldByAnotherProgram } else { Reason::WithinMinInterval };
                assert_eq!(refusal.reason, reason, "{begin} and {minutes}");
            }
            db.set("k", &format!("lock_flag = 1, begin_time = {}, time = 60", time("1000-01-01 00:00:00"))).await;
            acquired(aware(hours).try_acquire("k").await);
        }
        if db.server.name.starts_with('m') {
            let mut lax = db.pool_of(1).await.acquire().await.unwrap();
            DB::execute_on(&mut lax, "SET sql_mode = ''").await.unwrap();
            let zero =
                "UPDATE t_resource_lock SET begin_time = 0, end_time = 0, lock_flag = 1 WHERE key_resource = 'k'";
            assert_eq!(DB::execute_on(&mut lax, zero).await.unwrap(), 1);
            assert_eq!(refused(aware(0).try_acquire("k").await).reason, Reason::HeldByAnotherProgram);
            db.set("k", "lock_flag = 0, status = 'S'").await;
            acquired(aware(0).try_acquire("k").await);
        }
    }
}

async fn a_column_that_does_not_fit_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let usual = &shapes(db.server.name)[0];
    let times: [(&str, &str); 2] = match db.server.name {
        "sqlite" => [("datetime", "REAL"), ("datetime", "date")],
        "postgres" => [("timestamp", "date"), ("timestamp", "varchar(19)")],
        _ => [("datetime", "varchar(19)"), ("begin_time datetime", "begin_time timestamp NULL")],
    };
    let number = if db.server.name == "postgres" {
        "lock_flag boolean NOT NULL DEFAULT false"
    } else {
        "lock_flag char(1) NOT NULL DEFAULT '0'"
    };
    let flag = usual.lines().find(|line| line.contains("lock_flag")).unwrap().trim().trim_end_matches(',');
    let end = usual.lines().find(|line| line.contains("end_time")).unwrap().trim().trim_end_matches(',');
    let full = end.replace("DEFAULT NULL", "NOT NULL");
    for (there, instead, column) in [
        (times[0].0, times[0].1, "_time"),
        (times[1].0, times[1].1, "_time"),
        (flag, number, "lock_flag"),
        (end, full.as_str(), "end_time"),
    ] {
        db.execute("DROP TABLE t_resource_lock").await;
        db.execute(&usual.replace(there, instead)).await;
        let before = definitions(&db).await;
        let error = rowlock::migrate(&db.pool).await.unwrap_err();
        assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })), "{instead}: {error:?}");
        assert!(error.to_string().contains(column) && error.to_string().contains("; use "), "{error}");
        assert_eq!(definitions(&db).await, before);
        assert!(
            matches!(db.lock().try_acquire("k").await, Err(Error::Setup(Setup::ColumnMissing { .. }))),
            "nothing was added"
        );
    }
}

/// PostgreSQL converts a time for a column without a time zone by the time zone of the session.
async fn a_session_in_another_time_zone_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let abroad = PoolOptions::<DB>::new().max_connections(1).after_connect(|conn, _| {
        Box::pin(async move { DB::execute_on(conn, "SET TIME ZONE 'Asia/Shanghai'").await.map(drop) })
    });
    let abroad = abroad.connect(&db.url).await.unwrap();
    acquired(LeaseLock::new(abroad.clone()).try_acquire("k").await);
    put(&db, Table::Articles).await;
    let error = LeaseLock::new(abroad).try_acquire("k").await.unwrap_err();
    assert!(
        matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains("Asia/Shanghai"),
        "{error:?}"
    );
    acquired(db.lock().try_acquire("k").await);
}

/// Compared in another character set, a key would be searched for in every row, and every row would
/// be locked.
async fn a_key_of_the_articles_table_is_found_by_its_index<DB: TestDatabase>(db: TestDb<DB>) {
    put(&db, Table::Articles).await;
    for batch in 0..20 {
        let values =
            (0..100).map(|row| format!("('row {}', 'S', 0)", batch * 100 + row)).collect::<Vec<_>>().join(", ");
        db.execute(&format!("INSERT INTO t_resource_lock (key_resource, status, lock_flag) VALUES {values}")).await;
    }
    // The rows that a session reads are counted in it.
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let mut held = Vec::new();
    for key in ["row 3", "row 1999", "row 1000", "row 500"] {
        held.push(acquired(lock.try_acquire(key).await));
    }
    if db.server.name.starts_with('m') {
        // The count itself reads rows. Two counts in a row show how many.
        let (first, second) = (rows_read(db.server.name, &pool).await, rows_read(db.server.name, &pool).await);
        let lease = acquired(lock.try_acquire("row 77").await);
        refused(lock.try_acquire("row 77").await);
        lease.renew().await.unwrap();
        lease.fail().await.unwrap();
        acquired(lock.try_acquire("row 77").await).abandon().await.unwrap();
        acquired(lock.try_acquire("row 77").await).release().await.unwrap();
        let third = rows_read(db.server.name, &pool).await;
        let read = (third - second) - (second - first);
        assert!(read.abs() < 200, "{read} rows read by eight operations on a table of 2000");
    }
    // Another transaction has one row locked. The other rows stay available, one by one and all
    // together.
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    if db.server.name != "sqlite" {
        DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
        DB::execute_on(&mut other, "SELECT 1 FROM t_resource_lock WHERE key_resource = 'row 5' FOR UPDATE")
            .await
            .unwrap();
        let started = Instant::now();
        acquired(lock.try_acquire("row 6").await).release().await.unwrap();
        acquired(lock.try_acquire("row 5 and a half").await);
        for lease in &held {
            lease.renew().await.unwrap();
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        assert_eq!(refused(lock.try_acquire("row 5").await).reason, Reason::Busy);
        DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    }
}

/// How many rows the pool's only connection has read in scans, not by a key.
async fn rows_read<DB: TestDatabase>(server: &str, pool: &sqlx::Pool<DB>) -> i64 {
    let schema = if server == "mariadb" { "information_schema" } else { "performance_schema" };
    let sql = format!("SELECT CAST(SUM(variable_value) AS SIGNED) FROM {schema}.session_status
               WHERE variable_name IN ('Handler_read_next', 'Handler_read_rnd_next', 'Handler_read_prev', 'Handler_read_rnd')");
    DB::number(pool, &sql).await.unwrap()
}
