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
    an_attempt_that_new_times_end_is_caught,
    times_that_no_version_has_are_caught,
    times_that_do_not_apply_are_caught,
    times_that_go_back_are_caught,
    an_instance_with_older_times_is_counted,
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

/// Three processes have version 0, and the first one restarts with version 1. Its times take effect
/// while the run with the token 110 fails, which is made again.
const REPLACED: &str = "
    0 1 starts 0
    0 2 starts 0
    0 3 starts 0
    1 1 started 0
    1 2 started 0
    1 3 started 0
    50 0 seen k 100 t0 every_1s|UTC
    110 1 leaves
    111 1 starts 1
    112 1 started 1
    1050 0 seen k 110 t0 every_1s|UTC
    1150 0 seen k 110 t1 cron_*_*_*_*_*_*|UTC
    1160 2 leaves
    1161 2 starts 1
    1162 2 started 1
    1163 3 leaves
    1164 3 starts 1
    1165 3 started 1
    4900 0 seen k 160 t1 cron_*_*_*_*_*_*|UTC
    4910 0 deployed 1";

/// The runs with these tokens are those of version 1.
fn replaced() -> Case {
    let case = Case { changes: Changes::Pattern, ..good() }.and(REPLACED, "");
    let of_1 = |case: Case, run: &str| case.with(&format!("run {run}\n"), &format!("run {run} 1\n"));
    ["k 120 11 2", "k 130 12 1", "k 140 12 2", "k 150 13 1", "k 160 13 2"].into_iter().fold(case, of_1)
}

fn new_times_pass() {
    let (rules, operated) = replaced().operated();
    assert_eq!((rules, operated), (Vec::new(), Operated { changes: 1, ..Operated::default() }));
    // The times came before the run, which was claimed with the times before.
    replaced().with("1150 0 seen", "990 0 seen").with("1050 0 seen k 110", "980 0 seen k 100").breaks(&[]);
}

fn a_tick_that_new_times_lose_is_caught() {
    let lost = [Rule::NothingLost];
    // It was due when they took effect.
    let without = replaced().with("1000 2 run k 110 11 1\n", "").with("1100 2 end k 110 Failed", "");
    let without = without.with("1200 3 run k 120 11 2 1\n", "").with("1300 3 end k 120 Succeeded", "");
    without.with("k 110 11 1 2 F 0", "").with("k 120 11 2 3 S 0", "").breaks(&lost);
    let later = replaced().with("2000 1 run k 130 12 1 1\n", "").with("2100 1 killed", "").with("k 130 12 1 1 L 0", "");
    let later = later.with("3100 3 run k 140 12 2 1\n", "").with("3200 3 end k 140 Succeeded", "");
    later.with("k 140 12 2 3 S 0", "").breaks(&lost);
}

fn an_attempt_that_new_times_end_is_caught() {
    let last = |case: Case| case.with("1200 3 run k 120 11 2 1\n", "").with("1300 3 end k 120 Succeeded", "");
    last(replaced()).with("k 120 11 2 3 S 0", "").breaks(&[Rule::NothingLost]);
    // The same of a run that was triggered.
    let triggered = replaced().with("110 11 1", "110 11.5 1").with("120 11 2", "120 11.5 2");
    let triggered = triggered.and(
        "1010 0 triggers k\n1020 0 triggered k\n1310 2 run k 125 11 1 1\n1320 2 end k 125 Succeeded",
        "k 125 11 1 2 S 0",
    );
    let triggered = triggered.with("1010 0", "910 0").with("1020 0", "920 0");
    triggered.breaks(&[]);
    last(triggered.with("120 11.5 2 1\n", "120 11 2 1\n"))
        .with("k 120 11.5 2 3 S 0", "")
        .breaks(&[Rule::TriggersRunOnce]);
}

fn a_claim_with_times_that_were_replaced_is_caught() {
    let new = [Rule::NewTimesApply];
    replaced().with("k 130 12 1 1\n", "k 130 12 1 0\n").breaks(&new);
    // The same of times that are not in effect yet.
    replaced().with("k 110 11 1\n", "k 110 11 1 1\n").breaks(&new);
    // It had claimed before they took effect, as far as is known.
    let before = replaced().with("1150 0 seen k 110", "1150 0 seen k 130").with("k 130 12 1 1\n", "k 130 12 1 0\n");
    before.breaks(&[]);
    // Version 3 has the times of version 0 again, and not those of version 1.
    let later = replaced().and(
        "4920 3 leaves\n4921 3 starts 3\n4922 1 leaves\n4930 0 seen k 160 t3 every_1s|UTC\n6000 0 seen k 170 t3 every_1s|UTC",
        "k 170 14 1 3 F 0",
    );
    let claims = |version| later.and(&format!("5000 3 run k 170 14 1 {version}\n5100 3 end k 170 Failed"), "");
    claims(3).breaks(&[]);
    claims(0).breaks(&[]);
    claims(1).breaks(&new);
    // The times changed twice between the reads.
    claims(1).with("6000 0 seen k 170 t3", "6000 0 seen k 170 t5").breaks(&[]);
}

fn times_that_no_version_has_are_caught() {
    let new = [Rule::NewTimesApply];
    replaced().and("6000 0 seen k 160 t2 cron_*/1_*_*_*_*_*|UTC", "").breaks(&new);
    // An instance that has them starts later.
    replaced().with("111 1 starts 1", "1155 1 starts 1").with("112 1 started 1", "1156 1 started 1").breaks(&new);
    // They changed, and the row says that they did not.
    replaced().with("k 110 t1", "k 110 t0").breaks(&new);
}

fn times_that_do_not_apply_are_caught() {
    let none = replaced().with("4900 0 seen k 160 t1 cron_*_*_*_*_*_*|UTC", "4900 0 seen k 160 t2 every_1s|UTC");
    none.breaks(&[Rule::NewTimesApply]);
    // Not all processes had them.
    none.with("4910 0 deployed 1", "").breaks(&[]);
}

/// The times of version 0 are in effect again at ten seconds.
fn taken_back() -> Case {
    replaced().and("9900 0 seen k 160 t1 cron_*_*_*_*_*_*|UTC\n10000 0 seen k 160 t4 every_1s|UTC", "")
}

fn times_that_go_back_are_caught() {
    let new = [Rule::NewTimesApply];
    taken_back().breaks(&new);
    // No instance with the newer ones was left. The process 1 was killed.
    let left = taken_back().and("9000 2 leaves\n9100 3 leaves", "");
    left.breaks(&[]);
    assert_eq!(left.operated().1, Operated { changes: 2, returned: 1, ..Operated::default() });
    left.with("9100 3 leaves", "").breaks(&new);
    // The one that was left was stalled, or cut off.
    let alone = |lines: &str| left.with("9100 3 leaves", lines);
    alone("9500 3 held-up 8000").breaks(&[]);
    alone("9500 3 cut-off 8000").breaks(&[]);
    alone("8500 3 cut-off 8000").breaks(&new);
    // It had started shortly before.
    alone("9200 3 leaves\n9201 3 starts 1\n9202 3 started 1").breaks(&[]);
    alone("4911 3 leaves\n4912 3 starts 1\n4913 3 started 1\n").breaks(&[]);
    alone("4891 3 leaves\n4892 3 starts 1\n4893 3 started 1\n").breaks(&new);
    // An instance could have announced the newer ones before the older ones were seen.
    taken_back().with("50 0 seen", "950 0 seen").breaks(&[]);
}

fn an_instance_with_older_times_is_counted() {
    let older = taken_back().with("10000 0 seen k 160 t4 every_1s|UTC", "9000 4 starts 0\n9001 4 started 0");
    let (rules, operated) = older.operated();
    assert_eq!((rules, operated), (Vec::new(), Operated { changes: 1, older: 1, ..Operated::default() }));
}

/// Runs are forgotten that ended at 11 or before.
fn forgotten(had: &str, left: &str) -> Case {
    let rows = |text| lines(text).map(Told::parse).collect();
    let limits = (11 * SECOND, 11 * SECOND + 10);
    let forgetting = Forgetting { had: rows(had), left: rows(left), limits, under_way: (None, None) };
    Case { forgettings: vec![forgetting], ..good() }
}

/// The same while attempts are made at these seconds before and after.
fn forgotten_during(had: &str, left: &str, slots: (Option<i64>, Option<i64>)) -> Case {
    let mut case = forgotten(had, left);
    let slot = |second: Option<i64>| second.map(|second| second * SECOND);
    case.forgettings[0].under_way = (slot(slots.0), slot(slots.1));
    case
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
    // The attempts at a tick that goes on stay. If it has ended by then, they may go.
    let failed = "k 120 12 1 3 F 0 10.9";
    let (had, left) = (format!("{LAST}\n{failed}"), LAST);
    forgotten_during(&had, &had, (Some(12), Some(12))).breaks(&[]);
    forgotten_during(&had, &had, (Some(12), None)).breaks(&[]);
    forgotten_during(&had, left, (Some(12), None)).breaks(&[]);
}

fn a_run_that_is_forgotten_wrongly_is_caught() {
    let broken = [Rule::OldRunsAreForgotten];
    // The last success.
    forgotten(HAD, "").breaks(&broken);
    // One that is not old enough.
    forgotten(&format!("{HAD}\n{NEXT}"), LAST).breaks(&broken);
    // An attempt at a tick that goes on.
    let had = format!("{LAST}\nk 120 12 1 3 F 0 10.9");
    forgotten_during(&had, LAST, (Some(12), Some(12))).breaks(&broken);
    // One of another tick stays.
    forgotten_during(&had, &had, (Some(13), Some(13))).breaks(&broken);
    // One that is old enough stays.
    forgotten(HAD, HAD).breaks(&broken);
    forgotten(HAD, &format!("k 110 11 1 2 F 0 10.7\n{LAST}")).breaks(&broken);
}
