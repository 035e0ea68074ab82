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

use harness::{Server, Suite, TestDatabase};

fn main() {
    let suites = Server::all().map(|server| {
        let mut suite = Suite::new(server).shared();
        match server.name {
            "sqlite" => register::<sqlx::Sqlite>(&mut suite),
            "postgres" => register::<sqlx::Postgres>(&mut suite),
            _ => register::<sqlx::MySql>(&mut suite),
        }
        suite
    });
    harness::run(suites, Vec::new());
}

fn register<DB: TestDatabase>(suite: &mut Suite) {
    program_run::register::<DB>(suite);
    program_stop::register::<DB>(suite);
    program_claims::register::<DB>(suite);
    program_doctor::register::<DB>(suite);
    program_end::register::<DB>(suite);
    program_forced::register::<DB>(suite);
    program_hold::register::<DB>(suite);
    program_terminal::register::<DB>(suite);
    program_input::register::<DB>(suite);
    program_instances::register::<DB>(suite);
    program_log::register::<DB>(suite);
    program_lost::register::<DB>(suite);
    program_names::register::<DB>(suite);
    program_orders::register::<DB>(suite);
    program_others::register::<DB>(suite);
    program_runs::register::<DB>(suite);
    program_waiting::register::<DB>(suite);
    program_why::register::<DB>(suite);
    program_lead::register::<DB>(suite);
    program_limits::register::<DB>(suite);
    program_cron::register::<DB>(suite);
    program_day::register::<DB>(suite);
    program_jobs::register::<DB>(suite);
    program_passwords::register::<DB>(suite);
    program_preview::register::<DB>(suite);
    program_schedules::register::<DB>(suite);
    program_service::register::<DB>(suite);
    program_shared::register::<DB>(suite);
    program_stalled::register::<DB>(suite);
    program_supervisor::register::<DB>(suite);
    program_upgrade::register::<DB>(suite);
    outages::register::<DB>(suite);
    ui_pages::register::<DB>(suite);
    ui_runs::register::<DB>(suite);
    ui_changes::register::<DB>(suite);
    ui_connections::register::<DB>(suite);
    ui_guard::register::<DB>(suite);
    ui_load::register::<DB>(suite);
    ui_operating::register::<DB>(suite);
    ui_operators::register::<DB>(suite);
    ui_access::register::<DB>(suite);
    ui_browser::register::<DB>(suite);
}
