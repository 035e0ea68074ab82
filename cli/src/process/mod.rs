//! The process of a command, and this program's own.

pub mod descendants;
pub mod find;
pub mod front;
pub mod signals;
pub mod status;
pub mod stub;
pub mod work;
