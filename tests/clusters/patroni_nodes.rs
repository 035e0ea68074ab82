//! The nodes of a cluster that Patroni manages: killed, paused, restarted, and asked about over
//! Patroni's REST API.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use rowlock::LeaseLock;
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool, Postgres};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use crate::{
    nodes::until,
    standby::{PAYMENTS, pool},
    ticks::TABLE,
};

/// How long a node may take to reply.
const REPLY: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(90);

/// Whether a standby has what a client is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Synchronous,
    Asynchronous,
}

/// All nodes, with a database of the test's own. Nodes are numbered from 1.
pub struct Cluster {
    folder: PathBuf,
    servers: Vec<String>,
    /// The test's database at each of them.
    urls: Vec<String>,
    /// The database at the primary, through HAProxy.
    pub url: String,
    apis: Vec<String>,
    mode: Mode,
}

const STREAM_TO_TWO: &str = "SELECT count(*) = 2 AND current_setting('synchronous_standby_names') = ''
     FROM pg_stat_replication WHERE state = 'streaming'";
const STREAM_TO_TWO_ONE_SYNCHRONOUS: &str = "SELECT count(*) = 2 AND count(*) FILTER (WHERE sync_state = 'sync') = 1
     FROM pg_stat_replication WHERE state = 'streaming'";

impl Cluster {
    pub async fn new(folder: PathBuf, mode: Mode) -> Self {
        let name = format!("rowlock_{}", uuid::Uuid::new_v4().simple());
        let read = |part: &str, file: &str| fs::read_to_string(folder.join(part).join(file)).unwrap().trim().to_owned();
        // A URL has the user postgres as well.
        let database = |url: &str| format!("{}/{name}", url.strip_suffix("/postgres").unwrap());
        let servers = ["1", "2", "3"].map(|node| read(node, "url")).to_vec();
        let apis = ["1", "2", "3"].map(|node| read(node, "api")).to_vec();
        let urls = servers.iter().map(|url| database(url)).collect();
        let url = database(&read("proxy", "url"));
        let cluster = Self { folder, servers, urls, url, apis, mode };
        // A test that failed may have left them stopped.
        cluster.resume_etcd();
        for node in 1..=3 {
            fs::remove_file(cluster.folder.join(node.to_string()).join("stopped")).ok();
            cluster.resume(node);
        }
        cluster.choose(mode).await;
        cluster.ready().await;
        let leader = cluster.primary().await.unwrap();
        let mut conn = PgConnection::connect(&cluster.servers[leader - 1]).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut conn).await.unwrap();
        conn.close().await.unwrap();
        let pool = cluster.pool_of(leader);
        rowlock::migrate(&pool).await.unwrap();
        sqlx::raw_sql(PAYMENTS).execute(&pool).await.unwrap();
        sqlx::raw_sql(TABLE).execute(&pool).await.unwrap();
        cluster
    }

    /// Connections to the primary, through HAProxy.
    pub fn pool(&self) -> PgPool {
        pool(&self.url)
    }

    /// Connections to this node, as of clients with an old address of the primary.
    pub fn pool_of(&self, node: usize) -> PgPool {
        pool(self.url_of(node))
    }

    pub fn url_of(&self, node: usize) -> &str {
        &self.urls[node - 1]
    }

    pub fn lock_at(&self, node: usize) -> LeaseLock<Postgres> {
        LeaseLock::new(self.pool_of(node))
    }

    /// The reply of a node, if there is one, on a connection of its own.
    pub async fn one<T>(&self, node: usize, sql: &'static str) -> Option<T>
    where
        T: for<'r> sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres> + Send + Unpin,
    {
        let mut conn = timeout(REPLY, PgConnection::connect(&self.servers[node - 1])).await.ok()?.ok()?;
        let reply = timeout(REPLY, sqlx::query_scalar(sql).fetch_one(&mut conn)).await.ok()?.ok();
        conn.close().await.ok();
        reply
    }

    /// Switches the mode at run time. The primary's Patroni reads it within a second.
    async fn choose(&self, mode: Mode) {
        let body = format!("{{\"synchronous_mode\": {}}}", mode == Mode::Synchronous);
        until("the mode is chosen", async || self.ask(1, "PATCH", "/config", &body).await == Some(200)).await;
        sleep(Duration::from_millis(1_500)).await;
    }

    /// Waits until there is a primary, from which the two others receive what is committed.
    pub async fn ready(&self) {
        until("all nodes are there", async || {
            let Some(primary) = self.primary().await else { return false };
            let (sql, synchronous) = match self.mode {
                Mode::Synchronous => (STREAM_TO_TWO_ONE_SYNCHRONOUS, 1),
                Mode::Asynchronous => (STREAM_TO_TWO, 0),
            };
            let mut known = 0; // to Patroni, which promotes no other
            for node in 1..=3 {
                known += usize::from(self.ask(node, "GET", "/synchronous", "").await == Some(200));
            }
            known == synchronous && self.one(primary, sql).await == Some(true)
        })
        .await;
    }

    /// The node that Patroni takes for the primary.
    pub async fn primary(&self) -> Option<usize> {
        for node in 1..=3 {
            if self.is_primary(node).await {
                return Some(node);
            }
        }
        None
    }

    pub async fn is_primary(&self, node: usize) -> bool {
        self.ask(node, "GET", "/primary", "").await == Some(200)
    }

    /// Waits for a primary other than the last one, and returns it.
    pub async fn next_primary(&self, last: usize) -> usize {
        let since = Instant::now();
        loop {
            for node in (1..=3).filter(|node| *node != last) {
                if self.is_primary(node).await && self.one(node, "SELECT NOT pg_is_in_recovery()").await == Some(true) {
                    return node;
                }
            }
            assert!(since.elapsed() < PATIENCE, "there is no other primary");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Asks Patroni to make another node the primary.
    pub async fn switch_over(&self, primary: usize) {
        let body = format!("{{\"leader\": \"n{primary}\"}}");
        assert_eq!(self.ask(primary, "POST", "/switchover", &body).await, Some(200));
    }

    /// Sends a request to a node's Patroni, and returns the status of its reply.
    async fn ask(&self, node: usize, method: &str, path: &str, body: &str) -> Option<u16> {
        let address = self.apis[node - 1].strip_prefix("http://").unwrap();
        let length = body.len();
        let request = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}");
        let reply = async {
            let mut stream = TcpStream::connect(address).await.ok()?;
            stream.write_all(request.as_bytes()).await.ok()?;
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await.ok()?;
            reply.split(' ').nth(1)?.parse().ok()
        };
        // A switchover is answered when it is over.
        timeout(if method == "GET" { REPLY } else { PATIENCE }, reply).await.ok()?
    }
}

/// What happens to processes.
impl Cluster {
    /// Kills the node's server and its Patroni with SIGKILL.
    pub fn kill(&self, node: usize) {
        self.kill_patroni(node);
        let postmaster = self.postmaster(node).unwrap();
        let children = children(postmaster);
        kill_process(postmaster, Signal::KILL).unwrap();
        signal_all(&children, Signal::KILL); // one that is paused does not notice
    }

    /// Kills the node's Patroni with SIGKILL. Its server goes on.
    pub fn kill_patroni(&self, node: usize) {
        fs::write(self.file(node, "stopped"), "").unwrap();
        kill_process(pid(&self.file(node, "pid")).unwrap(), Signal::KILL).unwrap();
    }

    /// Pauses all processes of the node (SIGSTOP), as a machine is paused.
    pub fn pause(&self, node: usize) {
        kill_process(pid(&self.file(node, "pid")).unwrap(), Signal::STOP).unwrap();
        // The postmaster first, so that it starts no more processes.
        let postmaster = self.postmaster(node).unwrap();
        kill_process(postmaster, Signal::STOP).unwrap();
        signal_all(&children(postmaster), Signal::STOP);
    }

    /// Lets the node's server go on, and then its Patroni.
    pub fn resume(&self, node: usize) {
        self.resume_server(node);
        self.resume_patroni(node);
    }

    pub fn resume_server(&self, node: usize) {
        let Some(postmaster) = self.postmaster(node) else { return };
        signal_all(&children(postmaster), Signal::CONT);
        kill_process(postmaster, Signal::CONT).ok();
    }

    fn resume_patroni(&self, node: usize) {
        if let Some(patroni) = pid(&self.file(node, "pid")) {
            kill_process(patroni, Signal::CONT).ok();
        }
    }

    /// Lets the node come back, and waits until all nodes are there.
    pub async fn start(&self, node: usize) {
        fs::remove_file(self.file(node, "stopped")).ok();
        self.resume(node);
        self.ready().await;
    }

    /// Pauses the processes of the primary that send what is committed to the standbys.
    pub async fn pause_senders(&self, primary: usize) {
        let sql = "SELECT array_agg(pid) FROM pg_stat_replication";
        for sender in self.one::<Vec<i32>>(primary, sql).await.unwrap() {
            kill_process(Pid::from_raw(sender).unwrap(), Signal::STOP).unwrap();
        }
    }

    /// Waits until the standbys have applied what was committed.
    pub async fn caught_up(&self, primary: usize) {
        let sql = "SELECT bool_and(replay_lsn >= pg_current_wal_insert_lsn()) FROM pg_stat_replication";
        until("the standbys have caught up", async || self.one(primary, sql).await == Some(true)).await;
    }

    /// Has a standby receive what is committed, and not apply it, until its server is resumed. The
    /// process that applies it is paused, because Patroni undoes `pg_wal_replay_pause` each second.
    pub async fn pause_replay(&self, standby: usize) {
        let sql = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'startup'";
        let startup = self.one::<i32>(standby, sql).await.unwrap();
        kill_process(Pid::from_raw(startup).unwrap(), Signal::STOP).unwrap();
    }

    /// Waits until Patroni has asked one of these standbys to become the primary. Its server does
    /// that once it has applied all that it received.
    pub async fn promoted(&self, standbys: [usize; 2]) {
        let is_asked = |standby: usize| self.file(standby, "data/promote").exists();
        until("a standby is to be promoted", async || standbys.into_iter().any(is_asked)).await;
    }

    /// Whether the standby has received more than it has applied.
    pub async fn lags(&self, standby: usize) -> bool {
        let sql = "SELECT pg_last_wal_replay_lsn() < pg_last_wal_receive_lsn()";
        self.one(standby, sql).await.unwrap()
    }

    pub fn pause_etcd(&self) {
        kill_process(self.etcd(), Signal::STOP).unwrap();
    }

    pub fn resume_etcd(&self) {
        kill_process(self.etcd(), Signal::CONT).unwrap();
    }

    fn etcd(&self) -> Pid {
        pid(&self.folder.join("etcd/pid")).unwrap()
    }

    fn postmaster(&self, node: usize) -> Option<Pid> {
        pid(&self.file(node, "data/postmaster.pid"))
    }

    fn file(&self, node: usize, name: &str) -> PathBuf {
        self.folder.join(node.to_string()).join(name)
    }
}

/// The number in the first line of a file.
fn pid(file: &Path) -> Option<Pid> {
    Pid::from_raw(fs::read_to_string(file).ok()?.lines().next()?.trim().parse().ok()?)
}

fn children(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero();
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

/// Some may have ended.
fn signal_all(processes: &[Pid], signal: Signal) {
    for process in processes {
        kill_process(*process, signal).ok();
    }
}
