//! Which database, and a way to it.

use std::{os::unix::fs::DirBuilderExt as _, path::PathBuf, str::FromStr as _, time::Duration};

use sqlx::{
    ConnectOptions, Connection, Pool, SqlitePool,
    mysql::MySqlConnectOptions,
    pool::PoolOptions,
    postgres::PgConnectOptions,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

use crate::{
    args::SourceArguments,
    exit::{Failure, IO, UNAVAILABLE, USAGE},
};

pub enum Kind {
    Sqlite,
    Postgres,
    MySql,
}

/// The database that was named.
pub struct Source {
    pub kind: Kind,
    pub url: String,
    /// The program's own file, created and migrated as needed.
    pub own_file: bool,
    pub timeout: Duration,
}

impl Source {
    pub fn choose(arguments: &SourceArguments) -> Result<Self, Failure> {
        let timeout = arguments.connect_timeout;
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
            // What stands before the colon may be anything, a password too.
            _ => {
                let text = "the database URL has to begin with postgres:, mysql:, mariadb: or sqlite:";
                return Err(Failure::new(USAGE, text));
            }
        };
        Ok(Self { kind, url, own_file: false, timeout })
    }
}

/// `$XDG_STATE_HOME/rowlock/locks.db`, or the same below `~/.local/state`.
fn local_file() -> Result<String, Failure> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| std::env::home_dir().map(|home| home.join(".local/state")));
    let folder =
        state.ok_or_else(|| Failure::new(IO, "--local: neither XDG_STATE_HOME nor HOME is set"))?.join("rowlock");
    // For this user alone: whoever knows a holder's id may end its claim.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| Failure::io(&folder, &error))?;
    Ok(folder.join("locks.db").display().to_string())
}

pub async fn open_sqlite(url: &str, create: bool, timeout: Duration) -> Result<SqlitePool, Failure> {
    // A path is taken as it is; only a URL has characters that mean something.
    let options = match url.starts_with("sqlite:") {
        true => SqliteConnectOptions::from_str(url).map_err(unreadable)?,
        false => SqliteConnectOptions::new().filename(url),
    };
    // The journal mode stays in the file: whoever only looks at it leaves it as it is.
    let options = if create { options.create_if_missing(true).journal_mode(SqliteJournalMode::Wal) } else { options };
    let place = options.get_filename().display().to_string();
    connect(options, Some(place), "check the path; if there is no such file, `rowlock migrate` creates it", timeout)
        .await
}

pub async fn open<DB>(url: &str, timeout: Duration) -> Result<Pool<DB>, Failure>
where
    DB: sqlx::Database<Connection: Connection<Options: Place>>,
{
    let options = <DB::Connection as Connection>::Options::from_str(url).map_err(unreadable)?;
    let place = is_plain(url).then(|| options.place());
    connect(options, place, "check that the server runs, and the database URL", timeout).await
}

/// Whether the URL was read as it was meant: a password with a slash in it makes the rest of it a part of the path.
fn is_plain(url: &str) -> bool {
    let rest = url.split_once("://").and_then(|(_, rest)| rest.find(['/', '?', '#']).map(|end| &rest[end..]));
    rest.is_some_and(|rest| !rest.contains('@'))
}

/// Where a server is, for people: neither who asks for it nor with what settings.
pub trait Place {
    fn place(&self) -> String;
}

fn on_server(host: &str, port: u16, socket: Option<&PathBuf>, database: Option<&str>) -> String {
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
    let server = socket.map_or(format!("{host}:{port}"), |socket| socket.display().to_string());
    database.map_or(server.clone(), |database| format!("{server}, database {database}"))
}

impl Place for PgConnectOptions {
    fn place(&self) -> String {
        on_server(self.get_host(), self.get_port(), self.get_socket(), self.get_database())
    }
}

impl Place for MySqlConnectOptions {
    fn place(&self) -> String {
        on_server(self.get_host(), self.get_port(), self.get_socket(), self.get_database())
    }
}

/// One connection first, by itself: its error says what is wrong, where a pool's says only that the time is up.
async fn connect<DB, O>(options: O, place: Option<String>, next: &str, timeout: Duration) -> Result<Pool<DB>, Failure>
where
    DB: sqlx::Database<Connection: Connection<Options = O>>,
    O: ConnectOptions<Connection = DB::Connection> + Clone,
{
    let failed = |why: &dyn std::fmt::Display| {
        let place = place.as_ref().map(|place| format!(" at {place}")).unwrap_or_default();
        Failure::new(UNAVAILABLE, format_args!("no connection to {}{place}: {why}; {next}", DB::NAME))
    };
    match tokio::time::timeout(timeout, options.connect()).await {
        Ok(Ok(conn)) => soon(conn.close()).await,
        Ok(Err(error)) => return Err(failed(&error)),
        Err(_) => return Err(failed(&format_args!("no answer within {timeout:?}"))),
    }
    // One for the claim, one for its renewal.
    let pool = PoolOptions::<DB>::new().max_connections(2).test_before_acquire(false).acquire_timeout(timeout);
    Ok(pool.connect_lazy_with(options))
}

/// Says good-bye to the server, which otherwise notes an aborted connection; not for long.
pub async fn soon(closing: impl Future) {
    let _ = tokio::time::timeout(Duration::from_secs(1), closing).await;
}

fn unreadable(_: sqlx::Error) -> Failure {
    // The parser's error may quote from the URL.
    Failure::new(
        USAGE,
        "the database URL cannot be read: write it like postgres://user:password@host:5432/database, with special characters percent-encoded",
    )
}
