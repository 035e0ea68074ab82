//! The pessimistic lock: leases on keys in the table `t_resource_lock`.

pub(crate) mod admin;
pub(crate) mod agenda;
pub(crate) mod attempt;
pub(crate) mod builder;
pub(crate) mod changes;
pub(crate) mod claims;
pub(crate) mod confirm;
mod creates;
pub(crate) mod ending;
mod forgetting;
pub(crate) mod guard;
pub(crate) mod handle;
pub(crate) mod handle_terms;
pub(crate) mod held;
pub(crate) mod info;
pub(crate) mod ledger;
pub(crate) mod lock;
pub(crate) mod polling;
pub(crate) mod readers;
pub(crate) mod reads;
pub(crate) mod releases;
pub(crate) mod renewer;
pub(crate) mod replies;
mod resource_lock;
mod run;
pub(crate) mod shared;
#[cfg(all(test, feature = "sqlite", feature = "schedule"))]
mod slept_tests;
pub(crate) mod span;
pub(crate) mod state;
pub(crate) mod terms;
pub(crate) mod wait;
pub(crate) mod wanted;
