//! A model of readers and writers of a name: the name's row, the readers' rows, clients that are
//! paused at any step or crash, and transactions that confirm a claim before they commit.
//!
//! What a row says to a reader and to a writer is decided by the code's own `rules::judge`; the
//! steps repeat `src/read_write/{read,drain}.rs`.

use libtest_mimic::Trial;
use stateright::{Model, Property};

use crate::{
    rules::Verdict,
    trials,
    verdict::{LEASE, verdict},
};

const CLIENTS: usize = 3;
const READERS: usize = 2;
const NAME: usize = READERS;
const TICKS: i64 = 2;

const APART: &str = "no reader is in beside a writer";
const IN_TIME: &str = "no commit follows the entry of the other side's next holder";
const FENCES: &str = "a fence is never below that of an earlier holder";

/// A wrong design that looks equally good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// A reader looks at the name, and then claims a row.
    ReaderLooksFirst,
    /// A writer looks at the readers, and then claims the name.
    WriterLooksFirst,
    /// A writer enters beside a reader whose lease is over, without ending its claim.
    ExpiredReaderIgnored,
    /// A reader enters beside a writer whose lease is over.
    ExpiredWriterIgnored,
    /// A reader that waited for the name enters under it though its claim on the name is over.
    TurnIsOver,
    /// The row's token falls when a claim is put back.
    TokenFalls,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Row {
    holder: Option<u8>,
    token: u8,
    expires_at: i64,
    /// A transaction that confirmed the claim has locked the row.
    locked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Claim {
    row: usize,
    token: u8,
    deadline: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Idle,
    /// Wrong designs look before they claim.
    Looked {
        fence: u8,
    },
    /// A reader that has claimed a row, and has to look at the name.
    Claimed(Claim),
    /// A reader that has claimed the name, and has to claim a row.
    InTurn(Claim),
    /// A writer that waits for the readers that its first look showed, by their tokens. The last
    /// look showed those of `left`.
    Drains {
        name: Claim,
        before: Option<[Option<u8>; READERS]>,
        left: [Option<u8>; READERS],
    },
    In {
        claim: Claim,
        fence: u8,
    },
    /// Its transaction has confirmed the claim, and will commit.
    Confirmed {
        claim: Claim,
        fence: u8,
    },
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: i64,
    rows: [Row; READERS + 1],
    clients: [Stage; CLIENTS],
    /// The highest fence of a reader, and of a writer, that was let in.
    fences: [Option<u8>; 2],
    late_commit: bool,
    low_fence: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    /// A client looks at the name, or at the readers.
    Look(usize),
    LookAtReaders(usize),
    /// A writer, or a reader whose turn it is, claims the name.
    ClaimName(usize),
    TakeTurn(usize),
    /// A reader claims this row.
    Claim(usize, usize),
    /// A writer takes over the claim of a reader whose lease is over, and frees the row.
    EndExpired(usize, usize),
    Enter(usize),
    Renew(usize),
    Confirm(usize),
    Commit(usize),
    Release(usize),
    Crash(usize),
}

struct Design(Option<Mutant>);

impl State {
    fn verdict(&self, row: usize, client: usize) -> Verdict {
        let Row { holder, expires_at, .. } = self.rows[row];
        verdict(holder, expires_at, self.now, u8::try_from(client).unwrap())
    }

    /// Runs a claim statement.
    fn claim(&mut self, client: usize, row: usize) -> Option<Claim> {
        let granted = !self.rows[row].locked && !matches!(self.verdict(row, client), Verdict::Refuse(..));
        granted.then(|| {
            let (token, expires_at) = (self.rows[row].token + 1, self.now + LEASE);
            let holder = Some(u8::try_from(client).unwrap());
            self.rows[row] = Row { holder, token, expires_at, locked: false };
            Claim { row, token, deadline: expires_at }
        })
    }

    fn is_ours(&self, claim: Claim, client: usize) -> bool {
        let Row { holder, token, .. } = self.rows[claim.row];
        holder.map(usize::from) == Some(client) && token == claim.token
    }

    fn free(&mut self, design: &Design, client: usize, claim: Claim) {
        if self.is_ours(claim, client) {
            let token = claim.token - u8::from(design.0 == Some(Mutant::TokenFalls));
            self.rows[claim.row] = Row { holder: None, locked: false, token, ..self.rows[claim.row] };
        }
    }

    /// What the name says to a reader: its fence, if it may enter.
    fn access(&self, design: &Design, client: usize) -> Option<u8> {
        let expired_is_open = design.0 == Some(Mutant::ExpiredWriterIgnored);
        match self.verdict(NAME, client) {
            Verdict::Acquire => Some(self.rows[NAME].token),
            Verdict::TakeOver if expired_is_open => Some(self.rows[NAME].token),
            _ => None,
        }
    }

    /// The readers whose claims stand, by their tokens.
    fn readers(&self, design: &Design, client: usize) -> [Option<u8>; READERS] {
        std::array::from_fn(|row| match self.verdict(row, client) {
            Verdict::TakeOver if design.0 == Some(Mutant::ExpiredReaderIgnored) => None,
            Verdict::TakeOver | Verdict::Refuse(..) => Some(self.rows[row].token),
            _ => None,
        })
    }

    /// Lets a client in, if its claim lasts.
    fn enter(&mut self, design: &Design, client: usize, claim: Claim, fence: u8) -> Stage {
        if self.now >= claim.deadline {
            self.free(design, client, claim);
            return Stage::Ended;
        }
        let side = usize::from(claim.row == NAME);
        let [readers, writers] = self.fences;
        self.low_fence |= writers > Some(fence) || (side == 1 && readers >= Some(fence));
        self.fences[side] = self.fences[side].max(Some(fence));
        Stage::In { claim, fence }
    }

    fn look(&mut self, design: &Design, id: usize) -> Option<Stage> {
        Some(match (self.access(design, id), self.clients[id]) {
            (Some(fence), Stage::Claimed(claim)) => self.enter(design, id, claim, fence),
            (None, Stage::Claimed(claim)) => {
                self.free(design, id, claim);
                Stage::Ended
            }
            (Some(fence), _) => Stage::Looked { fence },
            (None, _) => return None,
        })
    }

    fn look_at_readers(&self, design: &Design, id: usize) -> Option<Stage> {
        let seen = self.readers(design, id);
        match self.clients[id] {
            Stage::Drains { name, before, .. } => {
                let left = before.map_or(seen, |before| {
                    std::array::from_fn(|row| seen[row].filter(|token| before[row] == Some(*token)))
                });
                Some(Stage::Drains { name, before: Some(left), left })
            }
            _ => (seen == [None; READERS]).then_some(Stage::Looked { fence: 0 }),
        }
    }

    fn claim_name(&mut self, design: &Design, id: usize) -> Option<Stage> {
        let name = self.claim(id, NAME)?;
        Some(match self.clients[id] {
            Stage::Looked { .. } => self.enter(design, id, name, name.token),
            _ => Stage::Drains { name, before: None, left: [None; READERS] },
        })
    }

    fn claim_row(&mut self, design: &Design, id: usize, row: usize) -> Option<Stage> {
        let claim = self.claim(id, row)?;
        Some(match self.clients[id] {
            Stage::Looked { fence } => self.enter(design, id, claim, fence),
            Stage::InTurn(name) => {
                let stands = self.now < name.deadline || design.0 == Some(Mutant::TurnIsOver);
                self.free(design, id, name);
                if stands {
                    return Some(self.enter(design, id, claim, name.token));
                }
                self.free(design, id, claim);
                Stage::Ended
            }
            _ => Stage::Claimed(claim),
        })
    }

    fn end_expired(&mut self, design: &Design, id: usize, row: usize) -> Option<Stage> {
        let Stage::Drains { name, before, mut left } = self.clients[id] else { return None };
        let ended = self.claim(id, row)?;
        self.free(design, id, ended);
        left[row] = None;
        Some(Stage::Drains { name, before, left })
    }

    fn renew(&mut self, id: usize) -> Option<Stage> {
        let Stage::In { claim, fence } = self.clients[id] else { return None };
        let claim = Claim { deadline: self.now + LEASE, ..claim };
        self.rows[claim.row].expires_at = claim.deadline;
        self.is_ours(claim, id).then_some(Stage::In { claim, fence })
    }

    fn confirm(&mut self, id: usize) -> Option<Stage> {
        let Stage::In { claim, fence } = self.clients[id] else { return None };
        self.rows[claim.row].locked = true;
        self.is_ours(claim, id).then_some(Stage::Confirmed { claim, fence })
    }

    fn commit(&mut self, id: usize) -> Option<Stage> {
        let Stage::Confirmed { claim, fence } = self.clients[id] else { return None };
        let [readers, writers] = self.fences;
        self.late_commit |= if claim.row == NAME { readers >= Some(fence) } else { writers > Some(fence) };
        self.rows[claim.row].locked = false;
        Some(Stage::In { claim, fence })
    }

    fn release(&mut self, design: &Design, id: usize) -> Option<Stage> {
        let Stage::In { claim, .. } = self.clients[id] else { return None };
        self.free(design, id, claim);
        Some(Stage::Ended)
    }

    fn crash(&mut self, id: usize) -> Stage {
        if let Stage::Confirmed { claim, .. } = self.clients[id] {
            self.rows[claim.row].locked = false;
        }
        Stage::Ended
    }
}

impl Design {
    fn starts(&self, id: usize, actions: &mut Vec<Action>) {
        let looks_first = |mutant| self.0 == Some(mutant);
        match looks_first(Mutant::ReaderLooksFirst) {
            true => actions.push(Action::Look(id)),
            false => actions.extend((0..READERS).map(|row| Action::Claim(id, row))),
        }
        actions.push(if looks_first(Mutant::WriterLooksFirst) {
            Action::LookAtReaders(id)
        } else {
            Action::ClaimName(id)
        });
        actions.push(Action::TakeTurn(id));
    }
}

impl Model for Design {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut rows = [Row::default(); READERS + 1];
        rows[NAME].token = 1; // a name that was never claimed lets no reader in
        let (clients, fences) = ([Stage::Idle; CLIENTS], [None; 2]);
        vec![State { now: 0, rows, clients, fences, late_commit: false, low_fence: false }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < TICKS {
            actions.push(Action::Tick);
        }
        let next = state.clients.iter().position(|stage| *stage == Stage::Idle);
        for (id, stage) in state.clients.iter().enumerate() {
            let rows = (0..READERS).map(|row| Action::Claim(id, row));
            match *stage {
                // The clients are interchangeable: each starts after the one before.
                Stage::Idle if Some(id) == next => self.starts(id, actions),
                Stage::Idle | Stage::Ended => continue,
                Stage::Looked { .. } if self.0 == Some(Mutant::WriterLooksFirst) => {
                    actions.push(Action::ClaimName(id));
                }
                Stage::Looked { .. } | Stage::InTurn(_) => actions.extend(rows),
                Stage::Claimed(_) => actions.push(Action::Look(id)),
                Stage::Drains { before, left, .. } => {
                    actions.push(Action::LookAtReaders(id));
                    actions
                        .extend((0..READERS).filter(|row| left[*row].is_some()).map(|row| Action::EndExpired(id, row)));
                    if before.is_some() && left == [None; READERS] {
                        actions.push(Action::Enter(id));
                    }
                }
                Stage::In { .. } => {
                    actions.extend([Action::Renew(id), Action::Confirm(id), Action::Release(id)]);
                }
                Stage::Confirmed { .. } => actions.push(Action::Commit(id)),
            }
            if *stage != Stage::Idle {
                actions.push(Action::Crash(id));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let (id, stage) = match action {
            Action::Tick => {
                state.now += 1;
                return Some(state);
            }
            Action::Look(id) => (id, state.look(self, id)?),
            Action::LookAtReaders(id) => (id, state.look_at_readers(self, id)?),
            Action::ClaimName(id) => (id, state.claim_name(self, id)?),
            Action::TakeTurn(id) => (id, Stage::InTurn(state.claim(id, NAME)?)),
            Action::Claim(id, row) => (id, state.claim_row(self, id, row)?),
            Action::EndExpired(id, row) => (id, state.end_expired(self, id, row)?),
            Action::Enter(id) => match state.clients[id] {
                Stage::Drains { name, .. } => (id, state.enter(self, id, name, name.token)),
                _ => return None,
            },
            Action::Renew(id) => (id, state.renew(id)?),
            Action::Confirm(id) => (id, state.confirm(id)?),
            Action::Commit(id) => (id, state.commit(id)?),
            Action::Release(id) => (id, state.release(self, id)?),
            Action::Crash(id) => (id, state.crash(id)),
        };
        state.clients[id] = stage;
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(APART, |_, state: &State| {
                let is_in = |writer: bool| {
                    state.clients.iter().any(|stage| match stage {
                        Stage::In { claim, .. } | Stage::Confirmed { claim, .. } => {
                            (claim.row == NAME) == writer && state.now < claim.deadline
                        }
                        _ => false,
                    })
                };
                !(is_in(true) && is_in(false))
            }),
            Property::always(IN_TIME, |_, state: &State| !state.late_commit),
            Property::always(FENCES, |_, state: &State| !state.low_fence),
        ]
    }
}

pub fn trials() -> Vec<Trial> {
    let caught = [
        (Mutant::ReaderLooksFirst, APART),
        (Mutant::WriterLooksFirst, APART),
        (Mutant::ExpiredReaderIgnored, IN_TIME),
        (Mutant::ExpiredWriterIgnored, IN_TIME),
        (Mutant::TurnIsOver, APART),
        (Mutant::TokenFalls, FENCES),
    ];
    trials::trials("readers", Design, caught)
}
