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

use harness::{Server, Suite};

fn main() {
    if worker::was_asked_for() {
        return worker::main();
    }
    if ticks::worker::was_asked_for() {
        return ticks::worker::main();
    }
    let suites = Server::all().map(|server| {
        let mut suite = Suite::new(server);
        match server.name {
            "sqlite" => register::<sqlx::Sqlite>(&mut suite),
            "postgres" => register::<sqlx::Postgres>(&mut suite),
            _ => register::<sqlx::MySql>(&mut suite),
        }
        suite
    });
    let mut trials = checker_tests::trials();
    trials.extend(sharing_tests::trials());
    trials.extend(ticks::trials());
    harness::run(suites, trials);
}

fn register<DB: crew::Books>(suite: &mut Suite) {
    history::register::<DB>(suite);
    ticks::register::<DB>(suite);
}
