//! The error of all scenarios: it ends the program, which prints it.

pub type Error = Box<dyn std::error::Error + Send + Sync>;
