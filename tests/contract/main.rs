//! The contract: what every database must do, written once and run for each database as
//! `DATABASE::module::name`.
//!
//! SQLite needs nothing. A server's tests run if its URL is set (`POSTGRES_URL`, `MYSQL_URL`,
//! `MARIADB_URL`); otherwise they are shown as ignored. `scripts/test` sets all three. If
//! `POSTGRES_URL` connects to a pooler, `POSTGRES_DIRECT_URL` is the server behind it
//! (`scripts/clusters`); tests of the server itself are then shown as ignored. `POSTGRES_POOLER` is
//! `sessions` if each client of the pooler has a session to itself.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

mod acquire;
mod acquiring;
mod all_held;
mod article;
mod at_most;
mod bank;
mod batched;
mod batches_undone;
mod blocked;
mod both_strategies;
mod cancelled;
mod changes_kept;
mod child;
mod commits;
mod completion;
mod connections;
mod contention;
mod created;
mod decimals;
mod delayed;
mod dropped_waiters;
mod durability;
mod ecosystem;
mod elections;
mod ended;
mod ended_work;
mod examples;
mod failures_apart;
mod fair;
mod fenced;
mod forced_rows;
mod forgetting;
mod functions;
mod functions_again;
mod functions_promises;
mod functions_refused;
mod functions_rows;
mod functions_sessions;
mod fuzzed;
mod grants_without_caller;
mod handles;
mod hooks;
mod in_flight;
mod in_memory;
mod invalid_input;
mod isolation;
mod keeping;
mod ledger;
mod left_behind;
mod line;
mod listening;
mod lock_delay;
mod locked_rows;
mod migrations;
mod migrations_live;
mod migrations_planned;
mod migrations_undone;
mod mixed;
mod neighbours;
mod noticed;
mod operating;
mod outages;
mod overwritten;
mod own_sessions;
mod own_threads;
mod philosophers;
mod plain_index;
mod put_back;
mod race;
mod read_write;
mod read_write_expired;
mod read_write_lost;
mod read_write_upgrades;
mod reentry;
mod replaced;
mod replies;
mod replies_refused;
mod rights;
mod rows_not_visible;
mod rules_table;
mod runtimes;
mod schedules;
mod schemas;
mod semaphores;
mod sequences;
mod servers;
mod session_settings;
mod sets;
mod shared_replies;
mod snapshots;
mod spans;
mod sqlite_file;
mod tickets;
mod ticks;
mod ticks_again;
mod ticks_apart;
mod ticks_commits;
mod ticks_deployed;
mod ticks_details;
mod ticks_ended;
mod ticks_exclusive;
mod ticks_instances;
mod ticks_limited;
mod ticks_listed;
mod ticks_missed;
mod ticks_operated;
mod ticks_ordered;
mod ticks_orders;
mod ticks_put_back;
mod ticks_raced;
mod ticks_renamed;
mod ticks_replies;
mod ticks_serializable;
mod ticks_snapshots;
mod ticks_tokens;
mod ticks_transaction;
mod ticks_triggered;
mod too_late;
mod triggers;
mod trips;
mod upgrade;
mod versioned;
mod versioned_in;
mod versioned_invalid_input;
mod versioned_limits;
mod versioned_lost;
mod versioned_tables;
mod versioned_triggers;
mod versioned_turns;
mod versioned_types;
mod versioned_unfit;
mod waiters;
mod waiting;
mod wider_columns;
mod work;

/// The items that `src/rules.rs` uses of its crate, so that the test can compare the servers with
/// that very file.
mod key {
    pub use rowlock::{Key, leases::Holder};
}
#[path = "../../src/rules.rs"]
#[allow(dead_code, unused_imports)]
mod rules;

use harness::{Server, Suite, TestDatabase, events};

fn main() {
    if child::was_asked_for() {
        return child::main();
    }
    events::keep();
    let suites = Server::all().map(|server| {
        let mut suite = Suite::new(server).shared();
        match server.name {
            "sqlite" => register::<sqlx::Sqlite>(&mut suite),
            "postgres" => {
                register::<sqlx::Postgres>(&mut suite);
                decimals::register::<sqlx::Postgres>(&mut suite);
                functions::register::<sqlx::Postgres>(&mut suite);
                functions_promises::register::<sqlx::Postgres>(&mut suite);
                functions_sessions::register::<sqlx::Postgres>(&mut suite);
                functions_again::register::<sqlx::Postgres>(&mut suite);
                functions_refused::register::<sqlx::Postgres>(&mut suite);
                functions_rows::register::<sqlx::Postgres>(&mut suite);
            }
            _ => {
                register::<sqlx::MySql>(&mut suite);
                decimals::register::<sqlx::MySql>(&mut suite);
                functions::register::<sqlx::MySql>(&mut suite);
                functions_promises::register::<sqlx::MySql>(&mut suite);
                functions_sessions::register::<sqlx::MySql>(&mut suite);
                functions_again::register::<sqlx::MySql>(&mut suite);
                functions_refused::register::<sqlx::MySql>(&mut suite);
                functions_rows::register::<sqlx::MySql>(&mut suite);
            }
        }
        suite
    });
    harness::run(suites, Vec::new());
}

fn register<DB: TestDatabase>(suite: &mut Suite) {
    acquire::register::<DB>(suite);
    acquiring::register::<DB>(suite);
    all_held::register::<DB>(suite);
    at_most::register::<DB>(suite);
    batched::register::<DB>(suite);
    batches_undone::register::<DB>(suite);
    blocked::register::<DB>(suite);
    both_strategies::register::<DB>(suite);
    cancelled::register::<DB>(suite);
    commits::register::<DB>(suite);
    completion::register::<DB>(suite);
    connections::register::<DB>(suite);
    contention::register::<DB>(suite);
    created::register::<DB>(suite);
    delayed::register::<DB>(suite);
    dropped_waiters::register::<DB>(suite);
    durability::register::<DB>(suite);
    ecosystem::register::<DB>(suite);
    elections::register::<DB>(suite);
    ended::register::<DB>(suite);
    ended_work::register::<DB>(suite);
    examples::register::<DB>(suite);
    failures_apart::register::<DB>(suite);
    fair::register::<DB>(suite);
    fenced::register::<DB>(suite);
    forgetting::register::<DB>(suite);
    fuzzed::register::<DB>(suite);
    grants_without_caller::register::<DB>(suite);
    handles::register::<DB>(suite);
    hooks::register::<DB>(suite);
    in_flight::register::<DB>(suite);
    in_memory::register::<DB>(suite);
    invalid_input::register::<DB>(suite);
    isolation::register::<DB>(suite);
    keeping::register::<DB>(suite);
    left_behind::register::<DB>(suite);
    listening::register::<DB>(suite);
    lock_delay::register::<DB>(suite);
    locked_rows::register::<DB>(suite);
    migrations::register::<DB>(suite);
    migrations_live::register::<DB>(suite);
    migrations_planned::register::<DB>(suite);
    mixed::register::<DB>(suite);
    neighbours::register::<DB>(suite);
    noticed::register::<DB>(suite);
    operating::register::<DB>(suite);
    outages::register::<DB>(suite);
    own_sessions::register::<DB>(suite);
    own_threads::register::<DB>(suite);
    philosophers::register::<DB>(suite);
    race::register::<DB>(suite);
    read_write::register::<DB>(suite);
    read_write_expired::register::<DB>(suite);
    read_write_lost::register::<DB>(suite);
    read_write_upgrades::register::<DB>(suite);
    reentry::register::<DB>(suite);
    replaced::register::<DB>(suite);
    replies::register::<DB>(suite);
    replies_refused::register::<DB>(suite);
    rights::register::<DB>(suite);
    rows_not_visible::register::<DB>(suite);
    rules_table::register::<DB>(suite);
    runtimes::register::<DB>(suite);
    schedules::register::<DB>(suite);
    schemas::register::<DB>(suite);
    semaphores::register::<DB>(suite);
    sequences::register::<DB>(suite);
    servers::register::<DB>(suite);
    sets::register::<DB>(suite);
    shared_replies::register::<DB>(suite);
    snapshots::register::<DB>(suite);
    spans::register::<DB>(suite);
    sqlite_file::register::<DB>(suite);
    ticks::register::<DB>(suite);
    ticks_again::register::<DB>(suite);
    ticks_apart::register::<DB>(suite);
    ticks_commits::register::<DB>(suite);
    ticks_deployed::register::<DB>(suite);
    ticks_ended::register::<DB>(suite);
    ticks_exclusive::register::<DB>(suite);
    ticks_limited::register::<DB>(suite);
    ticks_listed::register::<DB>(suite);
    ticks_missed::register::<DB>(suite);
    ticks_operated::register::<DB>(suite);
    ticks_ordered::register::<DB>(suite);
    versioned_tables::register::<DB>(suite);
    session_settings::register::<DB>(suite);
    plain_index::register::<DB>(suite);
    wider_columns::register::<DB>(suite);
    changes_kept::register::<DB>(suite);
    too_late::register::<DB>(suite);
    tickets::register::<DB>(suite);
    overwritten::register::<DB>(suite);
    put_back::register::<DB>(suite);
    migrations_undone::register::<DB>(suite);
    forced_rows::register::<DB>(suite);
    ticks_put_back::register::<DB>(suite);
    ticks_instances::register::<DB>(suite);
    ticks_details::register::<DB>(suite);
    ticks_triggered::register::<DB>(suite);
    ticks_tokens::register::<DB>(suite);
    ticks_orders::register::<DB>(suite);
    ticks_raced::register::<DB>(suite);
    ticks_renamed::register::<DB>(suite);
    ticks_replies::register::<DB>(suite);
    ticks_serializable::register::<DB>(suite);
    ticks_snapshots::register::<DB>(suite);
    ticks_transaction::register::<DB>(suite);
    triggers::register::<DB>(suite);
    trips::register::<DB>(suite);
    upgrade::register::<DB>(suite);
    versioned::register::<DB>(suite);
    versioned_in::register::<DB>(suite);
    versioned_invalid_input::register::<DB>(suite);
    versioned_limits::register::<DB>(suite);
    versioned_lost::register::<DB>(suite);
    versioned_triggers::register::<DB>(suite);
    versioned_turns::register::<DB>(suite);
    versioned_types::register::<DB>(suite);
    versioned_unfit::register::<DB>(suite);
    waiting::register::<DB>(suite);
    work::register::<DB>(suite);
}
