//! The guarantees under crashes, pauses and failures. Processes record what they do while the
//! faults happen, and a checker decides from the whole history.
//!
//! `ROWLOCK_LONG` sets the number of seconds of faults on a server, and `ROWLOCK_SEED` sets their
//! choice. `scripts/soak` sets both.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

mod asking;
mod checker;
mod checker_tests;
mod crew;
mod faults;
mod history;
mod leading;
mod record;
mod sharing;
mod sharing_tests;
mod telling;
mod ticks;
mod used;
mod worker;

use harness::Suites;

fn main() {
    if worker::was_asked_for() {
        return worker::main();
    }
    if ticks::worker::was_asked_for() {
        return ticks::worker::main();
    }
    let mut suites = Suites::of_all_servers();
    harness::modules!(suites: history ticks);
    let mut trials = checker_tests::trials();
    trials.extend(sharing_tests::trials());
    trials.extend(ticks::trials());
    harness::run(suites, trials);
}
