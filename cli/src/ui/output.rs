//! The page of what a run has printed.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use chrono::{DateTime, Utc};
use maud::html;
use rowlock::{Database, Schedules, admin::RunInfo};
use serde::Deserialize;

use crate::{
    format::{clock, precise},
    out::printable,
    schedule::output::lines,
    ui::{
        app::{App, Outputs},
        jobs::job_address,
        layout,
        text::encoded,
    },
};

/// Returns what reads outputs from a database.
pub fn outputs<DB: Database>(schedules: Schedules<DB>) -> Outputs {
    Box::new(move |name, slot, attempt| {
        let (schedules, name) = (schedules.clone(), name.to_owned());
        Box::pin(async move { Ok(schedules.output(&name, slot, attempt).await?) })
    })
}

#[derive(Debug, Deserialize)]
struct Asked {
    name: String,
    slot: String,
    attempt: u32,
}

pub fn output_address(run: &RunInfo) -> String {
    format!("/output?name={}&slot={}&attempt={}", encoded(&run.name), encoded(&precise(run.slot)), run.attempt)
}

pub fn routes() -> Router<Arc<App>> {
    Router::new().route("/output", get(output))
}

async fn output(State(app): State<Arc<App>>, Query(asked): Query<Asked>) -> Response {
    let Asked { name, slot, attempt } = asked;
    let Ok(slot) = slot.parse::<DateTime<Utc>>() else {
        let text = "Its tick has to be a time, such as 2026-10-25T00:00:00Z.";
        return layout::error(&app, StatusCode::BAD_REQUEST, "There is no such run", text);
    };
    let kept = match (app.outputs)(&name, slot, attempt).await {
        Ok(kept) => kept,
        Err(failure) => return layout::failure(&app, &failure),
    };
    let content = html! {
        p.path { a href=(job_address(&name)) { (printable(&name)) } }
        h1 { "Output" }
        p { "Attempt " (attempt) " at the tick of " (clock(slot)) "." }
        @match kept {
            Some(kept) => { pre { (lines(&kept)) } }
            None => { p.empty { "Nothing is kept: the run printed nothing, was lost, or its job keeps no output." } }
        }
    };
    layout::page(&app, &format!("{} · output", printable(&name)), "", &content).into_response()
}
