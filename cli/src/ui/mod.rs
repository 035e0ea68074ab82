//! `rowlock ui`: a web page of locks, jobs and runs, and metrics for Prometheus.
//!
//! `looks.rs` reads the database, as often for one open page as for a hundred. A look is a
//! `Snapshot`, and each page is a pure function of it: `locks.rs`, `jobs.rs`, `runs.rs`, `key.rs`,
//! `job.rs`, `instances.rs`, and `metrics.rs` for `/metrics`. `live.rs` sends a page's changes.
//! `guard.rs` decides which requests are answered, and `connections.rs` how long clients may take
//! for them. `change.rs` makes the changes that an operator asks for, and `changes.rs` asks once
//! more before.

mod app;
mod change;
mod changes;
mod connections;
mod guard;
mod instances;
mod job;
mod jobs;
mod key;
mod layout;
mod live;
mod locks;
mod looks;
mod metrics;
mod plot;
mod runs;
mod sessions;
mod snapshot;
mod text;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    middleware::{from_fn, from_fn_with_state},
    routing::get,
};
use rowlock::{Database, Schedules};
use tokio::{net::TcpListener, sync::mpsc};

use crate::{
    args::ui::Ui,
    exit::{self, Failure},
    out,
    process::signals::StopSignals,
};
use app::App;
use guard::{Guard, Passwords};
use looks::Looks;

/// How long the end of the program waits for changes that are under way.
const GRACE: Duration = Duration::from_secs(10);

/// Serves the pages until the program is asked to stop.
pub async fn serve<DB: Database>(pool: sqlx::Pool<DB>, place: &str, ui: Ui) -> Result<u8, Failure> {
    let passwords = ui.password_file.as_deref().map(Passwords::read).transpose()?;
    if passwords.is_none() && !ui.listen.ip().is_loopback() {
        let text = format_args!("--listen {}: other machines may reach this address: give --password-file", ui.listen);
        return Err(Failure::new(exit::USAGE, text));
    }
    let mut stop = StopSignals::listen()?;
    let taken = |error| Failure::new(exit::IO, format_args!("--listen {}: {error}", ui.listen));
    let listener = TcpListener::bind(ui.listen).await.map_err(taken)?;
    let address = listener.local_addr().map_err(taken)?;

    let (lock, schedules) = (ui.judged_by.lock(pool.clone())?, Schedules::new(pool));
    let looks = Looks::start(lock.clone(), schedules.clone());
    let changer = change::changer(lock, schedules);
    let guard = Arc::new(Guard { hosts: ui.host, passwords });
    let (changes, mut no_changes) = mpsc::channel(1);
    let app = Arc::new(App::new(looks, ui.allow_changes.then_some(changer), changes.downgrade(), place));

    out::say(format_args!("http://{address}/"))?;
    tokio::select! {
        () = connections::serve(listener, router(app, guard)) => {}
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
    Router::new()
        .merge(live::routes::<locks::Locks>())
        .merge(live::routes::<jobs::Jobs>())
        .merge(live::routes::<runs::Runs>())
        .merge(live::routes::<key::OneKey>())
        .merge(live::routes::<job::OneJob>())
        .merge(live::routes::<instances::Instances>())
        .merge(changes::routes())
        .route("/metrics", get(metrics::metrics))
        .merge(layout::files())
        .fallback(layout::not_found)
        .with_state(app)
        .layer(from_fn(guard::read_in_time))
        .layer(from_fn_with_state(guard, guard::admit))
        .layer(from_fn(guard::harden))
}
