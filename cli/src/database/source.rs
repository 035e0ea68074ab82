//! The choice of the database, and the files that have its URL or its password.

use std::{
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock},
    time::Duration,
};

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::{
    args::source::SourceArguments,
    database::passwords::{client_of_my_cnf, of_pgpass, of_url},
    exit::{Failure, IO, USAGE},
    secrets,
};

/// The longest wait for a connection. The pool adds it to the time of the clock, which has an end.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Sqlite,
    Postgres,
    MySql,
}

/// The database that was chosen.
pub struct Source {
    pub kind: Kind,
    /// The URL that is used, also if its file has another one by now.
    url: RwLock<String>,
    /// The file that has the URL.
    pub file: Option<PathBuf>,
    /// The program's own file, which is created and migrated as needed.
    pub own_file: bool,
    pub timeout: Duration,
}

impl Source {
    pub fn choose(arguments: &SourceArguments) -> Result<Self, Failure> {
        let timeout = arguments.connect_timeout.min(LONGEST);
        if arguments.local {
            let url = RwLock::new(url_of_path(&local_file()?));
            return Ok(Self { kind: Kind::Sqlite, url, file: None, own_file: true, timeout });
        }
        // An empty variable counts as one that is not set.
        let file = arguments.database_url_file.clone().filter(|file| !file.is_empty()).map(PathBuf::from);
        let url = match &file {
            Some(file) => url_of(file)?,
            None => arguments.database_url.clone().unwrap_or_default(),
        };
        if url.is_empty() {
            let text = "no database: give --database-url-file FILE, set DATABASE_URL, or use --local for a lock on this machine only";
            return Err(Failure::new(USAGE, text));
        }
        let source = Self { kind: kind(&url)?, url: RwLock::new(url), file, own_file: false, timeout };
        source.secrets()?.keep();
        Ok(source)
    }

    pub fn url(&self) -> String {
        self.url.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the URL for a command, which may run in another folder.
    pub fn url_of_commands(&self) -> String {
        let url = self.url();
        let path = match self.kind {
            Kind::Sqlite => url.trim_start_matches("sqlite:").trim_start_matches("//"),
            Kind::Postgres | Kind::MySql => return url,
        };
        match std::env::current_dir() {
            Ok(folder) if !path.starts_with(['/', ':']) => below(&folder, path),
            _ => url,
        }
    }

    /// Says that this URL is used from now on.
    pub fn use_url(&self, url: &str) {
        url.clone_into(&mut self.url.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Reads what may change while the program runs: the URL, and the text of the file that has
    /// passwords.
    pub fn secrets(&self) -> Result<Secrets, Failure> {
        let url = self.file.as_ref().map_or_else(|| Ok(self.url()), url_of)?;
        let home = |name: &str| std::env::home_dir().map(|home| home.join(name));
        let passwords = match self.kind {
            Kind::Sqlite => None,
            Kind::Postgres => std::env::var_os("PGPASSFILE").map(PathBuf::from).or_else(|| home(".pgpass")),
            Kind::MySql => home(".my.cnf"),
        };
        // The driver says what is wrong with a file that it cannot read.
        let passwords = passwords.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        Ok(Secrets { kind: self.kind, url, passwords })
    }
}

/// What may change while the program runs.
#[derive(Clone, PartialEq)]
pub struct Secrets {
    pub kind: Kind,
    pub url: String,
    /// The text of `.pgpass` or `.my.cnf`; empty if there is none.
    pub passwords: String,
}

impl Secrets {
    /// Has the passwords masked from now on.
    pub fn keep(&self) {
        let of_file: Vec<String> = match self.kind {
            Kind::Sqlite => Vec::new(),
            Kind::Postgres => self.passwords.lines().filter_map(of_pgpass).collect(),
            Kind::MySql => client_of_my_cnf(&self.passwords).remove("password").into_iter().collect(),
        };
        secrets::keep(of_url(&self.url).into_iter().chain(of_file).chain(std::env::var("PGPASSWORD").ok()));
    }
}

fn url_of_path(path: &Path) -> String {
    const MEAN: &AsciiSet = &CONTROLS.add(b'%').add(b'?').add(b'#');
    // Two slashes at its beginning would be a part of the URL.
    let path: PathBuf = path.components().collect();
    format!("sqlite:{}", utf8_percent_encode(&path.to_string_lossy(), MEAN))
}

/// Returns the URL of a file in a folder. The folder `/` ends with a slash already.
fn below(folder: &Path, file: &str) -> String {
    format!("{}/{file}", url_of_path(folder).trim_end_matches('/'))
}

fn url_of(file: &PathBuf) -> Result<String, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        Failure::new(USAGE, format_args!("the file of the database URL, {}: {error}", file.display()))
    })?;
    let url = text.trim();
    match url.is_empty() || url.contains('\n') {
        true => Err(Failure::new(USAGE, format_args!("{}: the database URL has to be its only line", file.display()))),
        false => Ok(url.to_owned()),
    }
}

fn kind(url: &str) -> Result<Kind, Failure> {
    match url.split(':').next().unwrap_or_default() {
        "sqlite" => Ok(Kind::Sqlite),
        "postgres" | "postgresql" => Ok(Kind::Postgres),
        "mysql" | "mariadb" => Ok(Kind::MySql),
        // The text before the colon is not printed, since it may be a password.
        _ => Err(Failure::new(USAGE, "the database URL has to begin with postgres:, mysql:, mariadb: or sqlite:")),
    }
}

/// Returns `$XDG_STATE_HOME/rowlock/locks.db`, or the same path below `~/.local/state`.
fn local_file() -> Result<PathBuf, Failure> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| std::env::home_dir().map(|home| home.join(".local/state")));
    let folder =
        state.ok_or_else(|| Failure::new(IO, "--local: neither XDG_STATE_HOME nor HOME is set"))?.join("rowlock");
    // The folder is accessible to this user alone: a process that knows a holder's id can end its
    // claim.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| Failure::io(&folder, &error))?;
    Ok(folder.join("locks.db"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_in_another_folder_find_the_same_file() {
        let folder = std::env::current_dir().unwrap().display().to_string();
        let absolute = |rest: &str| format!("sqlite:{folder}/{rest}");
        let own = url_of_path(Path::new("//home/a%b?/locks.db"));
        for (kind, url, expected) in [
            (Kind::Sqlite, "sqlite:locks.db?mode=rwc", absolute("locks.db?mode=rwc")),
            (Kind::Sqlite, "sqlite://a/locks.db", absolute("a/locks.db")),
            (Kind::Sqlite, "sqlite:/a/locks.db", "sqlite:/a/locks.db".to_owned()),
            (Kind::Sqlite, &own, "sqlite:/home/a%25b%3F/locks.db".to_owned()),
            (Kind::Postgres, "postgres://db/app", "postgres://db/app".to_owned()),
        ] {
            let url = RwLock::new(url.to_owned());
            let source = Source { kind, url, file: None, own_file: false, timeout: LONGEST };
            assert_eq!(source.url_of_commands(), expected);
        }
        assert_eq!(below(Path::new("/"), "locks.db?mode=rwc"), "sqlite:/locks.db?mode=rwc");
    }
}
