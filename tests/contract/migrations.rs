//! Each way to create the table works: `sqlx-cli`, the copied files, and `rowlock::migrate`. So
//! does each mix of them.

use std::{
    path::{Path, PathBuf},
    process::Output,
};

use harness::{Need, TestDatabase, TestDb, acquired};
use rowlock::{Schedule, jobs::TickOutcome};
use tokio::process::Command;

/// The program `sqlx`, which the variable names.
const SQLX_CLI: Need = Need { what: "SQLX_CLI", is_met: |_| std::env::var_os("SQLX_CLI").is_some() };

harness::tests!(
    everywhere(migrate_is_idempotent_and_leaves_the_applications_record_alone, sixteen_instances_migrate_at_once),
    everywhere[SQLX_CLI](
        sqlx_cli_runs_our_folder_beside_the_applications,
        sqlx_cli_runs_our_files_in_the_applications_folder
    )
);

async fn migrate_is_idempotent_and_leaves_the_applications_record_alone<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE _sqlx_migrations (version BIGINT PRIMARY KEY, description TEXT)").await;
    db.execute("INSERT INTO _sqlx_migrations VALUES (1, 'the application''s own')").await;
    acquired(db.lock().try_acquire("k").await).fail().await.unwrap();
    for _ in 0..3 {
        rowlock::migrate(&db.pool).await.unwrap();
    }
    db.execute("ALTER TABLE t_resource_lock DROP COLUMN confirms").await;
    rowlock::migrate(&db.pool).await.unwrap();
    assert_eq!(db.number("SELECT confirms FROM t_resource_lock").await, Some(0), "what is missing is added");
    assert_eq!(db.column("k", "status").await.as_deref(), Some("F"));
    assert_eq!(db.number("SELECT COUNT(*) FROM _sqlx_migrations").await, Some(1));
}

async fn sixteen_instances_migrate_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    for _ in 0..3 {
        drop_all(&db).await;
        let mut instances = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let pool = db.pool_of(1).await;
            instances.spawn(harness::task(async move { rowlock::migrate(&pool).await }));
        }
        while let Some(done) = instances.join_next().await {
            done.unwrap().unwrap();
        }
        acquired(db.lock().try_acquire("k").await);
        ticks(&db).await;
    }
}

/// The library's migrations folder is the source. Its runs are recorded in a table of their own, so
/// that the application's next run finds its own record unchanged.
async fn sqlx_cli_runs_our_folder_beside_the_applications<DB: TestDatabase>(db: TestDb<DB>) {
    drop_all(&db).await;
    let app = application(1);
    let ours = root().join("migrations").join(folder(&db));
    ok(sqlx(&db, &app, &[]).await);
    for _ in 0..2 {
        ok(sqlx(&db, &ours, &["--config", root().join("sqlx.toml").to_str().unwrap()]).await);
    }
    ticks(&db).await;
    works(&db).await;
    add_application_migration(&app, 2);
    ok(sqlx(&db, &app, &[]).await);
    assert_eq!(db.number("SELECT COUNT(*) FROM _sqlx_migrations").await, Some(2));
    assert_eq!(db.number("SELECT COUNT(*) FROM _rowlock_migrations").await, Some(files(&ours)));
    // The other two ways do no harm on the same database.
    copy(&ours, &app);
    ok(sqlx(&db, &app, &[]).await);
    rowlock::migrate(&db.pool).await.unwrap();
    works(&db).await;
}

/// The library's files are copied into the application's folder. They are recorded with the
/// application's migrations.
async fn sqlx_cli_runs_our_files_in_the_applications_folder<DB: TestDatabase>(db: TestDb<DB>) {
    let app = application(1);
    let ours = root().join("migrations").join(folder(&db));
    // `rowlock::migrate` ran first, and the table has a row. The files must leave the row
    // unchanged.
    acquired(db.lock().try_acquire("old").await).fail().await.unwrap();
    copy(&ours, &app);
    ok(sqlx(&db, &app, &[]).await);
    add_application_migration(&app, 2);
    ok(sqlx(&db, &app, &[]).await);
    assert_eq!(db.number("SELECT COUNT(*) FROM _sqlx_migrations").await, Some(2 + files(&ours)));
    assert_eq!(db.column("old", "status").await.as_deref(), Some("F"));
    ok(sqlx(&db, &ours, &["--config", root().join("sqlx.toml").to_str().unwrap()]).await);
    works(&db).await;
    add_application_migration(&app, 3);
    ok(sqlx(&db, &app, &[]).await);
}

/// Returns the number of files in a folder.
fn files(folder: &Path) -> i64 {
    i64::try_from(std::fs::read_dir(folder).unwrap().count()).unwrap()
}

pub async fn drop_all<DB: TestDatabase>(db: &TestDb<DB>) {
    let schedules = ["schedule", "schedule_run", "schedule_instance", "schedule_times", "schedule_detail"];
    for table in ["lock", "lock_queue", "change", "order"].into_iter().chain(schedules) {
        db.execute(&format!("DROP TABLE IF EXISTS t_resource_{table}")).await;
    }
}

/// Returns the texts of the migrations, in their order.
pub fn files_of<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<String> {
    let folder = std::fs::read_dir(root().join("migrations").join(folder(db))).unwrap();
    let mut files: Vec<_> = folder.map(|file| file.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect()
}

/// The tables of schedules can be used.
async fn ticks<DB: TestDatabase>(db: &TestDb<DB>) {
    let schedules = crate::ticks::idle(db, Schedule::after("k", crate::ticks::SHORT));
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
}

async fn works<DB: TestDatabase>(db: &TestDb<DB>) {
    rowlock::migrate(&db.pool).await.unwrap();
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn folder<DB: TestDatabase>(db: &TestDb<DB>) -> &'static str {
    if db.server.name == "mariadb" { "mysql" } else { db.server.name }
}

fn application(version: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    add_application_migration(&folder, version);
    folder
}

fn add_application_migration(folder: impl AsRef<Path>, version: u32) {
    let file = folder.as_ref().join(format!("{version:04}_app.sql"));
    std::fs::write(file, format!("CREATE TABLE app_{version} (id BIGINT PRIMARY KEY);")).unwrap();
}

fn copy(from: &Path, to: impl AsRef<Path>) {
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.as_ref().join(file.file_name())).unwrap();
    }
}

async fn sqlx<DB: TestDatabase>(db: &TestDb<DB>, source: impl AsRef<Path>, more: &[&str]) -> Output {
    let program = PathBuf::from(std::env::var_os("SQLX_CLI").unwrap());
    let mut command = Command::new(program);
    command.current_dir(std::env::temp_dir()).args(["migrate", "run", "--no-dotenv", "--database-url", &db.url]);
    command.arg("--source").arg(source.as_ref()).args(more).output().await.unwrap()
}

fn ok(output: Output) {
    assert!(output.status.success(), "{output:?}");
}
