//! A model of the protocol, checked exhaustively for small sizes: clients, the row, the database's
//! clock, pauses, delayed and lost statements and replies, requests that are sent twice, crashes,
//! an operator, a program that knows only the article's columns.
//!
//! The decision is the code's own (`src/rules.rs`), and so is the choice of a permit
//! (`src/lease/wanted.rs`); the rest repeats the table in docs/outcomes.md.
//! Each wrong design must be caught by the property that it breaks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

mod checks;
mod client;
mod design;
mod endings;
mod permits;
mod protocol;
mod readers;
mod schedule;
mod server;
mod state;
mod ticks;
mod trials;
mod verdict;

/// What `src/rules.rs` uses of its crate.
mod key {
    pub use rowlock::Key;

    /// A holder of this model.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Holder(uuid::Uuid);

    impl Holder {
        pub fn of(number: u8) -> Self {
            Self(uuid::Uuid::from_u128(number.into()))
        }

        pub fn as_uuid(&self) -> &uuid::Uuid {
            &self.0
        }
    }
}
#[path = "../../src/rules.rs"]
#[allow(dead_code, unused_imports)]
mod rules;
#[path = "../../src/lease/wanted.rs"]
#[allow(dead_code)]
mod wanted;

fn main() {
    let mut trials = checks::trials();
    trials.extend(ticks::trials());
    trials.extend(endings::trials());
    trials.extend(permits::trials());
    trials.extend(readers::trials());
    libtest_mimic::run(&libtest_mimic::Arguments::from_args(), trials).exit();
}
