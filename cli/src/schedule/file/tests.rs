use std::{ffi::OsString, time::Duration};

use rowlock::Schedule;

use super::*;

const ALL: &str = r#"
version = 1
max_concurrent_runs = 8

[defaults]
zone = "America/New_York"
catch_up = "all"
max = 7
backoff = "10s"
lease = "1m"
path = "/usr/bin:/bin"
env = { LANG = "C.UTF-8", TARGET = "archive" }
umask = "027"
on_failure = ["mail", "ops"]

[nightly-report]
cron = "30 2 * * *"
zone = "Europe/Berlin"
command = ["true", "--full"]
grace = "5m"
retry = 3
timeout = "2h"
exclusive_with = "billing"
env = { TARGET = "tape" }
cwd = "/"
user = "root"
database_url = true
on_success = ["true"]
on_failure = ["true"]

[refresh]
every = "30s"
command = ["true"]

["a name"]
after = "10m"
command = ["true"]
catch_up = "skip"
renamed_from = ["an older name", "the oldest"]
"#;

#[test]
fn every_key_is_read() {
    let Jobs { jobs, max_concurrent_runs, .. } = parse(ALL).unwrap();
    assert_eq!(max_concurrent_runs, Some(8));
    let names: Vec<&str> = jobs.iter().map(|job| job.schedule.name()).collect();
    assert_eq!(names, ["nightly-report", "refresh", "a name"], "in the order of the file");
    assert_eq!(jobs[0].command, ["true", "--full"]);
    assert_eq!(jobs[0].terms.timeout, Some(Duration::from_secs(7200)));
    assert_eq!(jobs[1].terms.timeout, None);
    assert_eq!(jobs[2].renamed_from, ["an older name", "the oldest"].map(|old| Key::new(old).unwrap()));
    let [report, refresh, _] = jobs.as_slice() else { panic!("{jobs:?}") };
    assert_eq!((report.terms.retries, refresh.terms.retries), (3, 0));
    let variables = |job: &Job| job.terms.surroundings.variables.clone().into_iter().collect::<Vec<_>>();
    let expected =
        |target: &str| [("LANG", "C.UTF-8"), ("PATH", "/usr/bin:/bin"), ("TARGET", target)].map(owned).to_vec();
    assert_eq!((variables(report), variables(refresh)), (expected("tape"), expected("archive")));
    let beginning = &report.terms.surroundings.beginning;
    assert_eq!((beginning.user.as_deref(), beginning.cwd.as_deref()), (Some("root"), Some(Path::new("/"))));
    assert_eq!((beginning.umask, refresh.terms.surroundings.beginning.umask), (Some(0o27), Some(0o27)));
    assert_eq!([report, refresh].map(|job| job.terms.surroundings.database_url), [true, false]);
    let command = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
    assert_eq!(
        (&report.terms.hooks.on_success, &report.terms.hooks.on_failure),
        (&command(&["true"]), &command(&["true"]))
    );
    assert_eq!(
        (&refresh.terms.hooks.on_success, &refresh.terms.hooks.on_failure),
        (&command(&[]), &command(&["mail", "ops"]))
    );
}

fn owned((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// The defaults do not apply to a job with which they do not go.
#[test]
fn a_default_gives_way_to_the_keys_of_a_job() {
    let defaults = "[defaults]\nzone = \"Europe/Berlin\"\ncatch_up = \"all\"\nmax = 7\nretry = 2\nbackoff = \"1s\"\n";
    let job = |keys: &str| parse(&format!("{defaults}[a]\ncommand = [\"true\"]\n{keys}")).expect(keys).jobs[0].clone();
    let all = rowlock::jobs::CatchUp::All(7);
    let daily = || Schedule::cron("a", "@daily").catch_up(all);
    let minutely = || Schedule::every("a", Duration::from_secs(60));
    for (keys, schedule) in [
        ("cron = \"@daily\"", daily().zone("Europe/Berlin")),
        ("cron = \"@daily\"\nzone = \"UTC\"", daily().zone("UTC")),
        ("every = \"1m\"", minutely().catch_up(all)),
        ("every = \"1m\"\ncatch_up = \"skip\"", minutely().catch_up(rowlock::jobs::CatchUp::Skip)),
    ] {
        let schedule = schedule.retry(2, Duration::from_secs(1)..Duration::from_secs(64));
        assert_eq!(format!("{:?}", job(keys).schedule), format!("{schedule:?}"), "{keys}");
    }
    assert_eq!(job("every = \"1m\"\nretry = 0").terms.retries, 0);
}

#[test]
fn a_file_of_roots_commands_that_others_may_write_is_told() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jobs.toml");
    std::fs::write(&file, "").unwrap();
    for (mode, told) in [(0o644, false), (0o664, true), (0o646, true), (0o600, false)] {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let warnings: Vec<String> = check(&file).unwrap().open_to().map(str::to_owned).collect();
        let is_root = Uid::effective().is_root();
        assert_eq!(warnings.len(), usize::from(told && is_root), "{mode:o}: {warnings:?}");
    }
}

#[test]
fn a_job_that_is_not_enabled_is_checked_and_not_run() {
    let file = parse("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nenabled = false\n").unwrap();
    assert_eq!((file.jobs.len(), file.to_string().as_str()), (0, ": 0 jobs, 1 not enabled"));
    assert!(parse("[a]\nevery = \"1x\"\ncommand = [\"true\"]\nenabled = false\n").is_err());
}

#[test]
fn a_job_that_cannot_run_here_is_told_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jobs.toml");
    let text = r#"
[fine]
every = "1s"
command = ["true"]
[missing]
every = "1s"
command = ["/no/such"]
[elsewhere]
every = "1s"
path = "/no/such/folder"
command = ["true"]
[nowhere]
every = "1s"
command = ["true"]
cwd = "/no/such/folder"
[nobodys]
every = "1s"
command = ["true"]
user = "no-such-user"
"#;
    std::fs::write(&file, text).unwrap();
    let jobs = check(&file).unwrap();
    let unable: Vec<&str> = jobs.unable().collect();
    let place = file.display();
    let expected = [
        format!("{place}, line 7: missing: command: /no/such: command not found"),
        format!("{place}, line 11: elsewhere: command: true: command not found"),
        format!("{place}, line 14: nowhere: cwd: there is no folder /no/such/folder"),
        format!("{place}, line 18: nobodys: user: there is no user no-such-user"),
    ];
    assert_eq!(unable, expected);
}

#[test]
fn the_files_of_the_guide_are_right() {
    let (cron, operators) = (include_str!("../../../../docs/cron.md"), include_str!("../../../../docs/operators.md"));
    let blocks = |text: &'static str| text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let all: Vec<&str> = blocks(cron).chain(blocks(operators)).filter(|block| block.contains("command = ")).collect();
    assert!(all.len() >= 3, "{all:?}");
    for block in all {
        let file = parse(block).expect(block);
        assert!(!file.jobs.is_empty(), "{block}");
    }
}

#[test]
fn what_is_wrong_has_its_line() {
    for (text, line, says) in [
        ("x = 1", 1, "\"x\" is outside of a job"),
        ("[a]\nevery = 1", 2, "a: every: it has to be a text in quotes, with a unit, such as \"1s\""),
        ("[a]\nevery = \"1x\"", 2, "write it like 30s, 5m or 1h"),
        ("[a]\nevery = \"1ms\"\ncommand = [\"true\"]", 2, "a period of 1ms is not possible"),
        ("[a]\ncron = \"61 * * * *\"", 2, "the cron pattern"),
        ("[a]\ncron = \"0 * * * *\"\nzone = \"Europe/Berlitz\"", 3, "is no time zone"),
        ("[a]\nevery = \"1s\"\nzone = \"UTC\"", 3, "only a cron pattern has a time zone"),
        ("[a]\nevery = \"1s\"\nafter = \"1s\"", 1, "it needs exactly one of these"),
        ("[a]\ncommand = [\"true\"]", 1, "it needs exactly one of these"),
        ("\n[a]\nevery = \"1s\"", 2, "it has no command"),
        ("[a]\nevery = \"1s\"\ncommand = \"true\"", 3, "a list of texts"),
        ("[a]\nevery = \"1s\"\ncommand = []", 3, "it is empty: write a list of texts"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nenv = { PATH = \"/bin\" }", 4, "PATH is a key of its own"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nenv = { A = 1 }", 4, "a table of texts"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nenv = { ROWLOCK_JOB = \"b\" }", 4, "the program's own"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nenv = { \"a=b\" = \"\" }", 4, "no equals sign"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\ncwd = \"tmp\"", 4, "begin with a slash"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\numask = \"928\"", 4, "octal digits"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\numask = 22", 4, "a text in quotes"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nuser = \"\"", 4, "the name of a user"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nenabled = 1", 4, "true or false"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\non_failure = \"mail\"", 4, "a list of texts"),
        ("version = 2", 1, "the only version that this program knows"),
        ("max_concurrent_runs = 0", 1, "from 1 to 10000"),
        ("[defaults]\ncommand = [\"true\"]", 2, "\"command\" is no key that all jobs can have"),
        ("[defaults]\nlease = \"1ms\"", 2, "from 100 ms to 30 days"),
        ("[defaults]\nzone = \"Europe/Berlitz\"", 2, "is no time zone"),
        ("[defaults]\nmax = \"3\"", 2, "a whole number"),
        ("[defaults]\nbackoff = 3", 2, "a text in quotes"),
        ("defaults = 3", 1, "is outside of a job"),
        ("[a]\nevery = \"1s\"\ncatch_up = \"none\"", 3, "\"skip\", \"once\" or \"all\""),
        ("[a]\nevery = \"1s\"\ncatch_up = \"once\"\nmax = 3", 4, "max goes with catch_up"),
        ("[a]\nevery = \"1s\"\ncatch_up = \"all\"\nmax = 0", 4, "from 1 to 1000"),
        ("[a]\nevery = \"1s\"\nretry = \"3\"", 3, "a whole number"),
        ("[a]\nevery = \"1s\"\nretry = -1", 3, "a whole number from 0 to 1000"),
        ("[a]\nevery = \"1s\"\nlease = \"0s\"", 3, "a lease of 0s is not possible"),
        ("[a]\nevery = \"1s\"\nbackoff = \"3s\"", 3, "backoff goes with retry"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nlease = \"1ms\"", 4, "from 100 ms to 30 days"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\ntimeout = \"0s\"", 4, "from 1ms to 366days"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nevrey = 1", 4, "\"evrey\" is no key of a job"),
        ("[a]\nevery = \"1s\"\ncommnd = [\"true\"]", 3, "\"commnd\" is no key of a job: did you mean \"command\"?"),
        ("[a]\nevery = \"1s\"\nwhatever = 1", 3, "\"whatever\" is no key of a job: it has cron, every"),
        ("[a]\nevery = \"1s\"\nexclusive_with = \" k\"\ncommand = [\"true\"]", 3, "white space"),
        ("[a]\nevery = \"1s\"\n[a]\n", 3, "duplicate"),
        ("[a]\nevery = \"1s\"\nevery = \"2s\"\n", 3, "duplicate key: every"),
        ("[a]\nremoved = false", 2, "a: removed: it has to be true"),
        ("[a]\nremoved = \"yes\"", 2, "a: removed: it has to be true"),
        ("[a]\nremoved = true\nevery = \"1s\"", 3, "a: every: a job that is removed has no other key"),
        ("[\" a\"]\nremoved = true", 1, "white space"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nrenamed_from = \"a\"", 4, "it has this name already"),
        (
            "[b]\nremoved = true\n[a]\nevery = \"1s\"\ncommand = [\"true\"]\nrenamed_from = \"b\"",
            3,
            "a section of its own",
        ),
        ("[a]\nevery = \"1s", 2, ""),
    ] {
        let wrong = wrong(text);
        assert!(wrong.iter().any(|(at, why)| *at == line && why.contains(says)), "{text:?}: {wrong:?}");
    }
}

#[test]
fn jobs_may_be_removed() {
    let file =
        parse("[gone]\nremoved = true\n[a]\nevery = \"1s\"\ncommand = [\"true\"]\n[old]\nremoved = true\n").unwrap();
    let removed: Vec<&str> = file.removed.iter().map(Key::as_str).collect();
    assert_eq!((file.jobs.len(), removed), (1, vec!["gone", "old"]));
    assert_eq!(file.to_string(), ": 1 job, 2 removed");
    assert_eq!(parse("[gone]\nremoved = true").unwrap().to_string(), ": 0 jobs, 1 removed");
    assert_eq!(parse("# nothing yet\n").unwrap().to_string(), ": 0 jobs");
}

/// The lines and messages of what is wrong.
fn wrong(text: &str) -> Vec<(usize, String)> {
    let line = |at: usize| 1 + text[..at.min(text.len())].matches('\n').count();
    parse(text).expect_err(text).into_iter().map(|Wrong { at, why }| (line(at), why)).collect()
}

#[test]
fn all_that_is_wrong_is_said_once_in_the_order_of_the_lines() {
    let text = r#"x = 1
[a]
cron = "*/90 * * * *"
zone = "Europe/Berlitz"
command = ["/no/such"]
retry = "3"
backoff = "1M"
[b]
command = ["true"]
evrey = "5m"
grace = "900d"
[c]
every = "5M"
command = []
max = 3
[" d"]
after = "1 month"
[e]
every = "1s"
command = ["true"]
[defaults]
zone = "Europe/Berlitz"
"#;
    let wrong = wrong(text);
    let found: Vec<(usize, &str)> = wrong.iter().map(|(line, why)| (*line, why.as_str())).collect();
    let expected = [
        (1, "outside of a job"),
        (3, "write 0, or set a fixed rate, such as every 90m"),
        (4, "is no time zone"),
        (6, "a whole number"),
        (7, "write 1m for minutes"),
        (10, "\"evrey\" is no key of a job"),
        (11, "a grace of"),
        (13, "write 5m for minutes"),
        (14, "a list of texts"),
        (15, "max goes with catch_up"),
        (16, "white space"),
        (16, "it has no command"),
        (17, "cron = \"0 0 1 * *\" for each month"),
        (22, "is no time zone"),
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for ((line, why), (at, says)) in found.into_iter().zip(expected) {
        assert!(line == at && why.contains(says), "line {line}: {why}; expected in line {at}: {says}");
    }
    let syntax = "[a]\nevery = \n[b]\nevery = \"1s\"\nevery = \"2s\"\n";
    assert_eq!(parse(syntax).unwrap_err().len(), 2, "{:?}", parse(syntax));
}
