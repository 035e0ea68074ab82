//! PostgreSQL that Patroni manages, in synchronous mode: the primary is killed, replaced and
//! paused, and etcd is lost, under clients that reach the primary through HAProxy.

use std::{path::PathBuf, time::Duration};

use rowlock::{Lease, LeaseLock, Reason};
use sqlx::{Postgres, postgres::PgPoolOptions};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use crate::{
    nodes::until,
    patroni_nodes::{Cluster, Mode},
    relay::Relay,
    standby::{Payers, pool},
    ticks::Ticking,
    watch::{Wanted, Watch, everything, renew, work},
};

crate::suite::tests!(PATRONI(
    no_claim_is_lost_when_the_primary_is_killed,
    no_claim_is_lost_in_a_switchover,
    no_claim_is_lost_when_the_primary_is_paused_and_comes_back,
    no_claim_is_lost_while_etcd_is_lost,
    leases_are_renewed_past_a_proxy_that_forgets_idle_connections
));

const KEYS: [&str; 3] = ["one", "two", "three"];
/// Keys for clients of a primary that was replaced. The first one was free when it fell.
const DIRECT: [&str; 4] = ["direct", "one", "two", "three"];
/// Of the load. A claim whose reply is lost with the primary keeps its key that long.
const LEASE: Duration = Duration::from_secs(15);
/// Of a lease that stands through any of the faults.
const HELD: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(90);

/// All kinds of holders, payers and schedules, whose connections lead to the primary.
struct Load {
    watch: Watch,
    tasks: Vec<JoinHandle<()>>,
    payers: Payers,
    ticking: Ticking,
    held: Lease<Postgres>,
}

impl Load {
    async fn start(cluster: &Cluster) -> Self {
        let held = lock(cluster).lease(HELD).try_acquire("held").await.unwrap().acquired().unwrap();
        let watch = Watch::of_clients_of_a_primary();
        let tasks = everything(|| lock(cluster), &watch);
        let payers = Payers::start(|| lock(cluster));
        let ticking = Ticking::start(&[cluster.pool(), cluster.pool(), cluster.pool()]).await;
        let load = Self { watch, tasks, payers, ticking, held };
        load.go_on("at first").await;
        sleep(Duration::from_secs(2)).await;
        load
    }

    async fn go_on(&self, when: &str) {
        self.watch.all_go_on(when).await;
        self.payers.go_on(when).await;
    }

    /// Waits until grants continue. Workers may have to wait for the end of a lease: of a claim
    /// whose reply was lost with the primary.
    async fn granted_again(&self, cluster: &Cluster, fault: &str, since: Instant) {
        let free = lock(cluster);
        while free.acquire("free", PATIENCE).await.is_err() {
            assert!(since.elapsed() < PATIENCE, "{fault}: no grant");
            sleep(Duration::from_millis(20)).await;
        }
        let granted = since.elapsed();
        self.go_on(fault).await;
        println!("{fault}: a free key was granted after {granted:?}, and all work went on after {:?}", since.elapsed());
    }

    /// Ends all clients, and judges what they did.
    async fn end(self, cluster: &Cluster, fault: &str) {
        self.watch.end(self.tasks).await;
        self.ticking.ends(&cluster.pool(), fault).await;
        self.watch.tell(fault);
        self.watch.assert_right();
        self.payers.end(&cluster.pool()).await;
        // A key that was held all the time is still held.
        let other = lock(cluster);
        assert_eq!(other.try_acquire("held").await.unwrap().refused().unwrap().reason, Reason::Held);
        renew(&self.held).await;
        let token = self.held.token();
        self.held.release().await.unwrap();
        assert!(other.try_acquire("held").await.unwrap().acquired().unwrap().token() > token);
    }
}

/// A lock that looks for the outcome of a COMMIT for as long as a primary takes to be replaced.
fn lock(cluster: &Cluster) -> LeaseLock<Postgres> {
    let lock = LeaseLock::builder(cluster.pool()).time_limit(Duration::from_secs(20)).build();
    lock.unwrap().lease(LEASE)
}

async fn no_claim_is_lost_when_the_primary_is_killed(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let load = Load::start(&cluster).await;
    let last = cluster.primary().await.unwrap();
    let since = Instant::now();
    cluster.kill(last);
    let next = cluster.next_primary(last).await;
    println!("killed: node {next} follows {last} after {:?}", since.elapsed());
    load.granted_again(&cluster, "the primary was killed", since).await;
    cluster.start(last).await;
    load.go_on("beside the last primary, which is a standby").await;
    load.end(&cluster, "the primary was killed").await;
}

async fn no_claim_is_lost_in_a_switchover(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let load = Load::start(&cluster).await;
    let last = cluster.primary().await.unwrap();
    let since = Instant::now();
    cluster.switch_over(last).await;
    println!("switchover: answered after {:?}", since.elapsed());
    load.granted_again(&cluster, "switchover", since).await;
    cluster.ready().await;
    load.end(&cluster, "switchover").await;
}

/// The last primary goes on for a few seconds before its Patroni does, with clients that are
/// connected to it directly, as by an old DNS entry.
async fn no_claim_is_lost_when_the_primary_is_paused_and_comes_back(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let mut load = Load::start(&cluster).await;
    let last = cluster.primary().await.unwrap();
    let direct = cluster.lock_at(last);
    direct.try_acquire("direct").await.unwrap().acquired().unwrap().release().await.unwrap();
    let since = Instant::now();
    cluster.pause(last);
    let next = cluster.next_primary(last).await;
    println!("paused: node {next} follows {last} after {:?}", since.elapsed());
    load.granted_again(&cluster, "the primary was paused", since).await;
    cluster.resume_server(last);
    for _ in 0..3 {
        load.tasks.push(tokio::spawn(work(Wanted::Key(direct.clone(), &DIRECT), "direct".into(), load.watch.clone())));
    }
    sleep(Duration::from_secs(4)).await;
    cluster.start(last).await;
    load.go_on("beside the last primary, which is a standby").await;
    assert_eq!(load.watch.entered("direct"), 0, "the last primary granted keys");
    load.end(&cluster, "the primary was paused").await;
}

/// Patroni demotes a primary that cannot renew its leader key.
async fn no_claim_is_lost_while_etcd_is_lost(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let load = Load::start(&cluster).await;
    let last = cluster.primary().await.unwrap();
    let since = Instant::now();
    cluster.pause_etcd();
    until("the primary is demoted", async || cluster.one(last, "SELECT pg_is_in_recovery()").await == Some(true)).await;
    println!("etcd is lost: demoted after {:?}", since.elapsed());
    sleep(Duration::from_secs(2)).await;
    let back = Instant::now();
    cluster.resume_etcd();
    load.granted_again(&cluster, "etcd was lost and is back", back).await;
    cluster.ready().await;
    load.end(&cluster, "etcd was lost").await;
}

/// Each renewal finds the connection of the last one forgotten, and is sent on another one. A claim
/// waits for its reply, unless the pool closes connections before the proxy forgets them.
async fn leases_are_renewed_past_a_proxy_that_forgets_idle_connections(folder: PathBuf) {
    const FORGOTTEN: Duration = Duration::from_secs(1);
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let relay = Relay::before(std::slice::from_ref(&cluster.url)).await;
    relay.forget_idle(FORGOTTEN);
    let url = relay.url(&cluster.url);
    let lease = Duration::from_secs(9);
    let lock = LeaseLock::new(pool(&url)).lease(lease);
    let mut held = Vec::new();
    for key in KEYS {
        held.push(lock.try_acquire(key).await.unwrap().acquired().unwrap());
    }
    let closing = PgPoolOptions::new().max_connections(8).idle_timeout(FORGOTTEN / 2).connect_lazy(&url).unwrap();
    let closing = LeaseLock::new(closing);
    let (mut longest, mut shortest_left) = (Duration::ZERO, lease);
    for _ in 0..10 {
        let end = Instant::now() + 2 * FORGOTTEN;
        while Instant::now() < end {
            sleep(Duration::from_millis(50)).await;
            shortest_left = held.iter().map(Lease::time_left).fold(shortest_left, Duration::min);
        }
        let since = Instant::now();
        let other = closing.acquire("other", Duration::from_secs(2)).await.unwrap();
        other.release().await.unwrap();
        longest = longest.max(since.elapsed());
    }
    assert!(shortest_left > lease / 3, "a renewal came late: {shortest_left:?} were left");
    let since = Instant::now();
    let late = lock.try_acquire("other").await;
    println!("idle connections are forgotten: leases had at least {shortest_left:?} left");
    println!(
        "idle connections are forgotten: {late:?} after {:?}; after {longest:?} if the pool closes them",
        since.elapsed()
    );
    for lease in held {
        assert!(lease.is_held(), "{lease:?}");
    }
}
