//! Pages that stay up to date: the page itself, and its part that changes as server-sent events.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Query, RawQuery, State},
    http::StatusCode,
    response::{
        Html, IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    },
    routing::get,
};
use maud::{Markup, html};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::ui::{
    app::App,
    layout,
    looks::View,
    snapshot::{Part, Snapshot},
};

/// A page, by what its address says beside the path.
pub trait Page: DeserializeOwned + Send + Sync + 'static {
    const PATH: &'static str;
    /// Without this part of a look there is nothing to show.
    const NEEDS: Part;

    fn title(&self) -> String;

    /// Returns the part that does not change, which comes first.
    fn head(&self) -> Markup;

    /// Returns the part that shows the database.
    fn live(&self, snapshot: &Snapshot, allows_changes: bool) -> Markup;
}

/// The routes of a page.
pub fn routes<P: Page>() -> Router<Arc<App>> {
    Router::new().route(P::PATH, get(page::<P>)).route(&address_of_events::<P>(), get(events::<P>))
}

fn address_of_events<P: Page>() -> String {
    format!("/events{}", P::PATH)
}

async fn page<P: Page>(State(app): State<Arc<App>>, RawQuery(raw): RawQuery, Query(page): Query<P>) -> Html<String> {
    let raw = raw.unwrap_or_default();
    let live = rendered(&app, &app.looks.fresh().await, &page);
    let content = html! {
        (page.head())
        div #live data-events={ (address_of_events::<P>()) "?" (raw) } { (maud::PreEscaped(live)) }
    };
    layout::page(&app, &page.title(), P::PATH, &content)
}

async fn events<P: Page>(State(app): State<Arc<App>>, Query(page): Query<P>) -> Response {
    // Open pages leave half of the places to requests.
    let Ok(place) = app.streams.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many pages are open").into_response();
    };
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let _place = place;
        let mut view = app.looks.fresh().await;
        loop {
            // A string in JSON has no line break, which would end the event's data.
            let data = serde_json::Value::from(rendered(&app, &view, &page)).to_string();
            if sender.send(Ok::<_, Infallible>(Event::default().data(data))).await.is_err() {
                return;
            }
            tokio::select! {
                next = app.looks.next() => view = next,
                () = sender.closed() => return,
            }
        }
    });
    let alive = KeepAlive::new().interval(Duration::from_secs(15));
    Sse::new(ReceiverStream::new(receiver)).keep_alive(alive).into_response()
}

fn rendered<P: Page>(app: &App, view: &View, page: &P) -> String {
    let snapshot = view.snapshot.as_ref().filter(|snapshot| !snapshot.lacks(P::NEEDS));
    let live = snapshot.map(|snapshot| page.live(snapshot, app.allows_changes()));
    let part = html! {
        (layout::state_of(view))
        @if let Some(live) = live { div.stale[view.problem.is_some()] { (live) } }
    };
    part.into_string()
}
