//! The client: it claims, holds, renews and ends, and interprets a reply or its absence.

use crate::{
    design::{Design, Event, Mutant},
    state::*,
};

impl State {
    pub fn send(&mut self, id: Id, statement: Statement) {
        // Only these two statements depend on the time at which they were sent.
        let counts = matches!(statement, Statement::Claim { .. } | Statement::Change(_, Change::Renew));
        let sent = if counts { self.monotonic() } else { 0 };
        self.clients[id].call = Some(Call { statement, sent, reply: None });
    }

    pub fn try_acquire(&mut self, id: Id) {
        let client = &mut self.clients[id];
        client.tries -= 1;
        let holder = self.next_holder;
        self.next_holder += 1;
        client.stage = Stage::Trying { holder, unanswered: false };
        self.send(id, Statement::Claim { holder });
    }

    pub fn end(&mut self, id: Id, change: Change) {
        let client = &mut self.clients[id];
        if let Stage::Held(held) = client.stage {
            client.stage = Stage::Ending { held, change, unanswered: false, done: false };
            self.send(id, Statement::Change(held.claim, change));
        }
    }

    pub fn begin(&mut self, id: Id, claim: Claim) {
        let client = &mut self.clients[id];
        client.transactions -= 1;
        client.transaction = Some(Transaction { claim, step: Step::Confirming, committed: false });
        self.send(id, Statement::Confirm(claim));
    }

    /// Runs the statement in flight. Its reply is then in flight.
    pub fn run_call(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].call.filter(|call| call.reply.is_none())?;
        let reply = Some(self.execute(design, id, call)?);
        self.clients[id].call = Some(Call { reply, ..call });
        Some(())
    }

    /// Runs a statement that the client no longer waits for.
    pub fn run_late(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].late?;
        if let Reply::Claim(Answer::Granted { .. }) = self.execute(design, id, call)? {
            design.meet(Event::LateClaimGranted);
        }
        self.clients[id].late = None;
        Some(())
    }

    /// Delivers the reply.
    pub fn deliver(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].call?;
        let reply = call.reply?;
        self.clients[id].call = None;
        match (call.statement, reply) {
            (Statement::Claim { holder }, Reply::Claim(answer)) => self.answered(design, id, holder, call.sent, answer),
            (_, Reply::Created) => {
                if let Stage::Trying { holder, .. } = self.clients[id].stage {
                    self.send(id, Statement::Claim { holder });
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
            Answer::NoRow => self.send(id, Statement::Create),
            Answer::Refused => self.clients[id].stage = Stage::Idle,
            Answer::Skipped => {}
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
                client.stage = Stage::Idle;
            }
        }
    }

    fn ended(&mut self, design: &Design, id: Id, outcome: Outcome) {
        let Stage::Ending { unanswered, done, .. } = self.clients[id].stage else { return };
        match outcome {
            // The change is sent again, or is unknown when the lease is over.
            Outcome::Skipped { .. } => return,
            Outcome::Done if !done => self.fault(Fault::DoneSaidWrongly),
            // An earlier request may have ended the claim: unknown, not lost.
            Outcome::Lost if unanswered && !design.is(Mutant::LostAfterSilence) => {}
            Outcome::Lost if done => self.fault(Fault::LostSaidWrongly),
            _ => {}
        }
        self.clients[id].stage = Stage::Idle;
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
        client.late = client.late.or(late(design, call));
        match (&mut client.stage, &mut client.transaction, call.statement) {
            (_, transaction, Statement::Confirm(_)) => *transaction = None,
            (_, Some(transaction), Statement::Commit(_)) => {
                if let Step::Committing(count) = transaction.step {
                    transaction.step = Step::Unsure(count);
                }
            }
            (Stage::Trying { unanswered, .. }, _, Statement::Claim { .. }) => *unanswered = true,
            // A create without a reply ends the try.
            (stage @ Stage::Trying { .. }, _, _) => *stage = Stage::Idle,
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
        let client = &mut self.clients[id];
        if client.life == Life::Running && matches!(client.stage, Stage::Held(held) if held.deadline <= now) {
            design.meet(Event::ToldLost);
            client.stage = Stage::Idle;
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
            late: client.late.or(unread),
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
