//! The guarantees under crashes, pauses and failures. Processes record what they do while the
//! faults happen, and a checker decides from the whole history.
//!
//! `ROWLOCK_LONG` sets the number of seconds of faults on a server, and `ROWLOCK_SEED` sets their
//! choice. `scripts/soak` sets both.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

mod by_hand;
mod checker;
mod crew;
mod faults;
mod record;
mod runs;
mod telling;
mod worker;

/// Shared with the contract tests.
#[path = "../contract/alone.rs"]
#[allow(dead_code)]
mod alone;
#[path = "../contract/harness.rs"]
#[allow(dead_code)]
mod harness;
#[path = "../contract/proxy.rs"]
#[allow(dead_code)]
mod proxy;

// Modules that the contract's `bed` also refers to.
mod article {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[allow(dead_code)]
    pub enum Table {
        Ours,
    }
}

mod examples {
    pub fn are_built() -> bool {
        false
    }
}

#[cfg(feature = "cli")]
mod program_end {
    pub fn has_process_namespaces() -> bool {
        false
    }
}

use libtest_mimic::Trial;

use crew::Books;
use harness::Server;

fn main() {
    if worker::was_asked_for() {
        return worker::main();
    }
    let arguments = alone::arguments();
    let mut trials = Vec::new();
    for server in Server::all() {
        match server.name {
            #[cfg(feature = "sqlite")]
            "sqlite" => histories::<sqlx::Sqlite>(server, &mut trials),
            #[cfg(feature = "postgres")]
            "postgres" => histories::<sqlx::Postgres>(server, &mut trials),
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => histories::<sqlx::MySql>(server, &mut trials),
            _ => {}
        }
    }
    judging(&mut trials);
    libtest_mimic::run(&arguments, trials).exit();
}

fn histories<DB: Books>(server: Server, trials: &mut Vec<Trial>) {
    macro_rules! runs {
        ($($name:ident),+ $(,)?) => {
            $(trials.push(harness::trial::<DB, _>(server, "history", stringify!($name), runs::$name));)+
        };
    }
    runs! {
        promises_hold_while_processes_are_troubled, a_stopped_holders_unfenced_write_overwrites_the_next_ones,
        a_stopped_holders_fenced_write_loses_nothing, a_stopped_transaction_that_is_cut_off_writes_nothing,
    }
}

fn judging(trials: &mut Vec<Trial>) {
    macro_rules! examples {
        ($($name:ident),+ $(,)?) => {
            $(trials.push(Trial::test(concat!("checker::", stringify!($name)), || {
                by_hand::$name();
                Ok(())
            }));)+
        };
    }
    examples! {
        a_good_history_passes, a_row_that_is_deleted_under_its_holder_excuses_it, two_holders_at_a_time_are_caught,
        a_token_that_falls_or_comes_twice_is_caught, a_write_below_the_highest_token_is_caught, a_lost_update_is_caught,
        a_crash_that_is_not_freed_is_caught, a_loss_that_is_told_too_late_is_caught, a_commit_that_is_told_wrongly_is_caught,
        a_release_that_is_told_wrongly_is_caught, a_claim_that_was_never_made_is_caught,
    }
}
