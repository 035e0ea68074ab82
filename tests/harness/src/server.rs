//! The servers that a suite runs on, and their URLs.

/// A database that the contract runs on.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    pub name: &'static str,
    /// The environment variable with its URL. SQLite needs none.
    pub(crate) variable: Option<&'static str>,
}

impl Server {
    pub fn all() -> [Self; 4] {
        [
            Self { name: "sqlite", variable: None },
            Self { name: "postgres", variable: Some("POSTGRES_URL") },
            Self { name: "mysql", variable: Some("MYSQL_URL") },
            Self { name: "mariadb", variable: Some("MARIADB_URL") },
        ]
    }

    pub(crate) fn url(&self) -> Option<String> {
        self.variable.map_or(Some("sqlite:".into()), |name| std::env::var(name).ok().filter(|url| !url.is_empty()))
    }
}

/// Returns the URL of the server itself if `POSTGRES_URL` connects to a pooler.
pub fn direct_url() -> Option<String> {
    std::env::var("POSTGRES_DIRECT_URL").ok().filter(|url| !url.is_empty())
}

/// Whether each client of the pooler has a session of the server to itself, as with Pgpool-II.
/// Otherwise it is one in transaction mode.
pub fn pools_sessions() -> bool {
    std::env::var("POSTGRES_POOLER").is_ok_and(|pools| pools == "sessions")
}

/// Returns a name for the database of one test.
pub(crate) fn unique_name() -> String {
    format!("rowlock_{}", uuid::Uuid::new_v4().simple())
}

/// Returns the same URL with another database.
pub fn with_database(url: &str, database: &str) -> String {
    let (url, options) = url.split_once('?').map_or((url, None), |(url, options)| (url, Some(options)));
    let (server, _) = url.rsplit_once('/').expect("a URL with a database");
    options.map_or(format!("{server}/{database}"), |options| format!("{server}/{database}?{options}"))
}

pub fn database_of(url: &str) -> &str {
    let url = url.split('?').next().unwrap_or(url);
    url.rsplit('/').next().unwrap_or(url)
}
