use proptest::prelude::*;

use super::*;
use crate::schedule::file;

const SYSTEM: &str = r#"# /etc/crontab
SHELL=/bin/bash
PATH = /usr/local/bin:/usr/bin
MAILTO="ops@example.org"
LANG='C.UTF-8'

17 *	* * *	root	cd / && run-parts --report /etc/cron.hourly
30 2 * * *  app   /opt/app/report --full
@daily      app   /opt/app/report "a \"quoted\" word"
@reboot     app   /opt/app/warm
0 6 1 * *   app   date +\%F > /tmp/day
5 4 * * sun app   mail -s hello ops%Dear all,%it's done
61 * * * *  app   /opt/app/never
~ 3 * * *   app   /opt/app/sometime
CRON_TZ=America/New_York
*/5 9-17 * * 1-5 app nice -n 10 /opt/app/market
0 0 * * *   app
"#;

fn home(user: &str) -> Option<String> {
    match user {
        "root" => Some("/root".to_owned()),
        "app" => Some("/srv/app".to_owned()),
        _ => None,
    }
}

fn of_system(text: &str, zone: &str) -> String {
    converted(text, zone, Users { of_all: None, home: &home })
}

fn of_user(text: &str, zone: &str) -> String {
    converted(text, zone, Users { of_all: Some(Some(("me".to_owned(), "/home/me".to_owned()))), home: &home })
}

/// Returns the jobs of a text, as they are run.
fn jobs(text: &str) -> Vec<file::Job> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jobs.toml");
    std::fs::write(&path, text).unwrap();
    file::read(&path).unwrap_or_else(|error| panic!("{error}\n{text}")).jobs
}

#[test]
fn a_crontab_of_a_system_is_converted() {
    let text = of_system(SYSTEM, "Europe/Berlin");
    let expected = r#"
[defaults]
catch_up = "skip"
zone = "Europe/Berlin"
user = "app"
cwd = "/srv/app"
path = "/usr/local/bin:/usr/bin"
env = { LANG = "C.UTF-8" }
# /etc/crontab
# MAILTO=ops@example.org: no mail is sent; write on_failure = ["..."] in [defaults] for what is to happen instead

# 17 *	* * *	root	cd / && run-parts --report /etc/cron.hourly
# no job: each machine needs it for itself; leave it in the machine's crontab
[report]
cron = "30 2 * * *"
command = ["/bin/bash", "-c", "/opt/app/report --full"]
[report-2]
cron = "@daily"
command = ["/bin/bash", "-c", "/opt/app/report \"a \\\"quoted\\\" word\""]
# @reboot     app   /opt/app/warm
# no job: it runs when a machine starts; leave it there, or make a systemd unit of it
[date]
cron = "0 6 1 * *"
command = ["/bin/bash", "-c", "date +%F > /tmp/day"]
[mail]
cron = "5 4 * * sun"
command = ["/bin/bash", "-c", "printf %s 'Dear all,\nit'\\''s done\n' | {\nmail -s hello ops\n}"]
"#;
    let (converted, rest) = text.strip_prefix(HEAD).unwrap().split_at(expected.len());
    assert_eq!(converted, expected);
    assert!(
        rest.starts_with("# 61 * * * *  app   /opt/app/never\n# no job: the cron pattern \"61 * * * *\": "),
        "{rest}"
    );
    assert!(rest.contains("# ~ 3 * * *   app   /opt/app/sometime\n# no job: "), "{rest}");
    assert!(rest.contains("nice -n 10 /opt/app/market\"]\nzone = \"America/New_York\"\n"), "{rest}");
    assert!(rest.ends_with("# 0 0 * * *   app\n# no job: there is no command\n"), "{rest}");
    assert_eq!(jobs(&text).len(), 5);
}

#[test]
fn what_the_jobs_of_a_user_have_in_common_is_a_default() {
    let text = "*/10 * * * * ./sync.sh >/dev/null 2>&1\nHOME=/tmp\n0 1 * * * cd /srv/app && nice ./sync.sh\n";
    let expected = r#"
[defaults]
catch_up = "skip"
zone = "UTC"
user = "me"
["sync.sh"]
cron = "*/10 * * * *"
command = ["/bin/sh", "-c", "./sync.sh >/dev/null 2>&1"]
cwd = "/home/me"
["sync.sh-2"]
cron = "0 1 * * *"
command = ["/bin/sh", "-c", "cd /srv/app && nice ./sync.sh"]
cwd = "/tmp"
env = { HOME = "/tmp" }
"#;
    let text = of_user(text, "UTC");
    assert_eq!(text.strip_prefix(HEAD), Some(expected));
    assert_eq!(jobs(&text).len(), 2);
    let text = of_user("PATH=/bin\n0 1 * * * a\n0 2 * * * b\n", "UTC");
    assert!(text.contains("zone = \"UTC\"\nuser = \"me\"\ncwd = \"/home/me\"\npath = \"/bin\"\n[a]"), "{text}");
}

#[test]
fn jobs_of_a_user_who_is_not_known_run_as_their_file_says() {
    let text = converted("0 1 * * * a\n", "UTC", Users { of_all: Some(None), home: &home });
    let [head, rest] = [NOT_KNOWN, "[a]\ncron = \"0 1 * * *\"\ncommand = [\"/bin/sh\", \"-c\", \"a\"]\n"];
    assert!(text.ends_with(&format!("zone = \"UTC\"\n{head}\n{rest}")), "{text}");
    assert_eq!(jobs(&text).len(), 1);
}

#[test]
fn a_zone_above_all_jobs_is_theirs() {
    let text = of_user("CRON_TZ=Asia/Tokyo\nTZ=UTC\n0 1 * * * a\n0 2 * * * b\n", "Europe/Berlin");
    assert!(
        text.contains("catch_up = \"skip\"\nzone = \"Asia/Tokyo\"\n") && text.contains("env = { TZ = \"UTC\" }\n"),
        "{text}"
    );
    assert!(!text.contains("Berlin"), "{text}");
    assert_eq!(jobs(&text).len(), 2);
}

#[test]
fn a_user_who_is_not_known_here_changes_nothing_of_the_others() {
    let text = of_system("0 1 * * * other /opt/a\n0 2 * * * root /opt/b\n", "UTC");
    assert!(
        text.contains("\"/opt/a\"]\nuser = \"other\"\n[b]")
            && text.contains("\"/opt/b\"]\nuser = \"root\"\ncwd = \"/root\"\n"),
        "{text}"
    );
}

/// As in Debian's cron.
#[test]
fn a_backslash_stands_before_a_percent_sign_and_before_itself() {
    for (command, expected) in [
        (r"date +\%F", "date +%F"),
        (r"grep 'a\\.b'", r"grep 'a\.b'"),
        (r"grep '\d\\\%'", r"grep '\d\%'"),
        ("cmd%", "printf %s '' | {\ncmd\n}"),
        ("cmd%a%", "printf %s 'a\n' | {\ncmd\n}"),
        ("cmd%a%b", "printf %s 'a\nb\n' | {\ncmd\n}"),
        (r"cmd%a\%b\c", "printf %s 'a%b\\c\n' | {\ncmd\n}"),
    ] {
        assert_eq!(script(command), expected, "{command}");
    }
}

#[test]
fn whatever_a_crontab_says_the_file_can_be_read() {
    let command = "[ -~\t\u{e4}\\\\\"'%=]{0,40}";
    let name = "[A-Za-z_ROWLOCK=\"' ]{0,12}";
    let lines = prop::collection::vec(
        prop_oneof![
            command.prop_map(|text| text),
            (command, "[0-9*/@, a-z-]{1,12}").prop_map(|(command, times)| format!("{times} {command}")),
            command.prop_map(|command| format!("0 1 * * * {command}")),
            (name, command).prop_map(|(name, value)| format!("{name}={value}")),
            prop::sample::select(&["CRON_TZ=UTC", "CRON_TZ=Asia/Tokyo", "TZ=UTC", "# a form feed: \u{c}"][..])
                .prop_map(str::to_owned),
        ],
        0..12,
    );
    proptest!(|(lines in lines, zone in prop_oneof![Just("UTC"), Just("Europe/Berlin")])| {
        let text = lines.join("\n");
        jobs(&of_system(&text, zone));
        jobs(&of_user(&text, zone));
    });
}
