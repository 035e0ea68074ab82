//! The program `rowlock`: the same locks for shells, crontabs and other languages.

#![forbid(unsafe_code)]

mod args;
mod database;
mod doctor;
mod exit;
mod format;
mod keys;
mod log;
mod migrate;
mod operator;
mod out;
mod process;
mod schedule;
mod secrets;
#[cfg(feature = "ui")]
mod ui;
mod writer;

use std::{process::ExitCode, sync::Arc, time::Duration};

use clap::CommandFactory as _;
use rowlock::{Database, LeaseLock, Schedules};
use rustix::process::Pid;
use tokio::runtime::Builder;

use args::{Action, Arguments, TableAction, source::SourceArguments};
use database::{Kind, Opened, Source};
use exit::Failure;
use keys::{claims, hold, lead, rows, show};
use process::{child, front, stub};

/// How long the end of the program waits for threads that are blocked, such as by a reader of
/// stdout that does not read.
const BLOCKED: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let arguments = Arguments::read();
    log::init(&arguments.log);
    let code = match run(arguments) {
        Ok(code) => code,
        Err(failure) => {
            if !failure.is_silent() {
                out::print_error(&failure);
            }
            failure.code
        }
    };
    out::flush();
    ExitCode::from(code)
}

/// The runtime has a single thread: the command's death signal is bound to the thread that started
/// it, and that thread has to live as long as the program.
fn run(arguments: Arguments) -> Result<u8, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| {
        Failure::new(exit::NOT_EXECUTABLE, format_args!("the program could not start its runtime: {error}"))
    })?;
    let result = runtime.block_on(dispatch(arguments));
    runtime.shutdown_timeout(BLOCKED);
    result
}

async fn dispatch(arguments: Arguments) -> Result<u8, Failure> {
    let Arguments { source, action, behind, .. } = arguments;
    let front = behind.and_then(Pid::from_raw);
    match action {
        Action::OnTables(TableAction::Run(_) | TableAction::Lead(_)) if front.is_none() && front::has_terminal() => {
            front::run_in_front().await
        }
        Action::OnTables(TableAction::Cron(cron)) if cron.only_reads() => schedule::preview::cron(&cron),
        Action::OnTables(action) => run_on_tables(&source, action, front).await,
        Action::Next(next) => schedule::preview::next(&next),
        Action::Doctor { json } => doctor::examine(&choose_source(&source)?, json).await,
        Action::Completions { shell } => {
            let mut program = Arguments::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut program, "rowlock", &mut script);
            out::say(String::from_utf8_lossy(&script).trim_end())
        }
        Action::Man { folder } => {
            let written =
                std::fs::create_dir_all(&folder).and_then(|()| clap_mangen::generate_to(Arguments::command(), &folder));
            written.map_err(|error| Failure::io(&folder, &error))?;
            Ok(exit::OK)
        }
        Action::Exec(stub) => Err(stub::become_command(stub)),
        Action::Supervise(run) => schedule::supervise::supervise(run).await,
    }
}

fn choose_source(source: &SourceArguments) -> Result<Arc<Source>, Failure> {
    rowlock::admin::accept_any_server(source.any_server);
    database::set_article_clients(source.article_clients);
    Source::choose(source).map(Arc::new)
}

/// `front`: the process that stands before this one on a terminal.
async fn run_on_tables(source: &SourceArguments, action: TableAction, front: Option<Pid>) -> Result<u8, Failure> {
    if let Some(front) = front {
        child::die_with_parent(front.as_raw_nonzero().get())?;
        out::never_stop();
    }
    let source = choose_source(source)?;
    // A migration completes the tables of its own file itself, or only says what it would do.
    let (own, create) = match &action {
        TableAction::Migrate(migrate) => (false, !migrate.dry_run && !migrate.undo),
        _ => (source.own_file, source.own_file),
    };
    match source.kind {
        Kind::Sqlite => {
            run_on(async || database::open_sqlite(&source, create, own).await, &source, action, front).await
        }
        Kind::Postgres => {
            run_on(async || database::open::<sqlx::Postgres>(&source).await, &source, action, front).await
        }
        Kind::MySql => run_on(async || database::open::<sqlx::MySql>(&source).await, &source, action, front).await,
    }
}

/// Opens the database, runs the action on it, and closes it.
async fn run_on<DB: Database>(
    open: impl AsyncFn() -> Result<Opened<DB>, Failure>,
    source: &Arc<Source>,
    action: TableAction,
    front: Option<Pid>,
) -> Result<u8, Failure> {
    let Opened { pool, place } = match &action {
        TableAction::Cron(cron) => schedule::cron::open_when_available(cron, open).await?,
        _ => open().await?,
    };
    let result = run_action(pool.clone(), (&place, source.clone()), action, front).await;
    // All locks of a pool share their connections. This call closes those connections too.
    LeaseLock::new(pool.clone()).shutdown(Duration::ZERO).await;
    database::within_second(pool.close()).await;
    result.map_err(|failure| failure.at(&place))
}

#[cfg_attr(not(feature = "ui"), allow(unused_variables))] // `place`
async fn run_action<DB: Database>(
    pool: sqlx::Pool<DB>,
    (place, source): (&str, Arc<Source>),
    action: TableAction,
    front: Option<Pid>,
) -> Result<u8, Failure> {
    match action {
        TableAction::Migrate(migrate) => migrate::migrate(pool, &migrate).await,
        TableAction::Run(run) if run.tick.cron.is_some() => schedule::tick::run(pool, run, front).await,
        TableAction::Run(run) => keys::run::run(run.terms.lock(pool)?.lock_delay(run.lock_delay), run, front).await,
        TableAction::Lead(lead) => lead::lead(lead.lock(pool)?, lead, front).await,
        TableAction::Leader(leader) => lead::leader(&LeaseLock::new(pool), &leader).await,
        TableAction::Acquire { key, terms } => claims::acquire(&terms.lock(pool)?, &key, &terms).await,
        TableAction::Hold(hold) => hold::hold(hold.terms.lock(pool)?.lock_delay(hold.lock_delay), hold).await,
        TableAction::Renew(renew) => claims::renew(pool, renew).await,
        TableAction::Release(release) => claims::release(pool, release).await,
        TableAction::List(list) => rows::list(&list.judged_by.lock(pool)?, &list).await,
        TableAction::Show(one) => show::show(&one.judged_by.lock(pool.clone())?, &Schedules::new(pool), &one).await,
        TableAction::Changes(asked) => operator::changes(&LeaseLock::new(pool), &asked).await,
        TableAction::Watch(watch) => rows::watch(&watch.judged_by.lock(pool)?, &watch).await,
        TableAction::Forget { older_than, runs, judged_by } => {
            let rows = match runs {
                true => Schedules::new(pool).forget_history(older_than).await?,
                false => judged_by.lock(pool)?.forget(older_than).await?,
            };
            out::say(format_args!("{rows} deleted"))
        }
        TableAction::Cron(cron) => schedule::cron::run(pool, source, cron).await,
        TableAction::Schedules { json } => schedule::show::list(&Schedules::new(pool), json).await,
        TableAction::Runs(runs) => schedule::show::runs(&Schedules::new(pool), &runs).await,
        TableAction::Instances(asked) => schedule::instances::instances(&Schedules::new(pool), &asked).await,
        TableAction::Why(named) => {
            schedule::why::why(&Schedules::new(pool.clone()), &LeaseLock::new(pool), &named).await
        }
        TableAction::Output(asked) => schedule::output::output(&Schedules::new(pool), &asked).await,
        TableAction::Pause(asked) => schedule::change::pause(&operator::schedules(pool), &asked).await,
        TableAction::Resume(named) => schedule::change::resume(&operator::schedules(pool), &named).await,
        TableAction::Skip(asked) => schedule::change::skip(&operator::schedules(pool), &asked).await,
        TableAction::Stop(named) => schedule::change::stop(&operator::schedules(pool), &named).await,
        TableAction::Trigger(trigger) => schedule::change::trigger(&operator::schedules(pool), &trigger).await,
        TableAction::Remove { name } => schedule::change::remove(&operator::schedules(pool), name.as_str()).await,
        TableAction::Reset(named) => schedule::change::reset(&operator::schedules(pool), &named).await,
        TableAction::Drain { label } => schedule::change::drain(&operator::schedules(pool), &label).await,
        #[cfg(feature = "ui")]
        TableAction::Ui(ui) => ui::serve(pool, place, ui).await,
    }
}
