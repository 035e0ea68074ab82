//! The rules of what operators do with schedules. Each is decided by the tokens of claims and by
//! the database's clock, and not by when a process heard of something.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::ticks::{
    checker::{Rule, Verdict, View},
    gathered::{Change, Instance, Pause, Told},
    record::{Micros, SECOND},
    terms::LIFE,
};

/// The longest time from the announcement of an instance to the arrival of a change that others
/// decided without its word: two beats, and requests that a fault delays for longer than a lease.
const DECIDED: Duration = Duration::from_secs(5);

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
        let mut wrong = |text: String| verdict.breaks(Rule::NewTimesApply, format!("{}: {text}", self.name()));
        let Self { history, .. } = self;
        for read in &history.reads {
            if !history.instances_of(&read.seen.times).any(|instance| instance.starts < read.at) {
                wrong(format!("the times of no version that was deployed: {read:?}"));
            }
        }
        for &(version, by) in &history.deployed {
            let last = history.reads.iter().rfind(|read| read.at <= by);
            if let Some(read) = last.filter(|read| read.seen.times != history.terms.times(version)) {
                wrong(format!("all processes had version {version}: {read:?}"));
            }
        }
        for change in history.changes() {
            if let Some(newer) = self.taken_back(change) {
                wrong(format!("{newer:?} lived: {:?} after {:?}", change.after, change.before));
            }
        }
        // From the first read of times to the last one, the row had them all the time.
        for reads in history.reads.chunk_by(|one, next| one.seen.since == next.seen.since) {
            let (first, last) = (&reads[0].seen, &reads[reads.len() - 1].seen);
            if let Some(other) = reads.iter().find(|read| read.seen.times != first.times) {
                wrong(format!("{other:?} is not recorded as a change: {first:?}"));
            }
            let others = |token: i64, version| {
                (first.token + 1..=last.token).contains(&token) && history.terms.times(version) != first.times
            };
            for run in history.runs.iter().filter(|run| others(run.token, run.version)) {
                wrong(format!("{run:?} between {first:?} and {last:?}"));
            }
        }
        let operated = &mut verdict.seen.operated;
        operated.changes += history.changes().count();
        let had = |change: &Change<'_>| {
            let before = history.reads.iter().take_while(|read| read.at < change.after.at);
            before.filter(|read| read.seen.times == change.after.seen.times).count() > 0
        };
        operated.returned += history.changes().filter(had).count();
        let older = |instance: &&Instance| {
            let read = history.reads.iter().rfind(|read| read.at <= instance.starts);
            read.is_some_and(|read| history.is_older(&history.terms.times(instance.version), &read.seen.times))
        };
        operated.older += history.instances.iter().filter(older).count();
    }

    /// Returns an instance with newer times that was alive when older ones took effect, as the
    /// others had to see. Its word counted before any request that led to the change was sent, and
    /// it could reach the database from then on.
    fn taken_back(&self, Change { before, after }: Change<'_>) -> Option<&Instance> {
        let (newer, older) = (&before.seen.times, &after.seen.times);
        if !self.history.is_older(older, newer) {
            return None;
        }
        let announced = before.at.checked_sub(DECIDED)?;
        let within = (announced.saturating_sub(LIFE), after.at);
        let lived = |instance: &&Instance| {
            instance.started.is_some_and(|started| started <= announced)
                && instance.ends > after.at
                && !self.suffered.was_cut_off(instance.process, within, LIFE / 3)
        };
        self.history.instances_of(newer).find(lived)
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
                let went_on = [forgetting.under_way.0, forgetting.under_way.1].map(|slot| slot == Some(told.slot));
                let wrong = match is_left {
                    true => !is_last && told.ended < forgetting.limits.0 && went_on == [false; 2],
                    false => told.ended > forgetting.limits.1 || (is_last && !later(told)) || went_on == [true; 2],
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
