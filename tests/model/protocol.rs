//! The protocol as a `stateright::Model`: the actions that are possible in each state, and the
//! properties that must always hold.

use stateright::{Model, Property};

use crate::{
    design::{Design, Mutant},
    rules::{Rules, Verdict},
    server::judge,
    state::*,
};

/// The initial time: later than any minimum interval that begins at the epoch.
const START: Tick = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Tick,
    StepClockBack,
    ForceRelease,
    DeleteRow,
    ForeignLock,
    ForeignRelease,
    /// The server ends the transaction of a connection that is closed.
    ConnectionLost(Id),
    /// The statement in flight runs on the server.
    Run(Id),
    /// The first copy of a request that was sent twice.
    RunFirst(Id),
    /// The second copy skips the row, which the first one has locked.
    SkipSecond(Id),
    /// A statement whose reply is not read runs on the server.
    RunLate(Id, usize),
    Deliver(Id),
    DeliverFirst(Id),
    SendAgain(Id),
    GiveUp(Id),
    Pause(Id),
    Resume(Id),
    Crash(Id),
    TryAcquire(Id),
    AskAgain(Id),
    EndTry(Id),
    Renew(Id),
    Release(Id, Ended),
    Abandon(Id),
    EndAgain(Id),
    /// Abandons once more what a renewal may have extended.
    AbandonAgain(Id),
    EndUnknown(Id),
    Confirm(Id),
    Commit(Id),
    /// Another task commits under the same claim: confirmed and committed in one step.
    CommitOther(Id),
    Rollback(Id),
    ReadConfirms(Id),
}

pub const COEXIST: &str = "two unexpired claims never coexist";
pub const STANDS: &str = "a lease that says it is held is held";
pub const TOKENS: &str = "tokens only grow";
pub const COMMIT: &str = "a stale claim never commits";
pub const SUPERSEDED: &str = "a superseded holder never renews or releases";
pub const REPLACED: &str = "a crashed holder is always replaced";
pub const WINDOW: &str = "two starts are min_interval apart";
pub const FOREIGN: &str = "another program's lock is respected";
pub const DONE: &str = "done is said of an ending only if it was done";
pub const DELAYED: &str = "the next holder starts the lock-delay after the last one had to stop";
pub const LOST: &str = "lost is said of an ending only if it was not done";
pub const VOID: &str = "nothing is granted or extended after its limit";
pub const OVER: &str = "nothing stands of a client that says so";
pub const SAID: &str = "what is said of a commit is true";

impl Model for Design {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client::new(self.tries, self.transactions);
        vec![State {
            db: Database { now: START, row: None, lock: None },
            stepped_back: 0,
            next_holder: 0,
            clients: vec![client; self.clients],
            foreign: Foreign { working: false, has_row: false, tries: self.foreign_tries },
            losses: self.losses,
            force_releases: self.force_releases,
            deletions: self.deletions,
            granted: Granted {
                valid: None,
                unexpired: vec![],
                highest: 0,
                last_start: None,
                closed_until: None,
                faults: vec![],
            },
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.monotonic() < START + self.ticks {
            actions.push(Action::Tick);
        }
        if self.step_back > 0 && state.stepped_back == 0 {
            actions.push(Action::StepClockBack);
        }
        for (id, client) in state.clients.iter().enumerate() {
            actions.extend((0..client.late.len()).map(|index| Action::RunLate(id, index)));
            if state.db.lock == Some(id) && !client.is_in_transaction() {
                actions.push(Action::ConnectionLost(id));
            }
            if client.life != Life::Crashed {
                self.actions_of(state, id, client, actions);
            }
        }
        // These actions wait for the row too.
        let Some(row) = state.db.row.filter(|_| state.db.lock.is_none()) else { return };
        if state.force_releases > 0 {
            actions.push(Action::ForceRelease);
        }
        // Without the row, only the clock distinguishes the next token from the last.
        let ticked = self.is(Mutant::ForgottenAhead) || row.token < state.db.now * MICROS;
        if state.deletions > 0 && !row.locked && ticked {
            actions.push(Action::DeleteRow);
        }
        if state.foreign.working {
            actions.push(Action::ForeignRelease);
        } else if state.foreign.tries > 0 && state.db.now >= row.begin_time + self.minutes {
            actions.push(Action::ForeignLock);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Tick => {
                state.db.now += 1;
                state.forget_expired();
                (0..state.clients.len()).for_each(|id| state.tell_lost(self, id));
            }
            Action::StepClockBack => {
                state.db.now -= self.step_back;
                state.stepped_back += self.step_back;
            }
            Action::ForceRelease => {
                state.force_releases -= 1;
                state.force_release(self);
            }
            Action::DeleteRow => {
                state.deletions -= 1;
                state.delete_row(self);
            }
            Action::ForeignLock => state.foreign_lock(self),
            Action::ForeignRelease => state.foreign_release(),
            Action::ConnectionLost(id) => state.connection_lost(id),
            Action::Run(id) => state.run_call(self, id)?,
            Action::RunFirst(id) => state.run_first(self, id)?,
            Action::SkipSecond(id) => state.skip_second(id)?,
            Action::RunLate(id, index) => state.run_late(self, id, index)?,
            Action::Deliver(id) => state.deliver(self, id)?,
            Action::DeliverFirst(id) => state.deliver_first(self, id)?,
            Action::SendAgain(id) => {
                state.losses -= 1;
                state.send_again(self, id)?;
            }
            Action::GiveUp(id) => {
                state.losses -= 1;
                state.give_up(self, id)?;
            }
            Action::Pause(id) => state.clients[id].life = Life::Paused,
            Action::Resume(id) => {
                state.clients[id].life = Life::Running;
                state.tell_lost(self, id);
            }
            Action::Crash(id) => state.crash(self, id),
            Action::TryAcquire(id) => state.try_acquire(self, id),
            Action::AskAgain(id) => {
                let Stage::Trying { holder } = state.clients[id].stage else { return None };
                state.send(self, id, Statement::Claim { holder });
            }
            Action::EndTry(id) => {
                let Stage::Trying { holder } = state.clients[id].stage else { return None };
                state.close(self, id, holder);
            }
            Action::EndUnknown(id) => state.lose(id),
            Action::Renew(id) => {
                let claim = state.clients[id].held()?.claim;
                state.send(self, id, Statement::Change(claim, Change::Renew));
            }
            Action::Release(id, status) => state.end(self, id, Change::Release(status)),
            Action::Abandon(id) => state.end(self, id, Change::Abandon),
            Action::EndAgain(id) => {
                let Stage::Ending { held, change, .. } = state.clients[id].stage else { return None };
                state.send(self, id, Statement::Change(held.claim, change));
            }
            Action::AbandonAgain(id) => {
                let Stage::EndingAgain(claim) = state.clients[id].stage else { return None };
                state.send(self, id, Statement::Change(claim, Change::Abandon));
            }
            Action::Confirm(id) => {
                let claim = state.clients[id].held()?.claim;
                state.begin(self, id, claim);
            }
            Action::Commit(id) => {
                let transaction = state.clients[id].transaction.as_mut()?;
                let Step::Confirmed(count) = transaction.step else { return None };
                transaction.step = Step::Committing(count);
                let claim = transaction.claim;
                state.send(self, id, Statement::Commit(claim));
            }
            Action::CommitOther(id) => {
                let claim = state.clients[id].held()?.claim;
                state.commit_other(self, claim)?;
            }
            Action::Rollback(id) => {
                state.clients[id].transaction = None;
                state.db.lock = state.db.lock.filter(|owner| *owner != id);
            }
            Action::ReadConfirms(id) => {
                let claim = state.clients[id].transaction?.claim;
                state.send(self, id, Statement::ReadConfirms(claim));
            }
        }
        if self.only.is_none() {
            state.forget_names();
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        macro_rules! free_of {
            ($name:expr, $fault:ident) => {
                Property::always($name, |_, state: &State| !state.granted.faults.contains(&Fault::$fault))
            };
        }
        let steady = self.step_back == 0;
        let alone = self.force_releases == 0 && self.foreign_tries == 0;
        let mut all = vec![
            free_of!(TOKENS, TokenFell),
            free_of!(COMMIT, StaleCommit),
            free_of!(SUPERSEDED, SupersededChange),
            free_of!(FOREIGN, ForeignLockTaken),
            free_of!(SAID, CommitSaidWrongly),
        ];
        if self.terms.rules == Rules::Recover || self.only == Some(REPLACED) {
            all.push(Property::always(REPLACED, replaced));
        }
        // A clock that is stepped back invalidates the guarantees about time. An operator or
        // another program may overrule a lease.
        if steady {
            all.push(Property::always(COEXIST, |_, state: &State| state.granted.unexpired.len() < 2));
            all.push(free_of!(WINDOW, StartedWithinMinInterval));
            all.push(free_of!(DELAYED, StartedWithinDelay));
        }
        if steady && alone {
            all.push(Property::always(STANDS, |_, state: &State| {
                let now = state.monotonic();
                state
                    .clients
                    .iter()
                    .filter(|client| client.stands(now))
                    .all(|client| client.held().map(|held| held.claim.token) == state.granted.valid)
            }));
        }
        if self.patience.is_some() {
            all.push(free_of!(VOID, CarriedOutLate));
            all.push(Property::always(OVER, |design: &Self, state: &State| {
                let now = state.db.now;
                let stands =
                    |holder| state.db.row.is_some_and(|row| row.holder == Some(holder) && Some(now) < row.expires_at);
                !state.clients.iter().filter_map(|client| client.says_over(now, design.row_lease())).any(stands)
            }));
        }
        all.push(free_of!(DONE, DoneSaidWrongly));
        all.push(free_of!(LOST, LostSaidWrongly));
        all.retain(|property| self.only.is_none_or(|only| only == property.name));
        all
    }
}

impl Design {
    fn actions_of(&self, state: &State, id: Id, client: &Client, actions: &mut Vec<Action>) {
        let holds = matches!(client.stage, Stage::Held(_));
        let is_over = matches!(client.stage, Stage::Idle | Stage::Over { .. });
        let busy = !is_over || client.transaction.is_some();
        if self.crashes && busy {
            actions.push(Action::Crash(id));
        }
        match client.life {
            Life::Paused => actions.push(Action::Resume(id)),
            _ if self.pauses && holds => actions.push(Action::Pause(id)),
            _ => {}
        }
        if let Some(call) = client.call {
            actions.push(if call.reply.is_none() { Action::Run(id) } else { Action::Deliver(id) });
            if let Some(first) = client.first {
                actions.push(if first.reply.is_none() { Action::RunFirst(id) } else { Action::DeliverFirst(id) });
                if first.reply.is_none() && call.reply.is_none() {
                    actions.push(Action::SkipSecond(id));
                }
            }
            if state.losses > 0 {
                actions.push(Action::GiveUp(id));
            }
            let may_repeat = matches!(call.statement, Statement::Claim { .. } | Statement::Change(..));
            if state.losses > 0 && self.patience.is_some() && may_repeat && client.first.is_none() {
                actions.push(Action::SendAgain(id));
            }
            return;
        }
        match client.transaction.map(|transaction| transaction.step) {
            Some(Step::Confirmed(_)) => actions.extend([Action::Commit(id), Action::Rollback(id)]),
            Some(Step::Unsure(_)) => {
                actions.push(Action::ReadConfirms(id));
                if self.shared_claim && holds && state.db.lock.is_none() {
                    actions.push(Action::CommitOther(id));
                }
            }
            Some(_) => {}
            None if client.stage == Stage::Idle && client.tries > 0 => actions.push(Action::TryAcquire(id)),
            None if holds => {
                if client.transactions > 0 {
                    actions.push(Action::Confirm(id));
                }
                if self.releases {
                    actions.push(Action::Release(id, Ended::Succeeded));
                }
                if self.failures {
                    actions.push(Action::Release(id, Ended::Failed));
                }
                if self.abandons {
                    actions.push(Action::Abandon(id));
                }
            }
            None => {}
        }
        match client.stage {
            Stage::Held(held) if held.deadline < state.monotonic() + self.lease => actions.push(Action::Renew(id)),
            Stage::Held(_) => {}
            Stage::Trying { .. } => actions.extend([Action::AskAgain(id), Action::EndTry(id)]),
            Stage::Ending { held, .. } if state.monotonic() < held.deadline => actions.push(Action::EndAgain(id)),
            Stage::Ending { .. } => actions.push(Action::EndUnknown(id)),
            Stage::EndingAgain(_)
                if client.renewing >= Some(state.db.now) && !self.is(Mutant::AbandonedAgainTooSoon) => {}
            Stage::EndingAgain(_) => actions.push(Action::AbandonAgain(id)),
            Stage::Idle | Stage::Over { .. } => {}
        }
    }
}

/// In every state: if all clients crash now, a new one acquires the key when the lease and the
/// minimum interval are over, and acquires it now if the lease is over.
fn replaced(design: &Design, state: &State) -> bool {
    const NEW: u8 = u8::MAX;
    let Some(row) = &state.db.row else { return true };
    if state.foreign.has_row && design.terms.article_clients.is_none() {
        return true;
    }
    let grants = |now| matches!(judge(design, Some(row), now, NEW), Verdict::Acquire | Verdict::TakeOver);
    let now = state.db.now;
    let last = design.row_lease().max(design.min_interval).max(design.minutes) + state.stepped_back;
    let expired = row.locked && row.expires_at <= Some(now) && !state.foreign.has_row;
    grants(now + last) && (!expired || grants(now))
}
