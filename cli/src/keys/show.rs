//! `show`: one key, and what else has its name.

use anstyle::Style;
use rowlock::{
    Database, Error, LeaseLock, Schedules,
    admin::{LockInfo, LockState, ScheduleInfo},
    errors::Setup,
};
use serde_json::{Value, json};

use crate::{
    args::keys::Show,
    exit::{self, Failure},
    format::{aligned, brief, clock_or_dash, or_dash},
    keys::{
        names::Parts,
        rows::{Queues, duration, object, objects, or_unknown, style, table, waiters, work_status},
    },
    operator,
    out::{self, printable},
    schedule,
};

/// Shows a key, the permits and readers of that name, and its schedule with its last runs.
pub async fn show<DB: Database>(lock: &LeaseLock<DB>, schedules: &Schedules<DB>, asked: &Show) -> Result<u8, Failure> {
    let key = asked.key.as_str();
    let entry = lock.inspect(key).await?;
    let schedule = match schedules.inspect(key).await {
        Err(Error::Setup(Setup::ScheduleTablesMissing)) => None,
        found if entry.is_some() => or_unknown(found, format_args!("{key}: whether a schedule has this name")),
        found => found?,
    };
    let parts = Parts::of(lock, key).await?;
    let queues = Queues::if_possible(lock).await;
    if entry.is_none() && parts.is_empty() && schedule.is_none() {
        let text = format_args!(
            "{key:?} has no row: it was never taken, or was forgotten; and no schedule has this name; `rowlock changes` lists what operators did"
        );
        return Err(Failure::new(exit::REFUSED, text));
    }
    let changed = match lock.changes(Some(key), CHANGES).await {
        // Before the table of changes was there, nothing was kept.
        Err(Error::Setup(Setup::TableMissing)) => Vec::new(),
        changed => or_unknown(changed, format_args!("{key}: what operators changed")),
    };
    let runs = match schedule {
        Some(_) => or_unknown(schedules.history(key, RUNS).await, format_args!("{key}: how its schedule ran")),
        None => Vec::new(),
    };
    if asked.json {
        let mut shown = entry.as_ref().map_or_else(|| json!({ "key": key }), |entry| object(entry, None));
        shown["waiting"] = queues.of_name(key).into();
        shown["permits"] = objects(parts.permits.as_deref().unwrap_or_default(), &queues).into();
        shown["readers"] = objects(parts.readers.as_deref().unwrap_or_default(), &queues).into();
        shown["schedule"] = schedule.as_ref().map_or(Value::Null, schedule::show::object);
        shown["changes"] = changed.iter().map(operator::change_object).collect();
        shown["runs"] = runs.iter().map(schedule::show::run_object).collect();
        return out::say_json(&shown);
    }
    let entry = entry.map(|entry| aligned(&lines(&entry, queues.of_name(key))));
    let schedule = schedule.map(|schedule| about(&schedule));
    let runs = (!runs.is_empty()).then(|| schedule::show::table(&runs));
    let parts = parts.described(&printable(key)).into_iter().flat_map(|(what, rows)| {
        let rows = (!rows.is_empty()).then(|| table(rows, &queues));
        std::iter::once(what).chain(rows)
    });
    let changed = (!changed.is_empty()).then(|| operator::change_table(&changed));
    let shown = entry.into_iter().chain(parts).chain(schedule).chain(runs).chain(changed);
    out::say(shown.collect::<Vec<_>>().join("\n\n"))
}

/// How many runs of a schedule are shown with it, and how many changes of operators.
const RUNS: u32 = 10;
const CHANGES: u32 = 10;

/// Describes a key, one fact a line.
fn lines(entry: &LockInfo, waiting: Option<u64>) -> Vec<(Style, [String; 2])> {
    let so_far = || (entry.now - entry.since?).to_std().ok().filter(|_| entry.state == LockState::Held);
    let took = match (duration(entry), so_far()) {
        (Some(took), _) => brief(took),
        (None, Some(took)) => format!("{} so far", brief(took)),
        (None, None) => "-".to_owned(),
    };
    let line = |name: &str, value: &str| (Style::new(), [name.to_owned(), printable(value)]);
    let mut lines = vec![
        line("KEY", &entry.key),
        line("STATE", &entry.state.to_string()),
        line("STATUS", work_status(entry)),
        line("BY", or_dash(&entry.by)),
        line("SINCE", &clock_or_dash(entry.since)),
        line("UNTIL", &clock_or_dash(entry.until)),
        line("ENDED", &clock_or_dash(entry.ended)),
        line("DURATION", &took),
        line("WAITING", &waiters(waiting)),
        line("TOKEN", &entry.token.to_string()),
    ];
    lines[1].0 = style(entry.state);
    lines
}

fn about(schedule: &ScheduleInfo) -> String {
    let (times, next) = (schedule::show::times(schedule), schedule::show::next(schedule));
    let state = schedule::state::described(schedule);
    let first = format!("schedule {}: {}, {state}, next at {next}", printable(&schedule.name), printable(&times));
    let about = schedule.description.lines().map(printable);
    std::iter::once(first).chain(about).collect::<Vec<_>>().join("\n")
}
