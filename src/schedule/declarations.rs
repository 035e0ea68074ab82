//! What instances declare: the text that they announce, what an instance has read of the others,
//! and what is declared of one schedule.

use std::collections::{BTreeSet, HashMap, HashSet};

use chrono::{DateTime, Utc};

use crate::{
    key::Key,
    store::{instances::DeclaredSet, schedule::Times},
};

/// The times of a schedule that is declared as removed.
pub const REMOVED: &str = "none";
/// How the times of a schedule begin that has another name.
pub const RENAMED: &str = "renamed ";

impl Times {
    /// Returns what rows remember the times by.
    pub fn mark(&self) -> u64 {
        hash(&[&self.spec, &self.zone])
    }

    pub fn are_removed(&self) -> bool {
        are_removed(&self.spec)
    }
}

/// Returns whether these are the times of a schedule that was removed, or has another name.
pub fn are_removed(spec: &str) -> bool {
    spec == REMOVED || renamed_to(spec).is_some()
}

/// Returns the other name of a schedule with these times.
pub fn renamed_to(spec: &str) -> Option<&str> {
    spec.strip_prefix(RENAMED)
}

/// Returns what names and times are compared and spread by: a hash that is the same in every
/// version of the library (FNV-1a).
pub fn hash(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Writes what an instance declares: a line for each schedule, with its name, times, zone and
/// description.
pub fn to_text<'a>(declared: impl Iterator<Item = (&'a Times, &'a str)>) -> String {
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('\t', "\\t").replace('\n', "\\n");
    let line = |(Times { name, spec, zone }, about): (&Times, &str)| {
        let line = [name.as_str(), spec, zone, about].map(escaped).join("\t");
        line.trim_end_matches('\t').to_owned()
    };
    declared.map(line).collect::<Vec<_>>().join("\n")
}

/// Reads what an instance declares: times, and descriptions, which may be empty. Lines that another
/// version wrote in another form are left out.
pub fn from_text(text: &str) -> impl Iterator<Item = (Times, String)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split('\t').map(unescaped);
        let (name, spec, zone) = (Key::new(&fields.next()?).ok()?, fields.next()?, fields.next()?);
        Some((Times { name, spec, zone }, fields.next().unwrap_or_default()))
    })
}

/// The same without the descriptions.
pub fn times_from(text: &str) -> Vec<Times> {
    from_text(text).map(|(times, _)| times).collect()
}

fn unescaped(field: &str) -> String {
    let mut text = String::with_capacity(field.len());
    let mut chars = field.chars();
    while let Some(char) = chars.next() {
        text.push(match (char, if char == '\\' { chars.next() } else { None }) {
            (_, Some('t')) => '\t',
            (_, Some('n')) => '\n',
            (_, Some(other)) => other,
            (char, None) => char,
        });
    }
    text
}

/// What an instance knows of the sets of instances that declare the same, itself among them.
#[derive(Clone)]
pub struct Declarations {
    /// The id of its own set.
    pub own: i64,
    /// What each set declares, by their ids.
    of: HashMap<i64, Vec<Times>>,
}

impl Declarations {
    /// Returns what an instance knows that announces this text.
    pub fn new(text: &str) -> Self {
        let own = hash(&[text]).cast_signed();
        Self { own, of: HashMap::from([(own, times_from(text))]) }
    }

    /// Forgets the sets that are no longer there. Returns the ids of those that are not known yet.
    pub fn unknown(&mut self, sets: &[DeclaredSet]) -> Vec<i64> {
        self.of.retain(|id, _| *id == self.own || sets.iter().any(|set| set.declares_id == *id));
        let ids = sets.iter().map(|set| set.declares_id);
        ids.filter(|id| !self.of.contains_key(id)).collect()
    }

    /// Adds sets, with the texts that were read of them.
    pub fn learn<T: AsRef<str>>(&mut self, texts: impl IntoIterator<Item = (i64, T)>) {
        self.of.extend(texts.into_iter().map(|(id, text)| (id, times_from(text.as_ref()))));
    }

    /// Returns what all instances declare of each schedule.
    pub fn words(&self, sets: &[DeclaredSet], now: DateTime<Utc>) -> HashMap<Key, Word> {
        let mut words: HashMap<Key, Word> = HashMap::new();
        let others = sets.iter().map(|set| (set.declares_id, set.alive > 0, set.counting > 0, set.since));
        for (declares_id, alive, counts, since) in others.chain([(self.own, true, false, now)]) {
            for times in self.of.get(&declares_id).into_iter().flatten() {
                words.entry(times.name.clone()).or_default().add(times, alive, counts, since);
            }
        }
        words
    }

    /// Returns the schedules that sets leave, of whose instances none has beaten for long.
    pub fn departed(&self, sets: &[DeclaredSet]) -> Vec<Key> {
        let forgotten = sets.iter().filter(|set| set.forgotten == set.present);
        forgotten.flat_map(|set| self.gone(set.declares_id, set.since, sets)).collect()
    }

    /// Returns the schedules that a set leaves without an instance to sets that came later.
    pub fn gone(&self, departing: i64, since: DateTime<Utc>, sets: &[DeclaredSet]) -> Vec<Key> {
        let living = sets.iter().filter(|set| set.alive > 0);
        let has_successor = living.clone().any(|set| set.since >= since);
        let Some(departing) = self.of.get(&departing).filter(|_| has_successor) else { return Vec::new() };
        let living = living.filter_map(|set| self.of.get(&set.declares_id));
        gone_names(departing, &living.map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// What instances declare of one schedule.
#[derive(Clone, Debug, Default)]
pub struct Word {
    /// The times of instances that are alive, and whose declaration counts.
    pub counts: HashSet<u64>,
    /// The times of instances that are alive.
    pub alive: HashSet<u64>,
    /// The times of instances that are not forgotten yet, and since when one declares them.
    pub since: HashMap<u64, DateTime<Utc>>,
    /// An instance that is not forgotten yet, and one that is alive, runs the schedule.
    pub is_run: bool,
    pub is_run_now: bool,
}

impl Word {
    /// Adds the times that a set of instances declares.
    pub fn add(&mut self, times: &Times, alive: bool, counts: bool, since: DateTime<Utc>) {
        let mark = times.mark();
        if alive {
            self.alive.insert(mark);
        }
        self.since.entry(mark).and_modify(|first| *first = since.min(*first)).or_insert(since);
        if counts {
            self.counts.insert(mark);
        }
        self.is_run |= !times.are_removed();
        self.is_run_now |= alive && !times.are_removed();
    }

    /// Returns whether an instance that is alive declares these times.
    pub fn has(&self, times: &Times) -> bool {
        self.alive.contains(&times.mark())
    }

    /// Returns whether other times than these are declared.
    pub fn contests(&self, times: &Times) -> bool {
        let mark = times.mark();
        self.since.keys().any(|other| *other != mark)
    }
}

/// Returns the schedules that instances leave without one although their service lives on: another
/// set that lives has at least half of their schedules. A service that is down leaves nothing: its
/// ticks are caught up on, also if it shares a schedule with others.
pub fn gone_names(departing: &[Times], living: &[&[Times]]) -> Vec<Key> {
    fn names(declared: &[Times]) -> BTreeSet<&Key> {
        declared.iter().map(|times| &times.name).collect()
    }
    let departing = names(departing);
    let living: Vec<BTreeSet<&Key>> = living.iter().map(|declared| names(declared)).collect();
    let is_successor = |declared: &BTreeSet<&Key>| 2 * declared.intersection(&departing).count() >= departing.len();
    if !living.iter().any(is_successor) {
        return Vec::new();
    }
    let left = departing.into_iter().filter(|name| living.iter().all(|declared| !declared.contains(name)));
    left.cloned().collect()
}

#[cfg(test)]
#[path = "declarations_tests.rs"]
mod tests;
