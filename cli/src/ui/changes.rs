//! Changes that an operator asks for: each is asked once more on a page of its own, and logged with
//! who asked.

use std::sync::Arc;

use axum::{
    Extension, Form, Router,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
    routing::get,
};
use maud::{Markup, html};
use rowlock::{
    Status,
    admin::{LockInfo, ScheduleInfo},
};
use serde::Deserialize;
use tokio::sync::mpsc;

use crate::{
    exit::{self, Failure},
    format::clock,
    keys::names::is_claimed,
    operator::label_of,
    out::printable,
    schedule::state::{is_declared_as_removed, nobody_runs},
    ui::{
        app::App,
        change::{Change, Verb, is_begun, seen, seen_tick},
        guard::Who,
        jobs::job_address,
        layout,
        locks::{holder, key_address, time_left},
        text::when,
    },
};

/// In place of a name, where none is asked for.
const NOBODY: &str = "-";

impl Verb {
    /// The button, and what it does.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Release => (
                "Release by force",
                "The key is free at once, and another instance may take it. The holder notices at its next renewal; \
                 until then its work may go on beside that of the next holder.",
            ),
            Self::Pause => ("Pause", "No run begins until the job is resumed. A run that is under way goes on."),
            Self::Resume => (
                "Resume",
                "Runs begin again, and no tick is skipped. The catch-up of the job decides about the ticks since the pause.",
            ),
            Self::Trigger => (
                "Run now",
                "The next instance that polls runs the job, beside its ticks. A paused job runs once it is resumed.",
            ),
            Self::Skip => (
                "Skip the next tick",
                "The next tick is skipped, and counts as missed. A run that is under way goes on. Resuming the job \
                 takes it back.",
            ),
            Self::Stop => (
                "Stop",
                "The instance that runs the job notices the stop within 20 seconds. A command then has its --stop-timeout to \
                 end. The tick counts as failed, and is not tried again. The ticks that follow are run.",
            ),
        }
    }

    fn question(self, name: &str) -> String {
        match self {
            Self::Release => format!("Release {name} by force?"),
            Self::Pause => format!("Pause {name}?"),
            Self::Resume => format!("Resume {name}?"),
            Self::Trigger => format!("Run {name} now?"),
            Self::Skip => format!("Skip the next tick of {name}?"),
            Self::Stop => format!("Stop the tick of {name}?"),
        }
    }

    /// Returns the page of what is changed.
    fn page(self, name: &str) -> String {
        if self == Self::Release { key_address(name) } else { job_address(name) }
    }
}

/// The key or the job, under the name that its page uses.
#[derive(Debug, Deserialize)]
struct Asked {
    #[serde(alias = "key")]
    name: String,
}

#[derive(Debug, Deserialize)]
struct Confirmed {
    name: String,
    #[serde(default)]
    seen: String,
    #[serde(default)]
    status: String,
    /// Not empty if the box is ticked.
    #[serde(default)]
    anyway: String,
}

/// The routes of all changes.
pub fn routes() -> Router<Arc<App>> {
    Verb::ALL.into_iter().fold(Router::new(), |router, verb| {
        let ask = async move |app: State<Arc<App>>, asked: Query<Asked>| ask(&app, verb, &asked.name).await;
        let change = async move |app: State<Arc<App>>, who: Extension<Who>, form: Form<Confirmed>| {
            confirm(&app, &who, verb, form.0).await
        };
        router.route(&format!("/{}", verb.name()), get(ask).post(change))
    })
}

fn read_only(app: &App) -> Response {
    let text = "This page only shows. A rowlock ui that is started with --allow-changes lets operators change things.";
    layout::error(app, StatusCode::FORBIDDEN, "Changes are not allowed", text)
}

/// Asks once more, and says what would happen.
async fn ask(app: &App, verb: Verb, name: &str) -> Response {
    if !app.allows_changes() {
        return read_only(app);
    }
    if verb.is_of_tick() {
        // The last look may be of an earlier tick.
        app.looks.at_once().await;
    }
    let view = app.looks.fresh().await;
    let lock = view.snapshot.as_ref().and_then(|snapshot| snapshot.lock(name));
    let lock = lock.filter(|lock| verb == Verb::Release && is_claimed(lock.state));
    let job = view.snapshot.as_ref().and_then(|snapshot| snapshot.job(name));
    let absent = match verb {
        Verb::Release if lock.is_none() => Some(("The key is not held", "It has been released, or was never taken.")),
        _ if verb.is_of_tick() && job.is_none() => Some(("There is no such job", "None was declared under this name.")),
        _ => None,
    };
    match (absent, &view.problem) {
        (Some(_), Some(problem)) => {
            return layout::error(app, StatusCode::SERVICE_UNAVAILABLE, "The database was not read", &problem.text);
        }
        (Some((title, text)), None) => return layout::error(app, StatusCode::NOT_FOUND, title, text),
        (None, _) => {}
    }
    let (triggered, of_tick) = (job.filter(|_| verb == Verb::Trigger), job.filter(|_| verb.is_of_tick()));
    let (button, effect) = verb.words();
    let content = html! {
        h1 { (verb.question(&printable(name))) }
        (layout::state_of(&view))
        @if let Some(lock) = lock { (claim(lock)) }
        @if let Some(job) = of_tick { (tick(verb, job)) }
        p { (effect) }
        form.confirm method="post" action={ "/" (verb.name()) } {
            input type="hidden" name="name" value=(name);
            @if let Some(lock) = lock { (release_fields(lock)) }
            @if let Some(job) = of_tick { input type="hidden" name="seen" value=(seen_tick(verb, job)); }
            @if let Some(why) = triggered.filter(|job| !is_declared_as_removed(job)).and_then(nobody_runs) { (anyway_fields(&why)) }
            p.actions {
                button.danger[[Verb::Release, Verb::Stop].contains(&verb)] { (button) }
                a.button href=(verb.page(name)) { "Cancel" }
            }
        }
    };
    layout::page(app, button, "", &content).into_response()
}

fn claim(lock: &LockInfo) -> Markup {
    html! {
        dl {
            div { dt { "Holder" } dd { (holder(lock)) } }
            div { dt { "Taken" } dd { @if let Some(since) = lock.since { (when(since, lock.now)) } @else { "–" } } }
            div { dt { "Time left" } dd { (time_left(lock)) } }
            div { dt { "Token" } dd.number { (lock.token) } }
        }
    }
}

/// Shows the tick that is stopped or skipped.
fn tick(verb: Verb, job: &ScheduleInfo) -> Markup {
    html! {
        dl {
            @if verb == Verb::Stop {
                div { dt { "Tick" } dd { @if let Some(slot) = job.run_slot { (clock(slot)) } @else { "none is under way" } } }
                @if job.attempt > 0 { div { dt { "Attempt" } dd { (job.attempt) " by " (printable(&job.by)) } } }
            } @else {
                div { dt { "Tick" } dd { @if is_begun(job) { "the next one after " } (clock(job.slot)) } }
                @if let Some(until) = job.skipped_until {
                    div { dt { "Until now" } dd { "its ticks are skipped until " (clock(until)) ": this one only, if you go on" } }
                }
            }
        }
    }
}

fn release_fields(lock: &LockInfo) -> Markup {
    html! {
        input type="hidden" name="seen" value=(seen(lock));
        fieldset {
            legend { "The row records the work as" }
            label { input type="radio" name="status" value="F" checked; " failed" }
            label { input type="radio" name="status" value="S"; " succeeded" }
            p { small { "Under the rules of the article, a key that failed stays closed until " code { "rowlock release --force --status S" } "." } }
        }
    }
}

fn anyway_fields(why: &str) -> Markup {
    html! {
        fieldset {
            legend { "No instance would run it now: " (printable(why)) }
            label { input type="checkbox" name="anyway" value="yes"; " Ask all the same: the next instance that declares it runs it" }
        }
    }
}

async fn confirm(app: &App, who: &Who, verb: Verb, confirmed: Confirmed) -> Response {
    let Some(changer) = &app.changer else { return read_only(app) };
    let Some(under_way) = app.changes.upgrade() else { return ending(app) };
    let Confirmed { name, seen, status, anyway } = confirmed;
    let status = if status == "S" { Status::Succeeded } else { Status::Failed };
    let by = label_of(who.name.as_deref().unwrap_or(NOBODY), who.from.ip());
    let made = changer(Change { verb, who: by, name: name.clone(), seen, status, anyway: !anyway.is_empty() });
    // A browser that goes away ends this request, but neither the change nor its line in the log.
    let until_answered = under_way.clone();
    let task = tokio::spawn(logged(made, verb, name.clone(), who.clone(), under_way));
    let failed = |error| Failure::new(exit::UNAVAILABLE, format_args!("whether it was changed is not known: {error}"));
    let mut response = match task.await.unwrap_or_else(|error| Err(failed(error))) {
        Ok(()) => {
            // The page that follows shows it.
            app.looks.at_once().await;
            Redirect::to(&format!("{}&done={}", verb.page(&name), verb.name())).into_response()
        }
        Err(failure) => layout::failure(app, &failure),
    };
    // The program waits for the answer too: it is dropped when that is written.
    response.extensions_mut().insert(until_answered);
    response
}

/// Waits until a change was made or has failed, and logs that.
async fn logged(
    made: impl Future<Output = Result<(), Failure>>,
    verb: Verb,
    name: String,
    who: Who,
    _under_way: mpsc::Sender<()>,
) -> Result<(), Failure> {
    let done = made.await;
    let (change, by, from) = (verb.name(), who.name.as_deref().unwrap_or(NOBODY), who.from.ip());
    match &done {
        Ok(()) => tracing::warn!(change, of = ?name, by = ?by, %from, "changed on the web page"),
        // It may say that the outcome is not known.
        Err(failure) => {
            tracing::warn!(change, of = ?name, by = ?by, %from, %failure, "a change on the web page failed")
        }
    }
    done
}

fn ending(app: &App) -> Response {
    let text = "Nothing was changed: rowlock ui is about to end.";
    layout::error(app, StatusCode::SERVICE_UNAVAILABLE, "The server ends", text)
}
