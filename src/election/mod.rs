//! Leader election: one instance leads, and the others wait to take its place.
//!
//! `campaign.rs` acquires the key of the election, `leadership.rs` is a term of office, and
//! `leaders.rs` observes who leads.

pub(crate) mod campaign;
pub(crate) mod leaders;
pub(crate) mod leadership;
