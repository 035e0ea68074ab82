//! The nodes of a Galera cluster, stopped, killed and restarted.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use rowlock::LeaseLock;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use sqlx::{AssertSqlSafe, MySql, MySqlPool, mysql::MySqlPoolOptions, pool::PoolConnection};
use tokio::time::{Instant, sleep};

/// How long a node may take to restart: it may have to copy another node's data.
const PATIENCE: Duration = Duration::from_secs(120);

/// All nodes, with a database of the test's own.
pub struct Cluster {
    folder: PathBuf,
    pub urls: Vec<String>,
    pub pools: Vec<MySqlPool>,
}

impl Cluster {
    pub async fn new(folder: PathBuf) -> Self {
        let name = format!("rowlock_{}", uuid::Uuid::new_v4().simple());
        let server = |node: usize| fs::read_to_string(folder.join(node.to_string()).join("url")).unwrap();
        let servers: Vec<String> = (1..=3).map(|node| server(node).trim().to_owned()).collect();
        for node in 1..=3 {
            // A test that failed may have left it stopped.
            fs::remove_file(folder.join(node.to_string()).join("stopped")).ok();
            synced(&servers[node - 1], node).await;
        }
        let first = MySqlPool::connect(&servers[0]).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&first).await.unwrap();
        let urls: Vec<String> = servers.iter().map(|url| url.replace("/test", &format!("/{name}"))).collect();
        let mut pools = Vec::new();
        for url in &urls {
            pools.push(pool(url));
        }
        let cluster = Self { folder, urls, pools };
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
        sqlx::raw_sql("SET SESSION wsrep_sync_wait = 7").execute(&mut *conn).await.unwrap();
        let number = sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut *conn).await.unwrap();
        sqlx::raw_sql("SET SESSION wsrep_sync_wait = 0").execute(&mut *conn).await.unwrap();
        number
    }

    /// Waits until every node has applied what was committed on any.
    pub async fn caught_up(&self) {
        for node in 1..=3 {
            self.number(node, "SELECT COUNT(*) FROM t_resource_lock").await;
        }
    }

    /// Asks the node to stop. Its clients are disconnected.
    pub async fn stop(&self, node: usize) {
        self.end(node, Signal::TERM).await;
    }

    /// Kills the node with SIGKILL.
    pub async fn kill(&self, node: usize) {
        self.end(node, Signal::KILL).await;
    }

    async fn end(&self, node: usize, signal: Signal) {
        let folder = self.node(node);
        fs::write(folder.join("stopped"), "").unwrap();
        let pid = fs::read_to_string(folder.join("pid")).unwrap().trim().parse().unwrap();
        let pid = Pid::from_raw(pid).unwrap();
        kill_process(pid, signal).unwrap();
        let since = Instant::now();
        while test_kill_process(pid).is_ok() {
            assert!(since.elapsed() < PATIENCE, "node {node} does not end");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Restarts the node, and waits until it is synced.
    pub async fn start(&self, node: usize) {
        fs::remove_file(self.node(node).join("stopped")).unwrap();
        synced(&self.urls[node - 1], node).await;
    }

    fn node(&self, node: usize) -> PathBuf {
        Path::new(&self.folder).join(node.to_string())
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

async fn synced(url: &str, node: usize) {
    let since = Instant::now();
    while !is_synced(url).await {
        assert!(since.elapsed() < PATIENCE, "node {node} does not come back");
        sleep(Duration::from_millis(100)).await;
    }
}

/// On a connection of its own: those of a pool may be waiting for a server that has ended.
async fn is_synced(url: &str) -> bool {
    use sqlx::Connection as _;
    let Ok(mut conn) = sqlx::MySqlConnection::connect(url).await else { return false };
    let state = sqlx::query_as("SHOW STATUS LIKE 'wsrep_local_state_comment'").fetch_one(&mut conn).await;
    let synced = state.is_ok_and(|(_, state): (String, String)| state == "Synced");
    conn.close().await.ok();
    synced
}

pub fn pool(url: &str) -> MySqlPool {
    pool_of(url, 8)
}

pub fn pool_of(url: &str, connections: u32) -> MySqlPool {
    MySqlPoolOptions::new().max_connections(connections).connect_lazy(url).unwrap()
}
