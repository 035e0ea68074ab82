//! What a check of the database has found.

use anstyle::{AnsiColor, Style};

/// What a check says about the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    Good,
    /// Worth knowing, and no reason to act.
    Note,
    Problem,
}

impl Mark {
    pub fn name(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }

    pub fn style(self) -> Style {
        match self {
            Self::Good => AnsiColor::Green.on_default(),
            Self::Note => AnsiColor::Yellow.on_default(),
            Self::Problem => AnsiColor::Red.on_default(),
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub check: &'static str,
    pub mark: Mark,
    pub found: String,
    /// What to do.
    pub advice: Option<String>,
}

impl Finding {
    pub fn good(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, mark: Mark::Good, found: found.into(), advice: None }
    }

    pub fn note(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, mark: Mark::Note, found: found.into(), advice: Some(advice.into()) }
    }

    pub fn problem(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { mark: Mark::Problem, ..Self::note(check, found, advice) }
    }
}
