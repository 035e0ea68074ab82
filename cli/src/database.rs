//! The choice of the database, and the connection to it.

use std::{
    io::ErrorKind, os::unix::fs::DirBuilderExt as _, path::PathBuf, str::FromStr as _, sync::OnceLock, time::Duration,
};

use chrono::FixedOffset;
use rowlock::{Action, Certainty, LeaseLock};
use sqlx::{
    ConnectOptions, Connection, Pool,
    mysql::{MySqlConnectOptions, MySqlDatabaseError},
    pool::PoolOptions,
    postgres::{PgConnectOptions, PgDatabaseError},
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

use crate::{
    args::source::SourceArguments,
    exit::{Failure, IO, UNAVAILABLE, USAGE},
};

/// The longest wait for a connection. The pool adds it to the time of the clock, which has an end.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The offset at which programs that know only the article's columns write their times.
static ARTICLE_CLIENTS: OnceLock<Option<FixedOffset>> = OnceLock::new();

/// Returns a lock on the table, which knows of the other programs on it.
pub fn lock<DB: rowlock::Database>(pool: Pool<DB>, label: Option<&str>) -> Result<LeaseLock<DB>, rowlock::Error> {
    let mut builder = LeaseLock::builder(pool);
    if let Some(offset) = article_clients() {
        builder = builder.article_clients(offset);
    }
    if let Some(label) = label {
        builder = builder.label(label);
    }
    builder.build()
}

/// Returns the lock for the keys of schedules that are exclusive with one, if it has to know of
/// other programs.
pub fn lock_of_schedules<DB: rowlock::Database>(
    pool: &Pool<DB>,
    label: Option<&str>,
) -> Result<Option<LeaseLock<DB>>, rowlock::Error> {
    article_clients().map(|_| lock(pool.clone(), label)).transpose()
}

pub fn article_clients() -> Option<FixedOffset> {
    ARTICLE_CLIENTS.get().copied().flatten()
}

pub enum Kind {
    Sqlite,
    Postgres,
    MySql,
}

/// The database that was chosen.
pub struct Source {
    pub kind: Kind,
    pub url: String,
    /// The program's own file, which is created and migrated as needed.
    pub own_file: bool,
    pub timeout: Duration,
}

impl Source {
    pub fn choose(arguments: &SourceArguments) -> Result<Self, Failure> {
        let _ = ARTICLE_CLIENTS.set(arguments.article_clients); // once in a process
        let timeout = arguments.connect_timeout.min(LONGEST);
        if arguments.local {
            return Ok(Self { kind: Kind::Sqlite, url: local_file()?, own_file: true, timeout });
        }
        let Some(url) = arguments.database_url.clone().filter(|url| !url.is_empty()) else {
            let text = "no database: give --database-url URL, set DATABASE_URL, or use --local for a lock on this machine only";
            return Err(Failure::new(USAGE, text));
        };
        let scheme = url.split(':').next().unwrap_or_default();
        let kind = match scheme {
            "sqlite" => Kind::Sqlite,
            "postgres" | "postgresql" => Kind::Postgres,
            "mysql" | "mariadb" => Kind::MySql,
            // The text before the colon is not printed, since it may be a password.
            _ => {
                let text = "the database URL has to begin with postgres:, mysql:, mariadb: or sqlite:";
                return Err(Failure::new(USAGE, text));
            }
        };
        Ok(Self { kind, url, own_file: false, timeout })
    }
}

/// Returns `$XDG_STATE_HOME/rowlock/locks.db`, or the same path below `~/.local/state`.
fn local_file() -> Result<String, Failure> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| std::env::home_dir().map(|home| home.join(".local/state")));
    let folder =
        state.ok_or_else(|| Failure::new(IO, "--local: neither XDG_STATE_HOME nor HOME is set"))?.join("rowlock");
    // The folder is accessible to this user alone: a process that knows a holder's id can end its
    // claim.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| Failure::io(&folder, &error))?;
    Ok(folder.join("locks.db").display().to_string())
}

/// A database that replies.
pub struct Opened<DB: sqlx::Database> {
    pub pool: Pool<DB>,
    /// The database for messages, without user name and settings.
    pub place: String,
}

pub async fn open_sqlite(url: &str, create: bool, timeout: Duration) -> Result<Opened<sqlx::Sqlite>, Failure> {
    // A path is used as it is written; only in a URL do some characters have a meaning.
    let options = match url.starts_with("sqlite:") {
        true => SqliteConnectOptions::from_str(url).map_err(unreadable)?,
        false => SqliteConnectOptions::new().filename(url),
    };
    // The journal mode is stored in the file. A command that only reads does not change it.
    let options = if create { options.create_if_missing(true).journal_mode(SqliteJournalMode::Wal) } else { options };
    let address = options.get_filename().display().to_string();
    connect(options, Some(address), "check the path; if there is no such file, `rowlock migrate` creates it", timeout)
        .await
}

pub async fn open<DB>(url: &str, timeout: Duration) -> Result<Opened<DB>, Failure>
where
    DB: sqlx::Database<Connection: Connection<Options: Address>>,
{
    let options = <DB::Connection as Connection>::Options::from_str(url).map_err(unreadable)?;
    let address = is_plain(url).then(|| options.address());
    connect(options, address, "check that the server runs, and the database URL", timeout).await
}

/// Returns whether the URL was parsed as intended. A password with a slash in it turns the rest of
/// the authority into a part of the path.
fn is_plain(url: &str) -> bool {
    let rest = url.split_once("://").and_then(|(_, rest)| rest.find(['/', '?', '#']).map(|end| &rest[end..]));
    rest.is_some_and(|rest| !rest.contains('@'))
}

/// The address of a server for messages, without user name and settings.
pub trait Address {
    fn address(&self) -> String;
}

fn on_server(host: &str, port: u16, socket: Option<&PathBuf>, database: Option<&str>) -> String {
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
    let server = socket.map_or(format!("{host}:{port}"), |socket| socket.display().to_string());
    database.map_or(server.clone(), |database| format!("{server}, database {database}"))
}

impl Address for PgConnectOptions {
    fn address(&self) -> String {
        on_server(self.get_host(), self.get_port(), self.get_socket(), self.get_database())
    }
}

impl Address for MySqlConnectOptions {
    fn address(&self) -> String {
        on_server(self.get_host(), self.get_port(), self.get_socket(), self.get_database())
    }
}

/// Describes a driver's error. The text of PostgreSQL's driver also names a line of the server's
/// source, which means nothing to a user.
pub fn said(error: &sqlx::Error) -> String {
    match error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()) {
        Some(error) => format!("error returned from database: {}", error.message()),
        None => error.to_string(),
    }
}

/// Opens a single connection first: its error states the cause, whereas a pool reports only a
/// timeout.
async fn connect<DB, O>(
    options: O,
    address: Option<String>,
    next: &str,
    timeout: Duration,
) -> Result<Opened<DB>, Failure>
where
    DB: sqlx::Database<Connection: Connection<Options = O>>,
    O: ConnectOptions<Connection = DB::Connection> + Clone,
{
    let address = address.map(|address| format!(" at {address}")).unwrap_or_default();
    let place = format!("{}{address}", DB::NAME);
    let failed = |why: &dyn std::fmt::Display, next: &str| {
        Failure::new(UNAVAILABLE, format_args!("no connection to {place}: {why}; {next}"))
    };
    match tokio::time::timeout(timeout, options.connect()).await {
        Ok(Ok(conn)) => within_second(conn.close()).await,
        Ok(Err(error)) => {
            return Err(failed(&said(&error), advice(&error).unwrap_or(next)).passing(may_pass(error)));
        }
        Err(_) => {
            let next =
                "check that the server runs, the host and the port in the database URL, and firewalls in between";
            return Err(failed(&format_args!("no reply within {timeout:?}"), next).passing(true));
        }
    }
    // One connection is for the claim, one for its renewal.
    let pool = PoolOptions::<DB>::new().max_connections(2).test_before_acquire(false).acquire_timeout(timeout);
    Ok(Opened { pool: pool.connect_lazy_with(options), place })
}

/// Returns what to do about a connection that failed, if the error tells that.
fn advice(error: &sqlx::Error) -> Option<&'static str> {
    match error {
        sqlx::Error::Io(error) if error.to_string().contains("failed to lookup address") => {
            Some("no address is known for the host: check the host in the database URL")
        }
        sqlx::Error::Io(error) => match error.kind() {
            ErrorKind::ConnectionRefused => {
                Some("no program listens there: check that the server runs, and the host and port in the database URL")
            }
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::TimedOut => {
                Some("check the network, and the host in the database URL")
            }
            _ => None,
        },
        sqlx::Error::Database(error) => {
            let number = error.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number);
            advice_on_refusal(error.code().as_deref().unwrap_or_default(), number)
        }
        _ => None,
    }
}

/// Returns what to do about a server's refusal: by the SQLSTATE, and by MySQL's own number.
fn advice_on_refusal(state: &str, number: Option<u16>) -> Option<&'static str> {
    match (number, state) {
        (Some(1045), _) | (None, "28P01" | "28000") => Some(
            "the server refuses the user or the password: check them in the database URL, and from where the user may connect",
        ),
        (Some(1049), _) | (None, "3D000") => Some("create the database, or check its name in the database URL"),
        (Some(1044), _) | (None, "42501") => {
            Some("GRANT the user access to the database, or check its name in the database URL")
        }
        (Some(1040 | 1203 | 1226), _) | (None, "53300") => {
            Some("the server, or the user, has as many connections as it may have: close others, or raise the limit")
        }
        _ => None,
    }
}

/// Returns whether a later attempt to connect may succeed, by the library's own judgement.
fn may_pass(error: sqlx::Error) -> bool {
    let key = rowlock::Key::new("connection");
    key.is_ok_and(|key| {
        rowlock::Error::database(Action::Connect, &key, Certainty::NothingChanged, error).is_retryable()
    })
}

/// Waits for a connection or pool to be closed, for one second at most. A server otherwise logs an
/// aborted connection.
pub async fn within_second(closing: impl Future) {
    let _ = tokio::time::timeout(Duration::from_secs(1), closing).await;
}

fn unreadable(_: sqlx::Error) -> Failure {
    // The parser's error may quote parts of the URL.
    Failure::new(
        USAGE,
        "the database URL cannot be read: write it like postgres://user:password@host:5432/database, with special characters percent-encoded",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_depends_on_the_servers_code() {
        for (state, number, says) in [
            ("28P01", None, Some("the password")),
            ("28000", Some(1045), Some("the password")),
            ("3D000", None, Some("create the database")),
            ("42000", Some(1049), Some("create the database")),
            ("42000", Some(1044), Some("GRANT")),
            ("53300", None, Some("as many connections")),
            ("08004", Some(1040), Some("as many connections")),
            ("42000", Some(1064), None),
            ("57P03", None, None),
        ] {
            let advice = advice_on_refusal(state, number);
            let fits = match (advice, says) {
                (Some(advice), Some(says)) => advice.contains(says) && !advice.contains("; "),
                (advice, says) => advice.is_none() && says.is_none(),
            };
            assert!(fits, "{state} {number:?}: {advice:?}");
        }
    }
}
