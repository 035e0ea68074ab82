//! Histories written by hand of what operators do: valid ones, and invalid ones for each rule.

use crate::ticks::{
    checker::{Operated, Rule},
    checker_tests::{Case, good, lines, tests},
    gathered::{Forgetting, Told},
    record::SECOND,
    terms::Changes,
};

fn named(name: &str) -> String {
    format!("ticks_checker::{name}")
}

tests!(
    a_pause_passes,
    a_claim_while_a_schedule_is_paused_is_caught,
    a_crash_of_a_paused_schedule_is_taken_over_after_its_resume,
    triggers_pass,
    a_trigger_that_is_not_run_is_caught,
    a_trigger_that_is_run_twice_is_caught,
    a_run_that_was_not_triggered_is_caught,
    new_times_pass,
    a_tick_that_new_times_lose_is_caught,
    a_claim_with_times_that_were_replaced_is_caught,
    an_attempt_after_its_times_were_replaced_is_caught,
    a_version_that_falls_is_caught,
    forgotten_runs_pass,
    a_run_that_is_forgotten_wrongly_is_caught,
);

impl Case {
    /// Adds lines and rows.
    fn and(&self, lines: &str, told: &str) -> Self {
        let (lines, told) = (format!("{}\n{lines}", self.lines), format!("{}\n{told}", self.told));
        Self { lines, told, ..self.clone() }
    }

    fn operated(&self) -> (Vec<Rule>, Operated) {
        let (rules, seen) = self.judged();
        (rules, seen.operated)
    }
}

/// Between the run with the token 120 and that with 130.
fn paused() -> Case {
    good().and("1310 0 pauses k\n1320 0 paused k 120\n1980 0 resumes k 120\n1990 0 resumed k", "")
}

fn a_pause_passes() {
    assert_eq!(paused().operated(), (Vec::new(), Operated::default()));
    let long = good().and("4810 0 pauses k\n4820 0 paused k 160\n6000 0 resumes k 160\n6010 0 resumed k", "");
    assert_eq!(long.operated(), (Vec::new(), Operated { pauses: 1, ..Operated::default() }));
    // A run that was claimed before goes on.
    paused().with("1310 0", "1220 0").with("1320 0", "1230 0").breaks(&[]);
    // It was claimed before, and its work began later.
    paused().with("1310 0", "1105 0").with("1320 0", "1110 0").breaks(&[]);
    // The pause had no reply, so it is not known when it began.
    paused().with("1320 0 paused k 120", "").with("resumes k 120", "resumes k 130").breaks(&[]);
}

fn a_claim_while_a_schedule_is_paused_is_caught() {
    // The token has grown, though no work has begun.
    paused().with("resumes k 120", "resumes k 125").breaks(&[Rule::PausesHold]);
    // A run began.
    paused().with("1980 0", "2001 0").with("1990 0", "2002 0").breaks(&[Rule::PausesHold]);
    paused().with("1980 0", "1998 0").with("1990 0", "2002 0").breaks(&[]);
}

fn a_crash_of_a_paused_schedule_is_taken_over_after_its_resume() {
    let late = |resumed: &str| {
        let case = good().with("3100 3 run", "23100 3 run").with("3200 3 end", "23200 3 end");
        let case = case.with("3300 2 run", "23300 2 run").with("3400 2", "23400 2").with("4500 3 run", "24500 3 run");
        let case = case.with("4600 2", "24600 2").with("4700 2", "24700 2").with("4800 3", "24800 3");
        let resumed = format!("2100 0 pauses k\n2110 0 paused k 130\n{resumed} 0 resumes k 130\n{resumed} 0 resumed k");
        case.and(&resumed, "")
    };
    late("13000").breaks(&[]);
    late("11000").breaks(&[Rule::CrashesAreTakenOver]);
}

/// Two triggers that count once, and one during the run of these.
fn triggered() -> Case {
    good().and(
        "4900 0 triggers k
         4910 0 triggered k
         4920 0 triggers k
         4930 0 triggered k
         5000 3 run k 170 13.500001 1
         5010 0 triggers k
         5020 0 triggered k
         5100 3 end k 170 Failed
         5200 2 run k 180 13.500001 2
         5300 2 end k 180 Succeeded
         5400 2 run k 190 13.700001 1
         5500 2 end k 190 Succeeded",
        "k 170 13.500001 1 3 F 0
         k 180 13.500001 2 2 S 0
         k 190 13.700001 1 2 S 0",
    )
}

fn triggers_pass() {
    assert_eq!(triggered().operated(), (Vec::new(), Operated { triggered: 2, ..Operated::default() }));
    // The last one had no reply, and was carried out all the same.
    triggered().with("5020 0 triggered k", "").breaks(&[]);
    // A tick is run after a trigger that is later than its slot.
    let lines = "3210 0 triggers k\n3220 0 triggered k\n3230 2 run k 145 13.9 1\n3240 2 end k 145 Succeeded";
    good().and(lines, "k 145 13.9 1 2 S 0").breaks(&[]);
}

fn a_trigger_that_is_not_run_is_caught() {
    let broken = [Rule::TriggersRunOnce];
    let without = |run: &str, end: &str, told: &str| triggered().with(run, "").with(end, "").with(told, "");
    // The last one.
    let last = without("5400 2 run k 190 13.700001 1", "5500 2 end k 190 Succeeded", "k 190 13.700001 1 2 S 0");
    last.with("5010 0", "5250 0").with("5020 0", "5260 0").breaks(&broken);
    // It failed, and is not tried again.
    without("5200 2 run k 180 13.500001 2", "5300 2 end k 180 Succeeded", "k 180 13.500001 2 2 S 0").breaks(&broken);
}

fn a_trigger_that_is_run_twice_is_caught() {
    let twice =
        triggered().with("k 170 Failed", "k 170 Succeeded").with("k 170 13.500001 1 3 F", "k 170 13.500001 1 3 S");
    twice.breaks(&[Rule::TriggersRunOnce]);
}

fn a_run_that_was_not_triggered_is_caught() {
    let broken = [Rule::TriggersRunOnce];
    let without = triggered().with("5010 0 triggers k", "").with("5020 0 triggered k", "");
    // The two before count for two runs.
    without.breaks(&[]);
    without.with("4920 0 triggers k", "").with("4930 0 triggered k", "").breaks(&broken);
    // It came later than the run.
    triggered()
        .with("4900 0", "5001 0")
        .with("4910 0", "5002 0")
        .with("4920 0", "5003 0")
        .with("4930 0", "5004 0")
        .breaks(&broken);
}

const NEW: &str = "1150 0 seen k 110 1 cron_*_*_*_*_*_*|UTC 12 11.7";

/// Other times are registered while the run with the token 110 fails: at 11.6 or before, and the
/// slot 11 is not tried again.
fn replaced() -> Case {
    let seen = format!("50 0 seen k 100 0 every_1s|UTC 10 10.1\n1050 0 seen k 110 0 every_1s|UTC 11 11.5\n{NEW}");
    let case = Case { changes: Changes::Pattern, ..good() }.and(&seen, "");
    let case =
        case.with("1200 3 run k 120 11 2", "").with("1300 3 end k 120 Succeeded", "").with("k 120 11 2 3 S 0", "");
    let case = case.with("k 110 11 1 2 F 0", "k 110 11 1 2 F 0 11.9").with("k 130 12 1\n", "k 130 12 1 1\n");
    let case = case.with("k 140 12 2\n", "k 140 12 2 1\n").with("k 150 13 1\n", "k 150 13 1 1\n");
    case.with("k 160 13 2\n", "k 160 13 2 1\n")
}

fn new_times_pass() {
    let (rules, operated) = replaced().operated();
    assert_eq!((rules, operated.changes), (Vec::new(), 1));
    // The tick before them was not run, and is dropped.
    let dropped = replaced().with("1000 2 run k 110 11 1", "").with("1100 2 end k 110 Failed", "");
    dropped.with("k 110 11 1 2 F 0 11.9", "").breaks(&[]);
    // It ended about when they were registered.
    let about = replaced().with("F 0 11.9", "F 0 11.6");
    about.breaks(&[]);
    about.and("1200 3 run k 120 11 2\n1300 3 end k 120 Succeeded", "k 120 11 2 3 S 0").breaks(&[Rule::NewTimesApply]);
    let again = about.and("1140 3 run k 110 11 2\n1145 3 end k 110 Succeeded", "");
    assert!(again.judged().0.contains(&Rule::Grows));
}

fn a_tick_that_new_times_lose_is_caught() {
    let lost = replaced().with("2000 1 run k 130 12 1 1", "").with("2100 1 killed", "").with("k 130 12 1 1 L 0", "");
    let lost =
        lost.with("3100 3 run k 140 12 2 1", "").with("3200 3 end k 140 Succeeded", "").with("k 140 12 2 3 S 0", "");
    lost.breaks(&[Rule::NothingLost]);
}

fn a_claim_with_times_that_were_replaced_is_caught() {
    replaced().with("k 130 12 1 1\n", "k 130 12 1 0\n").breaks(&[Rule::NewTimesApply]);
    // It had claimed before.
    let before = replaced().with(NEW, &NEW.replace("k 110", "k 130")).with("k 130 12 1 1\n", "k 130 12 1 0\n");
    before.breaks(&[]);
    // Version 3 has the times of version 0 again, and not those of version 1.
    let later = replaced().and("4900 0 seen k 160 3 every_1s|UTC 14 14", "k 170 13 3 3 F 0 15");
    let claims = |version| later.and(&format!("5000 3 run k 170 13 3 {version}\n5100 3 end k 170 Failed"), "");
    claims(3).breaks(&[]);
    claims(0).breaks(&[]);
    let (rules, _) = claims(1).operated();
    assert!(rules.contains(&Rule::NewTimesApply), "{rules:?}");
}

fn an_attempt_after_its_times_were_replaced_is_caught() {
    let again = replaced().and("1200 3 run k 120 11 2 1\n1300 3 end k 120 Succeeded", "k 120 11 2 3 S 0");
    let (rules, _) = again.judged();
    assert!(rules.contains(&Rule::NewTimesApply), "{rules:?}");
    // The attempt had failed before.
    again.with("F 0 11.9", "F 0 10.4").breaks(&[]);
}

fn a_version_that_falls_is_caught() {
    let seen = |version, times: &str| replaced().and(&format!("4900 0 seen k 160 {version} {times} 14 14.5"), "");
    seen(1, "cron_*_*_*_*_*_*|UTC").breaks(&[]);
    seen(0, "every_1s|UTC").breaks(&[Rule::NewTimesApply]);
    // The times are not those of the version.
    seen(2, "cron_*_*_*_*_*_*|UTC").breaks(&[Rule::NewTimesApply]);
}

/// Runs are forgotten that ended at 11 or before.
fn forgotten(had: &str, left: &str) -> Case {
    let rows = |text| lines(text).map(Told::parse).collect();
    let forgetting = Forgetting { had: rows(had), left: rows(left), limits: (11 * SECOND, 11 * SECOND + 10) };
    Case { forgettings: vec![forgetting], ..good() }
}

const HAD: &str = "k 100 10 1 1 S 0 10.5\nk 110 11 1 2 F 0 10.7\nk 120 11 2 3 S 0 10.8";
const LAST: &str = "k 120 11 2 3 S 0 10.8";
const NEXT: &str = "k 130 12 1 1 S 0 12";

fn forgotten_runs_pass() {
    assert_eq!(forgotten(HAD, LAST).operated(), (Vec::new(), Operated { forgotten: 2, ..Operated::default() }));
    forgotten(&format!("{HAD}\n{NEXT}"), NEXT).breaks(&[]);
    // The next success was recorded between the reads.
    forgotten(HAD, NEXT).breaks(&[]);
    // A run that is lost again is recorded again.
    forgotten(&HAD.replace("F 0 10.7", "L 0 10.7"), &format!("{LAST}\nk 115 11 1 2 L 0 12")).breaks(&[]);
    // One about the limit may go, or stay.
    forgotten(&HAD.replace("10.7", "11.000005"), LAST).breaks(&[]);
    forgotten(&HAD.replace("10.7", "11.000005"), &format!("{LAST}\nk 110 11 1 2 F 0 11.000005")).breaks(&[]);
}

fn a_run_that_is_forgotten_wrongly_is_caught() {
    let broken = [Rule::OldRunsAreForgotten];
    // The last success.
    forgotten(HAD, "").breaks(&broken);
    // One that is not old enough.
    forgotten(&format!("{HAD}\n{NEXT}"), LAST).breaks(&broken);
    // One that is old enough stays.
    forgotten(HAD, HAD).breaks(&broken);
    forgotten(HAD, &format!("k 110 11 1 2 F 0 10.7\n{LAST}")).breaks(&broken);
}
