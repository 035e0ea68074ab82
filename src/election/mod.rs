//! Leader election: one instance leads, and the others wait to take its place.

pub(crate) mod campaign;
pub(crate) mod leaders;
pub(crate) mod leadership;
