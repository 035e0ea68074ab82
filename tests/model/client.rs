//! The client: it claims, holds, renews and ends, and interprets a reply or its absence.

use crate::{
    design::{Design, Event, Mutant},
    state::*,
};

impl State {
    pub fn send(&mut self, design: &Design, id: Id, statement: Statement) {
        // Only these two statements depend on the time at which they were sent.
        let counts = matches!(statement, Statement::Claim { .. } | Statement::Change(_, Change::Renew));
        let sent = if counts { self.monotonic() } else { 0 };
        let not_after = statement.extends_for().and(design.patience).map(|patience| self.db.now + patience);
        self.clients[id].call = Some(Call { statement, sent, not_after, reply: None });
    }

    /// The connection is silent: the request is sent on another one too.
    pub fn send_again(&mut self, design: &Design, id: Id) -> Option<()> {
        let client = &mut self.clients[id];
        let call = client.call.take()?;
        client.late = Some(call);
        client.void = client.void.max(call.not_after);
        if let Stage::Ending { unanswered, .. } = &mut client.stage {
            *unanswered = true;
        }
        design.meet(Event::SentTwice);
        self.send(design, id, call.statement);
        Some(())
    }

    /// The claim is over for the client, which may still have to clear it.
    pub fn close(&mut self, design: &Design, id: Id, holder: u8) {
        let client = &mut self.clients[id];
        client.void = client.void.max(client.call.and_then(|call| call.not_after));
        let clears = client.void.is_some() && !design.is(Mutant::NothingCleared);
        client.stage = if clears { Stage::Clearing { holder } } else { Stage::Idle };
        if !clears {
            client.void = None;
        }
    }

    pub fn try_acquire(&mut self, design: &Design, id: Id) {
        let client = &mut self.clients[id];
        client.tries -= 1;
        let holder = self.next_holder;
        self.next_holder += 1;
        client.stage = Stage::Trying { holder, unanswered: false };
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

    /// Runs a statement that the client no longer waits for, or has sent again.
    pub fn run_late(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].late.filter(|call| call.reply.is_none())?;
        let reply = self.execute(design, id, call)?;
        if let Reply::Claim(Answer::Granted { .. }) = reply {
            design.meet(Event::LateClaimGranted);
        }
        let client = &self.clients[id];
        let is_over = call.statement.extends_for().is_some_and(|holder| !client.answers_for(holder));
        if design.patience.is_some() && client.life != Life::Crashed && is_over {
            match reply {
                Reply::Claim(Answer::Granted { .. }) => self.fault(Fault::GrantedLate),
                Reply::Change(Outcome::Done) => self.fault(Fault::ExtendedLate),
                _ => {}
            }
        }
        let client = &mut self.clients[id];
        let is_awaited = design.patience.is_some() && client.has_sent_twice();
        client.late = is_awaited.then_some(Call { reply: Some(reply), ..call });
        Some(())
    }

    /// Delivers the reply to what was sent first. The second one is then late.
    pub fn deliver_late(&mut self, design: &Design, id: Id) -> Option<()> {
        design.meet(Event::FirstReplyReadLate);
        let client = &mut self.clients[id];
        std::mem::swap(&mut client.call, &mut client.late);
        client.void = client.void.max(client.late.and_then(|call| call.not_after));
        self.deliver(design, id)
    }

    /// Delivers the reply. What was sent twice is settled by the first one.
    pub fn deliver(&mut self, design: &Design, id: Id) -> Option<()> {
        let client = &mut self.clients[id];
        client.late = client.late.filter(|late| late.reply.is_none());
        let call = self.clients[id].call?;
        let reply = call.reply?;
        self.clients[id].call = None;
        match (call.statement, reply) {
            (Statement::Claim { holder }, Reply::Claim(answer)) => self.answered(design, id, holder, call.sent, answer),
            (_, Reply::Created) => {
                if let Stage::Trying { holder, .. } = self.clients[id].stage {
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
            (_, Reply::Cleared) => {
                design.meet(Event::Cleared);
                let client = &mut self.clients[id];
                (client.stage, client.void) = (Stage::Idle, None);
            }
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
                self.close(design, id, claim.holder);
            }
            Outcome::TooLate => {}
        }
    }

    fn ended(&mut self, design: &Design, id: Id, outcome: Outcome) {
        let Stage::Ending { held, unanswered, done, .. } = self.clients[id].stage else { return };
        match outcome {
            // The change is sent again, or is unknown when the lease is over.
            Outcome::Skipped { .. } => return,
            Outcome::Done if !done => self.fault(Fault::DoneSaidWrongly),
            // An earlier request may have ended the claim: unknown, not lost.
            Outcome::Lost if unanswered && !design.is(Mutant::LostAfterSilence) => {}
            Outcome::Lost if done => self.fault(Fault::LostSaidWrongly),
            _ => {}
        }
        self.close(design, id, held.claim.holder);
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
        client.late = client.late.filter(|late| late.reply.is_none()).or(late(design, call));
        client.void = client.void.max(call.not_after);
        match (&mut client.stage, &mut client.transaction, call.statement) {
            (_, transaction, Statement::Confirm(_)) => *transaction = None,
            (_, Some(transaction), Statement::Commit(_)) => {
                if let Step::Committing(count) = transaction.step {
                    transaction.step = Step::Unsure(count);
                }
            }
            (Stage::Trying { unanswered, .. }, _, Statement::Claim { .. }) => *unanswered = true,
            // A create without a reply ends the try.
            (Stage::Trying { holder, .. }, _, _) => {
                let holder = *holder;
                self.close(design, id, holder);
            }
            (Stage::Ending { unanswered, .. }, _, Statement::Change(_, change)) if change != Change::Renew => {
                *unanswered = true;
            }
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
            self.close(design, id, held.claim.holder);
        }
    }

    /// The client loses all of its state. The statements that it sent may still run.
    pub fn crash(&mut self, design: &Design, id: Id) {
        let client = &mut self.clients[id];
        let unread = client.call.and_then(|call| late(design, call));
        *client = Client {
            life: Life::Crashed,
            stage: Stage::Idle,
            call: None,
            late: client.late.filter(|late| late.reply.is_none()).or(unread),
            void: None,
            transaction: None,
            tries: 0,
            transactions: 0,
        };
    }

    /// The server ends the transaction of a closed connection.
    pub fn connection_lost(&mut self, id: Id) {
        self.db.lock = None;
        let late = &mut self.clients[id].late;
        if late.is_some_and(|call| matches!(call.statement, Statement::Commit(_))) {
            *late = None;
        }
    }
}

/// The remainder of a call that the client no longer waits for.
fn late(design: &Design, call: Call) -> Option<Call> {
    let sent = if design.is(Mutant::ClockBeforeRowLock) { call.sent } else { 0 };
    call.reply.is_none().then_some(Call { sent, ..call })
}
