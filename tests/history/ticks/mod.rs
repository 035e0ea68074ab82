//! Histories of schedules: worker processes run the same schedules under faults, and a checker
//! judges the table of runs, the effects of the work, and what the workers recorded.

mod checker;
mod checker_tests;
mod crew;
mod faults;
mod gathered;
mod histories;
mod operated;
mod operated_tests;
mod operator;
mod record;
mod terms;
pub mod worker;

pub use histories::register;

pub fn trials() -> impl Iterator<Item = libtest_mimic::Trial> {
    checker_tests::trials().into_iter().chain(operated_tests::trials())
}
