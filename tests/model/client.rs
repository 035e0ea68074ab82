//! The client: it claims, holds, renews and ends, and interprets a reply or its absence.

use crate::{
    design::{Design, Event, Mutant},
    state::*,
};

impl State {
    pub fn send(&mut self, design: &Design, id: Id, statement: Statement) {
        let extends = statement.extends();
        let sent = if extends { self.monotonic() } else { 0 };
        let not_after = design.patience.filter(|_| extends).map(|patience| self.db.now + patience);
        self.clients[id].call = Some(Call { statement, sent, not_after, reply: None });
    }

    /// The connection is silent: the request is sent on another one too.
    pub fn send_again(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].call.take()?;
        self.clients[id].first = Some(call);
        design.meet(Event::SentTwice);
        self.send(design, id, call.statement);
        Some(())
    }

    /// The client knows of nothing that is left of the holder.
    pub fn close(&mut self, design: &Design, id: Id, holder: u8) {
        let client = &mut self.clients[id];
        if design.patience.is_some() {
            (client.stage, client.renewing) = (Stage::Over { holder }, None);
        } else {
            client.stage = Stage::Idle;
        }
    }

    /// The claim is lost. It ends with its lease.
    pub fn lose(&mut self, id: Id) {
        let client = &mut self.clients[id];
        (client.stage, client.claiming, client.renewing) = (Stage::Idle, None, None);
    }

    pub fn try_acquire(&mut self, design: &Design, id: Id) {
        let client = &mut self.clients[id];
        client.tries -= 1;
        let holder = self.next_holder;
        self.next_holder += 1;
        client.stage = Stage::Trying { holder };
        self.send(design, id, Statement::Claim { holder });
    }

    pub fn end(&mut self, design: &Design, id: Id, change: Change) {
        let client = &mut self.clients[id];
        if let Stage::Held(held) = client.stage {
            client.stage = Stage::Ending { held, change, unanswered: false, done: false };
            self.send(design, id, Statement::Change(held.claim, change));
        }
    }

    pub fn begin(&mut self, design: &Design, id: Id, claim: Claim) {
        let client = &mut self.clients[id];
        client.transactions -= 1;
        client.transaction = Some(Transaction { claim, step: Step::Confirming, committed: false });
        self.send(design, id, Statement::Confirm(claim));
    }

    /// Runs the statement in flight. Its reply is then in flight.
    pub fn run_call(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].call.filter(|call| call.reply.is_none())?;
        let reply = Some(self.execute(design, id, call)?);
        self.clients[id].call = Some(Call { reply, ..call });
        Some(())
    }

    /// Runs the first copy of a request that was sent twice.
    pub fn run_first(&mut self, design: &Design, id: Id) -> Option<()> {
        let first = self.clients[id].first.filter(|first| first.reply.is_none())?;
        let reply = Some(self.execute(design, id, first)?);
        self.clients[id].first = Some(Call { reply, ..first });
        Some(())
    }

    /// The second copy meets the row while the first one has it locked.
    pub fn skip_second(&mut self, id: Id) -> Option<()> {
        let call = self.clients[id].call?;
        let reply = Some(match call.statement {
            Statement::Claim { .. } => Reply::Claim(Answer::Skipped),
            // The time that is left is of use to a renewal alone, and counts from then.
            _ => Reply::Change(Outcome::Skipped { left: 0 }),
        });
        self.clients[id].call = Some(Call { reply, ..call });
        Some(())
    }

    /// Runs a statement that the client no longer waits for.
    pub fn run_late(&mut self, design: &Design, id: Id, index: usize) -> Option<()> {
        let call = *self.clients[id].late.get(index)?;
        let reply = self.execute(design, id, call)?;
        if let Reply::Claim(Answer::Granted { .. }) = reply {
            design.meet(Event::LateClaimGranted);
        }
        self.clients[id].late.remove(index);
        Some(())
    }

    /// Delivers the reply to the first copy.
    pub fn deliver_first(&mut self, design: &Design, id: Id) -> Option<()> {
        design.meet(Event::FirstReplyReadFirst);
        let client = &mut self.clients[id];
        std::mem::swap(&mut client.call, &mut client.first);
        if design.is(Mutant::DeadlineFromSecondCopy) {
            client.call = client.call.zip(client.first).map(|(first, second)| Call { sent: second.sent, ..first });
        }
        self.deliver(design, id)
    }

    /// Reads the reply. If it does not settle a request that was sent twice, it is set aside, and
    /// the other copy is waited for.
    pub fn deliver(&mut self, design: &Design, id: Id) -> Option<()> {
        let client = &mut self.clients[id];
        let call = client.call.take_if(|call| call.reply.is_some())?;
        let is_settled = call.reply?.is_settled();
        if client.first.is_some() && !is_settled && !design.is(Mutant::UnsettledCounts) {
            design.meet(Event::UnsettledSetAside);
            client.call = client.first.take();
            return Some(());
        }
        if is_settled {
            client.forget_void(design, call);
        }
        if let Some(other) = client.first.take() {
            client.leave(design, other);
            if is_settled && !design.is(Mutant::OtherCopyForgotten) {
                client.keep_unanswered(design, other, self.db.now);
            }
        }
        self.apply(design, id, call)
    }

    /// Applies the reply that counts.
    fn apply(&mut self, design: &Design, id: Id, call: Call) -> Option<()> {
        match (call.statement, call.reply?) {
            (Statement::Claim { holder }, Reply::Claim(answer)) => self.answered(design, id, holder, call.sent, answer),
            (_, Reply::Created) => {
                if let Stage::Trying { holder } = self.clients[id].stage {
                    self.send(design, id, Statement::Claim { holder });
                }
            }
            (Statement::Change(claim, Change::Renew), Reply::Change(outcome)) => {
                self.renewed(design, id, claim, call.sent, outcome);
            }
            (_, Reply::Change(outcome)) => self.ended(design, id, outcome),
            (_, Reply::Confirm(count)) => {
                let client = &mut self.clients[id];
                let step = count.map(Step::Confirmed);
                client.transaction =
                    client.transaction.zip(step).map(|(transaction, step)| Transaction { step, ..transaction });
                if client.transaction.is_none() {
                    design.meet(Event::ConfirmLost);
                }
            }
            (_, Reply::Commit) => self.clients[id].transaction = None,
            (_, Reply::Confirms(found)) => self.settle_commit(design, id, found),
            (_, Reply::Claim(_)) => {}
        }
        Some(())
    }

    fn answered(&mut self, design: &Design, id: Id, holder: u8, sent: Tick, answer: Answer) {
        let counted_from = if design.is(Mutant::DeadlineFromReply) { self.monotonic() } else { sent };
        match answer {
            Answer::Granted { token } => {
                let held = Held { claim: Claim { holder, token }, deadline: counted_from + design.lease };
                self.clients[id].stage = Stage::Held(held);
                self.tell_lost(design, id);
            }
            Answer::NoRow => self.send(design, id, Statement::Create),
            Answer::Refused => self.close(design, id, holder),
            Answer::Skipped | Answer::TooLate => {}
        }
    }

    fn renewed(&mut self, design: &Design, id: Id, claim: Claim, sent: Tick, outcome: Outcome) {
        let client = &mut self.clients[id];
        let Stage::Held(held) = &mut client.stage else { return };
        if held.claim != claim {
            return;
        }
        match outcome {
            Outcome::Done => held.deadline = held.deadline.max(sent + design.lease),
            Outcome::Skipped { left } => {
                design.meet(Event::RenewalSkipped);
                held.deadline = held.deadline.max(sent + left);
            }
            Outcome::Lost => {
                design.meet(Event::RenewalLost);
                self.lose(id);
            }
            Outcome::TooLate => {}
        }
    }

    fn ended(&mut self, design: &Design, id: Id, outcome: Outcome) {
        // The change is sent again, or is unknown when the lease is over.
        if matches!(outcome, Outcome::Skipped { .. }) {
            return;
        }
        let (held, change, unanswered, done) = match self.clients[id].stage {
            Stage::Ending { held, change, unanswered, done } => (held, change, unanswered, done),
            Stage::EndingAgain(claim) => {
                design.meet(Event::EndedAgain);
                return self.close(design, id, claim.holder);
            }
            _ => return,
        };
        match outcome {
            Outcome::Done if !done => self.fault(Fault::DoneSaidWrongly),
            // An earlier request may have ended the claim: unknown, not lost.
            Outcome::Lost if unanswered && !design.is(Mutant::LostAfterSilence) => {}
            Outcome::Lost if done => self.fault(Fault::LostSaidWrongly),
            _ => {}
        }
        if self.may_be_revived(design, id, change) {
            self.clients[id].stage = Stage::EndingAgain(held.claim);
        } else {
            self.close(design, id, held.claim.holder);
        }
        if design.is(Mutant::ClaimForgottenByEnding) {
            self.clients[id].claiming = None;
        }
    }

    /// Whether a renewal may have extended the row after it was abandoned, or may still do so. One
    /// that is void by now may have been carried out since the abandonment.
    fn may_be_revived(&self, design: &Design, id: Id, change: Change) -> bool {
        let void_counts = !design.is(Mutant::AbandonedAgainUnlessVoid);
        let renewing = self.clients[id].renewing.filter(|until| void_counts || *until > self.db.now);
        change == Change::Abandon && renewing.is_some() && !design.is(Mutant::AbandonedOnce)
    }

    fn settle_commit(&mut self, design: &Design, id: Id, found: Option<u8>) {
        let Some(transaction) = self.clients[id].transaction.take() else { return };
        let Step::Unsure(count) = transaction.step else { return };
        let says = match found {
            Some(found) => {
                design.meet(if found == count { Event::SaidCommitted } else { Event::SaidNotCommitted });
                found == count
            }
            None => return design.meet(Event::SaidUnknown),
        };
        if says != transaction.committed {
            self.fault(Fault::CommitSaidWrongly);
        }
    }

    /// No reply in time: the connection is closed, and the statement may still run, or never.
    pub fn give_up(&mut self, design: &Design, id: Id) -> Option<()> {
        let client = &mut self.clients[id];
        let call = client.call.take()?;
        for call in client.first.take().into_iter().chain([call]) {
            client.leave(design, call);
            client.keep_unanswered(design, call, self.db.now);
        }
        match (client.stage, &mut client.transaction, call.statement) {
            (_, transaction, Statement::Confirm(_)) => *transaction = None,
            (_, Some(transaction), Statement::Commit(_)) => {
                if let Step::Committing(count) = transaction.step {
                    transaction.step = Step::Unsure(count);
                }
            }
            // A create without a reply ends the try.
            (Stage::Trying { holder }, _, Statement::Create) => self.close(design, id, holder),
            _ => {}
        }
        Some(())
    }

    /// The renewer checks its clock, unless the process is stopped. Lost is final.
    pub fn tell_lost(&mut self, design: &Design, id: Id) {
        let now = self.monotonic();
        let client = &self.clients[id];
        let Stage::Held(held) = client.stage else { return };
        if client.life == Life::Running && held.deadline <= now {
            design.meet(Event::ToldLost);
            self.lose(id);
        }
    }

    /// The client loses all of its state. The statements that it sent may still run.
    pub fn crash(&mut self, design: &Design, id: Id) {
        let client = &mut self.clients[id];
        for call in client.first.take().into_iter().chain(client.call.take()) {
            client.leave(design, call);
        }
        let late = std::mem::take(&mut client.late);
        *client = Client { life: Life::Crashed, late, ..Client::new(0, 0) };
    }

    /// The server ends the transaction of a closed connection.
    pub fn connection_lost(&mut self, id: Id) {
        self.db.lock = None;
        self.clients[id].late.retain(|call| !matches!(call.statement, Statement::Commit(_)));
    }
}

impl Client {
    /// The reply is not read any more. If the statement has not run, it may run later.
    fn leave(&mut self, design: &Design, call: Call) {
        if call.reply.is_none() {
            let sent = if design.is(Mutant::ClockBeforeRowLock) { call.sent } else { 0 };
            self.late.push(Call { sent, ..call });
            self.late.sort();
        }
    }

    /// Forgets the earlier requests that were void before this one, which has a reply, was sent.
    fn forget_void(&mut self, design: &Design, answered: Call) {
        let (until, is_forgotten) = match answered.statement {
            Statement::Claim { .. } => (&mut self.claiming, design.is(Mutant::ClaimForgottenByReply)),
            Statement::Change(_, Change::Renew) => (&mut self.renewing, design.is(Mutant::RenewalForgottenByReply)),
            _ => return,
        };
        *until = until.filter(|until| *until >= answered.sent && !is_forgotten);
    }

    /// Keeps what may become of a statement without a reply.
    fn keep_unanswered(&mut self, design: &Design, call: Call, now: Tick) {
        match (call.statement, &mut self.stage) {
            (Statement::Claim { .. }, _) if design.is(Mutant::ClaimKeptFromNow) => {
                self.claiming = self.claiming.max(Some(now));
            }
            (Statement::Claim { .. }, _) => self.claiming = self.claiming.max(call.not_after),
            (Statement::Change(_, Change::Renew), _) => self.renewing = self.renewing.max(call.not_after),
            (Statement::Change(..), Stage::Ending { unanswered, .. }) => *unanswered = true,
            _ => {}
        }
    }
}
