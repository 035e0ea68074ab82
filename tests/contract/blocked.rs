//! A subscriber that blocks, as one does that writes into a pipe that is full.

use std::{
    fmt::Debug,
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, pool, refused};
use rowlock::{LeaseLock, Reason, Schedules, Status, Tick};
use sqlx::{Pool, pool::PoolOptions};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    sync::oneshot,
    time::timeout,
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::Field,
    span::{Attributes, Id, Record},
    subscriber::set_default,
};

use crate::{
    child::{self, say},
    ticks::{Never, due, steal},
};

harness::tests!(everywhere(
    a_lost_run_is_stopped_before_its_event,
    a_subscriber_that_blocks_for_ever_holds_up_no_renewal_and_no_loss,
    a_hook_that_blocks_for_ever_holds_up_no_renewal_and_no_loss,
    a_thread_that_stands_still_is_reported
));

/// Short enough for a renewal to come soon.
const LEASE: Duration = Duration::from_secs(3);

/// Holds up each warning and each error until it is opened.
#[derive(Clone, Default)]
struct Pipe(Arc<(Mutex<bool>, Condvar)>);

impl Pipe {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

impl Subscriber for Pipe {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().starts_with("rowlock")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |open| !*open).unwrap());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Runs `work` on a runtime whose events go to a pipe that nothing reads until the work is over.
async fn behind_a_pipe<DB: TestDatabase, T: Send + 'static>(
    db: &TestDb<DB>,
    work: impl AsyncFnOnce(Pool<DB>) -> T + Send + 'static,
) -> T {
    let (url, (reply, over)) = (db.url.clone(), oneshot::channel());
    std::thread::spawn(move || {
        let pipe = Pipe::default();
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let of_thread = pipe.clone();
        // The guard would end the subscriber of the thread.
        builder
            .worker_threads(4)
            .enable_all()
            .on_thread_start(move || std::mem::forget(set_default(of_thread.clone())));
        let runtime = builder.build().unwrap();
        let done = runtime.block_on(async { work(pool::<DB>(&url, 2).await).await });
        pipe.open();
        drop(runtime);
        drop(reply.send(done));
    });
    timeout(2 * PATIENCE, over).await.unwrap().unwrap()
}

async fn a_lost_run_is_stopped_before_its_event<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let (began, begun) = oneshot::channel();
    let running = behind_a_pipe(&db, async move |pool| {
        let began = Arc::new(Mutex::new(Some(began)));
        let schedules = Schedules::new(pool).lease(LEASE).on(schedule, move |tick: Tick<DB>| {
            if let Some(began) = began.lock().unwrap().take() {
                let _ = began.send(());
            }
            drop(tick);
            std::future::pending::<Never>()
        });
        let run = harness::spawn(async move { schedules.try_tick("k").await });
        timeout(PATIENCE, run).await.is_ok()
    });
    let (ended, ()) = tokio::join!(running, async {
        timeout(PATIENCE, begun).await.unwrap().unwrap();
        steal(&db, "k").await;
    });
    assert!(ended, "the run ends although its event blocks");
}

async fn a_subscriber_that_blocks_for_ever_holds_up_no_renewal_and_no_loss<DB: TestDatabase>(db: TestDb<DB>) {
    renews_and_loses(&db, "hold behind a pipe").await;
}

async fn a_hook_that_blocks_for_ever_holds_up_no_renewal_and_no_loss<DB: TestDatabase>(db: TestDb<DB>) {
    renews_and_loses(&db, "hold behind a hook").await;
}

/// Says which thread stands still.
struct Stalls;

impl Subscriber for Stalls {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "rowlock::session::threads"
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut |field: &Field, value: &dyn Debug| {
            if field.name() == "thread" {
                say(format!("{} {value:?}", event.metadata().level()));
            }
        });
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The job of a process whose pool has a hook that blocks for a while.
pub async fn stall<DB: TestDatabase>(pool: Pool<DB>, url: &str) {
    tracing::subscriber::set_global_default(Stalls).unwrap();
    let _kept = acquired(LeaseLock::new(pool).lease(LEASE).try_acquire("kept").await);
    let options = PoolOptions::<DB>::new().after_connect(|_, _| {
        std::thread::sleep(LEASE);
        Box::pin(async { Ok(()) })
    });
    let slow = LeaseLock::new(options.connect_lazy(url).unwrap());
    let _slow = acquired(slow.try_acquire("slow").await);
    std::future::pending::<Never>().await;
}

async fn a_thread_that_stands_still_is_reported<DB: TestDatabase>(db: TestDb<DB>) {
    let mut process = child::start(&db, "stall", "", std::path::Path::new(""));
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    for says in ["WARN \"rowlock\"", "INFO \"rowlock\""] {
        assert_eq!(timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap(), says);
    }
    process.kill().await.unwrap();
}

const LOST: [&str; 2] = ["first", "second"];

/// The job of another process, of which a thread for requests is blocked: it says which leases it
/// has lost.
pub async fn hold<DB: TestDatabase>(pool: Pool<DB>, url: &str, behind_a_hook: bool) {
    if !behind_a_hook {
        tracing::subscriber::set_global_default(Pipe::default()).unwrap();
    }
    let lock = LeaseLock::new(pool).lease(LEASE);
    let kept = acquired(lock.try_acquire("kept").await);
    let lost = [acquired(lock.try_acquire(LOST[0]).await), acquired(lock.try_acquire(LOST[1]).await)];
    if behind_a_hook {
        eventually("it is renewed", async || kept.renew().await.is_ok()).await; // with its session
        let (began, begun) = oneshot::channel();
        let began = Arc::new(Mutex::new(Some(began)));
        let options = PoolOptions::<DB>::new().after_connect(move |_, _| {
            if let Some(began) = began.lock().unwrap().take() {
                let _ = began.send(());
            }
            loop {
                std::thread::park();
            }
        });
        let blocked = LeaseLock::new(options.connect_lazy(url).unwrap());
        harness::spawn(async move { blocked.try_acquire("blocked").await });
        begun.await.unwrap();
    }
    say("holds");
    for lease in &lost {
        lease.cancellation_token().cancelled().await;
        say(lease.key().as_str());
    }
    kept.lost().await;
    say("lost what was to be kept");
}

async fn renews_and_loses<DB: TestDatabase>(db: &TestDb<DB>, job: &str) {
    let mut process = child::start(db, job, "", std::path::Path::new(""));
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let mut says = async || timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
    assert_eq!(says().await, "holds");
    let lock = db.lock();
    let until = async || lock.inspect("kept").await.unwrap().unwrap().until;
    for key in LOST {
        lock.force_release(key, Status::Failed).await.unwrap().unwrap();
        assert_eq!(says().await, key);
        let before = until().await;
        eventually("it is renewed", async || until().await > before).await;
    }
    assert_eq!(refused(lock.try_acquire("kept").await).reason, Reason::Held);
    process.kill().await.unwrap();
}
