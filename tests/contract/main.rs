//! The contract: what every database must do, written once, run as `DATABASE::promise` for each.
//!
//! SQLite needs nothing. A server's tests run where its URL is set (`POSTGRES_URL`, `MYSQL_URL`, `MARIADB_URL`);
//! elsewhere they show as ignored. `scripts/test` sets all three.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

mod acquire;
mod article;
mod bed;
mod both;
mod cancelled;
mod child;
mod door;
mod events;
#[cfg(feature = "sqlite")]
mod examples;
mod keeping;
mod line;
mod migrations;
mod neighbours;
mod operating;
#[cfg(feature = "cli")]
mod program;
#[cfg(feature = "cli")]
mod program_claims;
#[cfg(feature = "cli")]
mod program_input;
#[cfg(feature = "cli")]
mod program_run;
#[cfg(feature = "cli")]
mod program_stop;
mod proxy;
mod race;
mod replies;
mod rules_table;
mod trips;
mod upgrade;

/// What `src/rules.rs` uses of its crate, so that the test can hold the servers against that very file.
mod key {
    pub use rowlock::{Holder, Key};
}
#[path = "../../src/rules.rs"]
#[allow(dead_code, unused_imports)]
mod rules;

use libtest_mimic::{Arguments, Trial};

use bed::{Bed, Server};

fn main() {
    if child::was_asked_for() {
        return child::main();
    }
    events::keep();
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for server in Server::all() {
        match server.name {
            #[cfg(feature = "sqlite")]
            "sqlite" => contract::<sqlx::Sqlite>(server, &mut trials),
            #[cfg(feature = "postgres")]
            "postgres" => contract::<sqlx::Postgres>(server, &mut trials),
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => contract::<sqlx::MySql>(server, &mut trials),
            _ => {}
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn contract<DB: Bed>(server: Server, trials: &mut Vec<Trial>) {
    macro_rules! tests {
        ($($module:ident: $($name:ident),+;)+) => {
            $($(trials.push(bed::trial::<DB, _>(server, stringify!($module), stringify!($name), $module::$name));)+)+
        };
    }
    tests! {
        acquire:
            a_free_key_is_acquired, a_held_key_is_refused_with_who_since_and_until, a_released_key_is_free_at_once,
            tokens_grow_and_never_fall, a_window_refuses_until_it_is_over, a_failed_run_may_be_repeated_at_once_on_request,
            an_expired_claim_is_taken_over_and_named, an_abandoned_claim_is_taken_over_at_once,
            article_rules_leave_failures_and_crashes_to_an_operator, another_programs_lock_is_respected,
            a_try_does_not_wait_for_a_locked_row, a_try_ends_at_its_time_limit_with_the_pool_empty,
            a_try_ends_at_its_time_limit_behind_an_uncommitted_insert, a_lease_that_comes_too_late_is_not_given, keys_are_compared_byte_by_byte,
            the_row_says_what_the_article_says, a_dropped_try_leaves_no_statement_on_a_pooled_connection;
        keeping:
            a_lease_is_renewed_in_the_background, a_lease_is_lost_when_somebody_takes_the_row, loss_is_told_before_another_gets_in,
            a_renewal_that_finds_the_row_locked_is_unknown_not_lost, a_renewal_that_fails_is_unknown_and_tried_again, a_trampled_claim_is_lost, releasing_a_lost_lease_changes_nothing,
            a_release_waits_for_a_transaction_at_the_row, releasing_twice_over_a_lost_reply_is_done,
            dropping_a_lease_abandons_it, a_pool_of_one_is_enough, a_thousand_leases_are_renewed_in_few_statements,
            a_renewal_pool_of_its_own_keeps_leases_while_the_main_pool_is_empty,
            run_releases_by_the_works_result, run_cancels_the_work_when_the_lease_is_lost, run_in_a_spawned_task,
            a_panic_in_the_work_abandons_the_key, a_runtime_that_ends_tells_the_leases,
            loss_is_told_while_the_keepers_runtime_stands_still, a_runtime_that_ends_during_a_release_does_not_hang,
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
            a_forced_release_does_not_pass_a_transaction_at_the_row, forget_deletes_what_nobody_needs_and_nothing_else,
            forget_goes_through_more_rows_than_a_page;
        neighbours:
            a_counter_stays_exact_with_four_of_theirs_and_four_of_ours, their_lock_is_refused_in_its_time_and_then_taken_over,
            they_read_our_times_and_keep_our_window, their_late_unlock_is_found_out, their_late_unlock_and_relock_are_found_out,
            a_background_renewal_finds_out_too;
        upgrade:
            the_articles_table_is_upgraded_in_place, a_lease_lives_on_the_articles_table, times_of_any_kind_stand_in_the_row,
            a_column_that_does_not_fit_is_refused,
            a_key_of_the_articles_table_is_found_by_its_index;
        both: no_update_is_lost_with_32_workers;
        trips: round_trips_are_as_stated;
        cancelled:
            a_try_on_a_free_row, a_try_on_a_missing_row, a_takeover, a_refused_try, a_renewal, a_release, an_abandonment,
            a_run, a_shutdown, a_migration;
        replies: abandoning_a_lost_lease_changes_nothing, an_abandonment_waits_for_a_transaction_at_the_row;
    }
    #[cfg(feature = "sqlite")]
    if server.name == "sqlite" {
        tests! {
            examples:
                an_interval_runs_the_job_on_each_tick, instances_with_an_interval_run_the_job_once_a_tick,
                a_cron_schedule_runs_the_job_on_each_tick, asked_to_stop_it_gives_the_key_back_at_once;
        }
    }
    #[cfg(feature = "cli")]
    tests! {
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
        program_input:
            a_table_that_is_missing_says_what_to_run, a_command_that_cannot_be_run_takes_no_key,
            bad_arguments_are_refused_and_say_why;
    }
    #[cfg(feature = "cli")]
    if server.name == "sqlite" {
        // The same whatever the database.
        tests! {
            program_run: the_command_begins_with_the_signals_of_a_fresh_process, a_local_lock_needs_nothing,
                a_program_that_is_replaced_while_it_waits_runs_its_command, a_command_that_does_not_start_leaves_the_key_free;
            program_stop: the_commands_descendants_are_stopped_too, a_signal_that_was_ignored_stays_ignored;
            program_claims: a_reader_that_has_enough_is_no_failure, a_log_that_cannot_be_written_stops_nothing;
            program_input:
                a_file_that_is_missing_is_not_made, a_look_leaves_the_file_as_it_is, no_database_names_all_three_ways, each_commands_help_has_an_example,
                completions_and_man_pages_are_written;
        }
    } else {
        if server.name != "postgres" {
            tests! { program_run: it_takes_leave_of_the_server; }
        }
        tests! { program_input: a_server_out_of_reach_is_no_refusal, a_password_is_not_repeated; }
    }
    if server.name == "sqlite" {
        return; // it has no network on which anything could get lost, and its columns have no width
    }
    if server.name == "postgres" {
        tests! { upgrade: a_session_in_another_time_zone_is_refused; }
    }
    tests! {
        door: a_narrow_key_column_limits_the_key, unfit_columns_of_an_existing_table_are_refused;
        cancelled: an_open_transaction_is_seen;
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
