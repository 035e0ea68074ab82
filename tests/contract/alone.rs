//! Which tests run in parallel, and which run alone.
//!
//! Most tests spend most of their time waiting, so many more run in parallel than there are
//! processors. A test that measures a duration, or counts events within a period, runs alone, after
//! all others.

use std::sync::{PoisonError, RwLock};

use libtest_mimic::{Arguments, Trial};

/// How many tests run in parallel, unless `--test-threads` is given.
const AT_ONCE: usize = 6;

/// The tests that run alone, as `module::name`.
const ALONE: &[&str] = &[
    "acquire::a_try_ends_at_its_time_limit_with_the_pool_empty",
    "keeping::a_lease_is_renewed_in_the_background",
    "keeping::a_pool_of_one_is_enough",
    "keeping::a_renewal_that_finds_the_row_locked_is_unknown_not_lost",
    "lanes::a_runtime_that_stands_still_holds_up_no_other",
    "lanes::a_runtime_that_stands_still_delays_no_other_request",
    "operating::a_forced_release_does_not_pass_a_transaction_at_the_row",
    "listening::word_of_a_release_comes_before_the_next_question",
    "program_run::a_command_that_does_not_start_leaves_the_key_free",
    "program_run::it_takes_leave_of_the_server",
    "program_run::waiting_ends_with_the_key_or_with_the_time",
    "sets::a_set_is_renewed_in_the_background",
    "trips::a_transactions_round_trips_are_as_stated",
    "trips::round_trips_are_as_stated",
    "trips::round_trips_of_versions_are_as_stated",
    "waiting::a_waiter_that_gives_up_passes_the_permit_on",
    "work::retries_that_are_used_up_are_a_conflict",
];

static MACHINE: RwLock<()> = RwLock::new(());

/// Returns the command line, with this suite's own number of threads.
pub fn arguments() -> Arguments {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(AT_ONCE);
    arguments
}

/// Returns whether the test `DATABASE::module::name` runs alone.
fn runs_alone(trial: &str) -> bool {
    trial.split_once("::").is_some_and(|(_, test)| ALONE.contains(&test))
}

/// Moves the tests that run alone to the end, so that no other test waits for them.
///
/// # Panics
/// Panics if the list names a test that does not exist.
pub fn last(trials: &mut [Trial]) {
    if cfg!(all(feature = "sqlite", feature = "postgres", feature = "mysql", feature = "cli")) {
        for test in ALONE {
            let is_there =
                trials.iter().any(|trial| trial.name().split_once("::").is_some_and(|(_, name)| name == *test));
            assert!(is_there, "no test is named {test}, which is to run alone");
        }
    }
    trials.sort_by_key(|trial| runs_alone(trial.name()));
}

/// Runs a test in parallel with others, or alone.
pub fn run<T>(trial: &str, test: impl FnOnce() -> T) -> T {
    if runs_alone(trial) {
        let _alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
        test()
    } else {
        let _beside = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
        test()
    }
}
