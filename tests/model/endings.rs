//! A model of one request that ends two claims, and is sent twice if the first copy has no reply in
//! time: what each of the two callers is told is true.
//!
//! Another transaction locks a row, so that a copy ends one claim and skips the other one.

use libtest_mimic::Trial;
use stateright::{Model, Property};

use crate::trials;

const CLAIMS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Row {
    Held,
    /// Free, with the token of the claim that was ended.
    Free,
    /// Another holder's.
    Taken,
}

/// What tells most of a claim is least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Outcome {
    Done,
    Lost,
    /// Another transaction has the row locked.
    Skipped,
}

/// The outcomes for the claims that the request names.
type Outcomes = [Option<Outcome>; CLAIMS];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Copy {
    Unsent,
    Sent,
    Replied(Outcomes),
    /// Its reply was read, and did not settle the request.
    SetAside(Outcomes),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Said {
    Done,
    Lost,
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    rows: [Row; CLAIMS],
    /// By another transaction.
    locked: [bool; CLAIMS],
    /// The claims that the request names.
    asked: [bool; CLAIMS],
    copies: [Copy; 2],
    /// The claims that a copy names whose reply is not read. It may still run.
    late: Vec<[bool; CLAIMS]>,
    /// A request for the claim has no reply.
    unanswered: [bool; CLAIMS],
    /// The request has ended the claim.
    ended: [bool; CLAIMS],
    said: [Option<Said>; CLAIMS],
    /// How often the request may be sent again because of what it skipped.
    retries: u8,
    /// How often another transaction may lock a row.
    locks: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Lock(usize),
    Unlock(usize),
    /// Another holder claims the row, which is free or whose lease is over.
    Take(usize),
    SendSecond,
    Run(usize),
    RunLate(usize),
    Read(usize),
    GiveUp,
}

/// A wrong design that looks equally good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// Of two replies, the later one counts for each claim, also for one that the earlier copy
    /// ended.
    LaterCounts,
    /// A reply that skips a claim counts, and the other copy is forgotten.
    UnsettledCounts,
    /// When one copy has a reply, the other one is forgotten.
    OtherCopyForgotten,
}

const DONE: &str = "done is said of a claim only if the request ended it";
const LOST: &str = "lost is said of a claim only if the request did not end it";

struct Design(Option<Mutant>);

impl Design {
    fn is(&self, mutant: Mutant) -> bool {
        self.0 == Some(mutant)
    }
}

pub fn trials() -> Vec<Trial> {
    let caught = [(Mutant::LaterCounts, LOST), (Mutant::UnsettledCounts, LOST), (Mutant::OtherCopyForgotten, LOST)];
    trials::trials("endings", Design, caught)
}

impl Model for Design {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            rows: [Row::Held; CLAIMS],
            locked: [false; CLAIMS],
            asked: [true; CLAIMS],
            copies: [Copy::Sent, Copy::Unsent],
            late: vec![],
            unanswered: [false; CLAIMS],
            ended: [false; CLAIMS],
            said: [None; CLAIMS],
            retries: 1,
            locks: 2,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if !state.said.contains(&None) {
            return;
        }
        for index in 0..CLAIMS {
            if state.locked[index] {
                actions.push(Action::Unlock(index));
            } else {
                actions.extend((state.locks > 0).then_some(Action::Lock(index)));
                actions.extend((state.rows[index] != Row::Taken).then_some(Action::Take(index)));
            }
        }
        actions.extend((0..state.late.len()).map(Action::RunLate));
        for (number, copy) in state.copies.into_iter().enumerate() {
            match copy {
                Copy::Sent => actions.push(Action::Run(number)),
                Copy::Replied(_) => actions.push(Action::Read(number)),
                Copy::Unsent if number == 1 && state.copies[0] != Copy::Unsent => actions.push(Action::SendSecond),
                Copy::Unsent | Copy::SetAside(_) => {}
            }
        }
        if state.copies[0] != Copy::Unsent {
            actions.push(Action::GiveUp);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Lock(index) => {
                state.locks -= 1;
                state.locked[index] = true;
            }
            Action::Unlock(index) => state.locked[index] = false,
            Action::Take(index) => state.rows[index] = Row::Taken,
            Action::SendSecond => state.copies[1] = Copy::Sent,
            Action::Run(number) => state.copies[number] = Copy::Replied(state.run(state.asked)),
            Action::RunLate(number) => {
                let asked = state.late.remove(number);
                state.run(asked);
            }
            Action::Read(number) => state.read(self, number)?,
            Action::GiveUp => state.settle([None; CLAIMS], true),
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(DONE, |_, state: &State| {
                (0..CLAIMS).all(|index| state.said[index] != Some(Said::Done) || state.ended[index])
            }),
            Property::always(LOST, |_, state: &State| {
                (0..CLAIMS).all(|index| state.said[index] != Some(Said::Lost) || !state.ended[index])
            }),
        ]
    }
}

impl State {
    /// Carries a copy out.
    fn run(&mut self, asked: [bool; CLAIMS]) -> Outcomes {
        std::array::from_fn(|index| {
            asked[index].then(|| match self.rows[index] {
                Row::Held if self.locked[index] => Outcome::Skipped,
                Row::Held => {
                    (self.rows[index], self.ended[index]) = (Row::Free, true);
                    Outcome::Done
                }
                Row::Free => Outcome::Done,
                Row::Taken => Outcome::Lost,
            })
        })
    }

    /// Reads the reply to a copy. One that does not settle the request is set aside while the other
    /// copy is waited for.
    fn read(&mut self, design: &Design, number: usize) -> Option<()> {
        let Copy::Replied(outcomes) = self.copies[number] else { return None };
        let is_settled = !outcomes.contains(&Some(Outcome::Skipped));
        match self.copies[1 - number] {
            Copy::Unsent => self.settle(outcomes, false),
            Copy::SetAside(earlier) if !design.is(Mutant::LaterCounts) => {
                self.settle(combined(earlier, outcomes), false);
            }
            Copy::SetAside(_) => self.settle(outcomes, false),
            Copy::Sent | Copy::Replied(_) if is_settled => {
                self.settle(outcomes, !design.is(Mutant::OtherCopyForgotten));
            }
            Copy::Sent | Copy::Replied(_) if design.is(Mutant::UnsettledCounts) => self.settle(outcomes, false),
            Copy::Sent | Copy::Replied(_) => self.copies[number] = Copy::SetAside(outcomes),
        }
        Some(())
    }

    /// Tells the callers what these outcomes mean, and sends the request again for the others.
    fn settle(&mut self, outcomes: Outcomes, unanswered: bool) {
        let in_flight = self.copies.into_iter().filter(|copy| *copy == Copy::Sent).count();
        self.late.extend(std::iter::repeat_n(self.asked, in_flight));
        self.late.sort_unstable();
        for (index, outcome) in outcomes.into_iter().enumerate() {
            self.unanswered[index] |= unanswered && self.asked[index];
            self.said[index] = match outcome {
                Some(Outcome::Done) => Some(Said::Done),
                // Another copy may have ended the claim before another holder took the key.
                Some(Outcome::Lost) if self.unanswered[index] => Some(Said::Unknown),
                Some(Outcome::Lost) => Some(Said::Lost),
                Some(Outcome::Skipped) | None => self.said[index],
            };
            self.asked[index] = self.said[index].is_none();
        }
        let sends = self.retries > 0 && self.asked.contains(&true);
        self.retries -= u8::from(sends);
        self.copies = [if sends { Copy::Sent } else { Copy::Unsent }, Copy::Unsent];
    }
}

/// Of the outcomes for a claim, the one that tells most counts, whichever copy was carried out
/// first.
fn combined(one: Outcomes, other: Outcomes) -> Outcomes {
    std::array::from_fn(|index| one[index].min(other[index]))
}
