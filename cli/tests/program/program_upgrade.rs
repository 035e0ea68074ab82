//! `rowlock migrate`, and the program beside an older one on the same tables.

use std::{ffi::OsString, time::Duration};

use harness::{Need, TestDatabase, TestDb, eventually};
use tokio::process::Command;

use crate::{
    program::{PROGRAM, Program as _, Stage, Started, ended, read, start},
    program_cron::jobs,
};

/// The older program, which the variable names.
const FORMER: Need = Need { what: "FORMER", is_met: |_| former().is_some() };

harness::tests!(
    everywhere(migrate_prints_what_it_does, local_time_of_other_programs_is_declared),
    servers(functions_that_are_missing_or_old_are_named),
    everywhere[FORMER](an_upgrade_and_a_rollback_under_load)
);

fn former() -> Option<OsString> {
    std::env::var_os("FORMER")
}

async fn migrate_prints_what_it_does<DB: TestDatabase>(db: TestDb<DB>) {
    assert_eq!(db.rowlock("migrate", &[]).await.with(0).out, "-- the tables are complete\n");
    let to_undo = db.rowlock("migrate --undo", &[]).await.with(0).out;
    assert!(to_undo.contains("DROP TABLE t_resource_lock_queue;"), "{to_undo}");
    db.rowlock("run k -- true", &[]).await.with(0);
    let claimed = db.rowlock("acquire k", &[]).await.with(0).json();
    let refused = db.rowlock("migrate --undo --yes", &[]).await.with(75);
    assert!(refused.err.contains("key \"k\" is claimed by"), "{refused:?}");
    db.rowlock("release k --holder", &[claimed["holder"].as_str().unwrap()]).await.with(0);
    let (note, to_undo) = to_undo.split_once('\n').unwrap();
    assert!(note.starts_with("-- NOTE: these statements do not look for claims"), "{note}");
    assert_eq!(db.rowlock("migrate --undo --yes", &[]).await.with(0).out, to_undo);
    let planned = db.rowlock("migrate --dry-run", &[]).await.with(0).out;
    assert!(planned.contains("\n-- lock: ") && planned.contains("ALTER TABLE t_resource_lock"), "{planned}");
    assert_eq!(db.rowlock("migrate --dry-run", &[]).await.with(0).out, planned, "nothing was changed");
    assert!(db.rowlock("list", &[]).await.with(78).err.contains("run `rowlock migrate` once"));
    assert_eq!(db.rowlock("migrate", &[]).await.with(0).out, planned);
    db.rowlock("run k -- true", &[]).await.with(0);
    db.rowlock("migrate --yes", &[]).await.with(2);
}

/// A program that writes local time at +08:00 has just run the job.
async fn local_time_of_other_programs_is_declared<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("run k -- true", &[]).await.with(0);
    db.set("k", &format!("begin_time = {}", DB::ago(-8 * 3_600_000))).await;
    let noted = db.rowlock("migrate", &[]).await.with(0).out;
    assert!(noted.starts_with("-- NOTE: the begin_time of key \"k\" is in the future"), "{noted}");
    for (option, result) in
        [("", Some("note")), ("--article-clients +07:00", Some("note")), ("--article-clients +08:00", None)]
    {
        let found = db.rowlock(&format!("doctor --json {option}"), &[]).await.with(0).json();
        let check = found["checks"].as_array().unwrap().iter().find(|of| of["check"] == "times of other programs");
        assert_eq!(check.and_then(|check| check["result"].as_str()), result, "{option}");
    }
    db.set("k", "key_resource = 'a; b'").await;
    let found = db.rowlock("doctor --json", &[]).await.with(0).json();
    let check = found["checks"].as_array().unwrap().iter().find(|of| of["check"] == "times of other programs").unwrap();
    assert!(
        check["found"].as_str().unwrap().starts_with("the begin_time of key \"a; b\" is in the future: "),
        "{check}"
    );
    assert!(check["advice"].as_str().unwrap().starts_with("declare them with their offset"), "{check}");
    db.set("a; b", "key_resource = 'k'").await;
    let until = |refused: crate::program::Ended| refused.err.clone();
    let strict = until(db.rowlock("run k --min-interval 10m -- true", &[]).await.with(75));
    let aware = until(db.rowlock("run k --min-interval 10m --article-clients +08:00 -- true", &[]).await.with(75));
    assert_ne!(strict, aware);
    db.set("k", &format!("begin_time = {}", DB::ago(-8 * 3_600_000 + 660_000))).await;
    db.rowlock("run k --min-interval 10m -- true", &[]).await.with(75);
    db.rowlock("run k --min-interval 10m --article-clients +08:00 -- true", &[]).await.with(0);
    db.rowlock("run k --article-clients 8 -- true", &[]).await.with(2);
}

async fn functions_that_are_missing_or_old_are_named<DB: TestDatabase>(db: TestDb<DB>) {
    let functions = async || {
        let found = db.rowlock("doctor --json", &[]).await.json();
        let found = found["checks"].as_array().unwrap().iter().find(|of| of["check"] == "functions").cloned();
        found.map(|of| format!("{}: {}", of["result"].as_str().unwrap(), of["found"].as_str().unwrap()))
    };
    assert_eq!(functions().await, None);
    db.rowlock("migrate --functions", &[]).await.with(0);
    assert!(functions().await.unwrap().starts_with("ok: "));
    assert_eq!(db.rowlock("migrate --functions", &[]).await.with(0).out, "-- the tables are complete\n");
    let routine = if db.server.name == "postgres" { "FUNCTION" } else { "PROCEDURE" };
    db.execute(&format!("DROP {routine} rowlock_renew")).await;
    assert_eq!(functions().await.unwrap(), "problem: rowlock_renew is missing");
    db.rowlock("migrate --functions", &[]).await.with(0);
    for (version, result) in [(20_250_101, "problem: they are older than this program"), (20_990_101, "ok: ")] {
        db.execute(&format!("DROP {routine} rowlock_version")).await;
        db.execute(&match db.server.name {
            "postgres" => format!("CREATE FUNCTION rowlock_version() RETURNS int LANGUAGE sql AS 'SELECT {version}'"),
            _ => format!("CREATE PROCEDURE rowlock_version() SELECT {version} AS version"),
        })
        .await;
        assert!(functions().await.unwrap().starts_with(result));
        let migrated = db.rowlock("migrate --functions", &[]).await.with(0).out;
        assert_eq!(migrated.contains("rowlock_try_acquire"), version < 20_260_000, "a newer version is left alone");
        if version > 20_260_000 {
            db.execute(&format!("DROP {routine} rowlock_renew")).await;
            assert_eq!(functions().await.unwrap(), "problem: rowlock_renew is missing");
            db.rowlock("migrate --functions", &[]).await.with(0);
            assert_eq!(functions().await.unwrap(), "problem: rowlock_renew is missing", "also without one of them");
        }
    }
}

/// Machines are replaced one by one while jobs and locks are at work, and then the old ones return.
async fn an_upgrade_and_a_rollback_under_load<DB: TestDatabase>(db: TestDb<DB>) {
    let former = former().unwrap();
    let of = |program: &OsString, words: &str, more: &[&str]| {
        let mut command = Command::new("setsid");
        command.arg(program).args(words.split_whitespace()).args(more).env("DATABASE_URL", &db.url).env("TZ", "UTC");
        command
    };
    let ours = OsString::from(PROGRAM);
    db.rowlock("migrate --undo --yes", &[]).await.with(0);
    db.execute("DROP TABLE t_resource_lock").await;
    ended(of(&former, "migrate", &[])).await.with(0);

    let stage = Stage::new();
    std::fs::write(stage.file("count"), "0").unwrap();
    let adds = r#"n=$(cat "$0/count"); sleep 0.02; echo $((n + 1)) > "$0/count""#;
    let adding = async |program: &OsString, times: u32| {
        for _ in 0..times {
            let words = ["--wait", "60s", "--", "sh", "-c", adds, stage.path()];
            ended(of(program, "run count", &words)).await.with(0);
        }
    };
    let ticks = || std::fs::read_to_string(stage.file("ticks")).unwrap_or_default();
    let job = r#"echo "$ROWLOCK_SLOT $WHO" >> "$0/ticks""#;
    let file = jobs(&stage, &[("tick", "every = \"1s\"\nlease = \"2s\"", job)]);
    let cron = |program: &OsString, who: &str| {
        let mut command = of(program, "cron", &[file.to_str().unwrap()]);
        command.env("WHO", who);
        start(command)
    };
    let runs = async |who: &str, more: usize| {
        let count = || ticks().lines().filter(|line| line.ends_with(who)).count();
        let before = count();
        eventually(who, async || count() >= before + more).await;
    };
    let stops = async |cron: Started| {
        cron.stopped().await;
    };

    let machines = async {
        let old = cron(&former, "old");
        runs("old", 2).await;
        ended(of(&ours, "migrate", &[])).await.with(0);
        let new = cron(&ours, "new");
        tokio::time::sleep(Duration::from_secs(3)).await;
        stops(old).await;
        runs("new", 2).await;
        let old = cron(&former, "old");
        tokio::time::sleep(Duration::from_secs(3)).await;
        stops(new).await;
        runs("old", 2).await;
        stops(old).await;
    };
    tokio::join!(machines, adding(&former, 25), adding(&ours, 25));
    assert_eq!(read(&stage.file("count")), "50", "each addition was alone");
    let ticks = ticks();
    let mut slots: Vec<_> = ticks.lines().map(|line| line.split(' ').next().unwrap()).collect();
    let all = slots.len();
    slots.sort_unstable();
    slots.dedup();
    assert!(slots.len() == all && all > 8, "a tick was run twice: {ticks}");
}
