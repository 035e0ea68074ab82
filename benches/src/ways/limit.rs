//! The limit of the server itself: durable changes of one row each, two of which are a cycle.

use std::{path::PathBuf, process::Stdio, sync::Arc, time::Duration};

use sqlx::Pool;
use tempfile::NamedTempFile;
use tokio::process::Command;

use crate::{
    Error,
    contest::{Contender, Cycling, Round},
    database::Kind,
    speak::{Bind::Number, Speak, fill},
    statistics::Summary,
};

/// Creates the rows that are changed, one for each task.
pub async fn prepare<DB: Speak>(pool: &Pool<DB>, tasks: usize) -> Result<(), Error> {
    DB::script(pool, "DROP TABLE IF EXISTS plain".into()).await?;
    DB::script(pool, "CREATE TABLE plain (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL)".into()).await?;
    fill(pool, "plain (id, n)", (0..tasks).map(|id| format!("({id}, 0)"))).await
}

/// The simplest statements, or on PostgreSQL its own benchmark program, where it is installed.
pub fn limit<DB: Speak>(kind: Kind, url: &str, pool: Pool<DB>, connections: u32) -> Result<Arc<dyn Contender>, Error> {
    match pgbench().filter(|_| kind == Kind::Postgres) {
        Some(program) => Ok(Arc::new(Pgbench::new(program, url, connections)?)),
        None => Ok(Arc::new(Plain(pool))),
    }
}

/// Describes what [`limit`] is on this database, for readers of the figures.
pub fn told(kind: Kind) -> String {
    match pgbench().filter(|_| kind == Kind::Postgres) {
        Some(program) => format!("limit: half the rate of {} -n -M prepared, one UPDATE each", program.display()),
        None => "limit: two plain prepared UPDATEs of a row of its own for each task".to_owned(),
    }
}

struct Plain<DB: Speak>(Pool<DB>);

impl<DB: Speak> Contender for Plain<DB> {
    fn cycle(&self, task: usize) -> Cycling<'_> {
        Box::pin(async move {
            let id = [Number(i64::try_from(task)?)];
            for _ in 0..2 {
                let mut conn = self.0.acquire().await?;
                DB::execute(&mut conn, DB::PLAIN, &id).await?;
            }
            Ok(1)
        })
    }
}

/// On the path, or in Debian's folder for it.
fn pgbench() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut versions: Vec<PathBuf> = versions.map(|entry| entry.path().join("bin")).collect();
    versions.sort();
    let folders = std::env::split_paths(&path).chain(versions.into_iter().rev());
    folders.map(|folder| folder.join("pgbench")).find(|program| program.is_file())
}

struct Pgbench {
    program: PathBuf,
    url: String,
    password: Option<String>,
    connections: u32,
    script: NamedTempFile,
}

impl Pgbench {
    fn new(program: PathBuf, url: &str, connections: u32) -> Result<Self, Error> {
        let script = NamedTempFile::new()?;
        std::fs::write(script.path(), "UPDATE plain SET n = n + 1 WHERE id = :client_id;\n")?;
        let (url, password) = without_password(url);
        Ok(Self { program, url, password, connections, script })
    }
}

impl Contender for Pgbench {
    fn cycle(&self, _: usize) -> Cycling<'_> {
        Box::pin(async { Err("pgbench makes whole rounds only".into()) })
    }

    /// pgbench measures whole seconds, and reports only a rate.
    fn round(self: Arc<Self>, tasks: usize, span: Duration) -> crate::contest::Ending<Round> {
        Box::pin(async move {
            let clients = tasks.min(self.connections as usize);
            let threads = std::thread::available_parallelism()?.get().min(clients);
            let seconds = span.as_secs_f64().ceil().max(1.0);
            let mut command = Command::new(&self.program);
            command.args(["-n", "-M", "prepared", "-f"]).arg(self.script.path());
            command.args(["-c", &clients.to_string(), "-j", &threads.to_string(), "-T", &seconds.to_string()]);
            command.arg(&self.url).envs(self.password.as_ref().map(|password| ("PGPASSWORD", password)));
            let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
            let told = String::from_utf8_lossy(&output.stdout);
            let rate = rate(&told).filter(|_| output.status.success());
            let rate = rate.ok_or_else(|| format!("pgbench: {}", String::from_utf8_lossy(&output.stderr)))?;
            Ok(Round { per_second: rate / 2.0, attempts: 1.0, latencies: Summary::of(Vec::new()) })
        })
    }
}

/// The arguments of a process are readable for every user of the machine, so they contain no
/// password.
fn without_password(url: &str) -> (String, Option<String>) {
    let parts = url.split_once("://").and_then(|(scheme, rest)| {
        let (user, address) = rest.split_once('@')?;
        let (user, password) = user.split_once(':')?;
        Some((format!("{scheme}://{user}@{address}"), decoded(password)))
    });
    parts.map_or((url.to_owned(), None), |(url, password)| (url, Some(password)))
}

/// `%40` is an `@`.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&part.as_bytes()[2..]);
            }
            None => bytes.extend([b"%", part.as_bytes()].concat()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn rate(told: &str) -> Option<f64> {
    told.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_read_from_what_pgbench_says() {
        assert_eq!(rate("latency average = 0.5 ms\ntps = 1987.25 (without initial connection time)\n"), Some(1987.25));
        assert_eq!(rate("nothing"), None);
    }

    #[test]
    fn a_password_is_taken_out_of_the_url() {
        let parts = without_password("postgres://me:a%40b@host:5432/db?sslmode=disable");
        assert_eq!(parts, ("postgres://me@host:5432/db?sslmode=disable".into(), Some("a@b".into())));
        assert_eq!(without_password("postgres://me@host/db"), ("postgres://me@host/db".into(), None));
    }
}
