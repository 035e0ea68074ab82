//! The program `rowlock`: the same locks for shells, crontabs and other languages.

mod args;
mod claims;
mod command;
mod database;
mod descendants;
mod exit;
mod find;
mod front;
mod out;
mod show;
mod signals;
mod stub;
mod work;

use std::{process::ExitCode, time::Duration};

use clap::{CommandFactory as _, Parser as _};
use rowlock::{Database, LeaseLock};
use rustix::process::Pid;
use tracing_subscriber::{filter::Targets, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use args::{Action, Arguments};
use database::{Kind, Source};
use exit::Failure;

/// The runtime has a single thread: the command's death signal is bound to the thread that started
/// it, and that thread has to live as long as the program.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tell(arguments.verbose);
    let code = match act(arguments).await {
        Ok(code) => code,
        Err(failure) => {
            if !failure.is_silent() {
                out::complain(&failure);
            }
            failure.code
        }
    };
    ExitCode::from(code)
}

/// Sends rowlock's own events to stderr: warnings by default, informational events with `-v`, debug
/// events with `-vv`. The driver's events are left out, since they repeat parts of the URL.
fn tell(verbose: u8) {
    let level = match verbose {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        _ => tracing::Level::DEBUG,
    };
    let to_stderr = tracing_subscriber::fmt().with_max_level(level).with_writer(out::stderr).with_ansi(false);
    // A stderr that cannot be written must not cause a panic.
    let to_stderr = to_stderr.log_internal_errors(false).finish();
    let ours = Targets::new().with_target("rowlock", level);
    // A forced release is a warning for an application, but not for the user who has just requested
    // it.
    let ours = if verbose == 0 { ours.with_target("rowlock::lease::admin", tracing::Level::ERROR) } else { ours };
    to_stderr.with(ours).init();
}

async fn act(arguments: Arguments) -> Result<u8, Failure> {
    let Arguments { source, action, behind, .. } = arguments;
    let front = behind.and_then(Pid::from_raw);
    match action {
        Action::Run(_) if front.is_none() && front::has_terminal() => return front::stand_before().await,
        Action::Exec(stub) => return Err(stub::become_command(stub)),
        Action::Completions { shell } => {
            let mut program = Arguments::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut program, "rowlock", &mut script);
            out::say(String::from_utf8_lossy(&script).trim_end())?;
            return Ok(exit::OK);
        }
        Action::Man { folder } => {
            clap_mangen::generate_to(Arguments::command(), &folder).map_err(|error| Failure::io(&folder, &error))?;
            return Ok(exit::OK);
        }
        _ => {}
    }
    if let Some(front) = front {
        stub::die_with(front.as_raw_nonzero().get())?;
        out::never_stop();
    }
    let Source { kind, url, own_file, timeout } = Source::choose(&source)?;
    match kind {
        Kind::Sqlite => {
            let pool = database::open_sqlite(&url, own_file || matches!(action, Action::Migrate), timeout).await?;
            if own_file {
                rowlock::migrate(&pool).await?;
            }
            on(pool, action, front).await
        }
        Kind::Postgres => on(database::open::<sqlx::Postgres>(&url, timeout).await?, action, front).await,
        Kind::MySql => on(database::open::<sqlx::MySql>(&url, timeout).await?, action, front).await,
    }
}

async fn on<DB: Database>(pool: sqlx::Pool<DB>, action: Action, front: Option<Pid>) -> Result<u8, Failure> {
    let done = act_on(pool.clone(), action, front).await;
    // All locks of a pool share their connections. This call closes those connections too.
    LeaseLock::new(pool.clone()).shutdown(Duration::ZERO).await;
    database::soon(pool.close()).await;
    done
}

async fn act_on<DB: Database>(pool: sqlx::Pool<DB>, action: Action, front: Option<Pid>) -> Result<u8, Failure> {
    match action {
        Action::Migrate => {
            rowlock::migrate(&pool).await?;
            Ok(exit::OK)
        }
        Action::Run(run) => command::run(run.terms.lock(pool)?, run, front).await,
        Action::Acquire(acquire) => claims::acquire(acquire.terms.lock(pool)?, acquire).await,
        Action::Renew(renew) => claims::renew(pool, renew).await,
        Action::Release(release) => claims::release(LeaseLock::new(pool), release).await,
        Action::List(list) => show::list(&list.window.lock(pool)?, &list).await,
        Action::Show(one) => show::one(&one.window.lock(pool)?, &one).await,
        Action::Watch(watch) => show::watch(&watch.window.lock(pool)?, &watch).await,
        Action::Forget { older_than, window } => {
            let rows = window.lock(pool)?.forget(older_than).await?;
            out::say(format_args!("{rows} forgotten"))?;
            Ok(exit::OK)
        }
        Action::Exec(_) | Action::Completions { .. } | Action::Man { .. } => Ok(exit::OK),
    }
}
