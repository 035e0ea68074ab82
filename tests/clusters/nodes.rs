//! The nodes of a cluster (Galera, MySQL Group Replication), stopped, killed, paused and restarted.

use std::{
    cell::Cell,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rowlock::LeaseLock;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use sqlx::{AssertSqlSafe, MySql, MySqlPool, mysql::MySqlPoolOptions, pool::PoolConnection};
use tokio::time::{Instant, sleep, timeout};

/// How long a node may take to restart: it may have to copy another node's data.
const PATIENCE: Duration = Duration::from_secs(120);
/// After how long a member of a group is told to join again.
const REJOIN: Duration = Duration::from_secs(20);
/// How long it may take to answer a question.
const ANSWER: Duration = Duration::from_secs(10);

/// What replicates the data of the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Galera,
    /// With several primaries, unless the test chooses one.
    Group,
}

/// What happens to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It is asked to stop. Its clients are disconnected.
    Stop,
    /// SIGKILL.
    Kill,
    /// SIGSTOP, until the others have gone on without it. It then goes on, and takes some time to
    /// learn that it is no member any more.
    Pause,
    /// Its network is cut off, until the others have gone on without it. It goes on all the time,
    /// and its clients stay connected.
    Split,
    /// The primary is asked to leave that place to another node. Its clients stay connected.
    Retire,
}

/// All nodes, with a database of the test's own.
pub struct Cluster {
    pub kind: Kind,
    folder: PathBuf,
    pub urls: Vec<String>,
    pub pools: Vec<MySqlPool>,
}

impl Kind {
    async fn of(urls: &[String]) -> Self {
        let since = Instant::now();
        loop {
            for url in urls {
                if let Some(banner) = one::<String>(url, "SELECT VERSION()").await {
                    return if banner.contains("MariaDB") { Self::Galera } else { Self::Group };
                }
            }
            assert!(since.elapsed() < PATIENCE, "a node does not answer");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Whether the node has a place in the cluster, and has caught up.
    fn is_ready(self) -> &'static str {
        match self {
            Self::Galera => {
                "SELECT variable_value = 'Synced' FROM information_schema.global_status
                 WHERE variable_name = 'wsrep_local_state_comment'"
            }
            Self::Group => {
                "SELECT COUNT(*) = 3 FROM performance_schema.replication_group_members WHERE member_state = 'ONLINE'"
            }
        }
    }

    /// Whether the statements of a session wait until the node has applied all that was committed
    /// on any.
    pub fn waits(self, waits: bool) -> &'static str {
        match (self, waits) {
            (Self::Galera, true) => "SET SESSION wsrep_sync_wait = 3",
            (Self::Galera, false) => "SET SESSION wsrep_sync_wait = 0",
            (Self::Group, true) => "SET SESSION group_replication_consistency = 'BEFORE'",
            (Self::Group, false) => "SET SESSION group_replication_consistency = 'EVENTUAL'",
        }
    }
}

impl Cluster {
    pub async fn new(folder: PathBuf) -> Self {
        let name = format!("rowlock_{}", uuid::Uuid::new_v4().simple());
        let server = |node: usize| fs::read_to_string(folder.join(node.to_string()).join("url")).unwrap();
        let servers: Vec<String> = (1..=3).map(|node| server(node).trim().to_owned()).collect();
        for node in 1..=3 {
            // A test that failed may have left it paused, cut off or stopped.
            go_on(&folder, node);
            switch(&folder, node, "up");
        }
        let kind = Kind::of(&servers).await;
        for node in 1..=3 {
            back(kind, &folder, &servers, node).await;
        }
        ready(kind, &servers).await;
        if kind == Kind::Group {
            one::<String>(&servers[0], "SELECT group_replication_switch_to_multi_primary_mode()").await.unwrap();
        }
        let first = MySqlPool::connect(&servers[0]).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&first).await.unwrap();
        let urls: Vec<String> = servers.iter().map(|url| url.replace("/test", &format!("/{name}"))).collect();
        let mut pools = Vec::new();
        for url in &urls {
            pools.push(pool(url));
        }
        let cluster = Self { kind, folder, urls, pools };
        rowlock::migrate(&cluster.pools[0]).await.unwrap();
        cluster.execute("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL)").await;
        cluster.execute("CREATE TABLE payment (id int AUTO_INCREMENT PRIMARY KEY, token bigint NOT NULL)").await;
        cluster.execute("INSERT INTO account VALUES (1, 0)").await;
        cluster.execute("CREATE TABLE obstacle (id int PRIMARY KEY)").await;
        cluster.caught_up().await;
        cluster
    }

    pub fn lock(&self, node: usize) -> LeaseLock<sqlx::MySql> {
        LeaseLock::new(self.pools[node - 1].clone())
    }

    /// Executes on the first node.
    pub async fn execute(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pools[0]).await.unwrap();
    }

    /// Reads a number on the node, once it has applied all that was committed before.
    pub async fn number(&self, node: usize, sql: &str) -> i64 {
        let mut conn = self.pools[node - 1].acquire().await.unwrap();
        sqlx::raw_sql(self.kind.waits(true)).execute(&mut *conn).await.unwrap();
        let number = sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut *conn).await.unwrap();
        sqlx::raw_sql(self.kind.waits(false)).execute(&mut *conn).await.unwrap();
        number
    }

    /// How many keys are held, as the node itself knows.
    pub async fn held_at(&self, node: usize) -> Option<i64> {
        one(&self.urls[node - 1], "SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1").await
    }

    /// Waits until every node has applied what was committed on any.
    pub async fn caught_up(&self) {
        for node in 1..=3 {
            // A node that is behind refuses connections to a database that it does not have yet,
            // and prepares a statement without waiting for its table.
            let since = Instant::now();
            while one::<i64>(&self.urls[node - 1], "SELECT COUNT(*) FROM obstacle").await.is_none() {
                assert!(since.elapsed() < PATIENCE, "node {node} does not have the tables");
                sleep(Duration::from_millis(50)).await;
            }
            self.number(node, "SELECT COUNT(*) FROM t_resource_lock").await;
        }
    }

    /// What is done to the nodes, one after the other.
    pub fn troubles(&self) -> &'static [(usize, Trouble)] {
        match self.kind {
            Kind::Galera => &[(2, Trouble::Stop), (3, Trouble::Kill)],
            // A member that is asked to stop waits 50 s for transactions that are not certified.
            Kind::Group => &[(3, Trouble::Kill), (2, Trouble::Pause)],
        }
    }

    pub async fn trouble(&self, node: usize, trouble: Trouble) {
        match trouble {
            Trouble::Stop => self.end(node, Signal::TERM).await,
            Trouble::Kill => self.end(node, Signal::KILL).await,
            Trouble::Pause => self.pause(node).await,
            Trouble::Split => {
                assert!(switch(&self.folder, node, "down"), "there is no switch");
                self.expelled(node).await;
            }
            Trouble::Retire => self.choose_primary(node % 3 + 1).await,
        }
    }

    /// Kills the node with SIGKILL.
    pub async fn kill(&self, node: usize) {
        self.end(node, Signal::KILL).await;
    }

    async fn end(&self, node: usize, signal: Signal) {
        fs::write(self.folder.join(node.to_string()).join("stopped"), "").unwrap();
        let pid = pid(&self.folder, node);
        kill_process(pid, signal).unwrap();
        let since = Instant::now();
        while test_kill_process(pid).is_ok() {
            assert!(since.elapsed() < PATIENCE, "node {node} does not end");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Stops the node's process, and waits until the group has expelled it.
    pub async fn pause(&self, node: usize) {
        kill_process(pid(&self.folder, node), Signal::STOP).unwrap();
        self.expelled(node).await;
    }

    async fn expelled(&self, node: usize) {
        expelled(&self.urls, node).await;
    }

    /// Lets the process go on, and hear the others.
    pub fn resume(&self, node: usize) {
        go_on(&self.folder, node);
        switch(&self.folder, node, "up");
    }

    /// Lets the node come back, and waits until all nodes are there.
    pub async fn start(&self, node: usize) {
        back(self.kind, &self.folder, &self.urls, node).await;
        self.resume(node);
        ready(self.kind, &self.urls).await;
    }
}

/// Nodes that do not hear each other.
impl Cluster {
    /// Cuts a node off, and it goes on alone. On Galera it drops all messages of the others. A
    /// member of a group has a network of its own, or is paused where it has none.
    pub async fn silence(&self, node: usize) {
        match self.kind {
            Kind::Galera => {
                self.isolate(node, "SET GLOBAL wsrep_provider_options = 'gmcast.isolate=1'").await;
                self.lost_majority(node).await;
            }
            Kind::Group if switch(&self.folder, node, "down") => {}
            Kind::Group => kill_process(pid(&self.folder, node), Signal::STOP).unwrap(),
        }
    }

    async fn isolate(&self, node: usize, sql: &'static str) {
        send(&self.urls[node - 1], sql).await.unwrap();
    }

    /// Waits until the node has noticed that it is not in the majority, or for as long as that
    /// takes a member of a group, whose commits wait from the first moment.
    pub async fn lost_majority(&self, node: usize) {
        const STATUS: &str = "SELECT variable_value FROM information_schema.global_status
                              WHERE variable_name = 'wsrep_cluster_status'";
        match self.kind {
            Kind::Galera => {
                let url = &self.urls[node - 1];
                let is_lost = async || one::<String>(url, STATUS).await.as_deref() != Some("Primary");
                until("the node has noticed", is_lost).await;
            }
            Kind::Group => sleep(Duration::from_secs(1)).await,
        }
    }

    /// Waits until the others have given up the node, whose claims they may have certified before.
    pub async fn goes_on_without(&self, node: usize) {
        match self.kind {
            Kind::Galera => {}
            Kind::Group => self.expelled(node).await,
        }
    }

    /// Lets all nodes hear each other, and waits until they do.
    pub async fn unite(&self) {
        for node in 1..=3 {
            match self.kind {
                Kind::Galera => self.isolate(node, "SET GLOBAL wsrep_provider_options = 'gmcast.isolate=0'").await,
                Kind::Group => self.resume(node),
            }
        }
        ready(self.kind, &self.urls).await;
    }
}

fn pid(folder: &Path, node: usize) -> Pid {
    let pid = fs::read_to_string(folder.join(node.to_string()).join("pid")).unwrap();
    Pid::from_raw(pid.trim().parse().unwrap()).unwrap()
}

/// Ends a pause. A node that is stopped has no process.
fn go_on(folder: &Path, node: usize) {
    if folder.join(node.to_string()).join("pid").exists() {
        kill_process(pid(folder, node), Signal::CONT).ok();
    }
}

/// Plugs the node's network in ("up"), or cuts it off from the others ("down"). Returns whether
/// there is a switch. A node that has ended has no network, and comes back with a new one.
fn switch(folder: &Path, node: usize, to: &str) -> bool {
    let switch = folder.join("switch");
    if !switch.exists() {
        return false;
    }
    let output = Command::new(switch).args([&node.to_string(), to]).output().unwrap();
    assert!(output.status.success() || to == "up", "{output:?}");
    true
}

/// A group with one primary.
impl Cluster {
    pub async fn choose_primary(&self, node: usize) {
        let url = &self.urls[node - 1];
        let single = one::<i64>(url, "SELECT CAST(@@group_replication_single_primary_mode AS SIGNED)").await;
        let sql = match single.unwrap() {
            1 => "SELECT group_replication_set_as_primary(@@server_uuid)",
            _ => "SELECT group_replication_switch_to_single_primary_mode(@@server_uuid)",
        };
        one::<String>(url, sql).await.unwrap();
    }

    /// Waits until the group has replaced this primary, and returns the next one.
    pub async fn next_primary(&self, last: usize) -> usize {
        let sql = "SELECT CAST(@@super_read_only AS SIGNED)";
        let since = Instant::now();
        loop {
            for node in (1..=3).filter(|node| *node != last) {
                if one::<i64>(&self.urls[node - 1], sql).await == Some(0) {
                    return node;
                }
            }
            assert!(since.elapsed() < PATIENCE, "there is no other primary");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A node that shows nothing of what others commit: the next change that it applies waits for a
/// lock on a table that only the test uses.
pub struct Behind(PoolConnection<MySql>);

impl Cluster {
    pub async fn behind(&self, node: usize) -> Behind {
        let mut conn = self.pools[node - 1].acquire().await.unwrap();
        sqlx::raw_sql("LOCK TABLES obstacle READ").execute(&mut *conn).await.unwrap();
        self.execute("INSERT INTO obstacle VALUES (1)").await;
        Behind(conn)
    }
}

impl Behind {
    pub async fn over(mut self) {
        sqlx::raw_sql("UNLOCK TABLES").execute(&mut *self.0).await.unwrap();
    }
}

/// Has a server started again that was stopped. One that a group still knows from before it was
/// killed would try to join once, and fail.
async fn back(kind: Kind, folder: &Path, urls: &[String], node: usize) {
    let stopped = folder.join(node.to_string()).join("stopped");
    if kind == Kind::Group && stopped.exists() {
        expelled(urls, node).await;
    }
    fs::remove_file(stopped).ok();
}

async fn expelled(urls: &[String], node: usize) {
    let sql = "SELECT COUNT(*) FROM performance_schema.replication_group_members";
    until("the node is expelled", async || one::<i64>(&urls[node % 3], sql).await == Some(2)).await;
}

async fn ready(kind: Kind, urls: &[String]) {
    let rejoin = Cell::new(Instant::now() + REJOIN);
    for url in urls {
        let is_ready = async || {
            let is_ready = one(url, kind.is_ready()).await == Some(1_i64);
            if !is_ready && kind == Kind::Group && Instant::now() >= rejoin.get() {
                join_all(urls).await;
                rejoin.set(Instant::now() + REJOIN);
            }
            is_ready
        };
        until("all nodes are there", is_ready).await;
    }
}

/// Lets the members join that were expelled, and failed to join at once. By themselves they try
/// again after five minutes.
async fn join_all(urls: &[String]) {
    const STATE: &str = "SELECT IFNULL(MAX(member_state), 'OFFLINE') FROM performance_schema.replication_group_members
                         WHERE member_id = @@server_uuid";
    for url in urls {
        let state = one::<String>(url, STATE).await;
        if matches!(state.as_deref(), Some("ERROR" | "OFFLINE")) {
            println!("a member is {state:?}, and is told to join");
            timeout(PATIENCE, send(url, "STOP GROUP_REPLICATION; START GROUP_REPLICATION")).await.ok();
        }
    }
}

pub async fn until(what: &str, is: impl AsyncFn() -> bool) {
    let since = Instant::now();
    while !is().await {
        assert!(since.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// The reply of a node, if there is one, on a connection of its own: those of a pool may be waiting
/// for a server that has ended.
async fn one<T>(url: &str, sql: &'static str) -> Option<T>
where
    T: for<'r> sqlx::Decode<'r, MySql> + sqlx::Type<MySql> + Send + Unpin,
{
    use sqlx::Connection as _;
    let mut conn = timeout(ANSWER, sqlx::MySqlConnection::connect(url)).await.ok()?.ok()?;
    let reply = timeout(ANSWER, sqlx::query_scalar(sql).fetch_one(&mut conn)).await.ok()?.ok();
    conn.close().await.ok();
    reply
}

async fn send(url: &str, sql: &'static str) -> Result<(), sqlx::Error> {
    use sqlx::Connection as _;
    let mut conn = sqlx::MySqlConnection::connect(url).await?;
    sqlx::raw_sql(sql).execute(&mut conn).await.map(drop)
}

pub type Wandering = crate::wandering::Wandering<MySql>;

pub fn pool(url: &str) -> MySqlPool {
    pool_of(url, 8)
}

pub fn pool_of(url: &str, connections: u32) -> MySqlPool {
    MySqlPoolOptions::new().max_connections(connections).connect_lazy(url).unwrap()
}
