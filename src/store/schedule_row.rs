//! Rows of schedules and of their history.

use chrono::TimeDelta;

use crate::{
    key::Token,
    store::{
        Outcome, Reply, not_extended,
        run_info::{RunInfo, RunStatus},
        schedule::{Extended, Extension, ListedSchedule, Times, named},
        stored_row::StoredRow,
    },
};

pub fn times(row: &impl StoredRow) -> Reply<Times> {
    Ok(Times { name: named(&row.text("name")?)?, spec: row.text("spec")?, zone: row.text("zone")? })
}

pub fn listed(row: &impl StoredRow) -> Reply<ListedSchedule> {
    let (attempt, run_slot) = (row.count("attempt")?, row.time_or_null("run_slot")?);
    Ok(ListedSchedule {
        times: times(row)?,
        slot: row.time("slot")?,
        due_at: row.time("due_at")?,
        paused: row.is("paused")?,
        paused_until: row.time_or_null("paused_until")?,
        skip_until: row.time_or_null("skip_until")?,
        stopped: attempt > 0 && run_slot.is_some() && row.time_or_null("stop_slot")? == run_slot,
        note: row.text("note")?,
        triggered_at: row.time_or_null("triggered_at")?,
        run_slot,
        attempt,
        missed: row.count("missed")?,
        running: row.is("running")?,
        token: Token::new(row.number("token")?),
        label: row.text("client_ip")?,
        begin_time: row.time_or_null("begin_time")?,
        known: row.text_or_null("known")?.unwrap_or_default(),
        times_at: row.time_or_null("times_at")?,
        gone_at: row.time_or_null("gone_at")?,
        now: row.time("now")?,
    })
}

/// Derives the outcome of a renewal that changed nothing from the row of its claim, if that stands.
pub fn unextended(row: Option<&impl StoredRow>, extension: Extension) -> Reply<Extended> {
    let Some(row) = row else { return Ok(Extended::Is(Outcome::Lost)) };
    if !extension.is_stopped && row.is("stopped")? {
        return Ok(Extended::Stopped);
    }
    let left = TimeDelta::microseconds(row.number("left_micros")?);
    Ok(Extended::Is(not_extended(left, row.time("now")?, extension.not_after)))
}

pub fn run(row: &impl StoredRow) -> Reply<RunInfo> {
    Ok(RunInfo {
        name: row.text("name")?,
        slot: row.time("slot")?,
        attempt: row.count("attempt")?,
        token: Token::new(row.number("token")?),
        by: row.text("client_ip")?,
        began: row.time("begin_time")?,
        ended: row.time("end_time")?,
        status: match row.text("status")?.as_str() {
            "S" => RunStatus::Succeeded,
            "L" => RunStatus::Lost,
            "M" => RunStatus::Missed,
            _ => RunStatus::Failed,
        },
        missed: row.count("missed")?,
        error: row.text_or_null("error")?,
    })
}
