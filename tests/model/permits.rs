//! A model of the claim on any one of N permits: rows, clients, lost replies, requests that run
//! late, crashes. What a client claims is chosen by the code's own `wanted::choose`.

use libtest_mimic::Trial;
use stateright::{Model, Property};

use crate::{
    rules::Verdict,
    trials,
    verdict::{LEASE, verdict},
    wanted::{Choice, choose},
};

const MOST: usize = 2;
const CLIENTS: usize = 3;
const TICKS: i64 = 2;

const AT_MOST: &str = "never more than N hold at a time";
const ONE_PERMIT: &str = "a request takes one permit";

/// A wrong design that looks equally good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// The claim takes the row that the look showed to be free, without judging it again.
    LookDecides,
    /// One client has one permit more.
    OneMore,
    /// After a lost reply the client looks again, and may claim another permit.
    ChoiceForgotten,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Row {
    holder: Option<u8>,
    expires_at: i64,
}

impl Row {
    fn verdict(self, now: i64, client: u8) -> Verdict {
        verdict(self.holder, self.expires_at, now, client)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Idle,
    /// Wants a permit, of which it has chosen one.
    Asks {
        holder: u8,
        chosen: Option<usize>,
        unanswered: bool,
    },
    Holds {
        holder: u8,
        row: usize,
        deadline: i64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: i64,
    rows: Vec<Row>,
    clients: Vec<Stage>,
    /// Claims without a reply that may still run.
    late: Option<(u8, usize)>,
    /// A repeated request was refused while the one without a reply may still run: a permit that it
    /// takes is free again only when its lease ends.
    abandoned_late: bool,
    losses: u8,
    next_holder: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    /// The client believes that this permit is free.
    Guess(usize, usize),
    /// The client reads all rows, and draws this number.
    Look(usize, usize),
    Claim(usize),
    /// The claim runs, and its reply is lost.
    LoseReply(usize),
    /// The claim has no reply, and may run late.
    Delay(usize),
    RunLate,
    Release(usize),
    Crash(usize),
}

struct Design(Option<Mutant>);

impl State {
    /// Runs a claim statement. Returns whether it is granted.
    fn claim(&mut self, design: &Design, holder: u8, row: usize) -> bool {
        let granted = !matches!(self.rows[row].verdict(self.now, holder), Verdict::Refuse(..));
        if granted || design.0 == Some(Mutant::LookDecides) {
            self.rows[row] = Row { holder: Some(holder), expires_at: self.now + LEASE };
            return true;
        }
        false
    }

    fn look(&self, design: &Design, id: usize, holder: u8, random: usize) -> Choice {
        let count = if id == 0 && design.0 == Some(Mutant::OneMore) { MOST + 1 } else { MOST };
        let verdicts: Vec<Verdict> = self.rows[..count].iter().map(|row| row.verdict(self.now, holder)).collect();
        choose(&verdicts, random)
    }
}

impl Model for Design {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let (rows, clients) = (vec![Row { holder: None, expires_at: 0 }; MOST + 1], vec![Stage::Idle; CLIENTS]);
        vec![State { now: 0, rows, clients, late: None, abandoned_late: false, losses: 1, next_holder: 0 }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < TICKS {
            actions.push(Action::Tick);
        }
        if state.late.is_some() {
            actions.push(Action::RunLate);
        }
        for (id, stage) in state.clients.iter().enumerate() {
            match stage {
                // Each asks once, in this order: the clients are interchangeable.
                Stage::Idle if id == usize::from(state.next_holder) => {
                    actions.extend((0..MOST).map(|row| Action::Guess(id, row)));
                    actions.extend((0..=MOST).map(|random| Action::Look(id, random)));
                }
                Stage::Idle => {}
                Stage::Asks { chosen: None, .. } => {
                    actions.extend((0..=MOST).map(|random| Action::Look(id, random)));
                }
                Stage::Asks { .. } => {
                    actions.push(Action::Claim(id));
                    if state.losses > 0 {
                        actions.push(Action::LoseReply(id));
                        actions.extend(state.late.is_none().then_some(Action::Delay(id)));
                    }
                }
                Stage::Holds { .. } => actions.extend([Action::Release(id), Action::Crash(id)]),
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Tick => state.now += 1,
            Action::RunLate => {
                let (holder, row) = state.late.take()?;
                state.claim(self, holder, row);
            }
            Action::Crash(id) => state.clients[id] = Stage::Idle,
            Action::Release(id) => {
                let Stage::Holds { holder, row, .. } = state.clients[id] else { return None };
                if state.rows[row].holder == Some(holder) {
                    state.rows[row].holder = None;
                }
                state.clients[id] = Stage::Idle;
            }
            Action::Guess(id, _)
            | Action::Look(id, _)
            | Action::Claim(id)
            | Action::LoseReply(id)
            | Action::Delay(id) => {
                let (holder, chosen, unanswered) = match state.clients[id] {
                    Stage::Asks { holder, chosen, unanswered } => (holder, chosen, unanswered),
                    Stage::Idle => (state.next_holder, None, false),
                    Stage::Holds { .. } => return None,
                };
                state.next_holder = state.next_holder.max(holder + 1);
                state.clients[id] = state.goes_on(self, action, id, (holder, chosen, unanswered))?;
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(AT_MOST, |_, state: &State| {
                let holds = |stage: &&Stage| matches!(stage, Stage::Holds { deadline, .. } if state.now < *deadline);
                state.clients.iter().filter(holds).count() <= MOST
            }),
            Property::always(ONE_PERMIT, |_, state: &State| {
                let held: Vec<u8> = state.rows.iter().filter_map(|row| row.holder).collect();
                state.abandoned_late || (1..held.len()).all(|index| !held[..index].contains(&held[index]))
            }),
        ]
    }
}

impl State {
    /// The stage of a client that asks, after one of its steps.
    fn goes_on(
        &mut self,
        design: &Design,
        action: Action,
        id: usize,
        (holder, chosen, unanswered): (u8, Option<usize>, bool),
    ) -> Option<Stage> {
        let kept = chosen.filter(|_| design.0 != Some(Mutant::ChoiceForgotten));
        Some(match action {
            Action::Guess(_, row) => Stage::Asks { holder, chosen: Some(row), unanswered },
            Action::Look(_, random) => match self.look(design, id, holder, random) {
                Choice::Claim(row) => Stage::Asks { holder, chosen: Some(row), unanswered },
                Choice::Refuse(_) => Stage::Idle,
            },
            Action::Claim(_) => match self.claim(design, holder, chosen?) {
                true => Stage::Holds { holder, row: chosen?, deadline: self.now + LEASE },
                false => {
                    self.abandoned_late |= self.late.is_some_and(|(late, _)| late == holder);
                    Stage::Asks { holder, chosen: None, unanswered: false }
                }
            },
            Action::LoseReply(_) => {
                self.losses -= 1;
                self.claim(design, holder, chosen?);
                Stage::Asks { holder, chosen: kept, unanswered: true }
            }
            Action::Delay(_) => {
                self.losses -= 1;
                self.late = Some((holder, chosen?));
                Stage::Asks { holder, chosen: kept, unanswered: true }
            }
            _ => return None,
        })
    }
}

pub fn trials() -> Vec<Trial> {
    let caught = [(Mutant::LookDecides, AT_MOST), (Mutant::OneMore, AT_MOST), (Mutant::ChoiceForgotten, ONE_PERMIT)];
    trials::trials("permits", Design, caught)
}
