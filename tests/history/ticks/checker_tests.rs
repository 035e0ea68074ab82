//! Histories written by hand, with times in milliseconds and leases of a second: a valid one, and
//! an invalid one for each rule.

use std::time::Duration;

use libtest_mimic::Trial;
use rowlock::CatchUp;

use crate::ticks::{
    checker::{Rule, Seen, check},
    record::{Effect, Entry, History, Suffered, Told, runs},
    terms::Terms,
};

macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        pub fn trials() -> Vec<Trial> {
            let trial = |name: &str, test: fn()| {
                Trial::test(format!("ticks_checker::{name}"), move || {
                    test();
                    Ok(())
                })
            };
            vec![$(trial(stringify!($name), $name)),+]
        }
    };
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
    a_run_may_begin_once_the_commit_of_the_last_was_sent,
    effects_that_are_missing_or_too_many_are_caught,
    an_outcome_that_is_told_wrongly_is_caught,
    a_crash_that_is_not_taken_over_is_caught,
);

/// The slots 10 to 13, then 14 is next.
struct Case {
    catch_up: CatchUp,
    in_transaction: bool,
    lines: String,
    told: String,
    effects: String,
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty())
}

impl Case {
    fn judged(&self) -> (Vec<Rule>, Seen) {
        let (name, cron) = ("k".to_owned(), false);
        let terms = Terms { name, catch_up: self.catch_up, in_transaction: self.in_transaction, cron };
        let entries: Vec<Entry> = lines(&self.lines).map(|line| Entry::parse(line, 1_000)).collect();
        let history = History {
            first: 10,
            next: 14,
            runs: runs(&terms.name, &entries),
            told: lines(&self.told).map(Told::parse).collect(),
            effects: lines(&self.effects).map(Effect::parse).collect(),
            terms,
        };
        let verdict = check(&[history], &Suffered::new(Duration::from_secs(1), &entries));
        let mut rules: Vec<Rule> = verdict.violations.iter().map(|violation| violation.rule).collect();
        rules.dedup();
        (rules, verdict.seen)
    }

    /// Replaces a text that the lines, the rows or the effects have, in all of them.
    fn with(&self, old: &str, new: &str) -> Self {
        assert!([&self.lines, &self.told, &self.effects].iter().any(|text| text.contains(old)), "{old}");
        let replaced = |text: &str| text.replace(old, new);
        let (lines, told, effects) = (replaced(&self.lines), replaced(&self.told), replaced(&self.effects));
        Self { lines, told, effects, ..*self }
    }

    #[track_caller]
    fn breaks(&self, rules: &[Rule]) {
        assert_eq!(self.judged().0, rules);
    }
}

/// One of each: a success, a failure that is tried again, a crash that is taken over, a process
/// that is stopped past its lease.
fn good() -> Case {
    Case {
        catch_up: CatchUp::All(9),
        in_transaction: false,
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
    }
}

/// The same, with the effects.
fn in_transaction() -> Case {
    let effects = "k 100 10\nk 120 11\nk 140 12\nk 160 13".to_owned();
    Case { in_transaction: true, effects, ..good() }
}

fn a_good_history_passes() {
    let seen = Seen { slots: 4, successes: 4, crashes: 1, losses: 2, retried: 3, missed: 0, effects: 0 };
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
    Case { catch_up, in_transaction: false, lines: lines.to_owned(), told, effects: String::new() }
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
    good().with("k 140 12", "k 105 12").with("k 140 S", "k 105 S").breaks(&[Rule::Grows, Rule::NoOverlap]);
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

fn runs_that_overlap_are_caught() {
    let overlap = [Rule::NoOverlap];
    good().with("1100 2 end", "1201 2 end").breaks(&overlap);
    // It was stopped long before.
    good().with("3400 2 stopped", "1400 2 stopped").with("4600 2 continued", "1500 2 continued").breaks(&overlap);
    // It is not heard of again, and nothing killed it.
    good().with("1100 2 end k 110 Failed", "").with("k 110 11 1 2 F 0", "k 110 11 1 2 L 0").breaks(&overlap);
}

fn a_run_may_begin_once_the_commit_of_the_last_was_sent() {
    let late = good().with("1100 2 end k 110", "1250 2 end k 110");
    late.breaks(&[Rule::NoOverlap]);
    late.with("1250 2 end", "1150 2 commits k 110\n1250 2 end").breaks(&[]);
    late.with("1250 2 end", "1201 2 commits k 110\n1250 2 end").breaks(&[Rule::NoOverlap]);
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
