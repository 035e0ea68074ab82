//! What follows for schedules that get another name.

use std::time::Duration;

use chrono::TimeDelta;

use super::*;
use crate::{
    schedule::spec::Schedule,
    store::{instances::TimesChange, schedule::Times},
};

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::days(20_000) + TimeDelta::seconds(seconds)
}

fn schedule(name: &str) -> Schedule {
    Schedule::every(name, Duration::from_secs(60))
}

/// What an instance with the new name declares: the old one, and the new one.
fn renamed() -> Vec<Declared> {
    Declared::all_of(&schedule("new").renamed_from("old"))
}

/// A row of this name, which is to run at a time.
fn row(name: &str, slot: i64) -> ListedSchedule {
    ListedSchedule { now: at(0), ..ListedSchedule::unrun(Declared::new(&schedule(name)).times, at(slot)) }
}

/// A row of a name that another one has replaced.
fn replaced(name: &str, by: &str) -> ListedSchedule {
    let times = Declared::renamed(Key::new(name).unwrap(), &Declared::new(&schedule(by))).times;
    ListedSchedule { times, ..row(name, 1_000_000) }
}

fn ran(row: ListedSchedule, slot: i64) -> ListedSchedule {
    ListedSchedule { run_slot: Some(at(slot)), begin_time: Some(at(slot)), ..row }
}

/// What is known 30 s after a tick. A row of another name remembers its own times.
fn view(rows: Vec<ListedSchedule>) -> View {
    let judge = Judge { judges: true, calls: false, lives: TimeDelta::seconds(24), here: DateTime::UNIX_EPOCH };
    let with_past = |row: ListedSchedule| {
        let name = row.times.name.clone();
        let known = known(&[&row.times, &schedule(name.as_str()).times()]);
        (name, if row.times.are_removed() { ListedSchedule { known, ..row } } else { row })
    };
    let rows = rows.into_iter().map(with_past).collect();
    View { rows, words: HashMap::new(), judge, now: at(30) }
}

/// Returns what follows for the name that the first of these declares, if its times apply.
fn step_of(view: &View, declared: &[Declared]) -> Step {
    view.step(&declared[0], declared, Decision::Apply).ok().flatten().unwrap()
}

/// Adds instances that are alive, and declare these.
fn declared_by(view: &mut View, declared: &[Declared]) {
    for Declared { times, .. } in declared {
        view.words.entry(times.name.clone()).or_default().add(times, true, true, at(-900));
    }
}

/// What a row remembers that has had these times, the newest first.
fn known(times: &[&Times]) -> String {
    times.iter().map(|times| format!("{:016x}", times.mark())).collect::<Vec<_>>().join(" ")
}

fn remembers(view: &mut View, name: &str, times: &[&Times]) {
    view.rows.get_mut(&Key::new(name).unwrap()).unwrap().known = known(times);
}

/// Returns the names of a rename, and what the new one gets.
fn rename(step: Step) -> (String, String, TimesChange) {
    let Step::Rename(both) = step else { panic!("it is a change of one row") };
    let [old, new] = *both;
    assert!(old.seen.is_some() && old.times.are_removed());
    (old.times.name.to_string(), new.times.name.to_string(), new)
}

/// Returns the slot that the new name gets from rows like these, in seconds.
fn slot(rows: Vec<ListedSchedule>) -> i64 {
    let declared = renamed();
    let (old, new, change) = rename(step_of(&view(rows), &declared));
    assert_eq!((old.as_str(), new.as_str()), ("old", "new"));
    (change.slot - at(0)).num_seconds()
}

#[test]
fn what_is_due_passes_to_the_new_name() {
    assert_eq!(slot(vec![row("old", -600)]), -600);
    assert_eq!(slot(vec![row("old", 60)]), 60);
    // A tick that was begun goes on.
    let open = ListedSchedule { attempt: 2, ..ran(row("old", -600), -600) };
    assert_eq!(slot(vec![open.clone()]), -600);
    assert_eq!(slot(vec![ListedSchedule { running: true, due_at: at(29), ..open.clone() }]), -600);
    // With other times, the slot is the tick after it.
    let others = Times { spec: "every 30s".to_owned(), ..open.times.clone() };
    assert_eq!(slot(vec![ListedSchedule { times: others, ..open }]), -570);
    // Other times have moved the slot since.
    assert_eq!(slot(vec![ListedSchedule { attempt: 2, ..ran(row("old", 60), -600) }]), 60);
    let triggered = ListedSchedule { run_slot: Some(at(-600) + TimeDelta::microseconds(1)), ..row("old", 60) };
    assert_eq!(slot(vec![ListedSchedule { attempt: 2, ..triggered }]), 60);
}

#[test]
fn a_tick_that_the_new_name_has_run_does_not_come_again() {
    // Both were in effect, and the old one catches up.
    let with = |new| {
        let old = ListedSchedule { begin_time: Some(at(20)), ..ran(row("old", -60), -120) };
        slot(vec![old, new])
    };
    let again = |ran_at| with(ran(row("new", 60), ran_at));
    assert_eq!(again(-120), -60);
    assert_eq!(again(-60), 0);
    assert_eq!(again(0), 60);
    let run_slot = Some(at(0) + TimeDelta::microseconds(1));
    assert_eq!(with(ListedSchedule { run_slot, ..ran(row("new", 60), 0) }), -60, "a trigger is no tick");
    // What has passed to another name since is gone on with there.
    assert_eq!(slot(vec![ran(row("old", -60), -120), ran(replaced("new", "old"), -60)]), -60);
}

#[test]
fn a_schedule_that_was_gone_for_long_begins_afresh() {
    let (gone_at, declared) = (Some(at(0) - TimeDelta::days(8)), renamed());
    let gone = view(vec![ListedSchedule { gone_at, ..row("old", -600) }]);
    assert_eq!(rename(step_of(&gone, &declared)).2.slot, at(60));
    // One that is removed already stays so.
    let removed = view(vec![ListedSchedule { gone_at, ..replaced("old", "new") }]);
    assert_eq!(removed.decide(&declared[0], &declared), Decision::Return);
}

#[test]
fn a_run_that_is_under_way_is_waited_for() {
    let live = |row| ListedSchedule { running: true, due_at: at(31), ..row };
    let declared = renamed();
    for rows in [vec![live(row("old", 0))], vec![row("old", 0), live(row("new", 0))]] {
        let view = view(rows);
        assert!(view.step(&declared[0], &declared, Decision::Apply).is_err());
        assert!(view.step(&declared[0], &declared, Decision::Leave).is_ok_and(|step| step.is_none()));
    }
}

#[test]
fn the_name_that_ran_last_goes_on() {
    let declared = renamed();
    let is_rename = |rows| matches!(step_of(&view(rows), &declared), Step::Rename(_));
    assert!(!is_rename(vec![ran(row("old", -600), -660), ran(row("new", 60), 0)]));
    assert!(is_rename(vec![ran(row("old", -600), -660), row("new", 60)]));
    assert!(is_rename(vec![row("old", -600), row("new", 60)]));
    assert!(is_rename(vec![ran(row("old", 60), 0), ran(row("new", 0), -60)]));
    // One that was replaced has nothing to go on with.
    assert!(is_rename(vec![ran(row("old", -600), -660), ran(replaced("new", "old"), 0)]));
}

#[test]
fn a_rollback_is_a_rename() {
    let declared = [Declared::new(&schedule("old"))];
    let new = || ran(row("new", -60), -120);
    // It may skip a name.
    let skipping = vec![replaced("old", "between"), replaced("between", "new"), new()];
    for rows in [vec![ran(replaced("old", "new"), -120), new()], skipping] {
        let (from, to, change) = rename(step_of(&view(rows), &declared));
        assert_eq!((from.as_str(), to.as_str(), change.slot), ("new", "old", at(-60)));
    }
    // If the other name is gone, the old one begins with what it can have missed itself.
    let alone = view(vec![replaced("old", "new")]);
    assert!(matches!(step_of(&alone, &declared), Step::Change(_, change) if change.slot == at(0)));
}

#[test]
fn a_rollback_takes_nothing_from_instances_that_live() {
    let rows = || vec![ran(replaced("old", "new"), -120), ran(row("new", 60), 0)];
    let old = [Declared::new(&schedule("old"))];
    // They no longer say which name it had. Their times may be other ones, and not apply yet.
    for times in [60, 30] {
        let new = Declared::new(&Schedule::every("new", Duration::from_secs(times)));
        let mut view = view(rows());
        declared_by(&mut view, &old);
        assert_eq!(view.decide(&old[0], &old), Decision::Apply);
        let word = view.words.entry(new.times.name.clone()).or_default();
        word.add(&new.times, false, false, at(-900));
        assert_eq!(view.decide(&old[0], &old), Decision::Apply, "they are dead");
        view.judge.judges = false;
        assert_eq!(view.decide(&old[0], &old), Decision::Wait, "they may be back after an outage");
        view.judge.judges = true;
        declared_by(&mut view, &[new]);
        assert_eq!(view.decide(&old[0], &old), Decision::Leave);
        // A living instance with the opposite declaration has said that the name may go.
        declared_by(&mut view, &Declared::all_of(&schedule("old").renamed_from("new"))[..1]);
        assert_eq!(view.decide(&old[0], &old), Decision::Apply);
    }
}

#[test]
fn a_name_that_is_used_again_is_a_schedule_of_its_own() {
    let view = view(vec![ran(replaced("old", "new"), -120), ran(row("new", -60), -120)]);
    for old in [Declared::new(&schedule("old")), Declared::removed(Key::new("old").unwrap())] {
        let declared = [old, Declared::new(&schedule("new"))];
        let Step::Change(_, TimesChange { times, .. }) = step_of(&view, &declared) else {
            panic!("it takes nothing from another name")
        };
        assert_eq!(times, declared[0].times);
    }
    // Times that it never had are those of another schedule.
    let other = Declared::new(&Schedule::every("old", Duration::from_secs(30)));
    for alone in [Declared::removed(Key::new("old").unwrap()), other] {
        assert!(matches!(step_of(&view, &[alone]), Step::Change(..)));
    }
}

/// A release gives the schedule its old name back while the one before it still lives.
#[test]
fn declarations_in_both_directions_change_nothing_by_turns() {
    let (forth, back) = (renamed(), Declared::all_of(&schedule("old").renamed_from("new")));
    let (old, new) = (Declared::new(&schedule("old")), Declared::new(&schedule("new")));
    let mut by_both = view(vec![ran(replaced("old", "new"), -120), ran(row("new", 60), 0)]);
    remembers(&mut by_both, "old", &[&forth[0].times, &old.times]);
    remembers(&mut by_both, "new", &[&new.times]);
    declared_by(&mut by_both, &forth);
    declared_by(&mut by_both, &back);
    assert!(forth.iter().all(|declared| by_both.decide(declared, &forth) == Decision::Leave));
    assert_eq!(by_both.decide(&back[0], &back), Decision::Leave, "the old name's times are the older ones");
    // The release before has ended, and comes back.
    by_both.words.clear();
    declared_by(&mut by_both, &back);
    assert_eq!(by_both.decide(&back[0], &back), Decision::Apply);
    by_both.rows = view(vec![ran(row("old", 60), 0), ran(replaced("new", "old"), -120)]).rows;
    remembers(&mut by_both, "old", &[&forth[0].times, &old.times]);
    remembers(&mut by_both, "new", &[&back[0].times, &new.times]);
    declared_by(&mut by_both, &forth);
    assert!(back.iter().all(|declared| by_both.decide(declared, &back) == Decision::Leave));
    assert_eq!(by_both.decide(&forth[0], &forth), Decision::Leave);
}

#[test]
fn a_new_name_waits_for_the_old_one() {
    let declared = renamed();
    let waits = |rows| view(rows).waits(&declared[1], &declared);
    assert!(waits(vec![row("old", 60)]));
    assert!(waits(vec![row("old", 60), replaced("new", "old")]));
    // It was there before the declaration.
    assert!(!waits(vec![row("old", 60), row("new", 60)]));
    assert!(!waits(vec![replaced("old", "new")]));
    assert!(!waits(Vec::new()));
    assert!(!view(vec![row("old", 60)]).waits(&declared[0], &declared));
}
