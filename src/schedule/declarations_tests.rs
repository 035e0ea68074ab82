//! Texts of declarations, and what an instance concludes from those of others.

use chrono::TimeDelta;

use super::*;
use crate::schedule::{instances::Declared, spec::Schedule};

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
}

/// Returns the text of an instance that has these schedules.
fn text(names: &str) -> String {
    let times = names.split_whitespace().map(|name| Declared::removed(Key::new(name).unwrap()).times);
    to_text(times.collect::<Vec<_>>().iter().map(|times| (times, "")))
}

fn id(text: &str) -> i64 {
    hash(&[text]).cast_signed()
}

/// An instance with this text, which has been there since a time.
fn set(text: &str, alive: i64, counting: i64, since: i64) -> DeclaredSet {
    let (present, forgotten, lives) = (1, 0, TimeDelta::zero());
    DeclaredSet { declares_id: id(text), present, alive, counting, forgotten, since: at(since), lives }
}

#[test]
fn what_others_declare_is_read_once_and_forgotten_with_them() {
    let [own, other, third] = ["own", "other", "third"].map(text);
    let mut known = Declarations::new(&own);
    let both = [set(&own, 1, 1, 0), set(&other, 1, 1, 0)];
    assert_eq!(known.unknown(&both), [id(&other)]);
    known.learn([(id(&other), &other)]);
    assert!(known.unknown(&both).is_empty());
    // Its own text is known also before it is announced.
    assert_eq!(known.unknown(&[set(&third, 1, 1, 0)]), [id(&third)]);
    assert_eq!(known.unknown(&both), [id(&other)]);
}

#[test]
fn a_declaration_counts_as_its_set_does() {
    let [own, other] = ["x", "y"].map(text);
    let mut known = Declarations::new(&own);
    known.learn([(id(&other), &other)]);
    for (alive, counting) in [(0, 0), (1, 0), (1, 1)] {
        let words = known.words(&[set(&other, alive, counting, 7)], at(9));
        let word = |name: &str| &words[&Key::new(name).unwrap()];
        let mark = Declared::removed(Key::new("y").unwrap()).times.mark();
        assert!(word("y").since.contains_key(&mark));
        assert_eq!(word("y").alive.contains(&mark), alive > 0);
        assert_eq!(word("y").counts.contains(&mark), counting > 0);
        assert_eq!(word("y").since[&mark], at(7));
        assert!(!word("x").alive.is_empty() && word("x").counts.is_empty(), "its own counts as the row says");
    }
}

#[test]
fn schedules_are_gone_if_a_later_set_lives_without_them() {
    let [own, old] = ["x", "x y"].map(text);
    let mut known = Declarations::new(&own);
    known.learn([(id(&old), &old)]);
    let gone = |sets: &[DeclaredSet], since| known.gone(id(&old), at(since), sets).iter().map(Key::to_string).collect();
    let gone: &dyn Fn(&[DeclaredSet], i64) -> Vec<String> = &gone;
    assert_eq!(gone(&[set(&own, 1, 1, 5)], 4), ["y"]);
    assert_eq!(gone(&[set(&own, 1, 1, 5)], 5), ["y"]);
    assert!(gone(&[set(&own, 1, 1, 5)], 6).is_empty(), "the other one came first");
    assert!(gone(&[set(&own, 0, 0, 5)], 4).is_empty(), "it lives no more");
    assert!(gone(&[set(&own, 1, 1, 5), set(&old, 1, 1, 0)], 4).is_empty(), "another one has it");
    assert_eq!(gone(&[set(&own, 1, 1, 5), set(&old, 0, 0, 0)], 4), ["y"]);
    assert!(known.gone(id("unknown"), at(4), &[set(&own, 1, 1, 5)]).is_empty());
}

#[test]
fn schedules_are_gone_if_their_service_lives_on_without_them() {
    let times = |names: &str| -> Vec<Times> {
        names.split_whitespace().map(|name| Declared::removed(Key::new(name).unwrap()).times).collect()
    };
    for (departing, living, gone) in [
        ("x y", vec!["x"], "y"),
        ("y x z", vec!["x"], ""),
        ("y x z", vec!["x z"], "y"),
        ("x y", vec!["x", "y"], ""),
        ("x y z a", vec!["x", "y"], ""),
        ("x y", vec!["x", "a"], "y"),
        ("x y", vec!["a", "b"], ""),
        ("x y", vec!["x y z"], ""),
        ("x y", vec![], ""),
        ("", vec!["x"], ""),
    ] {
        let living: Vec<Vec<Times>> = living.into_iter().map(times).collect();
        let names = gone_names(&times(departing), &living.iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert_eq!(names.iter().map(Key::as_str).collect::<Vec<_>>().join(" "), gone, "{departing}");
    }
}

#[test]
fn what_is_declared_is_read_as_it_was_written() {
    let spec = |name: &str| Times { name: Key::new(name).unwrap(), spec: "every 60s".into(), zone: "UTC".into() };
    let names = ["k", "a\tb", "a\nb", "a\\b", "a\\tb", "a\\\\nb", "a\r\nb", "\\", "größe 時間 🕰", "t", "n"];
    let mut all: Vec<Times> = names.into_iter().map(spec).collect();
    let berlin = Schedule::cron("k", "30 2 * * *").zone("Europe/Berlin");
    all.extend([Declared::new(&berlin).times, Declared::removed(Key::new("k").unwrap()).times]);
    assert_eq!((to_text(std::iter::empty()), times_from("")), (String::new(), Vec::new()));
    for about in ["", "for\n\tall\\"] {
        let text = to_text(all.iter().map(|times| (times, about)));
        assert_eq!(text.lines().count(), all.len());
        assert!(from_text(&text).eq(all.iter().map(|times| (times.clone(), about.to_owned()))), "{text}");
    }
    let another = "k\tevery 60s\tUTC\tmore\n\nk\n k\tevery 60s\tUTC\nk\tevery 60s";
    assert_eq!(times_from(another), [spec("k")], "lines of another form are left out");
    let long = "n".repeat(Key::MAX_BYTES);
    assert_eq!(times_from(&to_text([(&spec(&long), "")].into_iter())), [spec(&long)]);
}
