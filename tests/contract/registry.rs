//! The tests of versions and of the properties of the tables' server, as trials.

use libtest_mimic::Trial;

#[cfg(all(feature = "rust_decimal", any(feature = "postgres", feature = "mysql")))]
use crate::decimals;
#[cfg(feature = "mysql")]
use crate::delayed;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::schemas;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::servers;
#[cfg(feature = "sqlite")]
use crate::sqlite_file;
use crate::{
    forgetting,
    harness::{self, Server, TestDatabase},
    sequences, snapshots, tests, versioned, versioned_door, versioned_in, versioned_limits, versioned_lost,
    versioned_turns, versioned_types,
};

/// The guarantees of versions in the application's own table.
pub fn versions<DB: TestDatabase>(server: Server, trials: &mut Vec<Trial>) {
    tests! { server, trials;
        versioned_door:
            only_plain_names_become_part_of_a_statement, one_column_is_not_taken_for_two, reserved_words_are_names_as_well,
            a_table_in_a_named_schema_is_found, the_case_of_names_matters_where_the_database_says_so, a_misspelt_column_is_named,
            a_column_or_table_that_goes_away_is_named, a_missing_table_says_so,
            a_key_column_without_a_unique_index_of_its_own_is_refused, columns_of_another_type_are_refused_with_their_type,
            a_value_of_another_type_is_an_error_that_changes_nothing;
        versioned_types:
            a_key_may_be_a_text_an_integer_or_a_uuid, a_uuid_is_the_same_in_capitals_and_without_hyphens,
            a_key_that_its_column_cannot_hold_is_refused_unseen, a_value_and_a_version_may_be_integers_of_any_width,
            a_value_may_be_of_any_type_that_the_driver_knows;
        versioned:
            a_row_that_is_not_there_is_none_and_is_not_made, an_update_writes_value_and_version_and_says_so,
            an_error_of_the_computation_comes_back_as_it_is_at_once_with_nothing_written,
            an_update_computes_anew_after_a_conflict, attempts_that_are_used_up_are_a_conflict_that_counts_them,
            a_balance_that_does_not_cover_the_amount_says_both, amounts_that_are_not_positive_or_do_not_fit_are_refused,
            a_program_that_forgets_the_version_is_not_overwritten, a_program_that_forgets_the_version_leaves_no_balance_below_zero, a_balance_that_came_back_is_another_one,
            a_version_or_value_of_null_is_an_error_that_changes_nothing, a_version_that_cannot_grow_is_an_error_that_changes_nothing,
            no_deduction_is_lost_with_32_workers, a_balance_never_falls_below_zero_with_32_workers;
        versioned_in:
            what_the_caller_commits_or_rolls_back_goes_with_the_rest, what_is_dropped_is_not_there,
            a_faster_one_is_a_conflict_after_one_attempt, a_snapshot_that_is_too_old_is_a_conflict,
            a_row_in_another_transactions_hands_is_a_conflict, an_error_leaves_the_transaction_to_the_caller,
            outside_a_transaction_nothing_is_changed, a_pool_of_one_is_enough_from_the_first_use_on;
        versioned_lost:
            an_update_that_is_dropped_was_made_wholly_or_not_at_all, a_deduction_that_is_dropped_was_made_wholly_or_not_at_all;
        versioned_turns:
            four_deductions_one_after_the_other_read_the_row_once,
            what_is_left_to_one_who_goes_away_is_left_to_the_next, the_only_connection_is_never_kept,
            what_a_trigger_made_of_a_balance_counts_and_not_what_was_written;
        versioned_limits: a_write_that_waits_for_a_row_ends_with_the_limit, a_connection_that_comes_within_the_time_of_the_retries_is_taken;
        sequences: random_sequences_end_as_their_model_does;
    }
    if server.name == "sqlite" {
        return; // no network, no width, no row locks
    }
    if server.name != "postgres" {
        tests! { server, trials;
            versioned_door: a_table_of_another_engine_is_refused, a_session_that_is_not_strict_is_refused, a_table_is_not_taken_for_its_namesake;
            versioned_types: what_64_bits_with_a_sign_do_not_hold_is_an_error;
        }
    }
    tests! { server, trials;
        versioned_turns: a_connection_that_was_closed_while_idle_costs_no_outcome;
        versioned: a_sum_that_the_column_cannot_hold_is_an_error_that_changes_nothing;
        versioned_in: a_deadlock_is_a_conflict_for_one_of_the_two;
        versioned_limits:
            a_write_that_is_not_answered_within_the_limit_is_unknown_and_not_sent_again,
            a_read_that_is_not_answered_within_the_limit_is_sent_over_another_connection,
            in_a_transaction_each_statement_has_the_limit,
            a_begin_that_is_not_answered_within_the_limit_is_sent_over_another_connection;
        versioned_lost:
            a_write_that_is_not_answered_is_unknown_and_not_tried_again, a_write_that_is_answered_too_late_is_unknown_and_not_tried_again,
            a_read_that_is_not_answered_is_sent_again, a_read_that_is_never_answered_has_changed_nothing;
    }
}

/// The guarantees of the statements on the lock's own tables, and of the servers that they are sent
/// to.
pub fn store<DB: TestDatabase>(server: Server, trials: &mut Vec<Trial>) {
    tests! { server, trials;
        forgetting: a_step_that_fails_leaves_those_before_it_done, minutes_of_any_size_are_counted;
        snapshots: a_claim_that_was_lost_since_the_snapshot_is_told_at_once;
    }
    if server.name != "sqlite" {
        tests! { server, trials; forgetting: keys_of_other_steps_can_be_acquired_between_steps; }
    }
    if server.name == "mariadb" {
        tests! { server, trials; snapshots: snapshot_isolation_tells_it_as_a_conflict; }
    }
    #[cfg(feature = "sqlite")]
    if server.name == "sqlite" {
        tests! { server, trials;
            schemas: a_table_in_an_attached_file_is_another;
            sqlite_file:
                a_file_in_utf_16_is_refused_unchanged, a_write_transaction_longer_than_a_lease_loses_it_in_time;
        }
    }
    #[cfg(feature = "postgres")]
    if server.name == "postgres" {
        tests! { server, trials;
            schemas:
                a_table_along_the_path_is_completed_where_it_is, where_there_is_none_both_are_made_in_the_first_schema,
                a_queue_that_is_not_beside_the_table_is_refused, the_copied_file_leaves_the_path_as_it_was;
            servers: an_untried_server_is_told_of;
        }
    }
    #[cfg(feature = "mysql")]
    if server.name.starts_with('m') {
        tests! { server, trials;
            delayed:
                a_renewal_that_was_held_up_moves_no_lease_back, a_claim_that_was_held_up_holds_for_a_whole_lease,
                a_sign_of_life_that_was_held_up_keeps_its_place, renewals_behind_a_metadata_lock_may_run_in_any_order;
            servers: tidb_is_refused;
        }
    }
}

/// SQLite has no decimals.
#[cfg(all(feature = "rust_decimal", any(feature = "postgres", feature = "mysql")))]
pub fn decimals<DB: TestDatabase>(server: Server, trials: &mut Vec<Trial>)
where
    rust_decimal::Decimal: rowlock::Value<DB>,
{
    tests! { server, trials;
        decimals:
            a_balance_of_cents_is_exact, more_decimals_than_the_column_keeps_are_refused,
            a_sum_of_too_many_digits_changes_nothing, a_balance_of_more_digits_than_the_type_has_is_not_written_over;
    }
    if server.name == "postgres" {
        tests! { server, trials; decimals: a_column_without_a_limit_keeps_every_decimal; }
    }
}
