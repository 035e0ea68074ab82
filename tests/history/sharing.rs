//! The rules of a read-write lock, which concern the rows of its readers and of its writer
//! together.

use std::time::Duration;

use crate::{
    checker::{GRACE, Heard, Hold, Rule, Verdict, View, meet, was_released},
    record::{Kind, Op, Outcome, Span},
};

impl<'a> View<'a> {
    pub fn check_shared(&self, verdict: &mut Verdict) {
        self.no_reader_beside_a_writer(verdict);
        self.loss_is_told_to_both_sides(verdict);
        self.writers_get_in(verdict);
        self.fences_grow(verdict);
        self.no_released_claim_is_taken_over(verdict);
        self.count_crashed_readers(verdict);
    }

    fn no_reader_beside_a_writer(&self, verdict: &mut Verdict) {
        let mut held: Vec<Hold<'_>> = Vec::new();
        for hold in self.holds() {
            held.retain(|before| hold.span.0 < before.span.1);
            if let Some(before) = held.iter().find(|before| excludes(before.op, hold.op)) {
                let by = before.span.1 - hold.span.0;
                verdict.breaks(
                    Rule::NoOverlap,
                    format!("{} had it until {by:?} after {}", side(before.op), side(hold.op)),
                );
            }
            held.push(hold);
        }
    }

    /// The next grant is the first one that cannot be beside this one.
    fn loss_is_told_to_both_sides(&self, verdict: &mut Verdict) {
        let mut heard = self.heard.clone();
        heard.sort_by_key(|heard| heard.at);
        for (place, one) in heard.iter().enumerate() {
            let next = |next: &&Heard<'_>| excludes(one.op, next.op) || one.op.row() == next.op.row();
            if let Some(next) = heard[place + 1..].iter().find(next) {
                self.loss_is_told_before(one, next, verdict);
            }
        }
    }

    /// Readers that come later keep no writer out. The wait counts from the end of the last other
    /// writer. It is not judged if there was no reader, if another writer goes on beside it, if the
    /// writer had no connection, or if it or the database stood still.
    fn writers_get_in(&self, verdict: &mut Verdict) {
        let holds = self.holds();
        for op in self.ops.iter().filter(|op| op.kind == Kind::Write) {
            let heard = op.heard().next().map(|heard| heard.1);
            let Some(over) = heard.or(op.done.map(|done| done.0)) else { continue };
            let others = self.ops.iter().filter(|other| !std::ptr::eq(**other, *op) && writes(other));
            let others = others.map(|other| self.time_of(other)).filter(|time| meet(*time, (op.asked, over)));
            let last = others.map(|time| time.1).max().unwrap_or_default();
            let wait = (last.max(op.asked), over);
            let cut_off = self.history.cut_off.iter().any(|(who, span)| *who == op.process && meet(*span, wait));
            if last >= over || cut_off || self.was_slow(op.process, wait) {
                continue;
            }
            let readers = holds.iter().filter(|hold| hold.op.is_reader() && meet(hold.span, wait));
            let Some(longest) = readers.map(|hold| hold.span.1 - hold.span.0).max() else { continue };
            verdict.seen.waits += 1;
            if over - wait.0 > longest + self.history.promised.lease + GRACE {
                let text = format!("{op} waited for {:?}, and the longest reader read for {longest:?}", over - wait.0);
                verdict.breaks(Rule::WritersGetIn, text);
            }
        }
    }

    /// The time in which the claims of an operation may stand.
    fn time_of(&self, op: &Op) -> Span {
        let killed = self.history.killed.iter().find(|(who, at)| *who == op.process && *at >= op.asked);
        let gone = killed.map_or(Duration::MAX, |(_, at)| *at + self.history.promised.lease);
        let dropped = op.end.map(|end| end.0 + self.history.promised.lease);
        (op.asked, op.done.map(|done| done.0).or(dropped).unwrap_or(gone))
    }

    /// The fence of a reader is not below the token of a writer before it, and below that of every
    /// later one.
    fn fences_grow(&self, verdict: &mut Verdict) {
        for (reader, fence, heard) in self.heard.iter().filter_map(|one| Some((one.op, one.op.fence?, one.at))) {
            for writer in self.heard.iter().filter(|one| !one.op.is_reader()) {
                let before = writer.at < reader.asked && writer.token > fence;
                let after = writer.op.asked > heard && writer.token <= fence;
                if before || after {
                    let (order, token) = (if before { "before" } else { "after" }, writer.token);
                    let text = format!("{reader} was fenced by {fence}, and {} {order} it had {token}", writer.op);
                    verdict.breaks(Rule::TokensGrow, text);
                }
            }
        }
    }

    /// A reader may take over the claim of a writer, and several readers that enter together tell
    /// of the same one.
    fn no_released_claim_is_taken_over(&self, verdict: &mut Verdict) {
        for (op, grant) in self.ops.iter().flat_map(|op| op.grants.iter().map(move |grant| (op, grant))) {
            let Some((prior, process)) = grant.prior else { continue };
            let of = |heard: &&Heard<'_>| heard.token == prior && heard.op.process == process;
            if let Some(before) = self.heard.iter().find(of).filter(|before| was_released(before.op)) {
                let text = format!("{op} took over from {}, which was released", before.op);
                verdict.breaks(Rule::OutcomesAreTrue, text);
            }
        }
    }

    /// How soon a crashed reader is replaced shows in the wait of the writer.
    fn count_crashed_readers(&self, verdict: &mut Verdict) {
        for (process, at) in &self.history.killed {
            let crashed = |op: &Op| op.process == *process && op.is_reader() && op.end.is_none() && op.sure_until > *at;
            let waits = |op: &Op| {
                let over = op.heard().next().map(|heard| heard.1).or(op.done.map(|done| done.0));
                op.kind == Kind::Write && op.asked < *at && over.is_some_and(|over| over > *at)
            };
            let both = self.ops.iter().any(|op| crashed(op)) && self.ops.iter().any(|op| waits(op));
            verdict.seen.crashes += usize::from(both);
        }
    }
}

/// Whether two operations were granted what cannot be held together.
fn excludes(one: &Op, other: &Op) -> bool {
    !(one.is_reader() && other.is_reader())
}

/// Whether the operation claims the name for longer than a moment, or may have claimed it.
fn writes(op: &Op) -> bool {
    let tried = op.kind == Kind::Try && !op.is_reader() && op.outcome() != Some(Outcome::Refused);
    op.kind == Kind::Write || tried
}

fn side(op: &Op) -> String {
    format!("{op}, {}", if op.is_reader() { "a reader," } else { "a writer," })
}
