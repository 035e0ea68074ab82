//! Histories of schedules: worker processes run the same schedules under faults, and a checker
//! judges the table of runs, the effects of the work, and what the workers recorded.

mod checker;
mod checker_tests;
mod crew;
mod faults;
mod histories;
mod record;
mod terms;
pub mod worker;

pub use checker_tests::trials;
pub use histories::register;
