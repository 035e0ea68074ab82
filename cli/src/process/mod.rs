//! The process of a command, and this program's own.

pub mod child;
pub mod descendants;
pub mod find;
pub mod front;
pub mod orphans;
pub mod service;
pub mod signals;
pub mod stub;
pub mod surroundings;
pub mod work;
