//! The connections of clients, some of which take their time.
//!
//! A connection has one request. While all places are taken, a new connection gets the place of the
//! one that has waited longest for its request, so that half requests keep nothing from others.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{Router, extract::ConnectInfo, http::Request};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use rustix::process::{Resource, getrlimit};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{AbortHandle, yield_now},
    time::sleep,
};

/// How long a client may take for the head of its request, and for the form that follows.
pub const LONGEST: Duration = Duration::from_secs(10);
/// The most connections at a time.
const MOST: u64 = 1000;
/// The most connections of `rowlock cron`, whose commands need the other files.
pub const FOR_NUMBERS: usize = 16;
/// How many bytes of a request are read ahead, and so the longest head.
const AHEAD: usize = 16 * 1024;
/// How many files the program may need beside its connections: those of the database above all.
const OTHER_FILES: u64 = 32;
/// The pause after a connection that could not be accepted.
const AGAIN: Duration = Duration::from_millis(100);

/// Serves this many connections at a time, for as long as it is awaited. Connections that were
/// accepted go on.
pub async fn serve(listener: TcpListener, router: Router, places: usize) {
    let (places, waiting) = (Arc::new(Semaphore::new(places)), Arc::new(Waiting::default()));
    let service = TowerToHyperService::new(router);
    for number in 0.. {
        let (stream, from) = accept(&listener).await;
        end_if_unread(&stream);
        let Some(place) = waiting.place(&places).await else { return };
        let (service, ended) = (service.clone(), waiting.clone());
        let arriving = Arriving { waiting: waiting.clone(), number };
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(from));
            request.extensions_mut().insert(arriving.clone());
            service.call(request)
        });
        let mut connection = http1::Builder::new();
        connection.timer(TokioTimer::new()).header_read_timeout(LONGEST).keep_alive(false).max_buf_size(AHEAD);
        let connection = connection.serve_connection(TokioIo::new(stream), service);
        let task = tokio::spawn(async move {
            // What goes wrong concerns this client alone.
            let _ = connection.await;
            ended.remove(number);
            drop(place);
        });
        waiting.add(number, task.abort_handle());
    }
}

/// The connection of a request that may not have arrived as a whole.
#[derive(Clone)]
pub struct Arriving {
    waiting: Arc<Waiting>,
    number: u64,
}

impl Arriving {
    /// The request has arrived: its connection is not replaced by another one any more.
    pub fn arrived(&self) {
        self.waiting.remove(self.number);
    }
}

/// The file limit leaves room for what the program does beside.
pub fn places() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files.saturating_sub(OTHER_FILES).clamp(8, MOST)).unwrap_or(8)
}

/// Has the system end the connection of a client that has read nothing of an answer for half a
/// minute, also if its machine is there.
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
fn end_if_unread(stream: &TcpStream) {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(stream, 30_000) {
        tracing::debug!(%error, "a client that does not read keeps its place");
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(_) => sleep(AGAIN).await,
        }
    }
}

/// The connections whose request has not arrived, the oldest first.
#[derive(Default)]
struct Waiting(Mutex<VecDeque<(u64, AbortHandle)>>);

impl Waiting {
    fn with<T>(&self, change: impl FnOnce(&mut VecDeque<(u64, AbortHandle)>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, number: u64, task: AbortHandle) {
        self.with(|waiting| waiting.push_back((number, task)));
    }

    fn remove(&self, number: u64) {
        self.with(|waiting| waiting.retain(|(one, _)| *one != number));
    }

    /// Returns a place. If there is none, the connection that has waited longest is closed.
    async fn place(&self, places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        // The requests of connections that were just accepted may have arrived.
        yield_now().await;
        if places.available_permits() == 0 {
            let oldest = self.with(VecDeque::pop_front);
            let _ = oldest.map(|(_, task)| task.abort());
        }
        places.clone().acquire_owned().await.ok()
    }
}
