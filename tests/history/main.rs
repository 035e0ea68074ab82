//! What is promised under crashes, pauses and failures: processes write down what they do while all that goes on, and a checker
//! decides from the whole history.
//!
//! `ROWLOCK_LONG` says for how many seconds a server is troubled, `ROWLOCK_SEED` what with; `scripts/soak` sets both.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

mod checker;
mod examples;
mod record;

use libtest_mimic::{Arguments, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    macro_rules! examples {
        ($($name:ident),+ $(,)?) => {
            $(trials.push(Trial::test(concat!("checker::", stringify!($name)), || {
                examples::$name();
                Ok(())
            }));)+
        };
    }
    examples! {
        a_good_history_passes, a_row_that_is_deleted_under_its_holder_excuses_it, two_holders_at_a_time_are_caught,
        a_token_that_falls_or_comes_twice_is_caught, a_write_below_the_highest_token_is_caught, a_lost_update_is_caught,
        a_crash_that_is_not_freed_is_caught, a_loss_that_is_told_too_late_is_caught, a_commit_that_is_told_wrongly_is_caught,
        a_release_that_is_told_wrongly_is_caught, a_claim_that_nobody_made_is_caught,
    }
    libtest_mimic::run(&arguments, trials).exit();
}
