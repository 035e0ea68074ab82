//! What a driver's error means. No other module knows the servers' codes.

use std::{error::Error as StdError, sync::Arc};

use sqlx::error::DatabaseError;

/// The root cause of a conflict: the last source of an [`Error::Conflict`](crate::Error::Conflict).
///
/// [`transaction`](crate::LeaseLock::transaction) finds it in the sources of the work's error
/// and retries.
///
/// ```
/// use rowlock::{Error, Key, errors::Contention};
/// use std::error::Error as _;
///
/// let error = Error::conflict(Key::new("alice")?, 1);
/// assert!(error.source().is_some_and(|source| source.is::<Contention>()));
/// # Ok::<(), rowlock::errors::Invalid>(())
/// ```
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("another transaction used the same row")]
#[non_exhaustive]
pub struct Contention;

/// The meaning of a driver's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another transaction used the same rows. The statement was undone and may be sent again.
    Contention,
    /// The server is unreachable or the connection was lost. Either may recover.
    Outage,
    /// No statement was sent: the pool had no connection available.
    NoConnection,
    /// The server lacked the time, the space or the memory for the statement, which was undone.
    Overload,
    MissingTable,
    MissingColumn,
    ReadOnly,
    /// The user lacks a right. A row policy of the table may report the same for one of its rows.
    Denied,
    Other,
}

/// An error that several requests share. It stands in for the driver's own, which cannot be copied.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Shared(Arc<sqlx::Error>);

impl Shared {
    pub fn wrap(error: &Arc<sqlx::Error>) -> sqlx::Error {
        sqlx::Error::Io(std::io::Error::other(Self(error.clone())))
    }

    fn of(error: &sqlx::Error) -> Option<&sqlx::Error> {
        let sqlx::Error::Io(error) = error else { return None };
        error.get_ref()?.downcast_ref::<Self>().map(|Self(error)| &**error)
    }
}

/// Describes a driver's error. The text of PostgreSQL's driver also names a line of the server's
/// source, which means nothing to a user. That of a pool names a pool, and stands also for sessions
/// that have none.
pub fn said(error: &sqlx::Error) -> String {
    let error = Shared::of(error).unwrap_or(error);
    if matches!(error, sqlx::Error::PoolTimedOut) {
        return "all are in use, or the server does not answer".to_owned();
    }
    #[cfg(feature = "postgres")]
    if let Some(error) = error.as_database_error().and_then(|error| error.try_downcast_ref()) {
        let error: &sqlx::postgres::PgDatabaseError = error;
        return format!("error returned from database: {}", error.message());
    }
    error.to_string()
}

impl Fault {
    /// Returns a short name for programs. It never changes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Contention => "contention",
            Self::Outage => "outage",
            Self::NoConnection => "no_connection",
            Self::Overload => "overload",
            Self::MissingTable => "missing_table",
            Self::MissingColumn => "missing_column",
            Self::ReadOnly => "read_only",
            Self::Denied => "denied",
            Self::Other => "other",
        }
    }

    pub fn is_transient(self) -> bool {
        matches!(self, Self::Contention | Self::Outage | Self::NoConnection | Self::Overload)
    }
}

/// Reads an error's meaning.
pub fn fault(error: &sqlx::Error) -> Fault {
    let error = Shared::of(error).unwrap_or(error);
    match error {
        sqlx::Error::Database(error) => server_fault(&**error).unwrap_or(Fault::Other),
        sqlx::Error::PoolTimedOut => Fault::NoConnection,
        sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed => Fault::Outage,
        // PostgreSQL's driver reads the end of a connection as a reply. A load balancer without an
        // available server ends connections this way.
        sqlx::Error::Protocol(text) if text.starts_with("unexpected response from SSLRequest: 0x00") => Fault::Outage,
        _ => Fault::Other,
    }
}

/// Returns whether a read-only database may accept writes a little later: a server may, after a
/// fail-over, and a file does not.
pub fn may_take_writes_again(error: &sqlx::Error) -> bool {
    #[cfg(feature = "sqlite")]
    if error.as_database_error().is_some_and(|error| error.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some()) {
        return false;
    }
    let _ = error;
    true
}

/// Returns whether the server refused a statement, and the connection goes on. After any other
/// error it is unknown what was done.
pub fn is_undone(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some() && fault(error) != Fault::Outage && !may_be_done(error)
}

/// Returns whether a statement may have been carried out although an error was the reply: its
/// transaction may be committed on the disk already.
pub fn may_be_done(error: &sqlx::Error) -> bool {
    let error = Shared::of(error).unwrap_or(error).as_database_error();
    #[cfg(feature = "postgres")]
    if let Some(error) = error.and_then(|error| error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()) {
        use sqlx::postgres::PgSeverity::{Fatal, Panic};
        // A lack of resources (53), the system (58) and the server's own state end a session at any
        // moment.
        let ends_session = matches!(error.severity(), Fatal | Panic);
        return ends_session && ["53", "58", "XX"].iter().any(|class| error.code().starts_with(class));
    }
    #[cfg(feature = "sqlite")]
    if let Some(error) = error.and_then(|error| error.try_downcast_ref::<sqlx::sqlite::SqliteError>()) {
        const IOERR: i32 = 10;
        return sqlite_code(error) == IOERR;
    }
    let _ = error;
    false
}

/// Returns whether a server's error proves that a COMMIT was not carried out.
pub fn refuses_commit(error: &sqlx::Error) -> bool {
    // Other errors are rare here, and some are reported after the engine has committed.
    #[cfg(feature = "mysql")]
    if error
        .as_database_error()
        .is_some_and(|error| error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>().is_some())
    {
        return fault(error) == Fault::Contention;
    }
    is_undone(error)
}

/// Returns whether the error is a server's answer to the question whether a transaction is open.
pub fn denies(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some() && !fault(error).is_transient()
}

/// Returns whether contention is at the root of an application's error, however deeply it is
/// wrapped.
pub fn contended(error: &(dyn StdError + 'static)) -> bool {
    // A wrapper that hides what it wraps (`transparent`, an `Arc`) shows only the source of that:
    // the server's error, which sqlx's own error holds in a box, or `Contention`.
    let boxed = error.downcast_ref::<Box<dyn DatabaseError>>();
    error.downcast_ref::<sqlx::Error>().is_some_and(|error| fault(error) == Fault::Contention)
        || server_fault(boxed.map_or(error, |error| &**error)) == Some(Fault::Contention)
        || error.is::<Contention>()
        || error.source().is_some_and(contended)
}

/// Reads the meaning of a server's error.
fn server_fault(error: &(dyn StdError + 'static)) -> Option<Fault> {
    #[cfg(feature = "postgres")]
    if let Some(error) = error.downcast_ref() {
        return Some(postgres_fault(error));
    }
    #[cfg(feature = "mysql")]
    if let Some(error) = error.downcast_ref() {
        return Some(mysql_fault(error));
    }
    #[cfg(feature = "sqlite")]
    if let Some(error) = error.downcast_ref() {
        return Some(sqlite_fault(error));
    }
    None
}

#[cfg(feature = "postgres")]
fn postgres_fault(error: &sqlx::postgres::PgDatabaseError) -> Fault {
    match error.code() {
        // 40001: a serialization failure; 40P01: a deadlock; 55P03: `lock_timeout`, or NOWAIT at a
        // locked row
        "40001" | "40P01" | "55P03" => Fault::Contention,
        "42P01" => Fault::MissingTable,
        "42703" => Fault::MissingColumn,
        "25006" => Fault::ReadOnly,
        "42501" => Fault::Denied,
        // 25P03, 25P04: the session was ended for being idle in a transaction, or for the
        // transaction's length; 40003: it is unknown whether the statement was completed; 53300:
        // too many connections
        "25P03" | "25P04" | "40003" | "53300" => Fault::Outage,
        // 57014: `statement_timeout`, or an operator
        "57014" => Fault::Overload,
        // 53: a lack of resources
        code if code.starts_with("53") => Fault::Overload,
        // 08: the connection; 57P: the server is shut down, has crashed, or starts
        code if code.starts_with("08") || code.starts_with("57P") => Fault::Outage,
        _ => Fault::Other,
    }
}

#[cfg(feature = "mysql")]
fn mysql_fault(error: &sqlx::mysql::MySqlDatabaseError) -> Fault {
    match error.number() {
        // 1020: the row was changed since it was read; 1205: a wait for a locked row reached its
        // limit, which may be zero; 1213: a deadlock; 3101: another member of the group changed the
        // same row first; 3572: NOWAIT met a locked row
        1020 | 1205 | 1213 | 3101 | 3572 => Fault::Contention,
        1146 => Fault::MissingTable,
        1054 => Fault::MissingColumn,
        // 1290: `read_only` or `super_read_only`; 1792: a read-only transaction; 1836: a read-only
        // server
        1290 | 1792 | 1836 => Fault::ReadOnly,
        // 1044: the database; 1045: the password; 1142, 1143: a table, a column; 1370: a procedure
        1044 | 1045 | 1142 | 1143 | 1370 => Fault::Denied,
        // 1040, 1203, 1226: too many connections, of all users or of this one; 1053: the server is
        // shut down; 1927, 3169, 4031: the session was ended; 1047: a Galera node outside its
        // cluster; 1180, 1317, 1969: an interrupted COMMIT; 1598: the binary log cannot be written,
        // and the server is stopped during a COMMIT; 3032, 3796 to 3799: a node outside its group;
        // 3781 to 3783: a new primary that has not caught up; 3100: a node left the group during a
        // COMMIT, which the others may have; 2002, 2003, 2006, 2013, 2055, 9001: a proxy has lost
        // its server, or reached none
        1040
        | 1047
        | 1053
        | 1180
        | 1203
        | 1226
        | 1317
        | 1598
        | 1927
        | 1969
        | 2002
        | 2003
        | 2006
        | 2013
        | 2055
        | 3032
        | 3100
        | 3169
        | 3781..=3783
        | 3796..=3799
        | 4031
        | 9001 => Fault::Outage,
        // 1021, 1114: no space; 1037, 1038, 1041, 1206: no memory; 3024: a limit to statements
        1021 | 1037 | 1038 | 1041 | 1114 | 1206 | 3024 => Fault::Overload,
        _ => Fault::Other,
    }
}

#[cfg(feature = "sqlite")]
fn sqlite_fault(error: &sqlx::sqlite::SqliteError) -> Fault {
    const BUSY: i32 = 5;
    const LOCKED: i32 = 6;
    const NOMEM: i32 = 7;
    const READONLY: i32 = 8;
    const FULL: i32 = 13;
    const PROTOCOL: i32 = 15;
    const AUTH: i32 = 23;
    match sqlite_code(error) {
        // PROTOCOL: others were faster at the file of the locks, again and again
        BUSY | LOCKED | PROTOCOL => Fault::Contention,
        READONLY => Fault::ReadOnly,
        NOMEM | FULL => Fault::Overload,
        AUTH => Fault::Denied,
        _ if error.message().starts_with("no such table") => Fault::MissingTable,
        _ if error.message().starts_with("no such column") => Fault::MissingColumn,
        _ => Fault::Other,
    }
}

/// Returns the primary code, without what SQLite adds to it.
#[cfg(feature = "sqlite")]
fn sqlite_code(error: &sqlx::sqlite::SqliteError) -> i32 {
    error.code().and_then(|code| code.parse::<i32>().ok()).unwrap_or_default() & 0xff
}
