//! `rowlock ui`: a web page of locks, jobs and runs, and metrics for Prometheus.
//!
//! `looks.rs` reads the database, as often for one open page as for a hundred. A look is a
//! `Snapshot`, and each page is a pure function of it: `locks.rs`, `jobs.rs`, `runs.rs`, `key.rs`,
//! `job.rs`, `instances.rs`, `changed.rs`, and `metrics.rs` for `/metrics`. `live.rs` sends a
//! page's changes, and `layout.rs` has what pages have in common. `output.rs` alone reads the
//! database for one request.
//!
//! `guard.rs` decides which requests are answered, `guesses.rs` how fast passwords may be tried,
//! and `connections.rs` how long clients may take for them. `change.rs` makes the changes that an
//! operator asks for, and `changes.rs` asks once more before.

mod app;
mod change;
mod changed;
mod changes;
mod connections;
mod guard;
mod guesses;
mod instances;
mod job;
mod jobs;
mod key;
mod layout;
mod live;
mod locks;
mod looks;
mod metrics;
mod output;
mod passwords;
mod plot;
mod runs;
mod snapshot;
mod text;

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use axum::{
    Router,
    middleware::{from_fn, from_fn_with_state},
};
use rowlock::{Database, Schedules};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, mpsc},
};

use crate::{
    args::keys::Ui,
    database,
    exit::{self, Failure},
    out,
    process::signals::StopSignals,
};
use app::App;
use guard::{Guard, HEALTH, METRICS};
use guesses::Guesses;
use looks::Looks;
use passwords::Passwords;

/// How long the end of the program waits for changes that are under way.
const GRACE: Duration = Duration::from_secs(10);

/// Serves the pages until the program is asked to stop.
pub async fn serve<DB: Database>(pool: sqlx::Pool<DB>, place: &str, ui: Ui) -> Result<u8, Failure> {
    let passwords = ui.password_file.as_deref().map(Passwords::read).transpose()?;
    let metrics_token = ui.metrics_token_file.as_deref().map(passwords::read_token).transpose()?;
    let mut stop = StopSignals::listen()?;
    let (listener, address) = listen(ui.listen, passwords.is_some(), "--password-file").await?;

    let (lock, schedules) = (ui.judged_by.lock(pool.clone())?, Schedules::new(pool.clone()));
    let (looks, outputs) = (Looks::start(lock, schedules.clone()), output::outputs(schedules));
    let changer = ui.allow_changes.then(|| change::changer(pool, ui.judged_by));
    let guard = Arc::new(Guard { hosts: ui.host, passwords, metrics_token, guesses: Guesses::default() });
    let (changes, mut no_changes) = mpsc::channel(1);
    let (streams, place) = (Arc::new(Semaphore::new(connections::places() / 2)), place.to_owned());
    let app = Arc::new(App { looks, outputs, changer, changes: changes.downgrade(), streams, place });

    out::say(format_args!("http://{address}/"))?;
    tokio::select! {
        () = connections::serve(listener, router(app, guard), connections::places()) => {}
        // Live pages would never let the server end by itself.
        _ = stop.next() => {}
    }
    // Nothing is sent: the channel closes with the last change. Another signal ends the wait.
    drop(changes);
    if let Err(why) = stop.within(GRACE, no_changes.recv()).await {
        out::print_error(format_args!("a change was not waited for, and is not logged: {why}"));
    }
    Ok(exit::OK)
}

fn router(app: Arc<App>, guard: Arc<Guard>) -> Router {
    let pages = Router::new()
        .merge(live::routes::<locks::Locks>())
        .merge(live::routes::<jobs::Jobs>())
        .merge(live::routes::<runs::Runs>())
        .merge(live::routes::<key::OneKey>())
        .merge(live::routes::<job::OneJob>())
        .merge(live::routes::<instances::Instances>())
        .merge(live::routes::<changed::Changed>())
        .merge(output::routes())
        .merge(changes::routes())
        .merge(metrics::routes(app.looks.clone()))
        .merge(layout::files())
        .fallback(layout::not_found)
        .with_state(app);
    guarded(pages, guard)
}

fn guarded(router: Router, guard: Arc<Guard>) -> Router {
    router
        .layer(from_fn(guard::read_in_time))
        .layer(from_fn_with_state(guard, guard::admit))
        .layer(from_fn(guard::harden))
}

/// Opens the address, of which the port may be any free one. One that other machines may reach
/// needs a secret.
async fn listen(address: SocketAddr, has_secret: bool, option: &str) -> Result<(TcpListener, SocketAddr), Failure> {
    if !has_secret && !address.ip().is_loopback() {
        let text = format_args!("--listen {address}: other machines may reach this address: give {option}");
        return Err(Failure::new(exit::USAGE, text));
    }
    let listener = TcpListener::bind(address).await;
    let opened = listener.and_then(|listener| listener.local_addr().map(|address| (listener, address)));
    opened.map_err(|error| Failure::new(exit::IO, format_args!("--listen {address}: {error}")))
}

/// Begins to serve the metrics and the state of the database.
pub async fn serve_numbers<DB: Database>(
    pool: sqlx::Pool<DB>,
    address: SocketAddr,
    token_file: Option<&Path>,
) -> Result<(), Failure> {
    let metrics_token = token_file.map(passwords::read_token).transpose()?;
    let (listener, address) = listen(address, metrics_token.is_some(), "--metrics-token-file").await?;
    let looks = Looks::start(database::lock(pool.clone(), None)?, Schedules::new(pool));
    let guard = Arc::new(Guard { metrics_token, ..Guard::default() });
    out::print_info(format_args!("http://{address}{METRICS} and {HEALTH}"));
    let places = connections::FOR_NUMBERS.min(connections::places());
    tokio::spawn(connections::serve(listener, guarded(metrics::routes(looks), guard), places));
    Ok(())
}
