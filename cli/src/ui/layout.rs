//! What pages have in common: the frame, the state of the database, the files, errors, and tables
//! that are longer than a page.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::{
    exit::{self, Failure},
    format::clock,
    out::printable,
    ui::{app::App, looks::View, snapshot::Unread, text::grouped},
};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");
const ICON: &str = include_str!("icon.svg");

/// The pages of the navigation.
const PAGES: [(&str, &str); 5] =
    [("/", "Locks"), ("/jobs", "Jobs"), ("/runs", "Runs"), ("/instances", "Instances"), ("/changes", "Changes")];

/// Returns a whole page.
pub fn page(app: &App, title: &str, current: &str, content: &Markup) -> Html<String> {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · rowlock" }
                link rel="stylesheet" href="/style.css";
                link rel="icon" href="/icon.svg" type="image/svg+xml";
                script src="/script.js" defer {}
            }
            body {
                a.skip href="#main" { "Skip to the content" }
                header {
                    a.brand href="/" { (PreEscaped(ICON)) "rowlock" }
                    nav aria-label="Pages" {
                        @for (path, name) in PAGES {
                            a href=(path) aria-current=[(path == current).then_some("page")] { (name) }
                        }
                    }
                    span.place title=(app.place) { (app.place) }
                }
                p #offline role="status" hidden { "The connection to rowlock ui is lost. This page is not up to date; it tries again." }
                main #main tabindex="-1" { (content) }
                footer {
                    (if app.allows_changes() { "Changes are allowed." } else { "Read-only." })
                    " Times are UTC unless they say otherwise, by the database's clock. rowlock " (env!("CARGO_PKG_VERSION")) "."
                }
            }
        }
    };
    Html(page.into_string())
}

/// Says how old the data is, and whether the database answers.
pub fn state_of(view: &View) -> Markup {
    let from = view.snapshot.as_ref().map(|snapshot| clock(snapshot.now));
    match (&view.problem, from) {
        (Some(problem), from) => html! {
            div.problem #problem role="alert" {
                strong { "The database does not answer." }
                " Since " (clock(problem.since)) ", each look has failed: " (printable(&problem.text)) ". "
                @match from {
                    Some(from) => { "What follows is from " (from) ". " }
                    None => { "Nothing was read so far. " }
                }
                "This page tries again every few seconds."
            }
        },
        (None, Some(from)) => html! {
            p.asof { "As of " (from) }
            @for Unread { part, why, .. } in view.snapshot.iter().flat_map(|snapshot| &snapshot.unread) {
                div.problem role="alert" { strong { (format!("{part:?}")) " could not be read." } " " (printable(why)) }
            }
        },
        (None, None) => html! {},
    }
}

/// A page that says what is wrong, in place of the one that was asked for.
pub fn error(app: &App, status: StatusCode, title: &str, text: &str) -> Response {
    let content = html! {
        h1 { (title) }
        p { (printable(text)) }
        p { a href="/" { "All locks" } }
    };
    (status, page(app, title, "", &content)).into_response()
}

/// Says why a request to the database failed.
pub fn failure(app: &App, failure: &Failure) -> Response {
    let status = match failure.code {
        exit::REFUSED => StatusCode::NOT_FOUND,
        exit::USAGE => StatusCode::BAD_REQUEST,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    error(app, status, "The request failed", &failure.to_string())
}

pub async fn not_found(State(app): State<Arc<App>>) -> Response {
    error(&app, StatusCode::NOT_FOUND, "There is no such page", "The address is wrong, or the page has moved.")
}

/// The files that pages refer to.
pub fn files() -> Router<Arc<App>> {
    let file = |kind: &'static str, text: &'static str| get(async move || ([(header::CONTENT_TYPE, kind)], text));
    Router::new()
        .route("/style.css", file("text/css; charset=utf-8", STYLE))
        .route("/script.js", file("text/javascript; charset=utf-8", SCRIPT))
        .route("/icon.svg", file("image/svg+xml", ICON))
}

/// One page of the rows that were found.
pub struct Shown<'a, T> {
    pub rows: &'a [T],
    /// The number of the page, from 1, and of the last one.
    page: usize,
    last: usize,
}

impl<'a, T> Shown<'a, T> {
    /// Returns the page with this number, or the nearest one, of pages with so many rows.
    pub fn new(found: &'a [T], page: usize, rows: usize) -> Self {
        let last = found.len().div_ceil(rows).max(1);
        let page = page.clamp(1, last);
        Self { rows: found.chunks(rows).nth(page - 1).unwrap_or_default(), page, last }
    }

    /// Links to the first, the previous, the next and the last page.
    pub fn links(&self, address: impl Fn(usize) -> String) -> Markup {
        let Self { page, last, .. } = *self;
        let link = |name: &str, to: usize| match to == page || to < 1 || to > last {
            true => html! { span { (name) } },
            false => html! { a href=(address(to)) { (name) } },
        };
        html! {
            @if last > 1 {
                nav.pages aria-label="Pages of the table" {
                    (link("First", 1)) (link("Previous", page.saturating_sub(1)))
                    strong { (grouped(page)) " of " (grouped(last)) }
                    (link("Next", page + 1)) (link("Last", last))
                }
            }
        }
    }
}
