//! Who makes a change; changes that operators make on the command line, which are logged with who
//! asked, and where; and `changes`, which shows all that were made.

use std::fmt::Display;

use anstyle::Style;
use rowlock::{Database, LeaseLock, Schedules, admin::ChangeInfo};
use serde_json::{Value, json};
use sqlx::Pool;

use crate::{
    args::keys::Changes,
    exit::Failure,
    format::{clock, precise, tabular},
    out::{self, printable},
};

/// The most characters of a label.
const LABEL: usize = 45;

/// Returns the schedules with who asks for a change, and where, as their label.
pub fn schedules<DB: Database>(pool: Pool<DB>) -> Schedules<DB> {
    Schedules::new(pool).label(&label())
}

/// Returns who runs the program, and where.
pub fn label() -> String {
    label_of(&user(), machine())
}

/// Returns who asks for a change, and from where, as a label. Of a name that is too long, the
/// beginning is kept.
pub fn label_of(user: &str, from: impl Display) -> String {
    format!("{user}@{from}").chars().filter(|c| !c.is_control()).take(LABEL).collect()
}

/// Logs a change that was made, with what was there before, or that it was not made. The program's
/// last line says why.
pub fn logged<T>(
    change: &str,
    of: &str,
    done: Result<T, impl Into<Failure>>,
    was: impl FnOnce(&T) -> String,
) -> Result<T, Failure> {
    let (by, from) = (user(), machine());
    let done: Result<T, Failure> = done.map_err(Into::into);
    match done.as_ref().map(was) {
        // Its holder may still work.
        Ok(was) if change == "release" => {
            tracing::warn!(change, ?of, ?by, %from, ?was, "changed on the command line");
        }
        Ok(was) => tracing::info!(change, ?of, ?by, %from, ?was, "changed on the command line"),
        Err(failure) => tracing::debug!(change, ?of, ?by, %from, %failure, "not changed on the command line"),
    }
    done
}

/// Returns the name of the user who runs the program, as the environment tells it.
fn user() -> String {
    let names = ["SUDO_USER", "USER", "LOGNAME"].into_iter().filter_map(|variable| std::env::var(variable).ok());
    let mut names = names.filter(|name| !name.is_empty());
    names.next().unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()))
}

fn machine() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

pub async fn changes<DB: Database>(lock: &LeaseLock<DB>, asked: &Changes) -> Result<u8, Failure> {
    let changes = lock.changes(asked.name.as_deref(), asked.limit).await?;
    match asked.json {
        true => out::say_json(&changes.iter().map(change_object).collect()),
        false => out::say(change_table(&changes)),
    }
}

pub fn change_table(changes: &[ChangeInfo]) -> String {
    let row = |change: &ChangeInfo| {
        let cells = [&clock(change.at), &change.what, &change.name, &change.who, &change.detail];
        (Style::new(), cells.map(|cell| printable(cell)))
    };
    tabular(["CHANGED", "WHAT", "NAME", "WHO", "DETAIL"], changes.iter().map(row))
}

pub fn change_object(change: &ChangeInfo) -> Value {
    json!({
        "at": precise(change.at),
        "what": change.what,
        "who": change.who,
        "name": change.name,
        "detail": change.detail,
    })
}
