//! Every cell of the decisions, and every case of the slot.

use std::time::Duration;

use super::*;
use crate::schedule::declarations::hash;

const LIVES: TimeDelta = TimeDelta::seconds(24);
const NOW: &str = "10:10:30.000123";

fn at(time: &str) -> DateTime<Utc> {
    format!("2026-01-05T{time}Z").parse().unwrap()
}

fn every(seconds: u64) -> Declared {
    Declared::new(&Schedule::every("k", Duration::from_secs(seconds)))
}

fn after(seconds: u64) -> Declared {
    Declared::new(&Schedule::after("k", Duration::from_secs(seconds)))
}

fn cron(pattern: &str) -> Declared {
    Declared::new(&Schedule::cron("k", pattern))
}

fn removed() -> Declared {
    Declared::removed(Key::new("k").unwrap())
}

/// A row on which nothing was run yet, and that has had these times, the newest first.
fn row(had: &[&Declared], declared: &Declared, slot: DateTime<Utc>) -> ListedSchedule {
    let known: Vec<String> = had.iter().map(|declared| format!("{:016x}", declared.times.mark())).collect();
    ListedSchedule { known: known.join(" "), ..ListedSchedule::unrun(declared.times.clone(), slot) }
}

/// What instances declare that have been there since nine: with a word that counts, and without.
fn word(counting: &[&Declared], others: &[&Declared]) -> Word {
    let mut word = Word::default();
    counting.iter().for_each(|declared| word.add(&declared.times, true, true, at("09:00:00")));
    others.iter().for_each(|declared| word.add(&declared.times, false, false, at("09:00:00")));
    word
}

const YOUNG: Judge = Judge { judges: false, calls: false, lives: LIVES, here: DateTime::UNIX_EPOCH };
const OLD: Judge = Judge { judges: true, ..YOUNG };
const CALLS: Judge = Judge { calls: true, ..YOUNG };

#[test]
fn decisions_about_an_uncontested_row() {
    let (old, mine) = (every(60), every(90));
    for judge in [YOUNG, OLD, CALLS] {
        let word = word(&[&mine], &[]);
        assert_eq!(decide(None, &mine, judge, &word, at(NOW)), Decision::Create);
        let decide = |row: ListedSchedule| decide(Some(&row), &mine, judge, &word, at(NOW));
        let of_mine = |had: &[&Declared]| row(had, &mine, at("10:12:00"));
        let of_old = |had: &[&Declared]| row(had, &old, at("10:11:00"));
        assert_eq!(decide(of_mine(&[&mine])), Decision::Leave);
        for had in [&[&old][..], &[&old, &mine], &[]] {
            assert_eq!(decide(of_old(had)), Decision::Apply);
        }
        let a_week = at(NOW) - TimeDelta::days(7);
        for (gone_at, to_own, to_other) in [
            (a_week - TimeDelta::microseconds(1), Decision::Fresh, Decision::Fresh),
            (a_week, Decision::Return, Decision::Apply),
            (at("10:10:00"), Decision::Return, Decision::Apply),
        ] {
            let gone = |row| ListedSchedule { gone_at: Some(gone_at), ..row };
            assert_eq!(decide(gone(of_mine(&[&old, &mine]))), to_own, "{gone_at}");
            assert_eq!(decide(gone(of_old(&[&old, &mine]))), to_other, "{gone_at}");
        }
        let gone_at = Some(a_week - TimeDelta::microseconds(1));
        let gone = |times: &Declared| ListedSchedule { gone_at, ..row(&[times], times, at("10:11:00")) };
        assert_eq!(decide(gone(&removed())), Decision::Fresh);
        let removes = |row: ListedSchedule| super::decide(Some(&row), &removed(), judge, &word, at(NOW));
        assert_eq!(removes(gone(&old)), Decision::Fresh);
        assert_eq!(removes(gone(&removed())), Decision::Return, "it begins nothing afresh");
    }
}

#[test]
fn decisions_about_a_contested_row() {
    let [old, mine, other] = [60, 90, 120].map(every);
    let (none, all): ([&Declared; 0], _) = ([], [&old, &mine]);
    let cells = [
        // The instance is too young.
        (YOUNG, vec![&old], &all[..], &none[..], Decision::Wait),
        (YOUNG, vec![&mine, &old], &all, &none, Decision::Wait),
        // Its times are new ones, or newer than those that others declare.
        (OLD, vec![&old], &all, &none, Decision::Apply),
        (OLD, vec![&mine, &old], &all, &none, Decision::Apply),
        (OLD, vec![&old, &mine, &other], &[&other, &mine], &none, Decision::Apply),
        (OLD, vec![&old], &[&other, &mine], &none, Decision::Apply),
        // Their word does not count.
        (OLD, vec![&old], &[&old], &[&mine], Decision::Leave),
        (OLD, vec![&old, &mine], &[], &[&mine, &old], Decision::Leave),
        // Others have newer times: those of the row, those before, or new ones.
        (OLD, vec![&old, &mine], &all, &none, Decision::Leave),
        (OLD, vec![&old, &other, &mine], &[&other, &mine], &none, Decision::Leave),
        (OLD, vec![&old, &mine], &[&other, &mine], &none, Decision::Leave),
        (OLD, vec![&mine, &old], &[&other, &mine], &none, Decision::Leave),
        // The word of those that have newer times does not count.
        (OLD, vec![&old, &mine], &[&mine], &[&old], Decision::Apply),
        (OLD, vec![&old, &mine], &[&mine], &[&other, &old], Decision::Apply),
        // A crontab waits for no beats, and its word counts at once.
        (CALLS, vec![&old], &[&old], &[&mine], Decision::Apply),
        (CALLS, vec![&old], &[&old, &other], &[&mine], Decision::Apply),
        (CALLS, vec![&mine, &old], &[&old], &[&mine], Decision::Apply),
        (CALLS, vec![&old, &mine], &[&old], &[&mine], Decision::Leave),
        (CALLS, vec![&old, &mine], &[], &[&old, &mine], Decision::Apply),
    ];
    for (place, (judge, known, counting, others, expected)) in cells.into_iter().enumerate() {
        let row = row(&known, &old, at("10:11:00"));
        let decision = decide(Some(&row), &mine, judge, &word(counting, others), at(NOW));
        assert_eq!(decision, expected, "cell {place}");
    }
}

#[test]
fn a_slot_is_put_back_if_the_clock_was_ahead() {
    let (now, word) = (at(NOW), word(&[], &[]));
    let ahead = now + TimeDelta::days(1_460);
    let row = |mine: &Declared, slot| row(&[mine], mine, slot);
    let decision = |mine: &Declared, row: &ListedSchedule| decide(Some(row), mine, OLD, &word, now);
    for mine in [every(60), cron("* * * * *")] {
        assert_eq!(decision(&mine, &row(&mine, ahead)), Decision::PutBack);
        for (here, expected) in [(AHEAD, Decision::PutBack), (AHEAD * 2, Decision::Leave)] {
            let judge = Judge { here: now + here, ..OLD };
            assert_eq!(decide(Some(&row(&mine, ahead)), &mine, judge, &word, now), expected, "{here} behind");
        }
        assert_eq!(decision(&mine, &row(&mine, at("11:11:00"))), Decision::Leave, "an hour is no proof");
        assert_eq!(decision(&mine, &row(&mine, at("11:12:00"))), Decision::PutBack);
        assert_eq!(decision(&mine, &ListedSchedule { running: true, ..row(&mine, ahead) }), Decision::Leave);
        for (run_slot, attempt, run_ahead, afresh) in [
            (None, 0, false, false),
            (Some(at("10:09:00")), 0, false, false),
            (Some(ahead), 0, true, false),
            (Some(ahead), 2, true, true),
        ] {
            let row = ListedSchedule { run_slot, attempt, ..row(&mine, ahead) };
            let change = mine.change(Decision::PutBack, Some(&row), OLD, &word, now).unwrap();
            assert_eq!((change.slot, change.new_times), (at("10:11:00"), false));
            assert_eq!(
                (change.run_ahead, change.forgets_after, change.afresh),
                (run_ahead, run_ahead.then_some(now), afresh),
                "{run_slot:?}, attempt {attempt}"
            );
            assert_eq!(change.known, row.known);
        }
    }
    assert_eq!(decision(&after(60), &row(&after(60), ahead)), Decision::PutBack);
    for (attempt, due_at, expected) in [
        (0, at("11:10:00"), Decision::Leave),
        (0, at("11:11:00"), Decision::PutBack),
        (1, at("11:11:00"), Decision::Leave),
    ] {
        let row = ListedSchedule { attempt, due_at, ..row(&every(60), at("10:09:00")) };
        assert_eq!(decision(&every(60), &row), expected, "due at {due_at}, attempt {attempt}");
    }
    assert_eq!(decision(&removed(), &row(&removed(), NEVER)), Decision::Leave);
    assert_eq!(decide(None, &removed(), OLD, &word, now), Decision::Leave);
}

#[test]
fn what_a_decision_changes() {
    let (old, mine, now) = (every(600), every(240), at("10:11:00"));
    let run_slot = Some(at("10:10:00"));
    let row = ListedSchedule { run_slot, attempt: 2, ..row(&[&old], &old, at("10:10:00")) };
    let word = word(&[&mine], &[]);
    let change = |decision, row| mine.change(decision, row, OLD, &word, now);
    for decision in [Decision::Leave, Decision::Wait] {
        assert!(change(decision, Some(&row)).is_none());
    }
    assert_eq!(change(Decision::Return, Some(&row)).unwrap().slot, row.slot);
    let created = change(Decision::Create, None).unwrap();
    assert!(created.seen.is_none() && created.new_times && !created.afresh);
    assert_eq!((created.slot, created.known), (at("10:12:00"), format!("{:016x}", mine.times.mark())));
    let fresh = change(Decision::Fresh, Some(&row)).unwrap();
    assert_eq!((fresh.slot, fresh.afresh, fresh.run_ahead), (at("10:12:00"), true, false));
    let applied = change(Decision::Apply, Some(&row)).unwrap();
    assert!(applied.new_times && !applied.afresh && !applied.run_ahead);
    let seen = applied.seen.unwrap();
    assert_eq!(seen.times, old.times);
    assert_eq!((seen.run_slot, seen.attempt), (run_slot, 2));
    assert_eq!(removed().change(Decision::Create, None, OLD, &word, now).unwrap().slot, NEVER);
}

/// A row that gets other times.
struct Case<'a> {
    from: &'a Declared,
    slot: &'a str,
    last: Option<&'a str>,
    begun: bool,
    now: &'a str,
}

impl Case<'_> {
    /// Returns the slot. Instances have declared the times since `since`.
    fn slot(&self, to: &Declared, since: &str, judge: Judge) -> DateTime<Utc> {
        let now = at(self.now);
        // A run is under way, or it waits for its next attempt: there is no difference.
        let [running, waiting] = [(true, 1), (false, 1)].map(|(running, attempt)| {
            let (running, attempt) = if self.begun { (running, attempt) } else { (false, 0) };
            let run_slot = self.last.map(at);
            let row = row(&[self.from], self.from, at(self.slot));
            let row = ListedSchedule { run_slot, running, attempt, ..row };
            let mut word = word(&[self.from], &[]);
            word.add(&to.times, true, true, at(since));
            to.change(Decision::Apply, Some(&row), judge, &word, now).unwrap().slot
        });
        assert_eq!(running, waiting);
        assert!(!is_trigger(running), "{running} would be taken for a trigger");
        running
    }
}

#[test]
fn what_was_due_stays_due() {
    let (old, tens) = (every(600), after(600));
    for from in [&old, &tens, &removed()] {
        for last in [None, Some("10:00:00"), Some("10:09:00.000001")] {
            let case = Case { from, slot: "10:10:00", last, begun: false, now: NOW };
            for to in [every(240), cron("*/4 * * * *"), after(600), after(1)] {
                assert_eq!(case.slot(&to, "10:10:29", OLD), at("10:10:00"), "{from:?} to {to:?}");
            }
            assert_eq!(case.slot(&removed(), "09:00:00", OLD), NEVER);
        }
    }
    // Behind a run that was begun, the tick after it.
    let case = |now| Case { from: &old, slot: "10:10:00", last: Some("10:10:00"), begun: true, now };
    for (to, behind) in [(every(240), "10:12:00"), (cron("*/4 * * * *"), "10:12:00"), (after(300), "10:15:00")] {
        assert_eq!(case("10:10:30").slot(&to, "09:00:00", OLD), at(behind), "the tick after it is not due yet");
        assert_eq!(case("10:21:00.5").slot(&to, "09:00:00", OLD), at("10:20:00"));
    }
    // The slot is already one of other times.
    let twice = Case { last: Some("10:00:00"), ..case("10:10:30") };
    assert_eq!(twice.slot(&every(240), "09:00:00", OLD), at("10:10:00"));
}

#[test]
fn ticks_of_the_times_are_looked_for_a_little_in_the_past() {
    let (old, tens, gone) = (every(600), after(600), removed());
    for (to, from) in [every(240), cron("*/4 * * * *")].iter().flat_map(|to| [(to, &old), (to, &tens), (to, &gone)]) {
        let slot = |last, since, judge| {
            Case { from, slot: "10:20:00", last, begun: false, now: "10:12:30.000123" }.slot(to, since, judge)
        };
        assert_eq!(slot(None, "09:00:00", OLD), at("10:12:00"), "two lives");
        assert_eq!(slot(Some("10:00:00"), "09:00:00", OLD), at("10:12:00"), "two lives, not more");
        assert_eq!(slot(Some("10:00:00"), "10:12:10", OLD), at("10:16:00"), "no instance had them yet");
        assert_eq!(slot(Some("10:00:00"), "10:13:00", OLD), at("10:16:00"), "the clock was ahead");
        assert_eq!(slot(Some("10:12:00"), "09:00:00", OLD), at("10:16:00"), "it was run");
        assert_eq!(slot(Some("10:12:10.000001"), "09:00:00", OLD), at("10:16:00"), "it was run before a trigger");
        assert_eq!(slot(Some("10:00:00"), "09:00:00", CALLS), at("10:12:00"));
    }
}

#[test]
fn a_delay_counts_from_the_last_run() {
    let (old, tens) = (every(600), after(600));
    let now = "10:10:30";
    let slot = |from, slot, last, to| Case { from, slot, last, begun: false, now: NOW }.slot(&to, "09:00:00", OLD);
    // A delay that is under way.
    assert_eq!(slot(&tens, "10:15:00", Some("10:05:00"), after(900)), at("10:15:00"));
    assert_eq!(slot(&tens, "10:15:00", Some("10:05:00"), after(60)), at("10:11:30"));
    assert_eq!(slot(&tens, "10:15:00", None, after(60)), at("10:11:30"));
    // The last run was a tick, a trigger, or there was none.
    assert_eq!(slot(&old, "10:20:00", Some("10:10:00"), after(60)), at("10:11:00"));
    assert_eq!(slot(&old, "10:20:00", Some("10:10:00"), after(20)), at(now));
    assert_eq!(slot(&old, "10:20:00", Some("10:10:00.000001"), after(60)), at(now));
    assert_eq!(slot(&old, "10:20:00", None, after(60)), at(now));
    assert_eq!(slot(&removed(), "10:20:00", Some("10:10:00"), after(60)), at("10:11:00"));
    // A run that was begun.
    for from in [&old, &tens] {
        let case = Case { from, slot: "10:10:00", last: Some("10:10:00"), begun: true, now: NOW };
        assert_eq!(case.slot(&after(60), "09:00:00", OLD), at("10:11:00"));
        assert_eq!(case.slot(&after(1), "09:00:00", OLD), at(now));
    }
}

#[test]
fn a_tick_that_has_ended_does_not_come_again() {
    let judge = Judge { lives: TimeDelta::seconds(60), ..OLD };
    for (from, last, slot) in [
        (every(60), "10:11:00", "10:12:00"),
        // The tick at 10:11 has ended before a trigger.
        (every(60), "10:11:10.000001", "10:12:00"),
        // Those at 10:10 and 10:11 were skipped.
        (every(60), "10:09:00", "10:12:00"),
        // The times before had no tick at 10:11.
        (every(120), "10:10:00", "10:11:00"),
        (every(120), "10:10:10.000001", "10:11:00"),
    ] {
        let case = Case { from: &from, slot: "10:12:00", last: Some(last), begun: false, now: "10:11:30" };
        assert_eq!(case.slot(&cron("* * * * *"), "10:09:30", judge), at(slot), "{from:?} at {last}");
    }
}

/// What is due when the jitter changes is run once, and by its own time if a smaller jitter would
/// make it late.
#[test]
fn another_jitter_repeats_no_tick_that_is_due() {
    let daily = Schedule::cron("k", "0 3 * * *");
    let (half, hours) = (TimeDelta::minutes(30), TimeDelta::hours(2));
    // The tick of 03:00 is due since 20 s, and comes at 03:30 now: not at both.
    assert_eq!(moved(at("03:00:00"), half, (None, at("03:00:20")), &daily), at("03:30:00"));
    // One of 05:00 does not become late at 04:00.
    assert_eq!(moved(at("05:00:00"), -hours, (None, at("04:00:00")), &daily), at("05:00:00"));
    assert_eq!(moved(at("05:00:00"), -hours, (None, at("02:00:00")), &daily), at("03:00:00"));
    // Nor does one come at or before the last run.
    let (often, last) = (Schedule::every("k", Duration::from_secs(60)), Some(at("12:04:00")));
    assert_eq!(moved(at("12:05:00"), -TimeDelta::minutes(2), (last, at("12:01:00")), &often), at("12:05:00"));
}

/// The tick of 03:00 is moved, and neither run again nor left out, whatever the jitter was and is,
/// and whether the tick of the day before is under way.
#[test]
fn another_jitter_moves_the_next_tick() {
    let daily = |name: &str, jitter: u64| {
        let daily = Schedule::cron(name, "0 3 * * *");
        if jitter == 0 { daily } else { daily.jitter(Duration::from_secs(jitter)) }
    };
    for (old, new) in [(0, 0), (0, 7_200), (7_200, 0), (600, 86_400), (86_400, 60)] {
        for name in ["report", "renamed", "another"] {
            let (old, new) = (daily("report", old), daily(name, new));
            let slot = old.next(at("12:00:00"));
            // A claim that was undone has begun nothing.
            for (begun, undone) in [(false, false), (true, false), (false, true)] {
                let claimed = begun || undone;
                let run_slot = if claimed { Some(slot) } else { Some(old.next(slot - TimeDelta::days(2))) };
                let now = slot + if claimed { TimeDelta::seconds(5) } else { -TimeDelta::minutes(1) };
                let row = ListedSchedule {
                    run_slot,
                    running: begun,
                    attempt: u32::from(begun),
                    due_at: if begun { now + TimeDelta::minutes(1) } else { slot },
                    now,
                    ..ListedSchedule::unrun(old.times(), slot)
                };
                let slot_now = Declared::new(&new).slot_after(&row, OLD, &Word::default(), now);
                let next = slot - old.shift + TimeDelta::days(i64::from(begun));
                // A smaller jitter makes no tick late.
                let is_late = slot_now - new.shift != next && new.shift < old.shift;
                let kept = if begun { old.next(slot) } else { slot };
                let moved = ListedSchedule::unrun(new.times(), slot_now);
                assert!(!is_ahead(&new, &moved, now, now), "{name}: {slot} {slot_now} {begun}");
                let is_kept = is_late && slot_now == kept && next + new.shift <= now;
                assert!(is_kept || slot_now - new.shift == next, "{name}: {slot} {slot_now} {begun}");
            }
        }
    }
}

/// Applies times, and returns what the row knows then, as places in `all`.
fn known_after(all: &[Declared], known: &[usize], mine: usize, word: &Word) -> Vec<usize> {
    let known: Vec<&Declared> = known.iter().map(|place| &all[*place]).collect();
    let row = row(&known, known[0], at("10:20:00"));
    let change = all[mine].change(Decision::Apply, Some(&row), OLD, word, at(NOW)).unwrap();
    let marks = change.known.split(' ').map(|mark| u64::from_str_radix(mark, 16).unwrap());
    marks.map(|mark| all.iter().position(|declared| declared.times.mark() == mark).unwrap()).collect()
}

#[test]
fn a_row_remembers_the_order_of_its_times() {
    let all: Vec<Declared> = (1..=20).map(|minutes| every(60 * minutes)).collect();
    let none = word(&[], &[]);
    assert_eq!(known_after(&all, &[1, 0], 2, &none), [2, 1, 0]);
    assert_eq!(known_after(&all, &[2, 1, 0], 0, &none), [2, 1, 0], "times that return keep their place");
    // The oldest times that no instance declares are forgotten.
    let full: Vec<usize> = (0..16).rev().collect();
    let kept = known_after(&all, &full, 16, &none);
    assert_eq!(kept, (1..=16).rev().collect::<Vec<_>>());
    let declared = word(&[&all[0]], &[&all[1], &all[3]]);
    let kept = known_after(&all, &full, 16, &declared);
    assert_eq!(kept, [16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 1, 0]);
}

#[test]
fn times_that_do_not_fit_into_the_memory_are_left_alone() {
    let all: Vec<Declared> = (1..=17).map(|minutes| every(60 * minutes)).collect();
    let (mine, others) = all.split_last().unwrap();
    let known: Vec<&Declared> = others.iter().collect();
    let row = row(&known, &others[0], at("10:20:00"));
    let (everybody, all_but_one) = (all.iter().collect::<Vec<_>>(), all[1..].iter().collect::<Vec<_>>());
    for judge in [OLD, CALLS] {
        let decide = |mine, word: &Word| decide(Some(&row), mine, judge, word, at(NOW));
        // Those of a crontab are forgotten long after it was changed.
        let not_yet = if judge.calls { Decision::Apply } else { Decision::Leave };
        assert_eq!(decide(mine, &word(&everybody, &[])), not_yet);
        assert_eq!(decide(mine, &word(&[mine], &known)), not_yet);
        assert_eq!(decide(mine, &word(&all_but_one, &[])), Decision::Apply);
        assert_eq!(decide(&others[1], &word(&[&others[1]], &known)), Decision::Apply, "they are known");
    }
}

/// An instance that begins again with the times in effect has beaten too rarely for its word to
/// count.
#[test]
fn a_restart_keeps_the_times_in_effect() {
    let (old, new) = (every(600), every(240));
    let row = row(&[&new, &old], &new, at("10:12:00"));
    let decision = |alive| {
        let mut word = word(&[&old], &[]);
        word.add(&new.times, alive, false, at("10:11:00"));
        decide(Some(&row), &old, OLD, &word, at("10:11:00"))
    };
    assert_eq!(decision(true), Decision::Leave);
    assert_eq!(decision(false), Decision::Apply);
}

#[test]
fn a_run_lives_until_its_lease_ends() {
    let run = ListedSchedule { running: true, due_at: at(NOW), ..row(&[], &every(60), at(NOW)) };
    assert!(is_live(&run, at(NOW) - TimeDelta::microseconds(1)) && !is_live(&run, at(NOW)));
}

#[test]
fn what_is_said_of_a_schedule() {
    let schedule = Schedule::every("k", Duration::from_secs(60)).description("sums");
    assert_eq!(Declared::new(&schedule).description(), "sums");
    assert_eq!(removed().description(), "");
}

/// Rows keep the hashes, and other versions of the library read them.
#[test]
fn a_hash_is_the_same_in_every_version() {
    assert_eq!(hash(&[]), 0xcbf2_9ce4_8422_2325);
    assert_eq!(hash(&["every 60s", "UTC"]), 0xce19_27d5_6aa6_d183);
    assert_eq!(every(60).times.mark(), 0xce19_27d5_6aa6_d183);
    assert_eq!(hash(&["cron 30 2 * * *", "Europe/Berlin"]), 0x6a52_dfd4_6e5e_7495);
    assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
    assert_eq!(removed().times.spec, "none");
}

#[test]
fn the_times_of_a_row_are_read_as_a_schedule() {
    let millis = [100, 101, 110, 999, 1_000, 1_001, 1_010, 1_100, 1_500, 60_000, 86_400_000, 31_622_400_000];
    let periods = millis.map(Duration::from_millis);
    let pattern = |pattern| Schedule::cron("k", pattern);
    let berlin = pattern("*/5 9-17 * * MON-FRI").zone("Europe/Berlin");
    let mut all = vec![pattern("@daily"), pattern("15 30 2 * * *"), berlin];
    all.extend(periods.map(|period| Schedule::every("k", period)));
    all.extend(periods.map(|delay| Schedule::after("k", delay)));
    let now = at(NOW);
    for schedule in all {
        let read = Schedule::of(&schedule.times()).unwrap();
        assert_eq!(read.times(), schedule.times());
        assert_eq!((read.next(now), read.first(now)), (schedule.next(now), schedule.first(now)), "{schedule:?}");
    }
    let of = |spec: &str| Schedule::of(&Times { spec: spec.into(), ..every(60).times });
    assert_eq!(of("every 0.1s").unwrap().text, "every 100ms");
    for spec in ["none", "", "every", "every 1", "every 5m", "every 1.s.", "every -1s", "cron * *", "later 5s"] {
        assert!(of(spec).is_none(), "{spec}");
    }
}
