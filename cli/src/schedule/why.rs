//! `why`: what keeps a schedule from running, or that nothing does.

use chrono::{DateTime, TimeDelta, Utc};
use rowlock::{
    Database, LeaseLock, Schedules,
    admin::{InstanceInfo, LockInfo, RunInfo, RunStatus, ScheduleInfo},
};
use serde_json::json;

use crate::{
    args::schedules::Named,
    exit::Failure,
    format::{brief, clock},
    keys::rows::claim,
    out::{self, printable},
    schedule::{
        show::{find, missed, object},
        state::{LATE, has_next, is_late, nobody_runs, versions},
    },
};

/// How many runs are looked at for the last ones.
const RUNS: u32 = 100;
/// Clocks that differ by less are not mentioned.
const APART: TimeDelta = TimeDelta::seconds(5);

pub async fn why<DB: Database>(schedules: &Schedules<DB>, lock: &LeaseLock<DB>, named: &Named) -> Result<u8, Failure> {
    let name = named.name.as_str();
    let info = find(schedules, name).await?;
    let waits_for = match info.waits_for() {
        Some(key) => lock.inspect(key).await?,
        None => None,
    };
    let seen = Seen {
        info: &info,
        waits_for: waits_for.as_ref(),
        here: Utc::now(),
        runs: &schedules.history(name, RUNS).await?,
        all: &schedules.list().await?,
        instances: &schedules.instances().await?,
    };
    let reasons = seen.reasons();
    if named.json {
        let mut shown = object(seen.info);
        shown["why"] = json!(reasons);
        return out::say_json(&shown);
    }
    let lines = reasons.iter().map(|reason| format!("{}: {}", printable(name), printable(reason)));
    out::say(lines.collect::<Vec<_>>().join("\n"))
}

/// What is known of a schedule.
struct Seen<'a> {
    info: &'a ScheduleInfo,
    /// The key that its run waits for.
    waits_for: Option<&'a LockInfo>,
    /// Its last runs, the latest slot first.
    runs: &'a [RunInfo],
    all: &'a [ScheduleInfo],
    instances: &'a [InstanceInfo],
    /// The time of this machine.
    here: DateTime<Utc>,
}

impl Seen<'_> {
    /// Returns what is to be said, what matters most first.
    fn reasons(&self) -> Vec<String> {
        let info = self.info;
        let no_instance = nobody_runs(info).map(|why| format!("{why}{}", self.had_it()));
        let paused = info.paused.then(|| {
            let triggered = if info.triggered.is_some() { ", and the run that was asked for waits too" } else { "" };
            let until = info.paused_until.map(|until| format!(" until {}", clock(until))).unwrap_or_default();
            format!("it is paused{until}{triggered}: `rowlock resume` lets it run")
        });
        let skipped = info.skipped_until.map(|until| {
            format!("an operator has its ticks skipped until {}: `rowlock resume` takes that back", clock(until))
        });
        let ahead = info.clock_was_ahead.then(|| {
            "its next tick is far ahead, since the database's clock was: the next instance puts it back".to_owned()
        });
        let of_row = [no_instance, paused, skipped, self.run(), self.lateness(), ahead, versions(info), self.next()];
        let of_runs = [self.failure(), self.skipped(), self.success()];
        of_row.into_iter().chain(of_runs).chain([apart(info.now - self.here)]).flatten().collect()
    }

    /// Returns the instances that declare the schedule.
    fn declaring(&self) -> impl Iterator<Item = &InstanceInfo> {
        let has = |instance: &&InstanceInfo| instance.declares.iter().any(|one| one.name == self.info.name);
        self.instances.iter().filter(has)
    }

    /// Says which instances that are silent had the schedule.
    fn had_it(&self) -> String {
        let silent = self.declaring().filter(|instance| !instance.alive);
        let silent = silent.map(|one| format!("{}, silent since {}", one.label, clock(one.beat))).collect::<Vec<_>>();
        if silent.is_empty() { String::new() } else { format!("; declared by {}", silent.join("; ")) }
    }

    /// Says what runs, or waits to be run again.
    fn run(&self) -> Option<String> {
        let info = self.info;
        let since = info.since.map(clock).unwrap_or_default();
        let (attempt, by) = (info.attempt, &info.by);
        if info.running {
            let until = clock(info.due);
            let does = match (self.waits_for, info.stopping) {
                (_, true) => "an operator has stopped it, and it ends; ".to_owned(),
                (Some(key), _) => format!("it waits for the key {} ({}); ", key.key, claim(key)),
                (None, _) => info.note.as_ref().map(|note| format!("{note}; ")).unwrap_or_default(),
            };
            return Some(format!(
                "it runs: attempt {attempt} on {by} since {since}, under token {}; {does}its lease ends at {until}",
                info.token
            ));
        }
        if let Some(lost) = info.lost_since {
            return Some(format!(
                "its run on {by} since {since} is lost: its lease is over since {}, and no instance has taken it over",
                clock(lost)
            ));
        }
        let due = if info.due > info.now { "at" } else { "since" };
        let waits = attempt > 0 && self.lateness().is_none();
        waits.then(|| format!("attempt {attempt} failed on {by}: the next one is due {due} {}", clock(info.due)))
    }

    /// Says since when it is due, and what else the instances do.
    fn lateness(&self) -> Option<String> {
        let info = self.info;
        if !is_late(info) || nobody_runs(info).is_some() {
            return None;
        }
        let runs_elsewhere = self.all.iter().filter(|one| one.running);
        let busy = self.declaring().filter(|instance| instance.alive).map(|instance| {
            let runs = runs_elsewhere.clone().filter(|one| one.by == instance.label).count();
            format!("{} runs {runs}", instance.label)
        });
        Some(format!(
            "it is due since {}, {} late, and no instance has begun it; an instance runs no more ticks at a time than its limit: {}",
            clock(info.due),
            brief((info.now - info.due).to_std().unwrap_or_default()),
            busy.collect::<Vec<_>>().join(", ")
        ))
    }

    fn next(&self) -> Option<String> {
        let info = self.info;
        if !has_next(info) || info.running || info.attempt > 0 || info.now - info.due > LATE {
            return None;
        }
        Some(match info.triggered {
            Some(at) => format!("a run was asked for at {}: the next instance that polls runs it", clock(at)),
            None if info.due > info.now => format!("it is not due: its next tick is at {}", clock(info.slot)),
            None => format!("it is due since {}: the next instance that polls runs it", clock(info.due)),
        })
    }

    fn success(&self) -> Option<String> {
        let run = self.runs.iter().find(|run| run.status == RunStatus::Succeeded);
        Some(match run {
            Some(run) => format!("it succeeded last at {}, on {}", clock(run.ended), run.by),
            None if self.runs.is_empty() => "it has no run in the history".to_owned(),
            None => format!("none of its last {} runs succeeded", self.runs.len()),
        })
    }

    /// Describes the last run that failed or was lost, unless one has succeeded since.
    fn failure(&self) -> Option<String> {
        let run = self.runs.iter().take_while(|run| run.status != RunStatus::Succeeded);
        let run = run.into_iter().find(|run| run.status != RunStatus::Missed)?;
        let what = if run.status == RunStatus::Lost { "was lost" } else { "failed" };
        let error = run.error.as_deref().unwrap_or("no reason is known");
        Some(format!(
            "attempt {} at the tick of {} {what} at {}, on {}: {error}",
            run.attempt,
            clock(run.slot),
            clock(run.ended),
            run.by
        ))
    }

    /// Describes the last ticks that were skipped, unless a run has begun since.
    fn skipped(&self) -> Option<String> {
        let run = self.runs.first().filter(|run| run.status == RunStatus::Missed)?;
        Some(format!(
            "{} ticks were skipped at {}, the first of {}",
            missed(run.missed),
            clock(run.ended),
            clock(run.slot)
        ))
    }
}

/// Says how far the database's clock is from this machine's.
fn apart(ahead: TimeDelta) -> Option<String> {
    let by = brief(ahead.abs().to_std().unwrap_or_default());
    (ahead.abs() > APART).then(|| {
        let side = if ahead > TimeDelta::zero() { "ahead of" } else { "behind" };
        format!("the database's clock, which decides, is {by} {side} this machine's")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_are_apart_are_mentioned() {
        let said = [-90, -5, 0, 5, 90].map(|seconds| apart(TimeDelta::seconds(seconds)));
        let text = |side| Some(format!("the database's clock, which decides, is 1m 30s {side} this machine's"));
        assert_eq!(said, [text("behind"), None, None, None, text("ahead of")]);
    }
}
