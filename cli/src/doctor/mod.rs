//! `rowlock doctor`: examines the database, and says what to do about each problem.
//!
//! `servers.rs` asks a database about itself. `checks.rs` judges the answers, and `rights.rs` those
//! about rights, each as a `Finding` of `finding.rs`.

mod checks;
mod finding;
mod rights;
mod servers;

use std::{sync::Arc, time::Duration};

use anstyle::Style;
use rowlock::LeaseLock;
use serde_json::{Value, json};

use crate::{
    database::{self, Kind, Opened, Source},
    exit::{self, Failure},
    format::aligned,
    out::{self, printable},
};
use finding::{Finding, Mark};
use servers::Server;

pub async fn examine(source: &Arc<Source>, json: bool) -> Result<u8, Failure> {
    let (findings, code) = match source.kind {
        Kind::Sqlite => findings(database::open_sqlite(source, false, false).await).await,
        Kind::Postgres => findings(database::open::<sqlx::Postgres>(source).await).await,
        Kind::MySql => findings(database::open::<sqlx::MySql>(source).await).await,
    };
    match json {
        true => out::say_json(&object(&findings))?,
        false => out::say(text(&findings))?,
    };
    Ok(code)
}

/// Returns what was found, and the exit code.
async fn findings<DB: Server>(opened: Result<Opened<DB>, Failure>) -> (Vec<Finding>, u8) {
    let Opened { pool, place } = match opened {
        Ok(opened) => opened,
        Err(failure) => {
            let (found, advice) = checks::unreachable(&failure.to_string());
            return (vec![Finding::problem("connection", found, advice)], failure.code);
        }
    };
    let mut findings = vec![Finding::good("connection", place)];
    findings.extend(checks::all(&pool).await);
    LeaseLock::new(pool.clone()).shutdown(Duration::ZERO).await;
    database::within_second(pool.close()).await;
    let code = if is_healthy(&findings) { exit::OK } else { exit::UNFIT };
    (findings, code)
}

fn is_healthy(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.mark != Mark::Problem)
}

fn object(findings: &[Finding]) -> Value {
    let one = |finding: &Finding| {
        json!({
            "check": finding.check,
            "result": finding.mark.name(),
            "found": finding.found,
            "advice": finding.advice,
        })
    };
    json!({ "healthy": is_healthy(findings), "checks": findings.iter().map(one).collect::<Vec<_>>() })
}

/// Returns a line for each finding, and one more for what to do.
fn text(findings: &[Finding]) -> String {
    let rows = findings.iter().flat_map(|finding| {
        let first = (finding.mark.style(), [finding.mark.name(), finding.check, &finding.found].map(printable));
        let advice = finding.advice.as_ref().map(|advice| (Style::new(), ["", "", advice].map(printable)));
        std::iter::once(first).chain(advice)
    });
    aligned(&rows.collect::<Vec<_>>())
}
