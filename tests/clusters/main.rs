//! A Galera cluster, PostgreSQL with a standby, and single servers: they are stopped and killed
//! during the tests.
//!
//! `scripts/clusters` starts such servers and sets the variables; without them the tests are shown
//! as ignored. Each variable names a folder: `GALERA` has `1`, `2` and `3`, nodes with `url`,
//! `pid`, and a server that is kept running unless there is a file `stopped`; `SYNCHRONOUS` and
//! `ASYNCHRONOUS` have `primary` and `standby`, with `url` and `data`. A primary is killed once, so
//! each pair serves one test. `ALONE` has `postgres` and `mariadb`, with `url`, `clock`, and a
//! server that is kept running.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

#[cfg(any(feature = "mysql", feature = "postgres"))]
mod alone;
#[cfg(feature = "mysql")]
mod galera;
#[cfg(feature = "mysql")]
mod galera_order;
#[cfg(feature = "mysql")]
mod galera_transactions;
#[cfg(feature = "mysql")]
mod nodes;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod relay;
#[cfg(feature = "postgres")]
mod standby;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod watch;

#[cfg(any(feature = "mysql", feature = "postgres"))]
use std::{
    future::Future,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use libtest_mimic::{Arguments, Trial};

/// Adds tests on the same servers to the trials, as `module: name, ...;`. They run one after the
/// other, because one kills what another would use. Tests on other servers run in parallel with
/// them.
#[cfg(any(feature = "mysql", feature = "postgres"))]
macro_rules! tests {
    ($trials:ident, $variable:literal; $($module:ident: $($name:ident),+;)+) => {{
        static SERVERS: Mutex<()> = Mutex::new(());
        $($trials.extend([$(
            trial($variable, &SERVERS, concat!(stringify!($module), "::", stringify!($name)), $module::$name)
        ),+]);)+
    }};
}

fn main() {
    let mut arguments = Arguments::from_args();
    // Each test has a thread of its own, to wait for its servers.
    arguments.test_threads.get_or_insert(16);
    #[cfg_attr(not(any(feature = "mysql", feature = "postgres")), expect(unused_mut, reason = "SQLite is one machine"))]
    let mut trials: Vec<Trial> = Vec::new();
    #[cfg(feature = "mysql")]
    tests! { trials, "GALERA";
        galera:
            no_key_is_held_twice_while_nodes_stop_and_return, a_node_that_is_behind_grants_nothing,
            a_session_that_waits_for_the_cluster_takes_no_lease_for_lost;
        galera_order: waiters_on_all_nodes_are_served_in_the_order_of_arrival, philosophers_on_all_nodes_eat;
        galera_transactions:
            no_update_is_lost_with_workers_on_all_nodes, a_commit_that_the_cluster_refuses_is_tried_again_under_the_same_lease,
            a_holder_that_another_node_took_over_from_cannot_commit, a_node_that_is_behind_is_not_believed_about_a_commit,
            a_commit_whose_node_is_killed_is_not_guessed;
    }
    #[cfg(feature = "mysql")]
    tests! { trials, "ALONE"; alone: a_mariadb_that_is_killed_loses_nothing, a_mariadb_whose_clock_is_stepped_fences; }
    #[cfg(feature = "postgres")]
    tests! { trials, "ALONE"; alone: a_postgres_that_is_killed_loses_nothing, a_postgres_whose_clock_is_stepped_fences; }
    #[cfg(feature = "postgres")]
    tests! { trials, "SYNCHRONOUS"; standby: no_claim_is_lost_when_a_synchronous_standby_takes_over; }
    #[cfg(feature = "postgres")]
    tests! { trials, "ASYNCHRONOUS"; standby: a_grant_that_the_standby_never_saw_is_fenced; }
    libtest_mimic::run(&arguments, trials).exit();
}

/// A test on the servers in the folder that the variable names.
#[cfg(any(feature = "mysql", feature = "postgres"))]
fn trial<F>(variable: &'static str, servers: &'static Mutex<()>, name: &str, test: fn(PathBuf) -> F) -> Trial
where
    F: Future<Output = ()> + 'static,
{
    let folder = std::env::var_os(variable).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let missing = folder.is_none();
    let run = move || {
        let _in_use = servers.lock().unwrap_or_else(PoisonError::into_inner);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(test(folder.ok_or("no servers")?));
        Ok(())
    };
    let kind = if missing { format!("needs {variable}: scripts/clusters") } else { String::new() };
    Trial::test(name, run).with_ignored_flag(missing).with_kind(kind)
}
