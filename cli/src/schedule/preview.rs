//! Ticks that are to come: `next`, `cron --check` and `cron --next`. They need no database.

use anstyle::Style;
use chrono::{DateTime, Utc};
use rowlock::{Error, Schedule, errors::Invalid};
use serde_json::json;

use crate::{
    args::schedules::{Cron, Crontab, Next},
    exit::{self, Failure},
    format::{clock, precise, tabular},
    out::{self, printable},
    schedule::{crontab, file},
};

pub fn next(next: &Next) -> Result<u8, Failure> {
    let schedule = Schedule::cron("next", &next.pattern).zone(&next.zone);
    let ticks = ticks(&schedule, next.after.unwrap_or_else(Utc::now), next.count).map_err(Error::from)?;
    if next.json {
        let object =
            |tick: DateTime<Utc>| json!({ "slot": precise(tick), "local": schedule.in_zone(tick).to_rfc3339() });
        return out::say_json(&ticks.map(object).collect());
    }
    let rows = ticks.map(|tick| [clock(tick), local(&schedule, tick)]);
    out::say(table(["NEXT", &printable(&next.zone)], rows))
}

/// Checks a file of jobs, and prints its errors or the ticks of its jobs; or makes such a file of a
/// crontab.
pub fn cron(cron: &Cron) -> Result<u8, Failure> {
    if let Some(whose) = cron.from_crontab {
        return out::say(crontab::convert(&cron.file, whose == Crontab::System)?.trim_end());
    }
    let jobs = match file::check(&cron.file) {
        Ok(jobs) => jobs,
        Err(wrong) => {
            wrong.iter().for_each(out::print_error);
            return Ok(exit::USAGE);
        }
    };
    jobs.open_to().for_each(out::print_warning);
    let wrong = || jobs.unable().chain(jobs.warnings());
    wrong().for_each(out::print_error);
    let code = if wrong().next().is_some() { exit::USAGE } else { exit::OK };
    let Some(count) = cron.next else {
        if code != exit::OK {
            return Ok(code);
        }
        jobs.jobs.iter().filter_map(|job| job.note(Utc::now())).for_each(out::print_info);
        return out::say(format_args!("{}, no error", printable(&jobs.to_string())));
    };
    // A database's time may differ a little.
    let now = Utc::now();
    let removed = jobs.removed.iter().map(|name| [name.as_str().to_owned(), "removed".to_owned(), "-".to_owned()]);
    let rows = jobs.jobs.iter().flat_map(|job| {
        let schedule = &job.schedule;
        let row = |next: String, local: String| [schedule.name().to_owned(), next, local];
        let ticks = ticks(schedule, now, count).into_iter().flatten();
        let mut rows: Vec<_> = ticks.map(|tick| row(clock(tick), local(schedule, tick))).collect();
        if rows.is_empty() {
            rows.push(row("after the run before".to_owned(), "-".to_owned()));
        }
        rows
    });
    out::say(table(["NAME", "NEXT", "IN ITS ZONE"], rows.chain(removed)))?;
    Ok(code)
}

fn ticks(
    schedule: &Schedule,
    after: DateTime<Utc>,
    count: u32,
) -> Result<impl Iterator<Item = DateTime<Utc>>, Invalid> {
    Ok(schedule.upcoming(after)?.take(count as usize))
}

/// What the clocks in the schedule's zone show, with the day of the week.
fn local(schedule: &Schedule, tick: DateTime<Utc>) -> String {
    schedule.in_zone(tick).format("%a %Y-%m-%d %H:%M:%S %:z").to_string()
}

fn table<const N: usize>(names: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    tabular(names, rows.map(|cells| (Style::new(), cells.map(|cell| printable(&cell)))))
}
