use super::*;

const ALL: &str = r#"
[nightly-report]
cron = "30 2 * * *"
zone = "Europe/Berlin"
command = ["true", "--full"]
catch_up = "all"
max = 7
grace = "5m"
retry = 3
backoff = "10s"
lease = "1m"
timeout = "2h"
exclusive_with = "billing"

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
    let jobs = parse(ALL).unwrap().jobs;
    let names: Vec<&str> = jobs.iter().map(|job| job.schedule.name()).collect();
    assert_eq!(names, ["nightly-report", "refresh", "a name"], "in the order of the file");
    assert_eq!(jobs[0].command, ["true", "--full"]);
    assert_eq!(jobs[0].timeout, Some(Duration::from_secs(7200)));
    assert_eq!(jobs[1].timeout, None);
    assert_eq!(jobs[2].renamed_from, ["an older name", "the oldest"].map(|old| Key::new(old).unwrap()));
}

#[test]
fn what_is_wrong_has_its_line() {
    for (text, line, says) in [
        ("x = 1", 1, "\"x\" is outside of a job"),
        ("[a]\nevery = 1", 2, "a: every: it has to be a text in quotes"),
        ("[a]\nevery = \"1x\"", 2, "write it like 30s, 5m or 1h"),
        ("[a]\nevery = \"1ms\"\ncommand = [\"true\"]", 2, "a period of 1ms is not possible"),
        ("[a]\ncron = \"61 * * * *\"", 2, "the cron pattern"),
        ("[a]\ncron = \"0 * * * *\"\nzone = \"Europe/Berlitz\"", 3, "is no time zone"),
        ("[a]\nevery = \"1s\"\nzone = \"UTC\"", 3, "only a cron pattern has a time zone"),
        ("[a]\nevery = \"1s\"\nafter = \"1s\"", 1, "it needs exactly one of these"),
        ("[a]\ncommand = [\"true\"]", 1, "it needs exactly one of these"),
        ("\n[a]\nevery = \"1s\"", 2, "it has no command"),
        ("[a]\nevery = \"1s\"\ncommand = \"true\"", 3, "a list of texts"),
        ("[a]\nevery = \"1s\"\ncommand = []", 3, "a list of texts"),
        ("[a]\nevery = \"1s\"\ncommand = [\"/no/such\"]", 3, "command not found"),
        ("[a]\nevery = \"1s\"\ncatch_up = \"none\"", 3, "\"skip\", \"once\" or \"all\""),
        ("[a]\nevery = \"1s\"\ncatch_up = \"once\"\nmax = 3", 4, "max goes with catch_up"),
        ("[a]\nevery = \"1s\"\ncatch_up = \"all\"\nmax = 0", 4, "from 1 to 1,000"),
        ("[a]\nevery = \"1s\"\nretry = \"3\"", 3, "a whole number"),
        ("[a]\nevery = \"1s\"\nbackoff = \"3s\"", 3, "backoff goes with retry"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nlease = \"1ms\"", 4, "from 100 ms to 30 days"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\ntimeout = \"0s\"", 4, "from 1ms to 366days"),
        ("[a]\nevery = \"1s\"\ncommand = [\"true\"]\nevrey = 1", 4, "\"evrey\" is no key of a job"),
        ("[a]\nevery = \"1s\"\ncommnd = [\"true\"]", 3, "\"commnd\" is no key of a job"),
        ("[a]\nevery = \"1s\"\nexclusive_with = \" k\"\ncommand = [\"true\"]", 3, "white space"),
        ("[a]\nevery = \"1s\"\n[a]\n", 3, "duplicate"),
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
    assert_eq!(file.number(), "1 job, 2 removed");
    assert_eq!(parse("[gone]\nremoved = true").unwrap().number(), "0 jobs, 1 removed");
    assert_eq!(parse("# nothing yet\n").unwrap().number(), "0 jobs");
}

/// The lines and messages of what is wrong.
fn wrong(text: &str) -> Vec<(usize, String)> {
    let line = |at: usize| 1 + text[..at.min(text.len())].matches('\n').count();
    parse(text).unwrap_err().into_iter().map(|Wrong { at, why }| (line(at), why)).collect()
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
"#;
    let wrong = wrong(text);
    let found: Vec<(usize, &str)> = wrong.iter().map(|(line, why)| (*line, why.as_str())).collect();
    let expected = [
        (1, "outside of a job"),
        (3, "write 0, or set a fixed rate, such as every 90m"),
        (4, "is no time zone"),
        (5, "command not found"),
        (6, "a whole number"),
        (7, "write 1m for minutes"),
        (8, "it needs exactly one of these"),
        (10, "\"evrey\" is no key of a job"),
        (11, "a grace of"),
        (13, "write 5m for minutes"),
        (14, "a list of texts"),
        (15, "max goes with catch_up"),
        (16, "white space"),
        (16, "it has no command"),
        (17, "cron = \"0 0 1 * *\" for each month"),
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for ((line, why), (at, says)) in found.into_iter().zip(expected) {
        assert!(line == at && why.contains(says), "line {line}: {why}; expected in line {at}: {says}");
    }
    let syntax = "[a]\nevery = \n[b]\nevery = \"1s\"\nevery = \"2s\"\n";
    assert_eq!(parse(syntax).unwrap_err().len(), 2, "{:?}", parse(syntax));
}
