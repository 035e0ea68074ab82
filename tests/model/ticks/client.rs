//! The client: it looks, claims, works, renews and ends, and interprets a reply or its absence.

use crate::{
    rules::Status,
    schedule::plan::{self, Start, Then},
    ticks::{
        design::{Design, Event, Mutant},
        state::*,
    },
};

impl State {
    pub fn send(&mut self, id: Id, statement: Statement) {
        let sent = self.monotonic();
        self.clients[id].call = Some(Call { statement, sent, reply: None });
    }

    pub fn look(&mut self, id: Id) {
        self.clients[id].stage = Stage::Looked { seen: self.row, now: self.now };
    }

    pub fn claims(&mut self, id: Id) -> Option<()> {
        let Stage::Looked { seen, now } = self.clients[id].stage else { return None };
        let holder = self.next_holder;
        self.next_holder += 1;
        self.clients[id].tries -= 1;
        self.clients[id].stage = Stage::Claiming(holder);
        self.send(id, Statement::Claim { seen, now, holder });
        Some(())
    }

    /// Ends the work: its end is sent.
    pub fn finish(&mut self, design: &Design, id: Id, run: Run, status: Status) {
        let now = at(run.now + (self.monotonic() - (run.deadline - design.lease)).max(0));
        let next = match plan::end(&design.schedule, &run.row(), status, now) {
            Then::Next(next) => Some(next.timestamp()),
            Then::Again(_) => None,
        };
        if next.is_none() {
            design.meet(Event::Retried);
        }
        let Run { claim, slot, triggered, attempt, missed, .. } = run;
        let status = if status == Status::Succeeded { 'S' } else { 'F' };
        let end = End { slot, triggered, attempt, missed, status, next };
        self.clients[id].stage = Stage::Ending(run, end);
        self.send(id, Statement::End(claim, end));
    }

    /// Sends the statement of this stage again.
    pub fn again(&mut self, id: Id) -> Option<()> {
        let statement = match self.clients[id].stage {
            Stage::Passing(run, pass) => Statement::Pass(run.claim, pass),
            Stage::Ending(run, end) => Statement::End(run.claim, end),
            Stage::PuttingBack(holder) => Statement::PutBack(holder),
            _ => return None,
        };
        self.send(id, statement);
        Some(())
    }

    /// Runs the statement in flight. Its reply is then in flight.
    pub fn run_call(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].call.filter(|call| call.reply.is_none())?;
        let reply = Some(self.execute(design, call.statement));
        self.clients[id].call = Some(Call { reply, ..call });
        Some(())
    }

    /// Runs a statement that the client no longer waits for.
    pub fn run_late(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].late.take()?;
        if let Reply::Claimed(_) = self.execute(design, call.statement) {
            design.meet(Event::LateClaimTaken);
        }
        Some(())
    }

    /// The client no longer waits for the reply. A statement that has not run may run later.
    pub fn give_up(&mut self, id: Id) -> Option<()> {
        let client = &mut self.clients[id];
        let call = client.call.take()?;
        if call.reply.is_none() {
            client.late = Some(call);
        }
        match client.stage {
            Stage::Claiming(holder) => client.stage = Stage::PuttingBack(holder),
            Stage::PuttingBack(_) | Stage::Telling => client.stage = Stage::Idle,
            _ => {}
        }
        Some(())
    }

    pub fn crash(&mut self, id: Id) {
        let client = &mut self.clients[id];
        if let Some(call) = client.call.take().filter(|call| call.reply.is_none()) {
            client.late = Some(call);
        }
        (client.life, client.stage) = (Life::Crashed, Stage::Idle);
    }

    /// The work is dropped when its lease is over, unless the client is paused.
    pub fn tell_lost(&mut self, design: &Design, id: Id) {
        let monotonic = self.monotonic();
        let client = &mut self.clients[id];
        if client.life != Life::Running {
            return;
        }
        if let Stage::Working(run) = client.stage
            && run.deadline <= monotonic
        {
            design.meet(Event::ToldLost);
            (client.stage, client.call) = (Stage::Idle, None);
        }
    }

    /// Delivers the reply.
    pub fn deliver(&mut self, design: &Design, id: Id) -> Option<()> {
        let call = self.clients[id].call?;
        let reply = call.reply?;
        self.clients[id].call = None;
        match (self.clients[id].stage, reply) {
            (Stage::Claiming(_), Reply::Claimed(run)) => {
                self.claimed(design, id, Run { deadline: call.sent + design.lease, ..run });
            }
            (Stage::Passing(run, pass), Reply::Done) if pass.runs => {
                let (slot, missed, attempt) = (pass.to, pass.missed, 1);
                self.clients[id].stage = Stage::Working(Run { slot, missed, attempt, ..run });
                self.tell_lost(design, id);
            }
            (Stage::Working(run), reply) => match reply {
                Reply::Done => {
                    let deadline = run.deadline.max(call.sent + design.lease);
                    self.clients[id].stage = Stage::Working(Run { deadline, ..run });
                }
                _ => {
                    design.meet(Event::RenewalLost);
                    self.clients[id].stage = Stage::Idle;
                }
            },
            (Stage::Ending(run, end), Reply::Done) => self.ended(design, id, run, &end),
            _ => self.clients[id].stage = Stage::Idle,
        }
        Some(())
    }

    fn ended(&mut self, design: &Design, id: Id, run: Run, end: &End) {
        if end.status == 'S' && !self.record.succeeded.contains(&run.claim.token) {
            self.fault(Fault::SucceededSaidWrongly);
        }
        self.clients[id].stage = Stage::Idle;
        if design.is(Mutant::HistoryOptional) {
            self.clients[id].stage = Stage::Telling;
            self.send(id, Statement::Tell(end.told(run.claim.token)));
        }
    }

    /// Decides what the claimed row is for.
    fn claimed(&mut self, design: &Design, id: Id, run: Run) {
        let from = run.slot;
        let pass = match plan::start(&design.schedule, &run.row(), at(run.now)) {
            Start::Run => {
                self.clients[id].stage = Stage::Working(run);
                return self.tell_lost(design, id);
            }
            Start::GiveUp | Start::Stop => return self.finish(design, id, run, Status::Failed),
            Start::Move { to, missed, skipped } => Pass { from, to: to.timestamp(), runs: true, missed, skipped },
            Start::Skip { next, skipped } => Pass { from, to: next.timestamp(), runs: false, missed: 0, skipped },
        };
        self.clients[id].stage = Stage::Passing(run, pass);
        self.send(id, Statement::Pass(run.claim, pass));
    }
}
