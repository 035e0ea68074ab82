//! What a schedule is doing, and why nothing runs it.

use chrono::TimeDelta;
use rowlock::admin::ScheduleInfo;

use crate::format::clock;

/// The times of a schedule that instances declare as removed.
const REMOVED: &str = "none";
/// An instance that lives has run what is due for longer, unless it is busy.
pub const LATE: TimeDelta = TimeDelta::seconds(10);

/// Returns what holds for a schedule, as names for programs. A paused schedule may still run: the
/// pause counts from the next run.
pub fn states(info: &ScheduleInfo) -> Vec<&'static str> {
    let mut states = Vec::with_capacity(3);
    let mut add = |holds: bool, state| {
        if holds {
            states.push(state);
        }
    };
    let is_lost = info.lost_since.is_some();
    let may_begin = !info.running && !is_lost && !info.paused;
    add(info.is_removed(), "removed");
    add(info.paused, "paused");
    add(info.running, "running");
    add(is_lost && !info.running, "lost");
    add(may_begin && info.triggered.is_some(), "triggered");
    add(may_begin && info.triggered.is_none() && info.attempt > 0, "retrying");
    add(info.clock_was_ahead, "clock_was_ahead");
    add(info.instances == 0 && !info.is_removed(), "no_instance");
    if states.is_empty() {
        states.push("waiting");
    }
    states
}

/// Returns the state that tells the most.
pub fn state(info: &ScheduleInfo) -> &'static str {
    let states = states(info);
    let of_run = states.iter().find(|state| ["running", "lost"].contains(state));
    of_run.or(states.first()).copied().unwrap_or("waiting")
}

/// Returns a state as words for people.
pub fn words(state: &str) -> String {
    state.replace('_', " ")
}

/// Returns the states with what explains them.
pub fn described(info: &ScheduleInfo) -> String {
    let mut all: Vec<String> = states(info).into_iter().map(words).collect();
    all.extend(info.paused_until.map(|until| format!("until {}", clock(until))));
    all.extend(info.skipped_until.map(|until| format!("skipped until {}", clock(until))));
    all.extend(info.stopping.then(|| "stopped by an operator".to_owned()));
    all.extend(info.lost_since.map(|lost| format!("lease over since {}", clock(lost))));
    all.extend(info.renamed_to().map(|name| format!("its name is {name}")));
    all.extend(is_late(info).then(|| format!("due since {}", clock(info.due))));
    all.extend(versions(info));
    all.join(", ")
}

/// Returns whether a schedule is due that nothing has run.
pub fn is_late(info: &ScheduleInfo) -> bool {
    has_next(info) && !info.running && info.lost_since.is_none() && info.now - info.due > LATE
}

/// Returns whether a tick is to come.
pub fn has_next(info: &ScheduleInfo) -> bool {
    !info.paused && !info.is_removed()
}

/// Returns whether instances declare that no schedule has this name.
pub fn is_declared_as_removed(info: &ScheduleInfo) -> bool {
    info.times == REMOVED || info.renamed_to().is_some()
}

/// Says how many instances declare other times than those that are in effect.
pub fn versions(info: &ScheduleInfo) -> Option<String> {
    let declare = |number: u32| format!("{number} {}", if number == 1 { "declares" } else { "declare" });
    let (instances, others) = (info.instances, info.instances_with_other_times);
    match (instances, others) {
        (_, 0) => None,
        (0, others) => Some(format!("{} other times", declare(others))),
        _ if is_declared_as_removed(info) => {
            Some(format!("2 versions: {} that, {} times", declare(instances), declare(others)))
        }
        (1, others) => Some(format!("2 versions: 1 runs it, {} other times", declare(others))),
        _ => Some(format!("2 versions: {instances} run it, {} other times", declare(others))),
    }
}

/// Says why a run that is asked for would not begin: no instance that is alive declares the
/// schedule. A pause is no such reason: it ends.
pub fn nobody_runs(info: &ScheduleInfo) -> Option<String> {
    let is_declared_as_removed = is_declared_as_removed(info);
    if !is_declared_as_removed && info.instances + info.instances_with_other_times > 0 {
        return None;
    }
    let why = match (is_declared_as_removed, info.gone_since) {
        (true, _) if info.renamed_to().is_some() => {
            format!("its name is {} now", info.renamed_to().unwrap_or_default())
        }
        (true, _) => {
            let since = info.times_since.map(|since| format!(" since {}", clock(since))).unwrap_or_default();
            format!("it is declared as removed{since}")
        }
        (false, Some(gone)) => format!("it was removed from the application, or renamed, at {}", clock(gone)),
        (false, None) => "no instance that declares it is alive".to_owned(),
    };
    let last = match info.since {
        Some(since) => format!("{} ran it last, from {} on", info.by, clock(since)),
        None => "it was not run so far".to_owned(),
    };
    Some(format!("{why}; {last}"))
}
