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
mod fencing;
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

use harness::{Suites, events};

fn main() {
    if child::was_asked_for() {
        return child::main();
    }
    events::keep();
    let mut suites = Suites::of_all_servers();
    harness::modules!(suites:
        acquire acquiring all_held at_most batched batches_undone blocked both_strategies cancelled
        changes_kept commits completion connections contention created decimals delayed
        dropped_waiters durability ecosystem elections ended ended_work examples failures_apart fair
        fenced fencing forced_rows forgetting functions functions_again functions_promises functions_refused
        functions_rows functions_sessions fuzzed grants_without_caller handles hooks in_flight
        in_memory invalid_input isolation keeping left_behind listening lock_delay locked_rows
        migrations migrations_live migrations_planned migrations_undone mixed neighbours noticed
        operating outages overwritten own_sessions own_threads philosophers plain_index put_back
        race read_write read_write_expired read_write_lost read_write_upgrades reentry replaced
        replies replies_refused rights rows_not_visible rules_table runtimes schedules schemas
        semaphores sequences servers session_settings sets shared_replies snapshots spans
        sqlite_file tickets ticks ticks_again ticks_apart ticks_commits ticks_deployed ticks_details
        ticks_ended ticks_exclusive ticks_instances ticks_limited ticks_listed ticks_missed
        ticks_operated ticks_ordered ticks_orders ticks_put_back ticks_raced ticks_renamed
        ticks_replies ticks_serializable ticks_snapshots ticks_tokens ticks_transaction
        ticks_triggered too_late triggers trips upgrade versioned versioned_in
        versioned_invalid_input versioned_limits versioned_lost versioned_tables versioned_triggers
        versioned_turns versioned_types versioned_unfit waiting wider_columns work
    );
    harness::run(suites, Vec::new());
}
