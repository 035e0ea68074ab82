//! The rules that must hold in every history, whatever faults the processes suffered. They are
//! decided from the whole history.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
    time::Duration,
};

use crate::record::{DATABASE, History, How, Kind, Op, Outcome, Promised, Span, Write};

/// The latest time after the end of its lease at which a crashed holder is replaced.
pub const GRACE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// No more leases than allowed overlap: one of a key, N of a semaphore. A lease that was
    /// neither released nor abandoned lasts as much longer as the lock-delay.
    NoOverlap,
    /// Tokens grow from grant to grant.
    TokensGrow,
    /// No write is accepted below the highest token accepted, and none overwrites what it has not
    /// seen.
    FencedWrites,
    /// The key of a killed process is granted again within the lease and a second, if another
    /// process asks all the time.
    CrashesAreFreed,
    /// A holder is notified of its loss before the next claim is granted, unless the holder was
    /// stalled.
    LossIsToldFirst,
    /// An operation that reported done took effect, once. One that reported otherwise did not. An
    /// unknown one did or did not.
    OutcomesAreTrue,
    /// Once no other writer precedes it, a writer waits no longer than the longest reader of that
    /// time holds its lease, and its own lease, and a second.
    WritersGetIn,
}

#[derive(Clone, Debug)]
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
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub operations: usize,
    pub grants: usize,
    pub writes: usize,
    /// Crashes of holders for whose key another process was asking.
    pub crashes: usize,
    /// Losses that were reported before another process was granted the key.
    pub losses: usize,
    /// Unknown outcomes that turned out to have taken effect, and that did not.
    pub unknown: [usize; 2],
    /// Waits of writers for readers alone.
    pub waits: usize,
}

#[derive(Debug, Default)]
pub struct Verdict {
    pub violations: Vec<Violation>,
    pub seen: Seen,
}

/// Time for which a process held the key for certain.
#[derive(Clone, Copy)]
pub struct Hold<'a> {
    pub op: &'a Op,
    token: i64,
    pub span: Span,
}

/// A process received a grant.
#[derive(Clone, Copy)]
pub struct Heard<'a> {
    pub op: &'a Op,
    pub token: i64,
    pub at: Duration,
}

/// Everything about one row, or about all rows of a semaphore or of a read-write lock.
pub struct View<'a> {
    pub history: &'a History,
    /// The operations that asked for the same name.
    asked: &'a [&'a Op],
    pub ops: Vec<&'a Op>,
    /// In the order of tokens.
    pub heard: Vec<Heard<'a>>,
    writes: Vec<&'a Write>,
}

pub fn check(history: &History) -> Verdict {
    let mut verdict = Verdict::default();
    let keys: BTreeSet<&str> = history.ops.iter().map(|op| op.key.as_str()).collect();
    for key in keys {
        let asked: Vec<&Op> = history.ops.iter().filter(|op| op.key == key).collect();
        let all = View::new(history, &asked, asked.clone());
        match history.promised.shared {
            true => all.check_shared(&mut verdict),
            false => all.no_more_than(history.promised.most, &mut verdict),
        }
        all.crashes_are_freed(&mut verdict);
        verdict.seen.operations += asked.len();
        let rows: BTreeSet<&str> = asked.iter().map(|op| op.row()).collect();
        for row in rows {
            let ops = asked.iter().copied().filter(|op| op.row() == row).collect();
            View::new(history, &asked, ops).check(&mut verdict);
        }
    }
    verdict
}

impl Verdict {
    pub fn breaks(&mut self, rule: Rule, text: impl fmt::Display) {
        self.violations.push(Violation { rule, text: text.to_string() });
    }
}

pub fn meet(one: Span, other: Span) -> bool {
    one.0 <= other.1 && other.0 <= one.1
}

impl<'a> View<'a> {
    fn new(history: &'a History, asked: &'a [&'a Op], ops: Vec<&'a Op>) -> Self {
        let of = |op: &&'a Op| op.heard().map(|(token, at)| Heard { op, token, at }).collect::<Vec<_>>();
        let mut heard: Vec<Heard<'_>> = ops.iter().flat_map(of).collect();
        heard.sort_by_key(|heard| (heard.token, heard.at));
        let rows: HashSet<&str> = ops.iter().map(|op| op.row()).collect();
        let mut writes: Vec<&Write> = history.writes.iter().filter(|write| rows.contains(&*write.key)).collect();
        writes.sort_by_key(|write| write.number);
        Self { history, asked, ops, heard, writes }
    }

    /// The rules of one row.
    fn check(&self, verdict: &mut Verdict) {
        let tokens: HashSet<i64> = self.heard.iter().map(|heard| heard.token).collect();
        verdict.seen.grants += tokens.len();
        verdict.seen.writes += self.writes.len();
        let Promised { most, shared, .. } = self.history.promised;
        if most > 1 || shared {
            self.no_more_than(1, verdict);
        }
        self.tokens_grow(verdict);
        self.fenced_writes(verdict);
        self.transactions_are_true(verdict);
        // These concern the rows of a read-write lock together.
        if !shared {
            self.loss_is_told_first(verdict);
            self.endings_are_true(verdict);
        }
    }

    /// A reader that is in does not depend on the row of the name any more.
    fn deletions(&self, op: &'a Op) -> impl Iterator<Item = Span> {
        let is_entering = |from| op.heard().next().is_none_or(|(_, at)| from <= at);
        let deleted = self.history.deleted.iter();
        deleted
            .filter(move |(key, span)| key == op.row() || (*key == op.key && is_entering(span.0)))
            .map(|deleted| deleted.1)
    }

    /// Whether the process was stalled, for at least `so_long` in all, within this time, or was
    /// killed before the end of it.
    pub fn stood_still(&self, process: usize, within: Span, so_long: Duration) -> bool {
        let killed = self.history.killed.iter().any(|(who, at)| *who == process && *at <= within.1);
        let still = self.history.stood_still.iter().filter(|(who, span)| *who == process && meet(*span, within));
        let mut still = still.map(|(_, (from, to))| *to.min(&within.1) - *from.max(&within.0)).peekable();
        killed || (still.peek().is_some() && still.sum::<Duration>() >= so_long)
    }

    /// Whether the process or the database was stalled for so long that the time of a grant cannot
    /// be judged.
    pub fn was_slow(&self, process: usize, within: Span) -> bool {
        [process, DATABASE].iter().any(|who| self.stood_still(*who, within, GRACE / 2))
    }

    /// A lease is held until its holder ends it, is notified of its loss, or has no time left. Work
    /// that was committed kept the row locked.
    pub fn holds(&self) -> Vec<Hold<'a>> {
        let mut holds = Vec::new();
        for op in &self.ops {
            if let Some(grant) = op.lease() {
                let mut to = op.sure_until.min(op.lost.unwrap_or(Duration::MAX));
                match op.end {
                    Some((end, How::Drop)) => to = to.min(end) + self.history.promised.delay,
                    Some((end, How::Release | How::Abandon)) => to = (to + self.history.promised.delay).min(end),
                    None => to += self.history.promised.delay,
                }
                for (from, until) in self.deletions(op) {
                    if op.asked <= until && from < to {
                        to = from;
                    }
                }
                holds.push(Hold { op, token: grant.token, span: (grant.at, to) });
            }
            for (run, work) in op.works.iter().enumerate() {
                let kept =
                    self.writes.iter().any(|write| (write.process, write.op, write.run) == (op.process, op.op, run));
                if let (Some(to), true) = (work.to, kept) {
                    holds.push(Hold { op, token: work.token, span: (work.from, to) });
                }
            }
        }
        holds.retain(|hold| hold.span.0 < hold.span.1);
        holds.sort_by_key(|hold| hold.span.0);
        holds
    }

    fn no_more_than(&self, most: usize, verdict: &mut Verdict) {
        let mut held: Vec<Hold<'_>> = Vec::new();
        for hold in self.holds() {
            held.retain(|before| hold.span.0 < before.span.1);
            let last = held.iter().max_by_key(|before| before.span.1);
            if let Some(last) = last.filter(|_| held.len() >= most) {
                let by = last.span.1 - hold.span.0;
                let text = format!(
                    "{} held it under {} until {by:?} after {} held it under {}, and {most} may",
                    last.op, last.token, hold.op, hold.token
                );
                verdict.breaks(Rule::NoOverlap, text);
            }
            held.push(hold);
        }
    }

    fn tokens_grow(&self, verdict: &mut Verdict) {
        // Of two holds, the order in which they began.
        for pair in self.holds().windows(2) {
            let ([one, next], same) = ([pair[0], pair[1]], std::ptr::eq(pair[0].op, pair[1].op));
            if next.token < one.token || (next.token == one.token && !same) {
                verdict.breaks(
                    Rule::TokensGrow,
                    format!("{} held it under {} after {} under {}", next.op, next.token, one.op, one.token),
                );
            }
        }
        // Of two grants that did not overlap, the later process asked after the earlier grant had
        // arrived.
        let mut heard = self.heard.clone();
        heard.sort_by_key(|heard| heard.at);
        let mut asked = self.heard.clone();
        asked.sort_by_key(|heard| heard.op.asked);
        let (mut before, mut highest) = (heard.iter().peekable(), i64::MIN);
        for later in &asked {
            while let Some(earlier) = before.next_if(|earlier| earlier.at < later.op.asked) {
                highest = highest.max(earlier.token);
            }
            if later.token <= highest {
                verdict.breaks(
                    Rule::TokensGrow,
                    format!("{} was granted {} when {highest} had been granted", later.op, later.token),
                );
            }
        }
        for pair in self.heard.windows(2) {
            if pair[0].token == pair[1].token && !std::ptr::eq(pair[0].op, pair[1].op) {
                verdict.breaks(
                    Rule::TokensGrow,
                    format!("{} was granted {} like {}", pair[1].op, pair[1].token, pair[0].op),
                );
            }
        }
    }

    fn fenced_writes(&self, verdict: &mut Verdict) {
        let (mut number, mut highest) = (0, i64::MIN);
        for write in &self.writes {
            let who = format!("operation {} of process {} on {}", write.op, write.process, write.key);
            if write.number != number + 1 {
                verdict
                    .breaks(Rule::FencedWrites, format!("{who} wrote number {} after number {number}", write.number));
            }
            if write.token < highest {
                verdict.breaks(Rule::FencedWrites, format!("{who} wrote under {} after {highest}", write.token));
            }
            (number, highest) = (write.number, highest.max(write.token));
        }
    }

    fn crashes_are_freed(&self, verdict: &mut Verdict) {
        for (process, at) in &self.history.killed {
            let held = |op: &&&Op| {
                let lease = op.lease().is_some() && op.end.is_none() && op.lost.is_none() && op.sure_until > *at;
                let work = op.works.last().is_some_and(|work| work.to.is_none());
                // A writer that waits for a reader may have to wait for others too.
                op.process == *process && op.done.is_none() && (lease || work) && !op.is_reader()
            };
            let Some(crashed) = self.ops.iter().find(held) else { continue };
            let until = *at + self.history.promised.lease + self.history.promised.delay + GRACE;
            let asks = |op: &&&Op| {
                let heard = op.heard().next().map(|heard| heard.1);
                let over = heard.or(op.done.map(|done| done.0)).unwrap_or(Duration::MAX);
                // A process that gave up did not ask all the time.
                let goes_on = op.asked < *at && over > *at && (heard.is_some() || over > until);
                op.process != *process
                    && op.kind != Kind::Try
                    && goes_on
                    && !self.was_slow(op.process, (*at, over.min(until)))
            };
            let Some(asking) = self.ops.iter().find(asks) else { continue };
            verdict.seen.crashes += 1;
            let freed =
                self.heard.iter().any(|heard| heard.op.process != *process && heard.at > *at && heard.at <= until);
            if !freed {
                let text =
                    format!("{crashed} crashed, and no one had it by {:?} after, though {asking} went on", until - *at);
                verdict.breaks(Rule::CrashesAreFreed, text);
            }
        }
    }

    fn loss_is_told_first(&self, verdict: &mut Verdict) {
        for (place, one) in self.heard.iter().enumerate() {
            let next = self.heard[place..].iter().find(|heard| heard.token > one.token && heard.at >= one.at);
            if let Some(next) = next {
                self.loss_is_told_before(one, next, verdict);
            }
        }
    }

    /// Judges a grant and the next one that cannot be beside it.
    pub fn loss_is_told_before(&self, one: &Heard<'a>, next: &Heard<'a>, verdict: &mut Verdict) {
        let Some(grant) = one.op.lease() else { return };
        let ended = one.op.end.is_some_and(|end| end.0 <= next.at);
        let told = one.op.lost.is_some_and(|lost| lost <= next.at);
        if told && one.op.end.is_none_or(|end| Some(end.0) >= one.op.lost) {
            verdict.seen.losses += 1;
        }
        if ended || told {
            return;
        }
        let since = next.at.saturating_sub(self.history.promised.lease).max(grant.at);
        let deleted = |op, until| self.deletions(op).any(|span| meet(span, (op.asked, until)));
        // A writer whose row is deleted while it waits for readers keeps no more of them out.
        let came_in = self.history.promised.shared && deleted(next.op, one.at);
        if came_in || deleted(one.op, next.at) || self.stood_still(one.op.process, (since, next.at), Duration::ZERO) {
            return;
        }
        verdict.breaks(Rule::LossIsToldFirst, format!("{} got in, and {} had not been told", next.op, one.op));
    }

    fn transactions_are_true(&self, verdict: &mut Verdict) {
        let mut writes: BTreeMap<(usize, u64), Vec<usize>> = BTreeMap::new();
        for write in &self.writes {
            writes.entry((write.process, write.op)).or_default().push(write.run);
        }
        for op in self.ops.iter().filter(|op| op.kind == Kind::Transaction) {
            let runs = writes.remove(&(op.process, op.op)).unwrap_or_default();
            let may = match op.outcome() {
                Some(Outcome::Done) => runs.len() == 1,
                Some(Outcome::Unknown) | None => runs.len() <= 1,
                _ => runs.is_empty(),
            };
            let last = runs.iter().all(|run| run + 1 == op.works.len());
            if !may || !last {
                let text = format!(
                    "{op} came to {:?} after {} runs, and was written by {runs:?}",
                    op.outcome(),
                    op.works.len()
                );
                verdict.breaks(Rule::OutcomesAreTrue, text);
            }
            if op.outcome() == Some(Outcome::Unknown) {
                verdict.seen.unknown[usize::from(runs.is_empty())] += 1;
            }
        }
    }

    /// The claim that a grant takes over shows the outcome of that claim.
    fn endings_are_true(&self, verdict: &mut Verdict) {
        let known: HashMap<i64, &Op> = self.heard.iter().map(|heard| (heard.token, heard.op)).collect();
        let mut taken: HashMap<i64, usize> = HashMap::new();
        for (op, grant) in self.ops.iter().flat_map(|op| op.grants.iter().map(move |grant| (op, grant))) {
            let Some((prior, process)) = grant.prior else { continue };
            let mut breaks = |what: &str| {
                verdict
                    .breaks(Rule::OutcomesAreTrue, format!("{op} took over from {prior} of process {process}, {what}"));
            };
            if taken.insert(prior, process).is_some() {
                breaks("and another claim had before");
            }
            match known.get(&prior) {
                Some(before) if was_released(before) => breaks("which was released"),
                Some(_) => {}
                None if self.may_have_claimed(process, grant.at) => {}
                None => breaks("which was never asked for"),
            }
        }
        let unheard: HashSet<usize> =
            taken.iter().filter(|(prior, _)| !known.contains_key(prior)).map(|(_, process)| *process).collect();
        // An abandoned claim is taken over whether it was ended or not.
        let tells = |op: &&&Op| op.kind != Kind::Transaction && op.end.is_none_or(|end| end.1 == How::Release);
        for op in self.ops.iter().filter(tells).filter(|op| op.outcome() == Some(Outcome::Unknown)) {
            let took_effect = match op.lease() {
                Some(grant) => !taken.contains_key(&grant.token),
                None => unheard.contains(&op.process),
            };
            verdict.seen.unknown[usize::from(!took_effect)] += 1;
        }
    }

    /// A claim whose grant its process never received: the process was killed, got no reply or a
    /// late one and claimed again, or claimed again within a transaction.
    fn may_have_claimed(&self, process: usize, before: Duration) -> bool {
        self.asked.iter().any(|op| {
            let unheard = match op.heard().next() {
                Some((_, heard)) => heard >= before,
                None => matches!(op.outcome(), None | Some(Outcome::Unknown)),
            };
            op.process == process && op.asked < before && (unheard || op.kind == Kind::Transaction)
        })
    }
}

pub fn was_released(op: &Op) -> bool {
    op.lease().is_some() && op.outcome() == Some(Outcome::Done) && op.end.is_some_and(|end| end.1 == How::Release)
}
