//! The tests of a suite, as trials of libtest-mimic.
//!
//! Most tests spend most of their time waiting, so many more run in parallel than there are
//! processors. A test that measures a duration, or counts events within a period, runs after all of
//! these, alone on its server. Such a test, and one that takes long, runs only if `ROWLOCK_ALL` is
//! set, as by `scripts/test --all`.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
    vec,
};

use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Builder, time::timeout};

use crate::{Server, TestDatabase, TestDb, databases, direct_url, pool, server::pools_sessions};

/// How many tests run in parallel, unless `--test-threads` is given.
const AT_ONCE: usize = 8;
/// The page that names the tests of each guarantee.
const GUARANTEES: &str = include_str!("../../../docs/guarantees.md");
/// How many of the slowest tests are named at the end.
const SLOWEST: usize = 20;

/// Lists the tests of a module, by where they run, as a function `register` of that module:
///
/// ```ignore
/// tests!(
///     everywhere(a_key_is_acquired, a_held_key_is_refused),
///     everywhere.alone(a_lease_is_renewed_in_time),
///     postgres[DIRECT](a_release_is_notified),
/// );
/// ```
///
/// A group is a constructor of [`Group`]. A [`Need`] in brackets, and `.each`, `.alone`, `.last` or
/// `.long`, are optional. A test is generic over its database, and is compiled for those of its
/// group.
#[macro_export]
macro_rules! tests {
    (@everywhere $test:tt) => {
        $crate::tests!(@sqlite $test);
        $crate::tests!(@servers $test);
    };
    (@servers $test:tt) => {
        $crate::tests!(@postgres $test);
        $crate::tests!(@mysql_and_mariadb $test);
    };
    (@sqlite ($suites:ident, $group:ident, $name:ident)) => {
        $suites.sqlite(&$group, stringify!($name), |db| Box::pin($name(db)));
    };
    (@postgres ($suites:ident, $group:ident, $name:ident)) => {
        $suites.postgres(&$group, stringify!($name), |db| Box::pin($name(db)));
    };
    (@mysql_and_mariadb ($suites:ident, $group:ident, $name:ident)) => {
        $suites.mysql_and_mariadb(&$group, stringify!($name), |db| Box::pin($name(db)));
    };
    (@mariadb $test:tt) => {
        $crate::tests!(@mysql_and_mariadb $test);
    };
    ($($group:ident $([$need:expr])? $(. $when:ident)? ($($name:ident),+ $(,)?)),+ $(,)?) => {
        /// Adds the tests of this module to the suites.
        pub fn register(suites: &mut $crate::Suites) {
            $(
                let group = $crate::Group::$group(module_path!())$(.needs($need))?$(.$when())?;
                $($crate::tests!(@$group (suites, group, $name));)+
            )+
        }
    };
}

/// Adds the tests of modules to the suites: `modules!(suites: acquire acquiring)`.
#[macro_export]
macro_rules! modules {
    ($suites:ident: $($module:ident)+) => {
        $($module::register(&mut $suites);)+
    };
}

/// What a test needs besides its server. Where it is missing, the test is shown as ignored.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    pub what: &'static str,
    pub is_met: fn(Server) -> bool,
}

/// A PostgreSQL that is not behind a pooler, which hides settings and locks of a session, the user
/// of a session, the number of connections, the number of statements (the pooler sends some of its
/// own), and a request that arrives after its sender has gone. On other servers the need is always
/// met.
pub const DIRECT: Need =
    Need { what: "a direct connection", is_met: |server| server.name != "postgres" || direct_url().is_none() };

/// A session of PostgreSQL of the client's own, as also behind a pooler of sessions. One in
/// transaction mode hides notifications.
pub const SESSION: Need =
    Need { what: "a session of its own", is_met: |server| (DIRECT.is_met)(server) || pools_sessions() };

/// A PostgreSQL whose count of statements has none of a pooler but those that check a connection.
/// Pgpool-II asks for the tables and functions of its clients' statements.
pub const COUNTED: Need = Need {
    what: "a pooler without statements of its own",
    is_met: |server| (DIRECT.is_met)(server) || !pools_sessions(),
};

/// Tests of one module that run on the same servers, under the same conditions.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    module: &'static str,
    runs_on: fn(&str) -> bool,
    need: Option<Need>,
    alone: bool,
    /// Left out unless all tests are wanted.
    long: bool,
    /// On each of the servers, though no guarantee names it.
    each: bool,
}

impl Group {
    fn new(path: &'static str, runs_on: fn(&str) -> bool) -> Self {
        let module = path.rsplit("::").next().unwrap_or(path);
        Self { module, runs_on, need: None, alone: false, long: false, each: false }
    }

    pub fn everywhere(path: &'static str) -> Self {
        Self::new(path, |_| true)
    }

    /// The databases with a network: all but SQLite.
    pub fn servers(path: &'static str) -> Self {
        Self::new(path, |name| name != "sqlite")
    }

    pub fn sqlite(path: &'static str) -> Self {
        Self::new(path, |name| name == "sqlite")
    }

    pub fn postgres(path: &'static str) -> Self {
        Self::new(path, |name| name == "postgres")
    }

    pub fn mysql_and_mariadb(path: &'static str) -> Self {
        Self::new(path, |name| ["mysql", "mariadb"].contains(&name))
    }

    pub fn mariadb(path: &'static str) -> Self {
        Self::new(path, |name| name == "mariadb")
    }

    #[must_use]
    pub fn needs(self, need: Need) -> Self {
        Self { need: Some(need), ..self }
    }

    /// These tests run on each of their servers, also where only some tests are wanted.
    #[must_use]
    pub fn each(self) -> Self {
        Self { each: true, ..self }
    }

    /// These tests run one at a time on each server, after all others.
    #[must_use]
    pub fn last(self) -> Self {
        Self { alone: true, ..self }
    }

    /// These tests judge by time. They run as the last ones do, and only if all tests are wanted.
    #[must_use]
    pub fn alone(self) -> Self {
        self.last().long()
    }

    /// These tests take long, and run only if all tests are wanted.
    #[must_use]
    pub fn long(self) -> Self {
        Self { long: true, ..self }
    }
}

impl Group {
    /// Whether another server runs this test, if not all tests are wanted. Where each of its
    /// servers is there, a test runs on one of them, by its name, unless a guarantee names it.
    fn is_left_to_another(&self, server: Server, name: &str) -> bool {
        if self.each || GUARANTEES.contains(&format!("`{}::{name}`", self.module)) {
            return false;
        }
        let mut servers = Server::all().to_vec();
        servers.retain(|other| (self.runs_on)(other.name));
        let sum: usize = self.module.bytes().chain(name.bytes()).map(usize::from).sum();
        let chosen = servers[sum % servers.len()];
        servers.iter().all(|other| other.url().is_some()) && chosen.name != server.name
    }
}

type Test<DB> = fn(TestDb<DB>) -> Pin<Box<dyn Future<Output = ()>>>;

/// The tests on all servers.
pub struct Suites([Suite; 4]);

impl Suites {
    pub fn of_all_servers() -> Self {
        Self(Server::all().map(Suite::new))
    }

    pub fn sqlite(&mut self, group: &Group, name: &str, test: Test<sqlx::Sqlite>) {
        self.0[0].add(group, name, test);
    }

    pub fn postgres(&mut self, group: &Group, name: &str, test: Test<sqlx::Postgres>) {
        self.0[1].add(group, name, test);
    }

    pub fn mysql_and_mariadb(&mut self, group: &Group, name: &str, test: Test<sqlx::MySql>) {
        for suite in &mut self.0[2..] {
            suite.add(group, name, test);
        }
    }
}

/// The tests on one server.
struct Suite {
    server: Server,
    parallel: Vec<Trial>,
    alone: Vec<Trial>,
    /// Held by the test that is alone on the server.
    turn: Arc<Mutex<()>>,
}

impl Suite {
    fn new(server: Server) -> Self {
        Self { server, parallel: Vec::new(), alone: Vec::new(), turn: Arc::default() }
    }

    /// Adds a test, unless its group does not run on this server. The trial creates a database for
    /// the test and drops it afterwards.
    ///
    /// This does not depend on the type of the test: a copy of it, and of a runtime's `block_on`,
    /// for each test would take a third of the time of a build.
    fn add<DB: TestDatabase>(&mut self, group: &Group, name: &str, test: Test<DB>) {
        let (server, alone) = (self.server, group.alone);
        if !(group.runs_on)(server.name) {
            return;
        }
        let url = server.url();
        let missing = match server.variable {
            Some(variable) if url.is_none() => Some(variable),
            _ if !all() && (group.long || group.is_left_to_another(server, name)) => Some("ROWLOCK_ALL"),
            _ => group.need.filter(|need| !(need.is_met)(server)).map(|need| need.what),
        };
        let turn = alone.then(|| self.turn.clone());
        let name = format!("{}::{}::{name}", server.name, group.module);
        let own = name.clone();
        let run = move || {
            let _alone = turn.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
            on_its_own_database(&own, server, url, test)
        };
        let trial = Trial::test(name, run);
        let trial = trial.with_ignored_flag(missing.is_some());
        let trial = trial.with_kind(missing.map(|what| format!("needs {what}")).unwrap_or_default());
        if alone { self.alone.push(trial) } else { self.parallel.push(trial) }
    }
}

fn on_its_own_database<DB: TestDatabase>(
    name: &str,
    server: Server,
    url: Option<String>,
    test: Test<DB>,
) -> Result<(), Failed> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let url = url.ok_or("no URL")?;
    let begun = Instant::now();
    let mut own = runtime.block_on(databases::take::<DB>(&server, &url));
    let ready = Instant::now();
    // A failed test leaves no database behind.
    let passed = catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(async {
            let pool = pool(&own.url, 10).await;
            test(TestDb { server, pool: pool.clone(), url: own.url.clone(), _folder: own.folder.take() }).await;
            timeout(Duration::from_secs(5), pool.close()).await.ok();
        });
    }));
    let ended = Instant::now();
    // What the test has left running ends first.
    runtime.shutdown_timeout(Duration::from_secs(5));
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(databases::leave::<DB>(&server, &url, own, passed.is_ok()));
    let database = (ready - begun) + ended.elapsed();
    TOOK.lock().unwrap_or_else(PoisonError::into_inner).push(Took { name: name.into(), test: ended - ready, database });
    passed.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default().into()
    })
}

/// How long a test took, without and with its database.
struct Took {
    name: String,
    test: Duration,
    database: Duration,
}

static TOOK: Mutex<Vec<Took>> = Mutex::new(Vec::new());

/// Names the slowest tests, and says how much of the time was spent on making their databases.
fn tell_times() {
    let mut took = std::mem::take(&mut *TOOK.lock().unwrap_or_else(PoisonError::into_inner));
    if took.len() <= SLOWEST {
        return;
    }
    took.sort_by_key(|took| std::cmp::Reverse(took.test));
    let (tests, databases): (Duration, Duration) =
        (took.iter().map(|took| took.test).sum(), took.iter().map(|took| took.database).sum());
    println!("{} tests took {tests:.0?}, and their databases {databases:.0?} more. The slowest:", took.len());
    for Took { name, test, .. } in &took[..SLOWEST] {
        println!("{:>8.1} s  {name}", test.as_secs_f64());
    }
}

/// Whether the tests that take long, or judge by time, are wanted as well.
pub fn all() -> bool {
    std::env::var_os("ROWLOCK_ALL").is_some_and(|all| !all.is_empty())
}

/// Runs the suites, and trials without a database, as the command line says. Of the tests that are
/// alone on their servers, those of different servers run in parallel.
pub fn run(suites: Suites, mut trials: Vec<Trial>) -> ! {
    let mut alone = Vec::new();
    for suite in suites.0 {
        trials.extend(suite.parallel);
        alone.push(suite.alone.into_iter());
    }
    let arguments = Arguments::from_args();
    let run = |at_once, trials: Vec<Trial>| {
        let test_threads = arguments.test_threads.or(Some(at_once));
        !trials.is_empty() && libtest_mimic::run(&Arguments { test_threads, ..arguments.clone() }, trials).has_failed()
    };
    let servers = alone.len();
    let failed = run(AT_ONCE, trials) | run(servers, in_turn(alone));
    databases::drop_idle();
    tell_times();
    std::process::exit(if failed { 101 } else { 0 })
}

/// The first of each list, the second of each, and so on.
fn in_turn<T>(mut lists: Vec<vec::IntoIter<T>>) -> Vec<T> {
    let mut all = Vec::new();
    while lists.iter().any(|list| list.len() > 0) {
        all.extend(lists.iter_mut().filter_map(Iterator::next));
    }
    all
}
