//! A Galera cluster, a group of MySQL servers, PostgreSQL with a standby and with Patroni, and
//! single servers: they are stopped and killed during the tests.
//!
//! `scripts/clusters` starts such servers and sets the variables; without them the tests are shown
//! as ignored. Each variable names a folder: `GALERA` has `1`, `2` and `3`, nodes with `url`,
//! `pid`, and a server that is kept running unless there is a file `stopped`; so has `GROUP`, with
//! a program `switch` if its nodes have networks of their own. `SYNCHRONOUS` and `ASYNCHRONOUS`
//! have `primary` and `standby`, with `url` and `data`. A primary is killed once, so each pair
//! serves one test. `PATRONI` has `1`, `2` and `3` as well, nodes with `url`, `api`, `pid`
//! (Patroni's) and `data`, and `etcd` and `proxy`. `ALONE` has `postgres` and `mariadb`, with
//! `url`, `clock`, and a server that is kept running.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

mod alone;
mod galera;
mod galera_order;
mod galera_transactions;
mod group;
mod group_primary;
mod nodes;
mod partition;
mod patroni;
mod patroni_fallen;
mod patroni_nodes;
mod relay;
mod split;
mod standby;
mod suite;
mod ticks;
mod wandering;
mod watch;

use libtest_mimic::Arguments;

fn main() {
    let mut trials = Vec::new();
    galera::register(&mut trials);
    galera_order::register(&mut trials);
    galera_transactions::register(&mut trials);
    partition::register(&mut trials);
    group::register(&mut trials);
    group_primary::register(&mut trials);
    split::register(&mut trials);
    alone::register(&mut trials);
    standby::register(&mut trials);
    patroni::register(&mut trials);
    patroni_fallen::register(&mut trials);
    ticks::register(&mut trials);
    let mut arguments = Arguments::from_args();
    // Each test has a thread of its own, to wait for its servers.
    arguments.test_threads.get_or_insert(trials.len());
    libtest_mimic::run(&arguments, trials).exit();
}
