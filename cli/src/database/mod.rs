//! The connection to the database that was chosen.

mod passwords;
mod rotation;
mod server;
mod source;

use std::{
    io::ErrorKind,
    str::FromStr as _,
    sync::{Arc, OnceLock},
    time::Duration,
};

use chrono::FixedOffset;
use rowlock::{
    LeaseLock,
    errors::{Action, Certainty},
};
use sqlx::{
    ConnectOptions, Connection, Pool,
    mysql::MySqlDatabaseError,
    pool::PoolOptions,
    postgres::PgDatabaseError,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

use crate::exit::{Failure, UNAVAILABLE};
use server::{Server, unreadable};
pub use source::{Kind, Source};

/// The offset at which programs that know only the article's columns write their times.
static ARTICLE_CLIENTS: OnceLock<Option<FixedOffset>> = OnceLock::new();

/// Tells of the other programs on the table, once in a process.
pub fn set_article_clients(offset: Option<FixedOffset>) {
    let _ = ARTICLE_CLIENTS.set(offset);
}

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

/// A database that replies.
pub struct Opened<DB: sqlx::Database> {
    pub pool: Pool<DB>,
    /// The database for messages, without user name and settings.
    pub place: String,
}

/// `complete`: creates the tables that are missing.
pub async fn open_sqlite(source: &Source, create: bool, complete: bool) -> Result<Opened<sqlx::Sqlite>, Failure> {
    let options = SqliteConnectOptions::from_str(&source.url()).map_err(unreadable)?;
    // The journal mode is stored in the file. A command that only reads does not change it.
    let options = if create { options.create_if_missing(true).journal_mode(SqliteJournalMode::Wal) } else { options };
    let address = options.get_filename().display().to_string();
    let folder = options.get_filename().parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    let next = match (folder, create) {
        (Some(folder), _) => format!("there is no folder {}", folder.display()),
        (None, true) => "check the path, and who may write the file and its folder".to_owned(),
        (None, false) => "check the path; if there is no such file, `rowlock migrate` creates it".to_owned(),
    };
    let opened = connect(options, Some(address), (&next, true), source.timeout).await?;
    if complete {
        rowlock::migrate(&opened.pool).await?;
    }
    Ok(opened)
}

/// Opens a server's database. Passwords that change later are followed until the pool is closed.
pub async fn open<DB>(source: &Arc<Source>) -> Result<Opened<DB>, Failure>
where
    DB: sqlx::Database<Connection: Connection<Options: Server>>,
{
    let secrets = source.secrets()?;
    secrets.keep();
    let options = <DB::Connection as Connection>::Options::read(&secrets)?;
    let address = is_plain(&secrets.url).then(|| options.address());
    let next = ("check that the server runs, and the database URL", names_user(&secrets.url));
    let opened: Opened<DB> = connect(options, address, next, source.timeout).await?;
    source.use_url(&secrets.url);
    let (pool, mut closed, source) = (opened.pool.clone(), opened.pool.close_event(), source.clone());
    tokio::spawn(async move { closed.do_until(rotation::follow(pool, source, secrets)).await });
    Ok(opened)
}

/// Returns whether the URL was parsed as intended. A password with a slash in it turns the rest of
/// the authority into a part of the path.
fn is_plain(url: &str) -> bool {
    let Some((_, rest)) = url.split_once("://") else { return false };
    rest.split_once(['/', '?', '#']).is_none_or(|(_, rest)| !rest.contains('@'))
}

/// Returns whether the URL names a user. The driver takes another one otherwise.
fn names_user(url: &str) -> bool {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let user = rest.rsplit_once('@').map_or("", |(user, _)| user);
    !user.is_empty() && !user.starts_with(':') || rest.contains("user=")
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
    (next, names_user): (&str, bool),
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
            let next = match advice(&error).unwrap_or(next) {
                REFUSED_USER if !names_user => "the URL names no user, and the server refuses the default one",
                next => next,
            };
            return Err(failed(&said(&error), next).passing(may_pass(error)));
        }
        Err(_) => {
            let next = "check that the server runs, that it is of the kind that the database URL says, the host and the port, and firewalls in between";
            return Err(failed(&format_args!("no reply within {timeout:?}"), next).passing(true));
        }
    }
    // One connection is for the claim, one for its renewal.
    let pool = PoolOptions::<DB>::new().max_connections(2).test_before_acquire(false).acquire_timeout(timeout);
    Ok(Opened { pool: pool.connect_lazy_with(options), place })
}

const REFUSED_USER: &str =
    "the server refuses the user or the password: check them in the database URL, and from where the user may connect";

/// Returns what to do about a connection that failed, if the error tells that.
fn advice(error: &sqlx::Error) -> Option<&'static str> {
    match error {
        // A zero is the end of the connection.
        sqlx::Error::Protocol(text)
            if text.starts_with("unexpected response from SSLRequest") && !text.contains(": 0x00") =>
        {
            Some("is another kind of server at this port? Check the port in the database URL, and how the URL begins")
        }
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
        // 1698: a user who is known by the system's user
        (Some(1045 | 1698), _) | (None, "28P01" | "28000") => Some(REFUSED_USER),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_may_have_no_path() {
        for (url, plain) in [
            ("postgres://me:word@host:5432", true),
            ("postgres://host", true),
            ("postgres://me@host/db?sslmode=disable", true),
            ("postgres://me:wo/rd@host/db", false),
            ("postgres://me:wo?rd@host", false),
            ("postgres://me:wo#rd@host", false),
            ("postgres:word", false),
        ] {
            assert_eq!(is_plain(url), plain, "{url}");
        }
    }

    #[test]
    fn a_url_may_name_no_user() {
        for (url, names) in [
            ("postgres://ann@host/db", true),
            ("postgres://ann:b%40c@host/db", true),
            ("postgres://host/db?user=ann", true),
            ("mysql://host/db", false),
            ("mysql://:password@host/db", false),
        ] {
            assert_eq!(names_user(url), names, "{url}");
        }
    }

    #[test]
    fn the_advice_depends_on_the_servers_code() {
        for (state, number, says) in [
            ("28P01", None, Some("the password")),
            ("28000", Some(1045), Some("the password")),
            ("28000", Some(1698), Some("the password")),
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
