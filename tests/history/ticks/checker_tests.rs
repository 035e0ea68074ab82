//! Histories written by hand, with times in milliseconds and leases of a second: a valid one, and
//! an invalid one for each rule.

use std::time::Duration;

use rowlock::jobs::CatchUp;

use crate::ticks::{
    checker::{Rule, Seen, check},
    gathered::{Effect, Forgetting, History, Suffered, Told},
    record::Entry,
    terms::{Changes, Terms},
};

/// For tests that are listed with it, which a file names by its function `named`.
macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        pub fn trials() -> Vec<libtest_mimic::Trial> {
            let trial = |name: &str, test: fn()| {
                libtest_mimic::Trial::test(named(name), move || {
                    test();
                    Ok(())
                })
            };
            vec![$(trial(stringify!($name), $name)),+]
        }
    };
}

pub(super) use tests;

fn named(name: &str) -> String {
    format!("ticks_checker::{name}")
}

tests!(
    a_good_history_passes,
    catching_up_passes_as_its_schedule_says,
    a_slot_that_succeeds_twice_is_caught,
    a_lost_slot_is_caught,
    a_slot_that_is_counted_twice_is_caught,
    slots_and_tokens_that_fall_are_caught,
    a_hole_in_the_attempts_is_caught,
    runs_that_overlap_are_caught,
    a_run_that_was_not_told_of_its_loss_is_caught,
    a_run_may_begin_while_the_last_waits_for_the_reply_to_its_commit,
    effects_that_are_missing_or_too_many_are_caught,
    an_outcome_that_is_told_wrongly_is_caught,
    a_crash_that_is_not_taken_over_is_caught,
);

/// The slots 10 to 13, then 14 is next.
#[derive(Clone)]
pub struct Case {
    pub catch_up: CatchUp,
    pub in_transaction: bool,
    pub changes: Changes,
    pub lines: String,
    pub told: String,
    pub effects: String,
    pub forgettings: Vec<Forgetting>,
}

pub fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty())
}

impl Case {
    pub fn judged(&self) -> (Vec<Rule>, Seen) {
        let (name, cron) = ("k".to_owned(), false);
        let (catch_up, in_transaction, changes) = (self.catch_up, self.in_transaction, self.changes);
        let terms = Terms { name, catch_up, in_transaction, cron, changes };
        let mut entries: Vec<Entry> = lines(&self.lines).map(|line| Entry::parse(line, 1_000)).collect();
        entries.sort_by_key(|entry| entry.at);
        let history = History {
            told: lines(&self.told).map(Told::parse).collect(),
            effects: lines(&self.effects).map(Effect::parse).collect(),
            forgettings: self.forgettings.clone(),
            ..History::new(terms, (10, 14), &entries)
        };
        let verdict = check(&[history], &Suffered::new(Duration::from_secs(1), &entries));
        let mut rules: Vec<Rule> = verdict.violations.iter().map(|violation| violation.rule).collect();
        rules.dedup();
        (rules, verdict.seen)
    }

    /// Replaces a text that the lines, the rows or the effects have, in all of them.
    pub fn with(&self, old: &str, new: &str) -> Self {
        assert!([&self.lines, &self.told, &self.effects].iter().any(|text| text.contains(old)), "{old}");
        let replaced = |text: &str| text.replace(old, new);
        let (lines, told, effects) = (replaced(&self.lines), replaced(&self.told), replaced(&self.effects));
        Self { lines, told, effects, ..self.clone() }
    }

    fn and_lines(&self, lines: &str) -> Self {
        Self { lines: format!("{}\n{lines}", self.lines), ..self.clone() }
    }

    #[track_caller]
    pub fn breaks(&self, rules: &[Rule]) {
        assert_eq!(self.judged().0, rules, "{}{}", self.lines, self.told);
    }
}

/// One of each: a success, a failure that is tried again, a crash that is taken over, a process
/// that is stopped past its lease.
pub fn good() -> Case {
    Case {
        catch_up: CatchUp::All(9),
        in_transaction: false,
        changes: Changes::Nothing,
        lines: "0 1 run k 100 10 1
                100 1 end k 100 Succeeded
                1000 2 run k 110 11 1
                1100 2 end k 110 Failed
                1200 3 run k 120 11 2
                1300 3 end k 120 Succeeded
                2000 1 run k 130 12 1
                2100 1 killed
                3100 3 run k 140 12 2
                3200 3 end k 140 Succeeded
                3300 2 run k 150 13 1
                3400 2 stopped
                4500 3 run k 160 13 2
                4600 2 continued
                4700 2 end k 150 Dropped
                4800 3 end k 160 Succeeded"
            .to_owned(),
        told: "k 100 10 1 1 S 0
               k 110 11 1 2 F 0
               k 120 11 2 3 S 0
               k 130 12 1 1 L 0
               k 140 12 2 3 S 0
               k 150 13 1 2 L 0
               k 160 13 2 3 S 0"
            .to_owned(),
        effects: String::new(),
        forgettings: Vec::new(),
    }
}

/// The same, with the effects.
fn in_transaction() -> Case {
    let effects = "k 100 10\nk 120 11\nk 140 12\nk 160 13".to_owned();
    Case { in_transaction: true, effects, ..good() }
}

fn a_good_history_passes() {
    let seen = Seen { slots: 4, successes: 4, crashes: 1, losses: 2, retried: 3, ..Seen::default() };
    assert_eq!(good().judged(), (Vec::new(), seen));
    assert_eq!(in_transaction().judged(), (Vec::new(), Seen { effects: 4, ..seen }));
    // The commit's reply was lost.
    in_transaction().with("k 120 Succeeded", "k 120 Failed").breaks(&[]);
}

/// The slots 11 and 12 are not run.
fn caught_up(catch_up: CatchUp, rows: &str) -> Case {
    let lines = "0 1 run k 100 10 1
                 100 1 end k 100 Succeeded
                 3000 1 run k 130 13 1
                 3100 1 end k 130 Succeeded";
    let told = format!("k 100 10 1 1 S 0\n{rows}");
    Case { catch_up, lines: lines.to_owned(), told, ..good() }
}

const STANDS: &str = "k 130 13 1 1 S 2";
const SKIPPED: &str = "k 130 11 0 1 M 2\nk 130 13 1 1 S 0";

fn catching_up_passes_as_its_schedule_says() {
    let seen = caught_up(CatchUp::Once, STANDS).judged();
    assert_eq!(seen, (Vec::new(), Seen { slots: 4, successes: 2, missed: 2, ..Seen::default() }));
    caught_up(CatchUp::Skip, SKIPPED).breaks(&[]);
    caught_up(CatchUp::Once, SKIPPED).breaks(&[Rule::NothingLost]);
    caught_up(CatchUp::Skip, STANDS).breaks(&[Rule::NothingLost]);
    caught_up(CatchUp::All(9), STANDS).breaks(&[Rule::NothingLost]);
    caught_up(CatchUp::All(9), SKIPPED).breaks(&[Rule::NothingLost]);
}

fn a_slot_that_succeeds_twice_is_caught() {
    // The attempt that failed succeeded too.
    good().with("k 110 Failed", "k 110 Succeeded").with("2 F 0", "2 S 0").breaks(&[Rule::OneSuccess]);
}

fn a_lost_slot_is_caught() {
    let lost = [Rule::NothingLost];
    // Its last row is missing.
    good().with("k 160 13 2 3 S 0", "").breaks(&lost);
    good().with("k 140 12 2 3 S 0", "").breaks(&lost);
    // Before all others.
    good().with("k 100 10 1 1 S 0", "").breaks(&lost);
    // Too few are counted.
    caught_up(CatchUp::Once, "k 130 13 1 1 S 1").breaks(&lost);
    caught_up(CatchUp::Skip, "k 130 11 0 1 M 1\nk 130 13 1 1 S 0").breaks(&lost);
}

fn a_slot_that_is_counted_twice_is_caught() {
    caught_up(CatchUp::Once, "k 130 13 1 1 S 3").breaks(&[Rule::OneSuccess]);
    caught_up(CatchUp::Skip, "k 130 11 0 1 M 3\nk 130 13 1 1 S 0").breaks(&[Rule::OneSuccess]);
}

fn slots_and_tokens_that_fall_are_caught() {
    // A later run with a lower token.
    good().with("k 140 12", "k 105 12").with("k 140 S", "k 105 S").breaks(&[
        Rule::Grows,
        Rule::NoOverlap,
        Rule::LossIsToldFirst,
    ]);
    // Two runs with one token.
    good().with("k 120", "k 110").breaks(&[Rule::Grows]);
    // A slot that has ended is still to come.
    let mut later = good();
    later.told += "\nk 170 14 1 3 S 0";
    later.lines += "\n5000 3 run k 170 14 1\n5100 3 end k 170 Succeeded";
    later.breaks(&[Rule::Grows]);
}

fn a_hole_in_the_attempts_is_caught() {
    let hole = [Rule::AttemptsWhole];
    good().with("k 120 11 2", "k 120 11 3").breaks(&hole);
    good().with("k 130 12 1 1 L 0", "").breaks(&hole);
    good().with("k 100 10 1", "k 100 10 2").breaks(&hole);
}

const UNTOLD: [Rule; 2] = [Rule::NoOverlap, Rule::LossIsToldFirst];

fn runs_that_overlap_are_caught() {
    good().with("1100 2 end", "1201 2 end").breaks(&UNTOLD);
    // It was stopped long before.
    good().with("3400 2 stopped", "1400 2 stopped").with("4600 2 continued", "1500 2 continued").breaks(&UNTOLD);
    // It is not heard of again, and nothing killed it.
    good().with("1100 2 end k 110 Failed", "").with("k 110 11 1 2 F 0", "k 110 11 1 2 L 0").breaks(&UNTOLD);
}

/// The run with the token 110 loses its lease, is told so and ends at these times, and the next one
/// begins at 1200.
fn lost(told: u32, ended: u32) -> Case {
    let told = format!("{told} 2 told k 110\n{ended} 2 end k 110 Dropped");
    good().with("1100 2 end k 110 Failed", &told).with("k 110 11 1 2 F 0", "k 110 11 1 2 L 0")
}

fn a_run_that_was_not_told_of_its_loss_is_caught() {
    lost(1150, 1160).breaks(&[]);
    lost(1190, 1210).breaks(&[Rule::NoOverlap]);
    lost(1205, 1210).breaks(&UNTOLD);
    // The same under a commit that was sent, and did not end the tick.
    let commits = |lines: &str| lost(1205, 1210).and_lines(lines);
    commits("1100 2 commits k 110").breaks(&UNTOLD);
    commits("1100 2 commits k 110\n1110 2 committed k 110").breaks(&UNTOLD);
    // Its process was stalled.
    lost(1205, 1210).and_lines("1204 2 held-up 1100").breaks(&[]);
}

fn a_run_may_begin_while_the_last_waits_for_the_reply_to_its_commit() {
    // The run with the token 120 begins at 1200, and the next one at 2000.
    let late = |lines: &str| good().with("1300 3 end k 120", &format!("{lines}\n2010 3 end k 120"));
    late("").breaks(&UNTOLD);
    late("1300 3 commits k 120\n2005 3 committed k 120").breaks(&[]);
    late("1300 3 commits k 120").breaks(&[]);
    // The reply has just come.
    late("1300 3 commits k 120\n1990 3 committed k 120").breaks(&[]);
    late("1300 3 commits k 120\n1970 3 committed k 120").breaks(&UNTOLD);
    // The reply had come, and the work went on.
    late("1300 3 commits k 120\n1400 3 committed k 120").breaks(&UNTOLD);
    late("2001 3 commits k 120\n2005 3 committed k 120").breaks(&UNTOLD);
    // The commit has not ended the tick.
    let undone =
        late("1300 3 commits k 120").with("k 120 Succeeded", "k 120 Failed").with("k 120 11 2 3 S", "k 120 11 2 3 F");
    let rules = undone.judged().0;
    assert!(UNTOLD.iter().all(|rule| rules.contains(rule)), "{rules:?}");
}

fn effects_that_are_missing_or_too_many_are_caught() {
    let effect = [Rule::OneEffect];
    let changed =
        |old: &str, new: &str| Case { effects: in_transaction().effects.replace(old, new), ..in_transaction() };
    changed("k 120 11\n", "").breaks(&effect);
    changed("k 160 13", "k 160 13\nk 160 13").breaks(&effect);
    // Of the run that was lost.
    changed("k 160 13", "k 160 13\nk 150 13").breaks(&effect);
    // Under the token of another run.
    changed("k 120 11", "k 110 11").breaks(&effect);
}

fn an_outcome_that_is_told_wrongly_is_caught() {
    let untrue = [Rule::OutcomesAreTrue];
    good().with("k 120 Succeeded", "k 120 Failed").breaks(&untrue);
    good().with("k 110 Failed", "k 110 Succeeded").breaks(&untrue);
    good().with("k 110 Failed", "k 110 Dropped").breaks(&untrue);
    // No process ran it.
    good().with("0 1 run k 100 10 1", "").with("100 1 end k 100 Succeeded", "").breaks(&untrue);
    // Another process did.
    good().with("k 100 10 1 1 S 0", "k 100 10 1 2 S 0").breaks(&untrue);
}

fn a_crash_that_is_not_taken_over_is_caught() {
    let moved = good()
        .with("3100 3 run", "13101 3 run")
        .with("3200 3 end", "13201 3 end")
        .with("3300 2 run", "13301 2 run")
        .with("3400 2", "13401 2")
        .with("4500 3 run", "14501 3 run")
        .with("4600 2", "14601 2")
        .with("4700 2", "14701 2")
        .with("4800 3", "14801 3");
    moved.breaks(&[Rule::CrashesAreTakenOver]);
    moved.with("13101 3 run", "13099 3 run").breaks(&[]);
}
