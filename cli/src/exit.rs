//! The program's exit codes, which never change, and the one-line message that states the cause.

use std::{fmt, path::Path};

use rowlock::{
    Error,
    errors::{DatabaseFault, NotFound, Setup},
};

pub const OK: u8 = 0;
/// The request is not possible in this form.
pub const USAGE: u8 = 2;
/// The database cannot be reached, or failed.
pub const UNAVAILABLE: u8 = 69;
/// A tick has failed without its command: the instances that ran it died too often.
pub const GIVEN_UP: u8 = 70;
/// A file or stdout could not be written.
pub const IO: u8 = 73;
/// The claim was lost.
pub const LOST: u8 = 74;
/// The claim was refused; a later attempt may succeed.
pub const REFUSED: u8 = 75;
/// The table is missing or cannot be used.
pub const UNFIT: u8 = 78;
/// The command was stopped, since it took longer than it may. The code is that of `timeout`.
pub const TOO_LONG: u8 = 124;
/// The command was found but cannot be run.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub const NOT_FOUND: u8 = 127;
/// The base of the exit code for a command that a signal ended: the signal's number is added.
pub const SIGNAL: u8 = 128;

/// Why the program ends without having completed the request.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    /// Whether the same request may succeed later, without any intervention.
    pub passes: bool,
    text: String,
}

impl Failure {
    pub fn new(code: u8, text: impl fmt::Display) -> Self {
        // The message is one line, whatever text the server returned.
        Self { code, passes: false, text: text.to_string().split_whitespace().collect::<Vec<_>>().join(" ") }
    }

    /// Returns the end of a program that has said why it ends, or needs not say it.
    pub fn silent(code: u8) -> Self {
        Self::new(code, "")
    }

    /// States whether the same request may succeed later.
    pub fn passing(self, passes: bool) -> Self {
        Self { passes, ..self }
    }

    /// Adds the database to a message about the database.
    pub fn at(mut self, database: &str) -> Self {
        if [UNAVAILABLE, UNFIT].contains(&self.code) && !self.is_silent() && !database.is_empty() {
            self.text = format!("{} ({database})", self.text);
        }
        self
    }

    /// Returns whether there is no message to print.
    pub fn is_silent(&self) -> bool {
        self.text.is_empty()
    }

    /// Says that no schedule has this name.
    pub fn no_schedule(name: &str) -> Self {
        Self::new(
            REFUSED,
            format_args!("there is no schedule {name:?}, or it was removed: `rowlock schedules` lists them"),
        )
    }

    pub fn io(path: &Path, error: &std::io::Error) -> Self {
        Self::new(IO, format_args!("{}: {error}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Lost { .. } | Error::NotFound(NotFound::Claim { .. }) => LOST,
            Error::Refused(_) | Error::Setup(Setup::StillUsed { .. } | Setup::ScheduleUnfit { .. }) => REFUSED,
            Error::Setup(Setup::TableMissing) => {
                return Self::new(UNFIT, "the table t_resource_lock does not exist here: run `rowlock migrate` once");
            }
            Error::Setup(Setup::ColumnMissing { table, columns, .. }) => {
                return Self::new(UNFIT, format_args!("{table} lacks {columns}: run `rowlock migrate` once"));
            }
            Error::Setup(Setup::ScheduleTablesMissing) => {
                let text = "the tables of schedules do not exist here: run `rowlock migrate` once";
                return Self::new(UNFIT, text);
            }
            Error::NotFound(NotFound::Schedule { renamed_to: Some(_), .. }) => return Self::new(REFUSED, &error),
            Error::NotFound(NotFound::Schedule { name, .. }) => return Self::no_schedule(name.as_str()),
            Error::Setup(Setup::TableUnfit { .. } | Setup::Unsupported { .. } | Setup::RowNotVisible { .. })
            | Error::Database(DatabaseFault::ReadOnly { .. }) => UNFIT,
            Error::Invalid(_) => USAGE,
            _ => UNAVAILABLE,
        };
        // `Debug` includes the driver's error, which `Display` leaves out.
        Self::new(code, format_args!("{error:?}")).passing(error.is_retryable())
    }
}
