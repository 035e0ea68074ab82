//! One job on several instances. First under a lock: which instance runs it, which are refused and
//! why, and which takes over when the running one is killed. Then as a schedule with a tick each
//! second: instances are killed in the middle of ticks, one is paused for longer than its lease,
//! and all are killed at once. At the end the history shows that each tick succeeded once.
//!
//!     cargo run --example scheduled_job
//!     cargo run --example scheduled_job --features postgres -- --database-url postgres://postgres@127.0.0.1/postgres
//!
//! The instances are processes: this program, started again. Without a URL they share a temporary
//! SQLite file. In a database given by URL, the rows of the job remain.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod locked;
mod stage;
mod ticks;

use std::error::Error;

use rowlock::Database;
use sqlx::Pool;

use stage::Stage;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const USAGE: &str = "\
Usage: scheduled_job [--database-url URL]

  --database-url URL  sqlite:, postgres: or mysql: (MariaDB too); otherwise a temporary SQLite file
  -h, --help          this text
";

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["-h" | "--help"] => print!("{USAGE}"),
        [] => {
            let folder = tempfile::tempdir()?;
            let url = format!("sqlite://{}?mode=rwc", folder.path().join("jobs.db").display());
            sqlx::query("PRAGMA journal_mode = WAL").execute(&sqlx::SqlitePool::connect(&url).await?).await?;
            on_database(&url, &[]).await?;
        }
        ["--database-url", url] => on_database(url, &[]).await?,
        // The parent passes the URL in the environment, since other users can see arguments.
        ["instance", ..] => {
            stage::end_with_parent();
            on_database(&std::env::var("DATABASE_URL")?, &words[1..]).await?;
        }
        _ => {
            eprint!("{USAGE}");
            std::process::exit(2)
        }
    }
    Ok(())
}

async fn on_database(url: &str, words: &[&str]) -> Result<()> {
    match url.split(':').next() {
        Some("sqlite") => act::<sqlx::Sqlite>(url, words).await,
        #[cfg(feature = "postgres")]
        Some("postgres" | "postgresql") => act::<sqlx::Postgres>(url, words).await,
        #[cfg(feature = "mysql")]
        Some("mysql" | "mariadb") => act::<sqlx::MySql>(url, words).await,
        _ => Err("this build does not know the database: add --features postgres or --features mysql".into()),
    }
}

/// Shows both stories, or is an instance in one of them.
async fn act<DB: Database>(url: &str, words: &[&str]) -> Result<()> {
    let pool = Pool::<DB>::connect(url).await?;
    match *words {
        ["locked", key, node, work_millis, tries] => {
            locked::instance(pool, key, node, work_millis.parse()?, tries).await
        }
        ["ticks", name, node] => ticks::instance(pool, name, node).await,
        _ => {
            rowlock::migrate(&pool).await?;
            let mut stage = Stage::new(url);
            // Rows of an earlier run in this database are of no concern.
            let name = format!("nightly-report-{}", std::process::id());
            println!("{:>7}  {:<8}  {:<8}  {:<17}  detail", "ms", "instance", "what", "token");
            locked::show(&mut stage, &pool, &name).await?;
            ticks::show(&mut stage, pool, &name).await
        }
    }
}
