//! `next`, `cron --check` and `cron --next`, and the zone of a pattern.

use std::{fs::Permissions, os::unix::fs::PermissionsExt as _, path::Path};

use harness::{TestDatabase, TestDb};
use rustix::process::getuid;
use serde_json::json;
use tokio::process::Command;

use crate::{
    program::{Ended, PROGRAM, Stage, ended, rowlock},
    program_cron::jobs,
};

harness::tests!(sqlite(
    the_next_ticks_of_a_pattern_are_printed,
    the_preview_of_the_guide_is_as_shown,
    a_pattern_that_is_misread_elsewhere_is_refused,
    a_file_is_checked_without_a_database,
    jobs_from_a_pipe_are_checked_and_not_run,
    every_error_of_a_file_is_printed,
    the_next_ticks_of_each_job_are_printed,
    a_pattern_without_a_zone_warns_where_the_machine_has_one,
    the_version_names_the_time_zones
));

async fn next(more: &[&str]) -> Ended {
    ended(rowlock("next", more)).await
}

async fn the_next_ticks_of_a_pattern_are_printed<DB: TestDatabase>(_: TestDb<DB>) {
    let after = ["--after", "2026-10-24T12:00:00Z"];
    let berlin = next(&[&["30 2 * * *", "--zone", "europe/berlin", "--count", "2"][..], &after].concat()).await.with(0);
    let lines = "NEXT                  europe/berlin\n\
                 2026-10-25 00:30:00Z  Sun 2026-10-25 02:30:00 +02:00\n\
                 2026-10-26 01:30:00Z  Mon 2026-10-26 02:30:00 +01:00\n";
    assert_eq!((berlin.out.as_str(), berlin.err.as_str()), (lines, ""));
    let casablanca = ["0 9 * * *", "--zone", "Africa/Casablanca", "--count", "1", "--json"];
    let casablanca = next(&[&casablanca[..], &after].concat()).await.with(0).json();
    let slot = json!([{ "slot": "2026-10-25T09:00:00.000000Z", "local": "2026-10-25T09:00:00+00:00" }]);
    assert_eq!(casablanca, slot);
    assert_eq!(next(&["* * * * * *"]).await.with(0).out.lines().count(), 6);
}

async fn the_preview_of_the_guide_is_as_shown<DB: TestDatabase>(_: TestDb<DB>) {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/crontab.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let shown = guide.split("<!-- preview -->\n```console\n").nth(1).unwrap().split("```").next().unwrap();
    let mut commands = 0;
    for shown in shown.split("$ ").skip(1) {
        let (command, output) = shown.split_once('\n').unwrap();
        let script = format!("rowlock() {{ '{PROGRAM}' \"$@\"; }}; {command} 2>&1");
        let ran = Command::new("sh").args(["-c", &script]).env_remove("DATABASE_URL").output().await.unwrap();
        assert_eq!(String::from_utf8(ran.stdout).unwrap(), output, "{command}");
        commands += 1;
    }
    assert_eq!(commands, 3, "{shown}");
}

async fn a_pattern_that_is_misread_elsewhere_is_refused<DB: TestDatabase>(_: TestDb<DB>) {
    for (words, says) in [
        (["*/90 * * * *", "--zone", "UTC"], "write 0, or set a fixed rate, such as every 90m"),
        (["0 22-6 * * *", "--zone", "UTC"], "write 22-23,0-6"),
        (["@reboot", "--zone", "UTC"], "@midnight"),
        (["0 9 * * *", "--zone", "Berlin"], "\"Berlin\" is no time zone"),
        (["0 9 * * *", "--after", "today"], "write it like 2026-10-25T00:00:00Z"),
        (["0 9 * * *", "--count", "0"], "--count"),
    ] {
        let wrong = next(&words).await.with(2);
        assert!(wrong.err.contains(says) && wrong.out.is_empty(), "{words:?}: {wrong:?}");
    }
}

async fn a_file_is_checked_without_a_database<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    let file =
        jobs(&stage, &[("a", "cron = \"@midnight\"\nzone = \"Europe/Berlin\"", ""), ("b", "after = \"1h\"", "")]);
    // That others may change what runs as root is no error.
    std::fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    let file = file.to_str().unwrap();
    let checked = ended(rowlock("cron --check", &[file])).await.with(0);
    assert_eq!(checked.out, format!("{file}: 2 jobs, no error\n"));
    assert_eq!(checked.err.lines().count(), usize::from(getuid().is_root()), "{checked:?}");
    std::fs::set_permissions(file, Permissions::from_mode(0o644)).unwrap();
    let often = jobs(&stage, &[("a", "every = \"20s\"", ""), ("b", "cron = \"* * * * *\"", "")]);
    let checked = ended(rowlock("cron --check", &[often.to_str().unwrap()])).await.with(0);
    let says = "rowlock: a: note: its lease of 30s is longer than the 20s between two ticks";
    assert!(checked.err.starts_with(says) && checked.err.lines().count() == 1, "{checked:?}");
}

/// The pipe would be empty when it is read again.
async fn jobs_from_a_pipe_are_checked_and_not_run<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = jobs(&stage, &[("a", "after = \"1h\"", "")]);
    for (words, code, says) in [("--check", 0, "1 job, no error"), ("", 2, "no regular file")] {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("cat \"$1\" | \"$0\" cron {words} /dev/stdin"), PROGRAM]).arg(&file);
        // An empty variable counts as one that is not set.
        shell.env("DATABASE_URL", &db.url).env("DATABASE_URL_FILE", "");
        let ended = ended(shell).await.with(code);
        assert!(format!("{ended:?}").contains(says), "{ended:?}");
    }
}

async fn every_error_of_a_file_is_printed<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    let first = "cron = \"0 0 1 JAN1 *\"\nzone = \"Berlin\"";
    let file = jobs(&stage, &[("a", first, ""), ("b", "every = \"5M\"\nevrey = 1", ""), ("c", "after = \"1h\"", "")]);
    let name = file.to_str().unwrap();
    for words in ["cron --check", "cron --next 1", "cron --check --next 1"] {
        let wrong = ended(rowlock(words, &[name])).await.with(2);
        let lines: Vec<&str> = wrong.err.lines().collect();
        assert!(wrong.out.is_empty() && lines.len() == 4, "{wrong:?}");
        for (line, (number, says)) in lines.iter().zip([(2, "write JAN"), (3, "no time zone"), (6, "5m"), (7, "evrey")])
        {
            assert!(line.starts_with(&format!("rowlock: {name}, line {number}: ")) && line.contains(says), "{line}");
        }
    }
    // The program that runs the jobs prints the first, and how many there are.
    let wrong = ended(rowlock("--database-url sqlite::memory: cron", &[name])).await.with(2);
    assert!(wrong.err.lines().count() == 1 && wrong.err.contains("3 more: `rowlock cron --check FILE`"), "{wrong:?}");
}

async fn the_next_ticks_of_each_job_are_printed<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    let file =
        jobs(&stage, &[("a", "cron = \"0 0 29 2 *\"\nzone = \"Asia/Kolkata\"", ""), ("b", "after = \"1h\"", "")]);
    let shown = ended(rowlock("cron --next 2", &[file.to_str().unwrap()])).await.with(0);
    let lines: Vec<&str> = shown.out.lines().collect();
    assert_eq!(lines.len(), 4, "{shown:?}");
    assert!(lines[0].starts_with("NAME  NEXT "), "{shown:?}");
    for line in &lines[1..3] {
        assert!(
            line.starts_with("a ") && line.contains("-02-28 18:30:00Z ") && line.ends_with("-02-29 00:00:00 +05:30")
        );
    }
    assert!(lines[3].starts_with("b     after the run before "), "{shown:?}");
}

async fn a_pattern_without_a_zone_warns_where_the_machine_has_one<DB: TestDatabase>(db: TestDb<DB>) {
    // Other times of one name would be a matter of their own.
    let run = async |name: &str, machine: &str, more: &[&str]| {
        let mut command =
            rowlock(&format!("run {name} --refused-ok --cron"), &[&["0 0 29 2 *"], more, &["--", "true"]].concat());
        command.env("DATABASE_URL", &db.url).env("TZ", machine);
        ended(command).await.with(0).err
    };
    let warning = "rowlock: k: warning: the cron pattern is read in UTC, and this machine's time zone is Europe/Berlin: \
                   add --zone Europe/Berlin, or --zone UTC if UTC is meant\n";
    assert_eq!(run("k", "Europe/Berlin", &[]).await, warning);
    // London has the time of UTC in winter alone.
    assert!(run("k", ":Europe/London", &[]).await.contains("add --zone Europe/London"));
    for (machine, zone) in [("Europe/Berlin", "UTC"), ("Europe/Berlin", "Europe/Berlin"), ("UTC", "Asia/Tokyo")] {
        assert_eq!(run(zone, machine, &["--zone", zone]).await, "", "{machine} {zone}");
    }
    for machine in ["UTC", "Etc/UTC", "GMT", "Africa/Abidjan", ""] {
        assert_eq!(run("k", machine, &[]).await, "", "{machine}");
    }
}

async fn the_version_names_the_time_zones<DB: TestDatabase>(_: TestDb<DB>) {
    let version = ended(rowlock("--version", &[])).await.with(0).out;
    let expected =
        format!("rowlock {} (time zones {})\n", env!("CARGO_PKG_VERSION"), rowlock::Schedule::zones_release());
    assert_eq!(version, expected);
}
