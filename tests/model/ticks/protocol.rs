//! Schedules as a `stateright::Model`: the actions that are possible in each state, and the
//! properties.

use stateright::{Model, Property};

use crate::{
    rules::Status,
    ticks::{
        design::{Design, Event, Mutant},
        state::*,
    },
};

/// The first slot, and the initial time.
const START: Time = 10 * TICK;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Tick,
    StepClockBack,
    Trigger,
    ForgetHistory,
    /// The statement in flight runs on the server.
    Run(Id),
    /// A statement that the client no longer waits for runs on the server.
    RunLate(Id),
    Deliver(Id),
    GiveUp(Id),
    Pause(Id),
    Resume(Id),
    Crash(Id),
    Look(Id),
    Claim(Id),
    Renew(Id),
    Succeed(Id),
    Fail(Id),
    /// The work is stopped, and its run handed back.
    Stop(Id),
    Again(Id),
    /// The client stops to try.
    Leave(Id),
}

pub const TWICE: &str = "no slot ends twice";
pub const LOST: &str = "no slot is lost";
pub const TRIGGERS: &str = "no trigger is lost";
pub const GROWS: &str = "slots and tokens only grow";
pub const SUPERSEDED: &str = "a run that has ended or was taken over never changes the row";
pub const COEXIST: &str = "two runs that count on their leases never coexist";
pub const HISTORY: &str = "each success has its row in the history";
pub const SAID: &str = "success is said only of a success";
pub const DUE: &str = "the schedule is always due again";
pub const DONE: &str = "all ticks are done";

impl Model for Design {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client { life: Life::Running, stage: Stage::Idle, call: None, late: None, tries: self.tries };
        let row = Row {
            slot: START,
            due: START,
            triggered: None,
            run_slot: None,
            attempt: 0,
            missed: 0,
            holder: None,
            token: 0,
            begin: 0,
        };
        let record = Record {
            ended: vec![],
            succeeded: vec![],
            valid: None,
            highest: 0,
            asked: vec![],
            forgotten: false,
            faults: vec![],
        };
        vec![State {
            now: START,
            stepped_back: 0,
            row,
            history: vec![],
            clients: vec![client; self.clients],
            next_holder: 0,
            losses: self.losses,
            triggers: self.triggers,
            forgets: self.forgets,
            record,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.monotonic() < START + self.ticks * TICK {
            actions.push(Action::Tick);
        }
        if self.step_back > 0 && state.stepped_back == 0 {
            actions.push(Action::StepClockBack);
        }
        if state.triggers > 0 {
            actions.push(Action::Trigger);
        }
        if state.forgets > 0 && !state.history.is_empty() {
            actions.push(Action::ForgetHistory);
        }
        for (id, client) in state.clients.iter().enumerate() {
            if client.late.is_some() {
                actions.push(Action::RunLate(id));
            }
            if client.life != Life::Crashed {
                self.actions_of(state, id, client, actions);
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Tick => {
                state.now += self.step;
                (0..state.clients.len()).for_each(|id| state.tell_lost(self, id));
            }
            Action::StepClockBack => {
                state.now -= self.step_back;
                state.stepped_back += self.step_back;
            }
            Action::Trigger => {
                state.triggers -= 1;
                state.trigger(self);
            }
            Action::ForgetHistory => {
                state.forgets -= 1;
                state.history.clear();
                state.record.forgotten = true;
            }
            Action::Run(id) => state.run_call(self, id)?,
            Action::RunLate(id) => state.run_late(self, id)?,
            Action::Deliver(id) => state.deliver(self, id)?,
            Action::GiveUp(id) => {
                state.losses -= 1;
                state.give_up(id)?;
            }
            Action::Pause(id) => state.clients[id].life = Life::Paused,
            Action::Resume(id) => {
                state.clients[id].life = Life::Running;
                state.tell_lost(self, id);
            }
            Action::Crash(id) => state.crash(id),
            Action::Look(id) => state.look(id),
            Action::Claim(id) => state.claims(id)?,
            Action::Renew(id) => {
                let Stage::Working(run) = state.clients[id].stage else { return None };
                state.send(id, Statement::Renew(run.claim));
            }
            Action::Succeed(id) | Action::Fail(id) => {
                let Stage::Working(run) = state.clients[id].stage else { return None };
                let status = if action == Action::Succeed(id) { Status::Succeeded } else { Status::Failed };
                state.finish(self, id, run, status);
            }
            Action::Stop(id) => {
                let Stage::Working(run) = state.clients[id].stage else { return None };
                state.clients[id].stage = Stage::Idle;
                state.send(id, Statement::Abandon(run.claim));
            }
            Action::Again(id) => state.again(id)?,
            Action::Leave(id) => {
                // A claim whose slot could not be moved is handed back.
                let abandoned = match state.clients[id].stage {
                    Stage::Passing(run, _) => Some(Statement::Abandon(run.claim)),
                    _ => None,
                };
                state.clients[id].stage = Stage::Idle;
                abandoned.into_iter().for_each(|statement| state.send(id, statement));
            }
        }
        if state.row.holder.is_none() && state.row.slot > START + self.ticks * TICK {
            self.meet(Event::AllDone);
        }
        if self.only.is_none() {
            state.forget_names();
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::always(TWICE, |_, state: &State| state.record.ended.windows(2).all(|pair| pair[0] < pair[1])),
            Property::always(LOST, none_lost),
            Property::always(TRIGGERS, |_, state: &State| {
                let waits = |time: &i64| {
                    let row = &state.row;
                    row.triggered == Some(*time) || (row.attempt > 0 && row.run_slot == Some(*time))
                };
                state.record.asked.iter().all(|time| state.record.ended.contains(time) || waits(time))
            }),
            Property::always(GROWS, |_, state: &State| {
                !state.record.faults.iter().any(|fault| [Fault::TokenFell, Fault::SlotFell].contains(fault))
            }),
            Property::always(SUPERSEDED, |_, state: &State| !state.record.faults.contains(&Fault::SupersededChange)),
            Property::always(SAID, |_, state: &State| !state.record.faults.contains(&Fault::SucceededSaidWrongly)),
            Property::always(HISTORY, |_, state: &State| {
                let told = |token: &i64| state.history.iter().any(|told| told.status == 'S' && told.token == *token);
                state.record.forgotten || state.record.succeeded.iter().all(told)
            }),
            Property::always(DUE, is_due),
            Property::sometimes(DONE, |design: &Self, state: &State| {
                state.row.holder.is_none() && state.row.slot > START + design.ticks * TICK
            }),
        ];
        // A clock that is stepped back invalidates the guarantees about time.
        if self.step_back == 0 {
            all.push(Property::always(COEXIST, |_, state: &State| {
                let now = state.monotonic();
                state.clients.iter().filter(|client| client.works(now).is_some()).count() < 2
            }));
        }
        all.retain(|property| self.only.is_none_or(|only| only == property.name));
        all
    }
}

impl Design {
    fn actions_of(&self, state: &State, id: Id, client: &Client, actions: &mut Vec<Action>) {
        let works = matches!(client.stage, Stage::Working(_));
        if self.crashes && client.stage != Stage::Idle {
            actions.push(Action::Crash(id));
        }
        match client.life {
            Life::Paused => actions.push(Action::Resume(id)),
            _ if self.pauses && works => actions.push(Action::Pause(id)),
            _ => {}
        }
        if let Some(call) = client.call {
            actions.push(if call.reply.is_none() { Action::Run(id) } else { Action::Deliver(id) });
            if state.losses > 0 && client.late.is_none() {
                actions.push(Action::GiveUp(id));
            }
            return;
        }
        match client.stage {
            Stage::Idle if client.tries > 0 && state.row.due <= state.now => actions.push(Action::Look(id)),
            Stage::Looked { .. } => actions.push(Action::Claim(id)),
            Stage::Working(run) => {
                actions.push(Action::Succeed(id));
                if self.failures {
                    actions.push(Action::Fail(id));
                }
                if self.stops {
                    actions.push(Action::Stop(id));
                }
                if run.deadline < state.monotonic() + self.lease {
                    actions.push(Action::Renew(id));
                }
            }
            Stage::Passing(..) | Stage::Ending(..) | Stage::PuttingBack(_) => {
                actions.extend([Action::Again(id), Action::Leave(id)]);
            }
            _ => {}
        }
    }
}

/// All slots before the row's have ended or were counted as missed, but for one that is run or is
/// to be run again, and those for which it stands.
fn none_lost(_: &Design, state: &State) -> bool {
    let Row { slot, run_slot, attempt, missed, holder, .. } = state.row;
    let stands = |run: Time| run - Time::from(missed) * TICK..=run;
    let goes_on = |of: Time| run_slot.is_some_and(|run| stands(run).contains(&of)) && (attempt > 0 || holder.is_some());
    (START..slot).step_by(TICK.unsigned_abs() as usize).all(|of| state.record.ended.contains(&of) || goes_on(of))
}

/// Whatever the clients do from now on, even if all of them crash: the row is due when its lease
/// ends, at its slot, or now.
fn is_due(design: &Design, state: &State) -> bool {
    let Row { slot, due, holder, triggered, .. } = state.row;
    let now = state.monotonic();
    match holder {
        _ if design.is(Mutant::AdvanceAtClaim) => true,
        Some(_) => due <= now + design.lease,
        None if triggered.is_some() => due <= now,
        None => due <= now.max(slot),
    }
}
