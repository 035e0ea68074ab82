//! The rules that must hold for every schedule, whatever faults the processes suffered. They are
//! decided from the whole history.

use std::{collections::BTreeMap, fmt, time::Duration};

use rowlock::jobs::CatchUp;

use crate::ticks::{
    gathered::{Effect, History, Run, Suffered, Told},
    record::{How, Micros},
    terms::RETRIES,
};

/// The latest time after the end of its lease at which a crashed run is taken over, on a busy
/// machine. With [`CatchUp::Skip`] that may be the next tick.
pub const GRACE: Duration = Duration::from_secs(10);
/// A tick is taken over at most this many times in addition to its retries.
const TAKEOVERS: u32 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// No slot succeeds twice, or succeeds and counts as missed.
    OneSuccess,
    /// Each slot has come to its end, or is counted as its catch-up says. Other times lose none.
    NothingLost,
    /// Slots and tokens never fall.
    Grows,
    /// The attempts at a slot are numbered from 1, without a hole.
    AttemptsWhole,
    /// The work of two runs of a schedule never overlaps, unless the process of the earlier one was
    /// stalled. Work that waits for the reply to its commit may, if it was committed.
    NoOverlap,
    /// A run is told of its loss before the next one begins, with the same exceptions.
    LossIsToldFirst,
    /// Work that ends its tick in a transaction has one effect for each success, and no other.
    OneEffect,
    /// What the table says of a run is what its process did.
    OutcomesAreTrue,
    /// The schedule of a killed process runs again within the lease and the grace.
    CrashesAreTakenOver,
    /// Nothing is claimed while the schedule is paused.
    PausesHold,
    /// A trigger is followed by a run, and a run that was triggered ends once.
    TriggersRunOnce,
    /// The times of a row are those of a version that was deployed. They apply within the time that
    /// is promised, and do not go back to older ones while an instance with the newer ones lives.
    /// Only instances that have the times of the row claim it.
    NewTimesApply,
    /// Runs that are to be forgotten go, and no others. The last success stays.
    OldRunsAreForgotten,
}

#[derive(Clone)]
pub struct Violation {
    pub rule: Rule,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.text)
    }
}

/// What a history contains, so that an empty history does not pass as a valid one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub slots: usize,
    pub successes: usize,
    /// Runs of killed processes that were taken over in time.
    pub crashes: usize,
    /// Attempts whose lease ended.
    pub losses: usize,
    /// Runs whose work was stopped before the next one began.
    pub stopped: usize,
    /// Successes after a failure or a loss.
    pub retried: usize,
    /// Ticks for which a later one stands, or that were skipped.
    pub missed: usize,
    pub effects: usize,
    pub operated: Operated,
}

/// The same of what operators did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operated {
    /// Pauses in which a tick was due.
    pub pauses: usize,
    /// Runs that were triggered.
    pub triggered: usize,
    /// Changes of the times.
    pub changes: usize,
    /// Those to times that had been in effect before.
    pub returned: usize,
    /// Instances that started with older times than those in effect, and took nothing back.
    pub older: usize,
    /// Rows of the table of runs.
    pub forgotten: usize,
}

#[derive(Default)]
pub struct Verdict {
    pub violations: Vec<Violation>,
    pub seen: Seen,
}

pub fn check(histories: &[History], suffered: &Suffered) -> Verdict {
    let mut verdict = Verdict::default();
    for history in histories {
        let view = View { history, suffered };
        view.slots(&mut verdict);
        view.grows(&mut verdict);
        view.attempts(&mut verdict);
        view.no_overlap(&mut verdict);
        view.effects(&mut verdict);
        view.outcomes(&mut verdict);
        view.crashes(&mut verdict);
        view.pauses(&mut verdict);
        view.triggers(&mut verdict);
        view.new_times(&mut verdict);
        view.forgettings(&mut verdict);
    }
    verdict
}

impl Verdict {
    pub fn breaks(&mut self, rule: Rule, text: impl fmt::Display) {
        self.violations.push(Violation { rule, text: text.to_string() });
    }
}

pub struct View<'a> {
    pub history: &'a History,
    pub suffered: &'a Suffered,
}

impl View<'_> {
    pub fn name(&self) -> &str {
        &self.history.terms.name
    }

    /// Whether the row is the end of its tick. An attempt that failed with attempts left is not,
    /// also if the times changed.
    pub fn ends(&self, told: &Told) -> bool {
        told.status == 'S' || (told.status == 'F' && told.attempt > RETRIES)
    }

    /// Counts how often each slot has ended, or is counted as missed.
    fn ended(&self, verdict: &mut Verdict) -> BTreeMap<i64, usize> {
        let mut ended: BTreeMap<i64, usize> = BTreeMap::new();
        for told in self.history.told.iter().filter(|told| !told.is_triggered()) {
            let (tick, missed) = (told.tick(), i64::from(told.missed));
            let slots = match told.status {
                'M' => tick..tick + missed,
                _ if self.ends(told) => tick - missed..tick + 1,
                _ => continue,
            };
            let may = match self.history.terms.catch_up {
                CatchUp::Skip => told.status == 'M' || missed == 0,
                CatchUp::Once => told.status != 'M',
                _ => told.status != 'M' && missed == 0,
            };
            if !may {
                let (name, catch_up) = (self.name(), self.history.terms.catch_up);
                verdict.breaks(Rule::NothingLost, format!("{name}: {catch_up:?} has {told:?}"));
            }
            verdict.seen.missed += told.missed as usize;
            slots.for_each(|slot| *ended.entry(slot).or_default() += 1);
        }
        ended
    }

    fn slots(&self, verdict: &mut Verdict) {
        let (name, ended) = (self.name(), self.ended(verdict));
        verdict.seen.slots += ended.len();
        for (slot, _) in ended.iter().filter(|(_, count)| **count > 1) {
            verdict.breaks(Rule::OneSuccess, format!("{name}: {slot} has come to its end more than once"));
        }
        let first = ended.keys().next().copied().unwrap_or(self.history.first).min(self.history.first);
        let lost = |slot: &i64| !ended.contains_key(slot);
        for slot in (first..self.history.next).filter(lost) {
            verdict.breaks(Rule::NothingLost, format!("{name}: {slot} is lost"));
        }
        if let Some((slot, _)) = ended.range(self.history.next..).next() {
            verdict.breaks(Rule::Grows, format!("{name}: {slot} has ended, and {} is the next", self.history.next));
        }
        for told in self.history.told.iter().filter(|told| told.status == 'S') {
            verdict.seen.successes += 1;
            verdict.seen.retried += usize::from(told.attempt > 1);
        }
        verdict.seen.losses += self.history.told.iter().filter(|told| told.status == 'L').count();
    }

    /// In the order of tokens, slots and attempts never fall: those of ticks, and those of
    /// triggers. Each attempt has a token of its own.
    fn grows(&self, verdict: &mut Verdict) {
        let mut told: Vec<&Told> = self.history.told.iter().filter(|told| told.status != 'M').collect();
        told.sort_by_key(|told| (told.token, told.slot, told.attempt));
        let mut tokens = BTreeMap::new();
        for one in &told {
            if let Some(other) = tokens.insert(one.token, one) {
                verdict.breaks(Rule::Grows, format!("{}: {one:?} has the token of {other:?}", self.name()));
            }
        }
        let (triggered, ticks): (Vec<&Told>, Vec<&Told>) = told.into_iter().partition(|told| told.is_triggered());
        for pair in ticks.windows(2).chain(triggered.windows(2)) {
            let at = |told: &Told| (told.slot, told.attempt);
            if at(pair[1]) <= at(pair[0]) {
                verdict.breaks(Rule::Grows, format!("{}: {:?} after {:?}", self.name(), pair[1], pair[0]));
            }
        }
    }

    fn attempts(&self, verdict: &mut Verdict) {
        let mut attempts: BTreeMap<Micros, Vec<u32>> = BTreeMap::new();
        for told in self.history.told.iter().filter(|told| told.status != 'M') {
            attempts.entry(told.slot).or_default().push(told.attempt);
        }
        for (slot, mut attempts) in attempts {
            attempts.sort_unstable();
            if !attempts.iter().copied().eq(1..=u32::try_from(attempts.len()).unwrap()) {
                verdict.breaks(Rule::AttemptsWhole, format!("{}: {slot} has the attempts {attempts:?}", self.name()));
            }
        }
    }

    /// Returns when the work ended, or was killed.
    fn end(&self, run: &Run) -> Duration {
        run.ended.map(|ended| ended.0).or_else(|| self.suffered.death(run.process)).unwrap_or(Duration::MAX)
    }

    /// Whether the work was waiting for the reply to a commit that had ended its tick, or had the
    /// reply and was about to end. Processes do not record stalls that are as short as that.
    fn is_committed(&self, run: &Run, at: Duration) -> bool {
        let about_to_end = self.suffered.lease / 40;
        let waits =
            run.commits.is_some_and(|sent| sent <= at) && run.committed.is_none_or(|reply| reply + about_to_end > at);
        waits && self.history.told.iter().any(|told| told.token == run.token && told.status == 'S')
    }

    fn no_overlap(&self, verdict: &mut Verdict) {
        let mut runs: Vec<&Run> = self.history.runs.iter().collect();
        runs.sort_by_key(|run| run.token);
        for pair in runs.windows(2) {
            let (one, next, end) = (pair[0], pair[1], self.end(pair[0]));
            if one.token == next.token {
                verdict.breaks(Rule::Grows, format!("{}: {one:?} and {next:?}", self.name()));
            }
            // A run notices the end of its lease by its clock. It may also be stalled before its
            // work begins.
            let before = if one.began < next.began { self.suffered.lease / 4 } else { self.suffered.lease };
            let within = (next.began.saturating_sub(before), one.began.max(next.began));
            let stalled = self.suffered.stalled(one.process, within);
            let told = one.told.is_some_and(|told| told <= next.began);
            if next.began >= end || stalled || self.is_committed(one, next.began) {
                let dropped = one.ended.is_some_and(|ended| ended.1 == How::Dropped);
                verdict.seen.stopped += usize::from(dropped && !stalled);
                continue;
            }
            verdict.breaks(Rule::NoOverlap, format!("{}: {next:?} within {one:?}", self.name()));
            if !told {
                verdict.breaks(Rule::LossIsToldFirst, format!("{}: {next:?}, and not told: {one:?}", self.name()));
            }
        }
    }

    fn effects(&self, verdict: &mut Verdict) {
        let effects = &self.history.effects;
        verdict.seen.effects += effects.len();
        let same = |told: &Told, effect: &Effect| (told.slot, told.token) == (effect.slot, effect.token);
        let successes: Vec<&Told> = self.history.told.iter().filter(|told| told.status == 'S').collect();
        for told in successes.iter().filter(|_| self.history.terms.in_transaction) {
            let count = effects.iter().filter(|effect| same(told, effect)).count();
            if count != 1 {
                verdict.breaks(Rule::OneEffect, format!("{}: {told:?} has {count} effects", self.name()));
            }
        }
        for effect in effects.iter().filter(|effect| !successes.iter().any(|told| same(told, effect))) {
            verdict.breaks(Rule::OneEffect, format!("{effect:?} of no success"));
        }
    }

    fn outcomes(&self, verdict: &mut Verdict) {
        let told = self.history.told.iter().filter(|told| ['S', 'F'].contains(&told.status));
        for told in told.filter(|told| told.attempt <= 1 + RETRIES + TAKEOVERS) {
            let is = |run: &&Run| {
                (run.token, run.process, run.slot, run.attempt) == (told.token, told.process, told.slot, told.attempt)
            };
            let how = self.history.runs.iter().find(is).map(|run| run.ended.map(|ended| ended.1));
            let true_ = match (told.status, how) {
                (_, None) => false,
                // A commit whose reply was lost ends the tick all the same.
                ('S', Some(how)) => how == Some(How::Succeeded) || self.history.terms.in_transaction,
                (_, Some(how)) => how == Some(How::Failed),
            };
            if !true_ {
                verdict.breaks(Rule::OutcomesAreTrue, format!("{}: {told:?}, and the work: {how:?}", self.name()));
            }
        }
    }

    /// Returns by when a run that crashed at this time is taken over: a paused schedule waits.
    fn taken_over_by(&self, at: Duration) -> Duration {
        let mut until = at + self.suffered.lease + GRACE;
        for pause in self.history.pauses.iter().filter(|pause| pause.resumed > at) {
            if pause.sent < until {
                until = until.max(pause.resumed.saturating_add(self.suffered.lease + GRACE));
            }
        }
        until
    }

    fn crashes(&self, verdict: &mut Verdict) {
        for run in self.history.runs.iter().filter(|run| run.ended.is_none()) {
            let Some(at) = self.suffered.death(run.process) else { continue };
            let until = self.taken_over_by(at);
            let others = || self.history.runs.iter().filter(|other| other.process != run.process);
            let times = |run: &Run| self.history.terms.times(run.version);
            let is_replaced = self.history.changes().any(|change| change.after.seen.token >= run.token);
            let is_current = |other: &Run| times(other) == times(run) && !is_replaced;
            let able = |other: &Run| {
                self.suffered.death(other.process).is_none_or(|death| death > until)
                    && !self.suffered.was_slow(other.process, (at, until), GRACE / 4)
                    && is_current(other)
            };
            if others().any(|other| (at..=until).contains(&other.began)) {
                verdict.seen.crashes += 1;
            } else if others().any(|other| other.began < at && able(other)) {
                verdict.breaks(Rule::CrashesAreTakenOver, format!("{}: not by {until:?}: {run:?}", self.name()));
            }
        }
    }
}
