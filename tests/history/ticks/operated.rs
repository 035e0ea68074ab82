//! The rules of what operators do with schedules. Each is decided by the tokens of claims and by the
//! database's clock, and not by when a process heard of something.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::ticks::{
    checker::{Rule, Verdict, View},
    gathered::{Change, Pause, Told},
    record::{Micros, SECOND},
};

impl View<'_> {
    /// Each claim raises the token of the row, so that two reads show whether there was one.
    pub fn pauses(&self, verdict: &mut Verdict) {
        for pause in &self.history.pauses {
            let &Pause { token: Some(token), resumes: Some((resumes, at_the_end)), .. } = pause else { continue };
            if at_the_end != token {
                verdict.breaks(Rule::PausesHold, format!("{}: {token} was {at_the_end} after {pause:?}", self.name()));
            }
            for run in self.history.runs.iter().filter(|run| run.token > token && run.began < resumes) {
                verdict.breaks(Rule::PausesHold, format!("{}: {run:?} in {pause:?}", self.name()));
            }
            let second = Duration::from_secs(1);
            verdict.seen.operated.pauses += usize::from(resumes - pause.sent > second);
        }
    }

    /// A trigger during a triggered run is followed by another one, and triggers that wait count
    /// once.
    pub fn triggers(&self, verdict: &mut Verdict) {
        let mut ends: BTreeMap<Micros, usize> = BTreeMap::new();
        for told in self.history.told.iter().filter(|told| told.is_triggered()) {
            *ends.entry(told.slot).or_default() += usize::from(self.ends(told));
        }
        verdict.seen.operated.triggered += ends.len();
        for (slot, _) in ends.iter().filter(|(_, count)| **count != 1) {
            verdict.breaks(Rule::TriggersRunOnce, format!("{}: the trigger {slot} did not end once", self.name()));
        }
        let runs = || self.history.runs.iter().filter(|run| run.slot % SECOND != 0);
        for trigger in self.history.triggers.iter().filter(|trigger| trigger.answered) {
            if !runs().any(|run| run.began >= trigger.sent && ends.contains_key(&run.slot)) {
                verdict.breaks(Rule::TriggersRunOnce, format!("{}: no run after {trigger:?}", self.name()));
            }
        }
        for (place, slot) in ends.keys().enumerate() {
            let began = runs().filter(|run| run.slot == *slot).map(|run| run.began).min();
            let sent = self.history.triggers.iter().filter(|trigger| began.is_none_or(|began| trigger.sent <= began));
            if sent.count() <= place {
                verdict.breaks(Rule::TriggersRunOnce, format!("{}: {slot} was not triggered", self.name()));
            }
        }
    }

    pub fn new_times(&self, verdict: &mut Verdict) {
        let (name, terms) = (self.name(), &self.history.terms);
        for seen in self.history.seen.iter().filter(|seen| seen.times != terms.times(seen.version)) {
            verdict.breaks(Rule::NewTimesApply, format!("{name}: not those of the version: {seen:?}"));
        }
        for pair in self.history.seen.windows(2).filter(|pair| pair[1].version < pair[0].version) {
            verdict.breaks(Rule::NewTimesApply, format!("{name}: {:?} after {:?}", pair[1], pair[0]));
        }
        let changes: Vec<Change<'_>> = self.history.changes().collect();
        verdict.seen.operated.changes += changes.len();
        // Between two changes, the times are those of the row.
        for (place, Change { after, .. }) in changes.iter().enumerate() {
            let until = changes.get(place + 1).map_or(i64::MAX, |next| next.before.token);
            let others =
                |token: i64, version| (after.token + 1..=until).contains(&token) && terms.times(version) != after.times;
            for run in self.history.runs.iter().filter(|run| others(run.token, run.version)) {
                verdict.breaks(Rule::NewTimesApply, format!("{name}: {run:?} after {after:?}"));
            }
        }
        let replaced = |told: &&Told| told.status == 'F' && self.history.is_replaced(told) == Some(true);
        for told in self.history.told.iter().filter(replaced).filter(|told| self.attempts_after(told) > 0) {
            verdict
                .breaks(Rule::NewTimesApply, format!("{name}: {told:?} was tried again, and its times were replaced"));
        }
    }

    pub fn forgettings(&self, verdict: &mut Verdict) {
        let name = self.name();
        for forgetting in &self.history.forgettings {
            // A run that is lost again may be recorded again, as another row.
            let id = |told: &Told| (told.slot, told.attempt, told.token, told.ended);
            let left: BTreeSet<_> = forgetting.left.iter().map(id).collect();
            let last = forgetting.had.iter().filter(|told| told.status == 'S').max_by_key(|told| told.slot).map(id);
            let later = |told: &Told| forgetting.left.iter().any(|other| other.status == 'S' && other.slot > told.slot);
            for told in &forgetting.had {
                let (is_left, is_last) = (left.contains(&id(told)), Some(id(told)) == last);
                let wrong = match is_left {
                    true => !is_last && told.ended < forgetting.limits.0,
                    false => told.ended > forgetting.limits.1 || (is_last && !later(told)),
                };
                if wrong {
                    let text = format!("{name}: {told:?} is left: {is_left}, {:?}", forgetting.limits);
                    verdict.breaks(Rule::OldRunsAreForgotten, text);
                }
                verdict.seen.operated.forgotten += usize::from(!is_left);
            }
        }
    }
}
