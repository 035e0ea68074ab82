//! How the database executes a statement: each runs in one step, or waits.

use chrono::{DateTime, Utc};

use crate::{
    design::{Design, Event, Mutant},
    key::Holder,
    rules::{self, Reason, Verdict},
    state::*,
};

fn at(tick: Tick) -> DateTime<Utc> {
    DateTime::from_timestamp(tick * 60, 0).unwrap()
}

impl Row {
    /// Created free, `S`, begun at the epoch.
    fn free() -> Self {
        let begin_time = 0;
        Self {
            locked: false,
            status: "S",
            begin_time,
            holder: None,
            token: 0,
            expires_at: None,
            claimed_at: None,
            ended: false,
            confirms: 0,
        }
    }

    fn set_free(&mut self, status: &'static str) {
        *self = Self { locked: false, status, holder: None, expires_at: None, claimed_at: None, ended: true, ..*self };
    }

    /// Locked by rowlock, and not overwritten by another program.
    fn stands(&self, design: &Design) -> bool {
        self.locked
            && self.holder.is_some()
            && (design.is(Mutant::ClaimedAtIgnored) || (self.claimed_at == Some(self.begin_time) && !self.ended))
    }

    fn is_ours(&self, claim: Claim, design: &Design) -> bool {
        self.stands(design) && self.holder == Some(claim.holder) && self.token == claim.token
    }

    fn next_token(&self, now: Tick, design: &Design) -> i64 {
        if design.is(Mutant::CounterAsToken) { self.token + 1 } else { (self.token + 1).max(now * MICROS) }
    }
}

/// The rules table: the code's own.
pub fn judge(design: &Design, row: Option<&Row>, now: Tick, holder: u8) -> Verdict {
    let row = row.map(|row| rules::Row {
        locked: row.locked,
        status: row.status.into(),
        begin_time: Some(at(row.begin_time)),
        minutes: Some(design.minutes),
        client_ip: String::new(),
        holder: row.holder.map(|holder| *Holder::of(holder).as_uuid()),
        token: row.token,
        expires_at: row.expires_at.map(at),
        claimed_at: if row.stands(design) { Some(at(row.begin_time)) } else { row.claimed_at.map(at) },
        ended: row.ended && !row.stands(design),
        awaited: false,
    });
    rules::judge(row.as_ref(), at(now), Holder::of(holder), &design.terms)
}

impl State {
    /// Runs a statement. `None` while it waits for the row, or when its transaction has ended.
    pub fn execute(&mut self, design: &Design, id: Id, call: Call) -> Option<Reply> {
        let is_late = call.not_after.is_some_and(|limit| self.db.now > limit);
        let reply = self.carry_out(design, id, call, is_late && !design.is(Mutant::NotAfterIgnored))?;
        if is_late {
            design.meet(Event::TooLate);
            if matches!(reply, Reply::Claim(Answer::Granted { .. }) | Reply::Change(Outcome::Done)) {
                self.fault(Fault::CarriedOutLate);
            }
        }
        Some(reply)
    }

    fn carry_out(&mut self, design: &Design, id: Id, call: Call, too_late: bool) -> Option<Reply> {
        let locked = self.db.lock.is_some();
        Some(match call.statement {
            Statement::Create => {
                self.db.row.get_or_insert(Row::free());
                Reply::Created
            }
            Statement::Change(claim, Change::Renew) if too_late => {
                let stands = self.db.row.is_some_and(|row| row.is_ours(claim, design));
                Reply::Change(if stands { Outcome::TooLate } else { Outcome::Lost })
            }
            Statement::Claim { holder } if design.is(Mutant::ClockBeforeRowLock) => {
                if locked {
                    return None;
                }
                Reply::Claim(self.claim(design, holder, call.sent, too_late))
            }
            Statement::Claim { holder } => Reply::Claim(self.claim(design, holder, self.db.now, too_late)),
            Statement::Change(claim, change) => Reply::Change(self.change(design, claim, change)),
            Statement::Confirm(_) if locked => return None,
            Statement::Confirm(claim) => Reply::Confirm(self.confirm(design, id, claim)),
            Statement::Commit(claim) => self.commit(design, id, claim)?,
            Statement::ReadConfirms(_) if locked && !design.is(Mutant::ConfirmsReadWithoutWaiting) => return None,
            Statement::ReadConfirms(claim) => {
                Reply::Confirms(self.db.row.filter(|row| row.is_ours(claim, design)).map(|row| row.confirms))
            }
        })
    }

    /// Takes the row if the rules grant it.
    fn claim(&mut self, design: &Design, holder: u8, now: Tick, too_late: bool) -> Answer {
        let verdict = judge(design, self.db.row.as_ref(), now, holder);
        let Some(mut row) = self.db.row else { return Answer::NoRow };
        match verdict {
            Verdict::Create => return Answer::NoRow,
            Verdict::Refuse(reason, _) => {
                match reason {
                    Reason::HeldByAnotherProgram => design.meet(Event::ForeignLockSeen),
                    Reason::WithinMinInterval => design.meet(Event::WithinMinInterval),
                    Reason::TimedOutUnfinished => design.meet(Event::TimedOutUnfinished),
                    Reason::LastRunFailed => design.meet(Event::LastRunFailed),
                    _ => {}
                }
                return Answer::Refused;
            }
            _ if too_late => return Answer::TooLate,
            _ if self.db.lock.is_some() => return Answer::Skipped,
            Verdict::Same => {
                design.meet(Event::SameAgain);
                self.check_change(row.token);
            }
            Verdict::Acquire | Verdict::TakeOver => {
                let event = match () {
                    () if verdict == Verdict::Acquire => Event::Acquired,
                    () if !row.stands(design) => Event::ForeignTakenOver,
                    () if row.expires_at < Some(row.begin_time + design.lease) => Event::AbandonedTakenOver,
                    () => Event::TakenOver,
                };
                design.meet(event);
                row.token = row.next_token(now, design);
                row.begin_time = now;
                row.claimed_at = Some(now);
                row.ended = false;
                self.check_grant(design, row.token, verdict == Verdict::Acquire);
            }
        }
        row.locked = true;
        row.status = "P";
        row.holder = Some(holder);
        row.expires_at = Some(now + design.row_lease());
        self.db.row = Some(row);
        self.lease_runs(design, row.token);
        Answer::Granted { token: row.token }
    }

    /// Applies one change to the claim, if it is still valid.
    fn change(&mut self, design: &Design, claim: Claim, change: Change) -> Outcome {
        let now = self.db.now;
        if change == Change::Renew && design.is(Mutant::RenewByUpsert) && self.db.lock.is_none() {
            let row = self.db.row.get_or_insert(Row::free());
            (row.locked, row.holder, row.token) = (true, Some(claim.holder), claim.token);
            row.claimed_at = Some(row.begin_time);
        }
        let ours = self.db.row.as_mut().filter(|row| row.is_ours(claim, design));
        let Some(row) = ours.filter(|_| self.db.lock.is_none()) else { return self.unmatched(design, claim, change) };
        match change {
            Change::Renew => {
                row.expires_at = Some(now + design.row_lease());
                if !self.clients.iter().any(|client| client.held().is_some_and(|held| held.claim == claim)) {
                    design.meet(Event::LateRenewalRevived);
                }
                self.check_change(claim.token);
                self.lease_runs(design, claim.token);
            }
            Change::Release(status) => {
                row.set_free(status.letter());
                if design.is(Mutant::ReleaseByDelete) {
                    self.db.row = None;
                }
                self.check_change(claim.token);
                self.granted.valid = None;
                self.lease_ends(claim);
            }
            Change::Abandon => {
                row.expires_at = row.expires_at.min(Some(now));
                self.check_change(claim.token);
                self.lease_ends(claim);
            }
        }
        Outcome::Done
    }

    /// Reads the outcome of a change that matched no row.
    fn unmatched(&mut self, design: &Design, claim: Claim, change: Change) -> Outcome {
        let Some(row) = self.db.row.filter(|row| row.token == claim.token) else { return Outcome::Lost };
        let ours = row.is_ours(claim, design);
        let left = row.expires_at.unwrap_or_default() - self.db.now - (design.row_lease() - design.lease);
        match change {
            // Freed by an earlier request of the client whose reply was lost.
            Change::Release(_) | Change::Abandon
                if !row.locked && (row.holder.is_none() || design.is(Mutant::DoneByAnother)) =>
            {
                design.meet(Event::DoneByReading);
                Outcome::Done
            }
            Change::Abandon if ours && row.expires_at <= Some(self.db.now) => {
                self.lease_ends(claim);
                Outcome::Done
            }
            _ if ours => Outcome::Skipped { left },
            _ => Outcome::Lost,
        }
    }

    /// The row stays locked until the transaction ends.
    fn confirm(&mut self, design: &Design, id: Id, claim: Claim) -> Option<u8> {
        let row = self.db.row.filter(|row| row.is_ours(claim, design))?;
        if !design.is(Mutant::ConfirmWithoutRow) {
            self.db.lock = Some(id);
        }
        Some(row.confirms + 1)
    }

    fn commit(&mut self, design: &Design, id: Id, claim: Claim) -> Option<Reply> {
        if self.db.lock != Some(id) && !design.is(Mutant::ConfirmWithoutRow) {
            return None;
        }
        self.db.lock = None;
        design.meet(Event::Committed);
        if let Some(row) = &mut self.db.row {
            row.confirms += 1;
            if row.expires_at <= Some(self.db.now) {
                design.meet(Event::CommittedExpired);
            }
        }
        if self.granted.valid != Some(claim.token) {
            self.fault(Fault::StaleCommit);
        }
        if let Some(transaction) = &mut self.clients[id].transaction {
            transaction.committed |= transaction.claim == claim;
        }
        Some(Reply::Commit)
    }

    pub fn commit_other(&mut self, design: &Design, claim: Claim) -> Option<()> {
        let row = self.db.row.as_mut().filter(|row| row.is_ours(claim, design))?;
        // Bounded, because two of them cover all cases.
        row.confirms = (row.confirms + 1).min(3);
        Some(())
    }

    /// An operator's release: the row is free, and the token grows.
    pub fn force_release(&mut self, design: &Design) {
        let now = self.db.now;
        let Some(row) = &mut self.db.row else { return };
        row.set_free("S");
        row.token = row.next_token(now, design);
        let token = row.token;
        self.check_token(token);
        self.overrule();
        self.foreign.has_row = false;
        design.meet(Event::ForceReleased);
    }

    pub fn delete_row(&mut self, design: &Design) {
        self.db.row = None;
        self.granted.last_start = None;
        design.meet(Event::RowDeleted);
    }

    /// The article's program knows neither holder nor lease: after `time` minutes it takes the row
    /// in any state.
    pub fn foreign_lock(&mut self, design: &Design) {
        let now = self.db.now;
        let Some(row) = &mut self.db.row else { return };
        if row.stands(design) {
            design.meet(Event::Trampled);
        }
        (row.locked, row.status, row.begin_time) = (true, "P", now);
        self.overrule();
        self.foreign = Foreign { working: true, has_row: true, tries: self.foreign.tries - 1 };
    }

    /// It frees the row, even if another client holds it by now.
    pub fn foreign_release(&mut self) {
        let Some(row) = &mut self.db.row else { return };
        (row.locked, row.status, row.ended) = (false, "S", true);
        self.overrule();
        self.foreign = Foreign { working: false, has_row: false, ..self.foreign };
    }

    fn overrule(&mut self) {
        self.granted.valid = None;
        self.granted.closed_until = None;
        self.granted.unexpired.clear();
    }

    fn check_token(&mut self, token: i64) {
        if token <= self.granted.highest {
            self.fault(Fault::TokenFell);
        }
        self.granted.highest = token.max(self.granted.highest);
    }

    fn check_grant(&mut self, design: &Design, token: i64, acquired: bool) {
        let now = self.db.now;
        self.check_token(token);
        if acquired && self.granted.last_start.is_some_and(|start| now < start + design.min_interval) {
            self.fault(Fault::StartedWithinMinInterval);
        }
        if self.granted.closed_until.take().is_some_and(|(_, end)| now < end) {
            self.fault(Fault::StartedWithinDelay);
        }
        if self.foreign.has_row {
            let over = self.db.row.is_some_and(|row| row.begin_time + design.minutes <= now);
            if design.terms.article_clients.is_none() || !over {
                self.fault(Fault::ForeignLockTaken);
            }
        }
        self.foreign.has_row = false;
        self.granted.last_start = (design.min_interval > 0).then_some(now);
        self.granted.valid = Some(token);
    }

    fn check_change(&mut self, token: i64) {
        if self.granted.valid != Some(token) {
            self.fault(Fault::SupersededChange);
        }
    }

    fn lease_runs(&mut self, design: &Design, token: i64) {
        let until = self.db.now + design.lease;
        if design.delay > 0 {
            self.granted.closed_until = Some((token, until + design.delay));
        }
        self.granted.unexpired.retain(|(other, _)| *other != token);
        self.granted.unexpired.push((token, until));
        self.forget_expired();
    }

    fn lease_ends(&mut self, claim: Claim) {
        self.granted.closed_until = self.granted.closed_until.filter(|(token, _)| *token != claim.token);
        self.granted.unexpired.retain(|(token, _)| *token != claim.token);
        for client in &mut self.clients {
            if let Stage::Ending { held, done, .. } = &mut client.stage {
                *done |= held.claim == claim;
            }
        }
    }

    pub fn forget_expired(&mut self) {
        let now = self.db.now;
        self.granted.unexpired.retain(|(_, until)| now < *until);
    }
}
