//! The contract: what every database must do, written once and run for each database as
//! `DATABASE::module::name`.
//!
//! SQLite needs nothing. A server's tests run if its URL is set (`POSTGRES_URL`, `MYSQL_URL`,
//! `MARIADB_URL`); otherwise they are shown as ignored. `scripts/test` sets all three. If
//! `POSTGRES_URL` connects to a pooler in transaction mode, `POSTGRES_DIRECT_URL` is the server
//! behind it (`scripts/clusters`); tests of the server itself are then shown as ignored.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]
// Without the feature of one database, its tests and the code that only they use are not called.
#![cfg_attr(
    not(all(feature = "sqlite", feature = "postgres", feature = "mysql", feature = "cli")),
    allow(dead_code, unused_imports)
)]

mod acquire;
mod acquiring;
mod alone;
mod apart;
mod article;
mod bank;
mod batched;
mod both;
mod cancelled;
mod child;
mod commits;
mod connections;
mod contention;
#[cfg(all(feature = "rust_decimal", any(feature = "postgres", feature = "mysql")))]
mod decimals;
#[cfg(feature = "mysql")]
mod delayed;
mod door;
mod dropped_waiters;
mod durability;
mod events;
mod examples;
mod fair;
mod fenced;
mod forgetting;
mod fuzzed;
mod harness;
#[cfg(feature = "sqlite")]
mod in_memory;
mod isolation;
mod keeping;
mod lanes;
mod ledger;
mod line;
#[cfg(feature = "postgres")]
mod listening;
mod migrations;
mod mixed;
mod neighbours;
mod operating;
mod outages;
mod philosophers;
#[cfg(feature = "cli")]
mod program;
#[cfg(feature = "cli")]
mod program_claims;
#[cfg(feature = "cli")]
mod program_end;
#[cfg(feature = "cli")]
mod program_input;
#[cfg(feature = "cli")]
mod program_run;
#[cfg(feature = "cli")]
mod program_stop;
#[cfg(feature = "cli")]
mod program_terminal;
mod proxy;
mod race;
mod reentry;
mod registry;
mod replaced;
mod replies;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod rights;
mod rules_table;
#[cfg(feature = "sqlite")]
mod schedules;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod schemas;
mod seats;
mod sequences;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod servers;
mod sets;
mod snapshots;
#[cfg(feature = "sqlite")]
mod sqlite_file;
mod triggers;
mod trips;
mod undone;
mod unheard;
mod unseen;
mod upgrade;
mod versioned;
mod versioned_door;
mod versioned_in;
mod versioned_limits;
mod versioned_lost;
mod versioned_turns;
mod versioned_types;
mod waiters;
mod waiting;
mod work;

/// The items that `src/rules.rs` uses of its crate, so that the test can compare the servers with
/// that very file.
mod key {
    pub use rowlock::{Holder, Key};
}
#[path = "../../src/rules.rs"]
#[allow(dead_code, unused_imports)]
mod rules;

use libtest_mimic::Trial;

use harness::{Server, TestDatabase};

fn main() {
    if child::was_asked_for() {
        return child::main();
    }
    events::keep();
    let arguments = alone::arguments();
    let mut trials = Vec::new();
    for server in Server::all() {
        match server.name {
            #[cfg(feature = "sqlite")]
            "sqlite" => contract::<sqlx::Sqlite>(server, &mut trials),
            #[cfg(feature = "postgres")]
            "postgres" => {
                contract::<sqlx::Postgres>(server, &mut trials);
                #[cfg(feature = "rust_decimal")]
                registry::decimals::<sqlx::Postgres>(server, &mut trials);
            }
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => {
                contract::<sqlx::MySql>(server, &mut trials);
                #[cfg(feature = "rust_decimal")]
                registry::decimals::<sqlx::MySql>(server, &mut trials);
            }
            _ => {}
        }
    }
    alone::last(&mut trials);
    libtest_mimic::run(&arguments, trials).exit();
}

/// Adds tests to the trials, as `module: name, ...;`.
macro_rules! tests {
    ($server:ident, $trials:ident; $($module:ident: $($name:ident),+;)+) => {
        $($($trials.push(harness::trial::<DB, _>($server, stringify!($module), stringify!($name), $module::$name));)+)+
    };
}

use tests;

fn contract<DB: TestDatabase>(server: Server, trials: &mut Vec<Trial>)
where
    i64: rowlock::Value<DB>,
{
    tests! { server, trials;
        acquire:
            a_free_key_is_acquired, a_held_key_is_refused_with_who_since_and_until, a_released_key_is_free_at_once,
            tokens_grow_and_never_fall, a_window_refuses_until_it_is_over, a_failed_run_may_be_repeated_at_once_on_request,
            an_expired_claim_is_taken_over_and_named, an_abandoned_claim_is_taken_over_at_once,
            article_rules_leave_failures_and_crashes_to_an_operator, another_programs_lock_is_respected,
            a_try_does_not_wait_for_a_locked_row, a_try_ends_at_its_time_limit_with_the_pool_empty,
            a_try_ends_at_its_time_limit_behind_an_uncommitted_insert, a_lease_that_comes_too_late_is_not_given, keys_are_compared_byte_by_byte,
            the_row_says_what_the_article_says, a_dropped_try_leaves_no_statement_on_a_pooled_connection;
        keeping:
            a_lease_is_renewed_in_the_background, a_lease_is_lost_when_another_program_takes_the_row, loss_is_told_before_another_gets_in,
            a_renewal_that_finds_the_row_locked_is_unknown_not_lost, a_renewal_that_fails_is_unknown_and_tried_again, a_trampled_claim_is_lost, releasing_a_lost_lease_changes_nothing,
            a_release_waits_for_a_transaction_at_the_row, releasing_twice_over_a_lost_reply_is_done,
            dropping_a_lease_abandons_it, a_pool_of_one_is_enough, a_thousand_leases_are_renewed_in_few_statements,
            run_releases_by_the_works_result, run_cancels_the_work_when_the_lease_is_lost, run_in_a_spawned_task,
            a_panic_in_the_work_abandons_the_key, a_runtime_that_ends_tells_the_leases,
            loss_is_reported_while_the_renewers_runtime_stands_still, a_runtime_that_ends_during_a_release_does_not_hang,
            tasks_of_the_work_are_told_however_the_lease_ends, an_abandonment_that_is_held_up_holds_up_no_other,
            a_release_after_another_program_freed_the_row_is_lost, a_release_on_a_closed_pool_fails_at_once;
        door:
            bad_keys_are_refused_before_anything_is_sent, bad_settings_are_refused, a_missing_table_says_what_to_run,
            a_missing_column_says_what_to_run, an_inexact_key_column_is_refused,
            a_read_only_database_is_an_error, far_times_are_answered, an_unreachable_database_is_an_error_not_a_refusal, events_tell_the_story;
        migrations:
            migrate_is_idempotent_and_leaves_the_applications_record_alone, sixteen_instances_migrate_at_once,
            sqlx_cli_runs_our_folder_beside_the_applications, sqlx_cli_runs_our_files_in_the_applications_folder;
        rules_table: every_cell_of_the_rules_table, every_cell_on_the_articles_own_table;
        race:
            a_counter_stays_exact_with_eight_processes_on_two_keys, sixteen_processes_create_the_same_key_once,
            a_killed_process_is_replaced_within_its_lease;
        operating:
            list_shows_each_state_in_the_order_of_keys, list_is_paged_and_filtered, inspect_looks_at_one_key,
            a_forced_release_frees_the_key_and_the_old_holder_finds_out, a_forced_release_is_what_article_rules_wait_for,
            a_forced_release_does_not_pass_a_transaction_at_the_row, forget_deletes_unused_rows_and_nothing_else,
            forget_clears_the_places_of_those_who_died_long_ago, forget_goes_through_more_rows_than_a_page;
        neighbours:
            a_counter_stays_exact_with_four_of_theirs_and_four_of_ours, their_lock_is_refused_in_its_time_and_then_taken_over,
            they_read_our_times_and_keep_our_window, their_late_unlock_is_found_out, their_late_unlock_and_relock_are_found_out,
            a_background_renewal_finds_out_too;
        upgrade:
            the_articles_table_is_upgraded_in_place, a_lease_lives_on_the_articles_table, times_of_any_kind_stand_in_the_row,
            a_column_that_does_not_fit_is_refused,
            a_key_of_the_articles_table_is_found_by_its_index;
        both:
            no_update_is_lost_with_32_workers, no_update_is_lost_with_four_pools, no_update_is_lost_with_four_processes,
            a_stale_claim_cannot_commit, a_lock_that_confirms_nothing_is_caught;
        fenced:
            a_claim_that_was_taken_over_or_passed_is_told_so, a_confirmed_claim_keeps_others_out_until_the_commit,
            an_expired_claim_that_was_not_taken_over_may_commit, a_forced_release_does_not_pass_a_confirmed_transaction,
            a_renewal_does_not_trip_over_the_transactions_own_row, a_confirmation_needs_a_transaction,
            a_claim_that_is_younger_than_the_snapshot_is_a_conflict, a_second_transaction_under_a_claim_waits_for_the_first,
            a_lease_confirmed_in_a_transaction_that_is_rolled_back_stands;
        contention: contention_is_known_however_it_is_wrapped, a_conflict_of_an_update_in_the_work_is_known;
        work:
            the_works_own_error_comes_back_and_rolls_back, work_that_swallows_an_error_is_found_out, work_that_rolls_back_is_found_out,
            work_that_commits_is_found_out, work_that_commits_and_begins_anew_is_found_out,
            work_that_rolls_back_and_fails_leaves_the_pool_clean, work_that_forgets_an_inner_transaction_is_found_out,
            work_that_forgets_an_inner_transaction_and_fails_leaves_the_pool_clean, inner_transactions_are_the_works_own,
            work_that_keeps_the_transaction_is_found_out, retries_that_are_used_up_are_a_conflict,
            a_key_that_is_not_to_be_had_is_refused_after_the_time, a_lease_with_a_window_is_kept_for_the_next_attempt,
            a_panic_in_the_work_rolls_back_and_abandons_the_key;
        acquiring:
            it_waits_until_the_holder_releases, it_waits_until_the_lease_of_a_crashed_holder_ends, it_gives_up_at_its_limit,
            it_refuses_at_once_where_only_a_window_helps_and_ends_later, it_waits_for_a_window_that_ends_in_time,
            a_version_is_granted_to_everybody, work_runs_under_both, work_is_cancelled_where_the_lock_can_tell;
        waiting:
            tasks_are_served_in_the_order_of_their_coming, no_request_is_sent_while_the_process_holds_the_key, a_thousand_tasks_ask_like_one,
            it_does_not_wait_past_its_limit, a_waiter_that_gives_up_passes_the_permit_on,
            a_refusal_names_the_holder_of_this_process, a_lost_lease_lets_the_next_one_ask,
            a_claim_whose_caller_was_dropped_is_abandoned, a_shutdown_waits_for_a_claim_that_was_dropped,
            a_shutdown_waits_for_a_place_that_was_dropped;
        replaced: a_claim_that_the_same_lock_replaced_is_told_lost, a_claim_whose_caller_was_dropped_is_no_crash;
        sets:
            each_key_has_its_row_and_its_token, one_that_cannot_be_had_leaves_the_others_as_they_were, the_loss_of_one_is_the_loss_of_all,
            a_dropped_set_is_abandoned, a_set_is_renewed_in_the_background, it_waits_for_all_and_holds_none_until_then, sets_do_not_deadlock,
            each_claim_of_a_set_can_be_confirmed, bad_sets_are_refused_at_the_door;
        reentry:
            it_sends_nothing_and_the_last_one_releases, the_order_of_the_ends_does_not_matter, a_loss_is_every_handles_loss,
            without_the_handle_it_is_refused, it_is_the_same_under_both_strategies;
        batched:
            many_keys_take_few_statements, those_who_come_at_the_same_moment_go_together, switched_off_each_takes_its_own, each_is_answered_by_itself,
            a_token_that_is_ahead_of_the_clock_grows_all_the_same, of_those_who_want_an_expired_key_one_takes_over,
            of_those_who_want_the_same_key_one_gets_it, each_release_has_its_own_status,
            a_release_of_what_is_lost_is_that_ones_alone, a_row_that_the_server_refuses_to_change_harms_no_other,
            a_request_dropped_before_sending_is_removed, more_than_fit_in_one_statement_take_a_few;
        apart:
            a_row_that_cannot_be_renewed_loses_no_other_lease, a_row_that_cannot_be_abandoned_keeps_no_other_key,
            a_release_that_the_server_refuses_is_tried_again, a_release_that_is_refused_to_the_end_changed_nothing,
            a_runtime_that_stands_still_loses_no_lease_of_another;
        seats: a_request_dropped_where_a_reply_is_shared_takes_it_from_no_other;
        triggers:
            a_claim_is_told_its_token_and_whom_it_was_taken_from, claims_that_travel_together_are_told_their_tokens,
            a_commit_is_known_by_its_confirmation;
        lanes: a_runtime_that_stands_still_holds_up_no_other, a_runtime_that_ends_leaves_no_request_waiting;
        trips: round_trips_are_as_stated, round_trips_of_versions_are_as_stated, a_transactions_round_trips_are_as_stated;
        examples: deduct_shows_exact_balances_each_way, deduct_tells_a_wrong_balance,
            deduct_leaves_no_table_behind_when_its_output_is_closed;
        cancelled:
            a_try_on_a_free_row, a_try_on_a_missing_row, a_takeover, a_refused_try, a_renewal, a_release, an_abandonment,
            a_run, a_shutdown, a_migration, a_transaction_under_a_lease, a_transaction_under_a_version;
        connections:
            a_claim_after_a_begin_that_was_dropped_is_committed, a_claim_after_a_begin_as_text_is_committed, a_place_in_a_queue_is_committed,
            a_transaction_is_one_of_its_own, a_change_of_a_value_is_committed, a_migration_is_committed,
            a_lease_that_a_closed_pool_leaves_behind_is_told;
        replies: abandoning_a_lost_lease_changes_nothing, an_abandonment_waits_for_a_transaction_at_the_row;
    }
    waits::<DB>(server, trials);
    registry::versions::<DB>(server, trials);
    registry::store::<DB>(server, trials);
    #[cfg(feature = "sqlite")]
    if server.name == "sqlite" {
        tests! { server, trials;
            schedules:
                an_interval_runs_the_job_on_each_tick, instances_with_an_interval_run_the_job_once_a_tick,
                an_instance_that_was_stopped_ticks_on_the_clock_again, an_interval_is_on_the_clock_again_after_a_stop,
                of_instances_that_are_asked_to_stop_the_next_takes_over_on_the_clock,
                a_cron_schedule_runs_the_job_on_each_tick, asked_to_stop_it_gives_the_key_back_at_once;
            in_memory:
                it_outlives_a_claim, it_outlives_a_claim_of_several_keys, it_outlives_a_renewal, it_outlives_a_release,
                it_outlives_an_update, it_outlives_a_deduction, it_outlives_a_transaction, it_outlives_what_times_out,
                it_outlives_work_that_ends_its_transaction;
        }
    }
    #[cfg(feature = "cli")]
    tests! { server, trials;
        program_run:
            the_exit_code_is_the_commands_and_the_row_tells_how_it_ended, the_command_sees_its_claim_and_what_comes_in,
            a_refusal_is_one_line_and_an_exit_code, one_of_many_runs_within_a_window, article_rules_wait_for_an_operator,
            a_failed_run_is_repeated_within_its_window_on_request, waiting_ends_with_the_key_or_with_the_time,
            a_command_may_outlast_its_lease, a_killed_holder_is_replaced_within_its_lease_and_its_command_dies;
        program_stop:
            a_command_that_obeys_is_waited_for_and_the_next_may_run_at_once,
            a_command_that_does_not_listen_is_killed_after_the_grace, a_command_keeps_its_key_through_its_grace,
            a_paused_holder_finds_out_and_stops_its_command, a_paused_holders_late_end_changes_nothing,
            a_forced_release_stops_the_command, an_end_after_a_forced_release_is_a_loss, a_holder_that_cannot_renew_stops_its_command, asked_to_stop_while_it_waits_it_stops,
            asked_again_it_does_not_wait_for_the_database;
        program_claims:
            a_claim_is_taken_renewed_and_released, list_and_show_tell_every_field, forget_deletes_old_rows,
            watch_prints_the_list_until_it_is_interrupted, what_others_wrote_moves_no_cursor;
        program_end: a_suspension_is_passed_on_and_the_key_kept, what_is_told_to_the_database_is_within_the_grace, a_command_whose_beginning_fails_leaves_the_key_free;
        program_terminal: a_command_that_is_suspended_keeps_its_key, a_suspended_command_whose_claim_is_lost_does_not_go_on;
        program_input:
            a_table_that_is_missing_says_what_to_run, a_command_that_cannot_be_run_takes_no_key,
            bad_arguments_are_refused_and_say_why;
    }
    #[cfg(feature = "cli")]
    if server.name == "sqlite" {
        // These tests do not depend on the database.
        tests! { server, trials;
            program_run: the_command_begins_with_the_signals_of_a_fresh_process, a_local_lock_needs_nothing,
                a_program_that_is_replaced_while_it_waits_runs_its_command, a_command_that_does_not_start_leaves_the_key_free;
            program_end:
                as_pid_1_it_stops_as_soon_as_its_command_does, orphans_are_buried_while_the_command_works,
                descendants_in_other_sessions_are_stopped_too, what_the_command_leaves_behind_is_ended_first;
            program_terminal:
                a_command_may_read_the_terminal, the_interrupt_key_reaches_the_command_once,
                on_a_terminal_descendants_do_not_outlive_the_claim, a_terminal_that_is_closed_ends_the_command, without_a_shell_nothing_stays_suspended,
                an_interrupted_command_closes_no_window;
            program_stop: the_commands_descendants_are_stopped_too, a_signal_that_was_ignored_stays_ignored;
            program_claims: a_reader_that_has_enough_is_no_failure, a_log_that_cannot_be_written_stops_nothing;
            program_input:
                a_file_that_is_missing_is_not_made, a_look_leaves_the_file_as_it_is, no_database_names_all_three_ways, each_commands_help_has_an_example,
                completions_and_man_pages_are_written, any_url_is_read_or_refused;
        }
    } else {
        if server.name != "postgres" {
            tests! { server, trials; program_run: it_takes_leave_of_the_server; }
        }
        tests! { server, trials; program_input: a_server_out_of_reach_is_no_refusal, a_password_is_not_repeated; }
    }
    if server.name == "sqlite" {
        tests! { server, trials;
            examples:
                deduct_refuses_what_it_does_not_know, fencing_refuses_the_late_write_that_nothing_else_stops,
                scheduled_job_hands_over;
        }
        return; // SQLite has no network that could lose anything, and its columns have no width
    }
    if server.name != "postgres" {
        tests! { server, trials;
            work: work_that_commits_without_a_word_is_found_out;
            undone: several_are_freed_together_or_as_they_are_told_apart;
            triggers: what_a_trigger_waits_for_is_waited_for;
        }
    }
    if server.name == "mariadb" {
        tests! { server, trials; isolation: snapshot_isolation, assignments_at_once; undone: a_concurrent_change_at_snapshot_isolation; }
    }
    if server.name == "postgres" {
        tests! { server, trials;
            upgrade: a_session_in_another_time_zone_is_refused;
            durability:
                a_release_that_nothing_hangs_on_does_not_wait_for_the_disk, a_release_that_others_hang_on_waits_for_the_disk,
                what_keeps_a_claim_waits_for_the_disk, what_follows_a_release_on_its_connection_waits_for_the_disk;
        }
    }
    tests! { server, trials;
        door: a_narrow_key_column_limits_the_key, unfit_columns_of_an_existing_table_are_refused;
        batched:
            a_row_locked_by_a_transaction_delays_no_other_request, a_request_dropped_after_sending_fails_no_other,
            a_lost_reply_is_lost_for_no_request, a_slow_reply_delays_no_other_request;
        seats: a_request_dropped_in_flight_leaves_no_claim;
        lanes: a_runtime_that_stands_still_delays_no_other_request;
        apart:
            a_release_without_the_right_to_it_fails_at_once, silent_connections_lose_no_lease,
            a_request_on_a_silent_connection_is_sent_on_another, a_renewal_that_is_not_driven_any_more_loses_no_other,
            a_runtime_that_stands_still_loses_no_place_of_another,
            leases_are_renewed_though_no_connection_can_be_opened, a_renewal_that_comes_after_the_release_tells_of_no_loss;
        undone:
            claims_whose_connection_the_server_ends_are_all_granted, releases_whose_connection_the_server_ends_are_all_done,
            releases_that_were_done_unheard_say_so_where_they_know,
            a_concurrent_change_at_read_committed, a_concurrent_change_at_repeatable_read, a_concurrent_change_at_serializable,
            a_rival_at_repeatable_read, a_rival_at_serializable;
        cancelled: an_open_transaction_is_seen;
        commits:
            a_lease_finds_out_that_its_commit_was_done, a_lease_finds_out_that_its_commit_was_not_done,
            a_lease_finds_out_about_a_commit_that_is_answered_too_late, a_commit_that_may_still_arrive_is_unknown,
            a_commit_before_a_takeover_is_unknown, a_commit_under_a_version_that_is_not_answered_is_unknown,
            a_begin_that_is_not_answered_is_sent_again, a_confirmation_or_check_that_is_not_answered_changes_nothing;
        connections:
            a_pool_that_is_used_up_stops_nothing, locks_of_one_pool_share_connections, settings_of_a_session_do_not_reach_a_lock,
            new_options_of_the_pool_are_taken_over, the_connections_of_a_lock_are_closed_with_the_pool,
            connections_that_went_away_while_idle_are_found_out, a_shutdown_closes_the_connections_that_are_idle,
            the_first_look_at_the_table_is_waited_for_within_the_callers_limit,
            a_connection_that_is_slow_to_open_serves_a_later_request;
        isolation: read_committed, repeatable_read, serializable;
        replies:
            a_claim_whose_reply_is_lost_is_the_same_claim_again, a_takeover_whose_reply_is_lost_still_tells_from_whom,
            a_claim_whose_request_is_lost_is_sent_again, a_claim_that_is_answered_too_late_is_unknown,
            a_late_reply_holds_no_longer_than_a_quick_one, a_claim_that_arrives_too_late_is_unknown, a_refusal_whose_reply_is_lost_is_asked_for_again,
            a_claim_whose_reply_is_lost_is_never_called_busy,
            a_create_that_is_not_answered_is_claimed_anyway,
            a_create_that_is_too_late_leaves_a_free_row, a_row_that_another_creates_first_is_claimed,
            a_renewal_that_is_not_answered_is_unknown, a_renewal_in_the_background_that_is_lost_is_tried_again,
            renewals_that_are_never_answered_end_in_a_loss_that_is_told_in_time,
            a_release_that_is_not_answered_is_done_once, a_release_that_was_done_before_another_came_is_unknown,
            a_release_that_is_never_answered_is_unknown, a_release_that_never_gets_at_the_row_is_unknown,
            an_abandonment_that_is_not_answered_is_done, an_abandonment_that_was_done_before_another_came_is_unknown,
            an_abandonment_that_is_never_answered_is_unknown;
    }
}

/// Tests of waiting that need several processes, faults or dropped futures.
fn waits<DB: TestDatabase>(server: Server, trials: &mut Vec<Trial>) {
    tests! { server, trials;
        fair:
            grants_come_in_the_order_of_arrival, no_waiter_is_overtaken_or_starves,
            the_waiters_of_a_killed_process_are_passed_over, no_attempt_overtakes_those_with_tickets,
            a_waiter_that_goes_away_leaves_its_place, a_try_in_order_looks_at_the_queue;
        mixed: no_waiter_is_forgotten_where_some_are_fair, a_waiter_whose_place_is_gone_is_not_the_first_any_more;
        outages: a_wait_outlives_a_transaction_that_is_longer_than_the_time_limit, what_does_not_pass_by_itself_ends_a_wait;
        unheard: the_row_is_as_it_was_before, what_was_taken_over_is_there_to_be_taken_over;
        unseen: a_row_that_vanishes_is_told_and_is_not_created_all_the_time;
        philosophers: philosophers_eat_as_they_please, philosophers_eat_in_order;
        dropped_waiters:
            a_waiter, a_waiter_in_order, a_waiter_for_several_keys, a_waiter_for_several_keys_in_order;
    }
    tests! { server, trials;
        fuzzed:
            any_text_is_a_key_of_its_own_or_refused, any_duration_is_kept_to_or_refused, any_name_is_a_plain_one_or_refused;
    }
    if server.name == "sqlite" {
        tests! { server, trials; replaced: a_grant_that_cannot_be_committed_is_none, a_full_disk_grants_nothing_and_takes_nothing; }
    }
    if server.name != "sqlite" {
        tests! { server, trials;
            outages:
                a_wait_outlives_an_outage, a_wait_outlives_an_outage_that_was_there_before_it,
                a_grant_that_goes_unheard_in_an_outage_is_found_after_it, a_wait_that_ends_in_an_outage_tells_what_is_known;
        }
        #[cfg(feature = "cli")]
        tests! { server, trials; outages: the_program_waits_through_an_outage; }
    }
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    if server.name != "sqlite" {
        tests! { server, trials; rights: the_rights_that_are_stated_are_enough; }
    }
    #[cfg(feature = "postgres")]
    if server.name == "postgres" {
        tests! { server, trials;
            mixed: numbers_that_do_not_grow_hang_no_waiter;
            listening:
                a_lock_object_listens_on_one_connection_while_a_task_waits, a_connection_that_listens_is_kept_for_the_next_who_waits,
                word_of_a_release_comes_before_the_next_question, a_listener_that_is_terminated_hangs_no_waiter_and_comes_back,
                a_listener_that_receives_nothing_any_more_hangs_no_waiter, a_listener_that_never_opens_hangs_no_waiter,
                a_release_is_notified_once_if_awaited_and_never_otherwise, a_row_in_a_transactions_hands_is_asked_for_with_pauses,
                behind_a_pooler_no_connection_listens_or_is_disturbed;
        }
    }
}
