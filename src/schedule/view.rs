//! What an instance knows when it decides, and what follows for each schedule: pure.

use std::{collections::HashMap, sync::LazyLock};

use chrono::{DateTime, Utc};

use crate::{
    key::Key,
    schedule::{
        declarations::{Word, renamed_to},
        instances::{Decision, Declared, Judge, decide, is_live, is_long_gone, were_in_effect},
        steps::Step,
    },
    store::schedule::{ListedSchedule, Times},
};

/// What is declared of schedules of which nothing is.
static NONE: LazyLock<Word> = LazyLock::new(Word::default);

/// What is known when an instance decides.
pub struct View {
    pub rows: HashMap<Key, ListedSchedule>,
    pub words: HashMap<Key, Word>,
    pub judge: Judge,
    pub now: DateTime<Utc>,
}

/// What follows for a schedule that the instance declares.
pub struct Judged<'v> {
    pub declared: &'v Declared,
    pub decision: Decision,
    /// What the decision leads to, or the row of the run that is waited for.
    pub step: Result<Option<Step>, &'v ListedSchedule>,
}

impl View {
    /// Returns what follows for each schedule that waits for no other one, and whether a row may be
    /// changed later.
    pub fn decide_all<'v>(&'v self, all: &'v [Declared]) -> (Vec<Judged<'v>>, bool) {
        let mut is_contested = !self.judge.judges;
        let judged = all.iter().filter(|declared| !self.waits(declared, all)).map(|declared| {
            let decision = self.decide(declared, all);
            is_contested |= self.is_contested(declared, decision);
            Judged { declared, decision, step: self.step(declared, all, decision) }
        });
        (judged.collect(), is_contested)
    }

    fn word(&self, name: &Key) -> &Word {
        self.words.get(name).unwrap_or(&NONE)
    }

    fn is_in_effect(&self, name: &Key) -> bool {
        self.rows.get(name).is_some_and(|row| !row.times.are_removed())
    }

    /// Returns whether a schedule without a row, or whose row is that of another name, is to take
    /// the place of one that is still in effect: it gets what is due there, and does not begin
    /// before.
    fn waits(&self, declared: &Declared, all: &[Declared]) -> bool {
        let name = &declared.times.name;
        let is_old = |old: &Declared| old.heir.as_ref().is_some_and(|heir| heir.times.name == *name);
        !self.is_in_effect(name) && all.iter().any(|old| is_old(old) && self.is_in_effect(&old.times.name))
    }

    /// Decides what an instance that declares all of these does about the row of one of them. A
    /// schedule takes the place of another one only if that may be removed and its own times may
    /// apply.
    fn decide(&self, declared: &Declared, all: &[Declared]) -> Decision {
        let decision = self.decide_alone(declared);
        let source = self.source(declared, all).filter(|_| is_change(decision));
        match (source, &declared.heir) {
            (Some(_), Some(heir)) if self.has_other_times(heir) => match self.decide_alone(heir) {
                kept @ (Decision::Leave | Decision::Wait) => kept,
                _ => decision,
            },
            // Only a declaration takes the place of a name from instances that live.
            (Some(source), None) => {
                let word = self.word(&source.times.name);
                match self.judge {
                    _ if word.has(&source.times) => decision,
                    _ if word.is_run_now => Decision::Leave,
                    Judge { judges: false, calls: false, .. } if word.is_run => Decision::Wait,
                    _ => decision,
                }
            }
            _ => decision,
        }
    }

    fn decide_alone(&self, declared: &Declared) -> Decision {
        let name = &declared.times.name;
        decide(self.rows.get(name), declared, self.judge, self.word(name), self.now)
    }

    /// Returns whether the row of a schedule has other times than those that are declared.
    pub fn has_other_times(&self, declared: &Declared) -> bool {
        self.rows.get(&declared.times.name).is_some_and(|row| row.times != declared.times)
    }

    /// Returns whether a row, about which this was decided, may be changed later.
    fn is_contested(&self, declared: &Declared, decision: Decision) -> bool {
        let is_contested = self.word(&declared.times.name).contests(&declared.times);
        is_contested || self.has_other_times(declared) || decision != Decision::Leave
    }

    /// Returns the schedule in effect that has the place of one that had these times before: the
    /// last one of those to which it was renamed, one after another.
    fn successor(&self, times: &Times) -> Option<Key> {
        let row = self.rows.get(&times.name)?;
        let mut next = row.times.spec.as_str();
        for _ in 0..self.rows.len() {
            let name = Key::new(renamed_to(next)?).ok()?;
            if self.is_in_effect(&name) {
                return Some(name).filter(|_| were_in_effect(times, row));
            }
            next = &self.rows.get(&name)?.times.spec;
        }
        None
    }

    /// Returns the schedule in effect whose place this one takes: the one that it was renamed from,
    /// or the one to which it was renamed before a rollback.
    fn source(&self, declared: &Declared, all: &[Declared]) -> Option<Declared> {
        let source = match (&declared.heir, &declared.schedule) {
            (Some(_), _) => declared.clone(),
            (None, None) => return None,
            (None, Some(_)) => {
                let other = self.successor(&declared.times)?;
                // A name that is used again is a schedule of its own.
                if all.iter().any(|declared| declared.times.name == other) {
                    return None;
                }
                Declared::renamed(other, declared)
            }
        };
        Some(source).filter(|source| self.is_in_effect(&source.times.name))
    }

    /// Returns what a decision about a row leads to. A run that is under way keeps its schedule
    /// from getting another name: it is the error.
    fn step(&self, declared: &Declared, all: &[Declared], decision: Decision) -> Result<Option<Step>, &ListedSchedule> {
        let name = &declared.times.name;
        if let Some(source) = self.source(declared, all).filter(|_| is_change(decision))
            && let (Some(heir), Some(from)) = (&source.heir, self.rows.get(&source.times.name))
        {
            let its = self.rows.get(&heir.times.name);
            if let Some(live) = [Some(from), its].into_iter().flatten().find(|row| is_live(row, self.now)) {
                return Err(live);
            }
            let new = source.inheritance(from, its, (self.judge, self.word(&heir.times.name)), self.now);
            let word = self.word(&source.times.name);
            let removal = if is_long_gone(from, self.now) { Decision::Fresh } else { Decision::Apply };
            let old = source.change(removal, Some(from), self.judge, word, self.now);
            if let Some((old, new)) = old.zip(new) {
                return Ok(Some(Step::Rename(Box::new([old, new]))));
            }
        }
        let change = declared.change(decision, self.rows.get(name), self.judge, self.word(name), self.now);
        Ok(change.map(|change| Step::Change(decision, change)))
    }
}

/// Returns whether the times of the instance apply to a row that has others, or is long gone.
fn is_change(decision: Decision) -> bool {
    matches!(decision, Decision::Apply | Decision::Fresh)
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
