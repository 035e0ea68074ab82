//! Servers that speak a database's protocol without being that database, recognized by their
//! version banners.

use std::sync::atomic::{AtomicBool, Ordering};

/// How well a server is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The database itself, or a build of it.
    Known,
    /// Another server, and what is to be said of it.
    Untried(&'static str, &'static str),
    /// Another server, on which two holders can hold a key at the same time.
    Refused(&'static str),
}

const UNTESTED: &str = "this server is not tested with rowlock";
const ACCEPTED: &str = "this server keeps no row locks: two holders can hold one key";

/// TiDB accepts `FOR UPDATE SKIP LOCKED` and drops the lock (pingcap/tidb issue 69720). Aurora DSQL
/// has no locks, and resolves conflicts at COMMIT.
const REFUSED: [(&str, &str); 2] = [("tidb", "TiDB"), ("dsql", "Aurora DSQL")];

/// Substrings of the banners of other servers, and the servers' names.
const UNTRIED: [(&str, &str); 10] = [
    ("cockroachdb", "CockroachDB"),
    ("-yb-", "YugabyteDB"),
    ("redshift", "Redshift"),
    ("greenplum", "Greenplum"),
    ("vitess", "Vitess"),
    ("planetscale", "PlanetScale"),
    ("oceanbase", "OceanBase"),
    ("tddl", "PolarDB-X"),
    ("singlestore", "SingleStore"),
    ("dolt", "Dolt"),
];

static ACCEPT_ANY: AtomicBool = AtomicBool::new(false);

/// Accepts every server from now on, also those on which two holders can hold a key at the same
/// time. Off by default.
///
/// A server that is known not to keep row locks is refused with
/// [`Error::Setup`](crate::Error::Setup): TiDB and Aurora DSQL. With `accept` set, the
/// first call of each lock reports it in a warning instead. This is for a version of such a server
/// that keeps them, and for experiments. It applies to all locks and schedules of the process, to
/// [`migrate`](crate::migrate), and to servers that are looked at for the first time after the
/// call.
///
/// # Examples
///
/// ```
/// rowlock::admin::accept_any_server(true);
/// ```
pub fn accept_any_server(accept: bool) {
    ACCEPT_ANY.store(accept, Ordering::Relaxed);
}

/// Reads a version banner.
pub fn support(banner: &str) -> Support {
    let banner = banner.to_ascii_lowercase();
    let named =
        |names: &[(&str, &'static str)]| names.iter().find(|(mark, _)| banner.contains(mark)).map(|(_, name)| *name);
    if let Some(name) = named(&REFUSED) {
        let is_accepted = ACCEPT_ANY.load(Ordering::Relaxed);
        return if is_accepted { Support::Untried(name, ACCEPTED) } else { Support::Refused(name) };
    }
    named(&UNTRIED).map_or(Support::Known, |name| Support::Untried(name, UNTESTED))
}

/// Returns the reason why a server cannot be used.
pub fn refusal(name: &str, banner: &str) -> String {
    format!(
        "the server is {name} ({banner}), which does not keep the row locks that a claim rests on; \
         use PostgreSQL, MySQL, MariaDB or SQLite for the locks, or accept it (`accept_any_server`, \
         `--any-server`) and expect two holders at a time"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_banner_tells_the_server() {
        for tidb in [
            "8.0.11-TiDB-v8.5.0",
            "5.7.25-TiDB-v7.1.0-serverless",
            "8.0.11 TiDB Server (Apache License 2.0) Community Edition, MySQL 8.0 compatible",
        ] {
            assert_eq!(support(tidb), Support::Refused("TiDB"), "{tidb}");
        }
        for (banner, name) in [
            ("CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu, built 2024/05/15)", "CockroachDB"),
            ("PostgreSQL 11.2-YB-2.20.1.0-b0 on x86_64-pc-linux-gnu, 64-bit", "YugabyteDB"),
            ("8.0.30-Vitess", "Vitess"),
            ("8.0.23-PlanetScale", "PlanetScale"),
            ("5.7.25-OceanBase-v4.2.1.0", "OceanBase"),
            ("PostgreSQL 8.0.2 on i686-pc-linux-gnu, Redshift 1.0.38698", "Redshift"),
        ] {
            assert_eq!(support(banner), Support::Untried(name, UNTESTED), "{banner}");
        }
        for known in [
            "PostgreSQL 15.14 (Debian 15.14-0+deb12u1) on x86_64-pc-linux-gnu, compiled by gcc",
            "PostgreSQL 18.0 on aarch64-apple-darwin",
            "9.7.0 MySQL Community Server - GPL",
            "8.0.36-28 Percona Server (GPL), Release 28",
            "10.11.14-MariaDB-0+deb12u2 Debian 12",
            "11.8.3-MariaDB-ubu2404 mariadb.org binary distribution",
        ] {
            assert_eq!(support(known), Support::Known, "{known}");
        }
    }
}
