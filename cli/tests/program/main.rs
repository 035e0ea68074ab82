//! The program `rowlock` on every database, run as users run it, as `DATABASE::module::name`.
//!
//! `tests/contract/main.rs` describes the variables that name the servers.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod outages;
mod program;
mod program_claims;
mod program_cron;
mod program_day;
mod program_doctor;
mod program_end;
mod program_forced;
mod program_hold;
mod program_input;
mod program_instances;
mod program_jobs;
mod program_lead;
mod program_limits;
mod program_log;
mod program_lost;
mod program_names;
mod program_orders;
mod program_others;
mod program_passwords;
mod program_preview;
mod program_run;
mod program_runs;
mod program_schedules;
mod program_service;
mod program_shared;
mod program_stalled;
mod program_stop;
mod program_supervisor;
mod program_terminal;
mod program_upgrade;
mod program_waiting;
mod program_why;
mod ui;
mod ui_access;
mod ui_browser;
mod ui_changes;
mod ui_connections;
mod ui_guard;
mod ui_load;
mod ui_operating;
mod ui_operators;
mod ui_pages;
mod ui_runs;

use harness::Suites;

fn main() {
    let mut suites = Suites::of_all_servers();
    harness::modules!(suites:
        outages program_claims program_cron program_day program_doctor program_end program_forced
        program_hold program_input program_instances program_jobs program_lead program_limits
        program_log program_lost program_names program_orders program_others program_passwords
        program_preview program_run program_runs program_schedules program_service program_shared
        program_stalled program_stop program_supervisor program_terminal program_upgrade
        program_waiting program_why ui_access ui_browser ui_changes ui_connections ui_guard ui_load
        ui_operating ui_operators ui_pages ui_runs
    );
    harness::run(suites, Vec::new());
}
