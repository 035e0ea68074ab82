//! MySQL Group Replication with one primary, which is killed or paused, and replaced.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use rowlock::{Error, LeaseLock, Reason, errors::DatabaseFault};
use sqlx::{MySql, MySqlPool};
use tokio::time::{Instant, sleep};

use crate::{
    galera_transactions::{paid, payments},
    group::not_believed,
    nodes::{Cluster, Kind, Trouble, pool},
    relay::Relay,
    ticks::{TABLE, Ticking},
    watch::{Wanted, Watch, work},
};

crate::suite::tests!(GROUP(
    no_claim_is_lost_when_the_primary_is_replaced,
    a_primary_that_was_replaced_lets_no_reader_in
));

const KEYS: [&str; 3] = ["one", "two", "three"];
const LEASE: Duration = Duration::from_secs(20);

/// The clients, behind a relay that leads to the primary, as a balancer does. It cuts no connection
/// to the last one.
struct Clients {
    cluster: Cluster,
    relay: Relay,
}

impl Clients {
    fn lock(&self) -> LeaseLock<MySql> {
        LeaseLock::new(self.pool()).lease(LEASE)
    }

    /// A lock that looks for the outcome of a COMMIT for as long as a primary takes to be replaced.
    fn patient_lock(&self) -> LeaseLock<MySql> {
        LeaseLock::builder(self.pool()).time_limit(LEASE).build().unwrap().lease(LEASE)
    }

    fn pool(&self) -> MySqlPool {
        pool(&self.relay.url(&self.cluster.urls[0]))
    }

    /// Troubles the primary, leads new connections to the next one, and lets the last one come
    /// back. Returns the next one.
    async fn replace(&self, last: usize, trouble: Trouble, watch: &Watch) -> usize {
        let since = Instant::now();
        self.cluster.trouble(last, trouble).await;
        let next = self.cluster.next_primary(last).await;
        self.relay.turn_to(&self.cluster.urls[next - 1..next]);
        let replaced = since.elapsed();
        watch.goes_on("worker", "at the next primary").await;
        println!("{trouble:?}: node {next} follows {last} after {replaced:?}; grants after {:?}", since.elapsed());
        self.cluster.start(last).await;
        watch.goes_on("worker", "when the last primary is there again").await;
        next
    }
}

/// Workers, payers and schedules go on at the next primary: after the death of the last one, after
/// a pause of it, and after it was asked to retire. The latter two go on, with connections of
/// clients.
async fn no_claim_is_lost_when_the_primary_is_replaced(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    cluster.execute(TABLE).await;
    cluster.choose_primary(1).await;
    let relay = Relay::before(&cluster.urls[..1]).await;
    let clients = Clients { cluster, relay };
    let held = clients.lock().try_acquire("held").await.unwrap().acquired().unwrap();
    let watch = Watch::of(&clients.cluster);
    let workers = (0..6)
        .map(|_| tokio::spawn(work(Wanted::Key(clients.lock(), &KEYS), "worker".into(), watch.clone())))
        .collect();
    let (done, over) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicBool::new(false)));
    let wanted = |over: Arc<AtomicBool>| move |_| !over.load(SeqCst);
    let payers: Vec<_> = (0..2)
        .map(|_| tokio::spawn(payments(Kind::Group, clients.patient_lock(), done.clone(), wanted(over.clone()))))
        .collect();
    let ticking = Ticking::start(&[clients.pool(), clients.pool(), clients.pool()]).await;
    sleep(Duration::from_secs(3)).await;
    let second = clients.replace(1, Trouble::Kill, &watch).await;
    let third = clients.replace(second, Trouble::Pause, &watch).await;
    let last = clients.replace(third, Trouble::Retire, &watch).await;
    watch.end(workers).await;
    over.store(true, SeqCst);
    let mut unknown = 0;
    for payer in payers {
        unknown += payer.await.unwrap();
    }
    ticking.ends(&clients.pool(), "schedules, the primary was replaced").await;
    watch.tell("the primary was replaced");
    watch.assert_right();
    let (done, (balance, count)) = (done.load(SeqCst), paid(&clients.cluster).await);
    println!("{done} payments, {unknown} in doubt, a balance of {balance}");
    assert_eq!(balance, count);
    assert!((done..=done + unknown).contains(&balance), "{done} payments and {unknown} in doubt, but {balance}");
    // A key that was held all the time is still held.
    let other = clients.cluster.lock(last);
    assert_eq!(other.try_acquire("held").await.unwrap().refused().unwrap().reason, Reason::Held);
    // Its connection may still lead to the last primary, which closes it.
    while let Err(error) = held.renew().await {
        assert!(held.is_held() && matches!(error, Error::Database(DatabaseFault::ReadOnly { .. })), "{error:?}");
    }
    let token = held.token();
    held.release().await.unwrap();
    assert!(other.try_acquire("held").await.unwrap().acquired().unwrap().token() > token);
}

/// The last primary does not know of the next one yet.
async fn a_primary_that_was_replaced_lets_no_reader_in(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    cluster.choose_primary(1).await;
    not_believed(&cluster, 1, Trouble::Pause).await;
}
