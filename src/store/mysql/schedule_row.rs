//! Rows of schedules and of their history.

use chrono::{DateTime, NaiveDateTime, Utc};
use sqlx::{Row as _, mysql::MySqlRow};

use crate::{
    key::Token,
    store::{
        Reply,
        schedule::{ListedRun, ListedSchedule, Times, from_stored_count, named},
    },
};

pub(super) fn times(row: &MySqlRow) -> Reply<Times> {
    Ok(Times { name: named(row.try_get("name")?)?, spec: row.try_get("spec")?, zone: row.try_get("zone")? })
}

pub(super) fn utc(row: &MySqlRow, name: &str) -> Reply<Option<DateTime<Utc>>> {
    Ok(row.try_get::<Option<NaiveDateTime>, _>(name)?.map(|time| time.and_utc()))
}

pub(super) fn listed(row: &MySqlRow) -> Reply<ListedSchedule> {
    Ok(ListedSchedule {
        times: times(row)?,
        slot: utc(row, "slot")?.unwrap_or_default(),
        due_at: utc(row, "due_at")?.unwrap_or_default(),
        paused: row.try_get::<i64, _>("paused")? == 1,
        paused_until: utc(row, "paused_until")?,
        skip_until: utc(row, "skip_until")?,
        stopped: row.try_get::<i32, _>("attempt")? > 0 && utc(row, "stop_slot")? == utc(row, "run_slot")?,
        note: row.try_get("note")?,
        triggered_at: utc(row, "triggered_at")?,
        run_slot: utc(row, "run_slot")?,
        attempt: from_stored_count(row.try_get("attempt")?),
        missed: from_stored_count(row.try_get("missed")?),
        running: row.try_get::<i64, _>("running")? == 1,
        token: Token::new(row.try_get("token")?),
        label: row.try_get("client_ip")?,
        begin_time: utc(row, "begin_time")?,
        now: utc(row, "now")?.unwrap_or_default(),
    })
}

pub(super) fn run(row: &MySqlRow) -> Reply<ListedRun> {
    Ok(ListedRun {
        name: row.try_get("name")?,
        slot: utc(row, "slot")?.unwrap_or_default(),
        attempt: from_stored_count(row.try_get("attempt")?),
        token: Token::new(row.try_get("token")?),
        label: row.try_get("client_ip")?,
        begin_time: utc(row, "begin_time")?.unwrap_or_default(),
        end_time: utc(row, "end_time")?.unwrap_or_default(),
        status: row.try_get("status")?,
        missed: from_stored_count(row.try_get("missed")?),
        error: row.try_get("error")?,
    })
}
