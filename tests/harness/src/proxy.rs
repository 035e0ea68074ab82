//! A proxy on loopback between a pool and its server, which holds or cuts what passes.
//!
//! The proxy recognizes two things in the protocols, which it neither counts nor holds, except in
//! silence: a ping, such as the pool's own of a connection that is given back, and the lock's own
//! check of a shared one. The unit that is held is a chunk, that is, the result of one read: a
//! client sends a request in one piece and waits for its reply. A chunk that is held and then let
//! through arrives even after its sender has disconnected, as on a slow network.
//!
//! This file has what a test sees and sets; `traffic.rs` reads and passes on.

mod traffic;

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use sqlx::pool::PoolOptions;
use tokio::{join, net::TcpListener, sync::watch, time::timeout};

use crate::{PATIENCE, TestDatabase, TestDb};

/// The direction of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the server.
    Requests,
    /// To the client.
    Replies,
}

#[derive(Debug, Default)]
struct State {
    /// How many chunks may still pass in each direction before they are held. `None` is any number.
    left: [Option<usize>; 2],
    /// The only connections that are held. `None` is all of them.
    only: Option<Vec<u64>>,
    /// How many chunks have come in each direction, those that are held included.
    seen: [usize; 2],
    /// Connections below this number are cut.
    cut_below: u64,
    accepted: u64,
    /// The connections that are open, and how many requests have come on each.
    open: BTreeMap<u64, usize>,
    /// What is held at this moment.
    held: Vec<(Way, u64)>,
    /// The connections on which a request was held.
    asked: BTreeSet<u64>,
    /// The connections on which LISTEN was sent.
    listeners: Vec<u64>,
    /// The delay of the first reply on a connection.
    delay: Duration,
    /// The delay of every reply.
    latency: Duration,
    /// The first text is replaced by the second, which has the same length.
    replaced: Option<(&'static str, &'static str)>,
    /// After an error of PostgreSQL that contains this text, replies are held.
    failing: Option<&'static str>,
}

impl State {
    /// Nothing at all passes on this connection.
    fn is_silent(&self, number: u64) -> bool {
        self.only.is_some() && self.holds(Way::Requests, number) && self.holds(Way::Replies, number)
    }

    fn holds(&self, way: Way, number: u64) -> bool {
        self.left[way as usize] == Some(0) && self.only.as_ref().is_none_or(|only| only.contains(&number))
    }
}

#[derive(Clone)]
struct Shared(Arc<watch::Sender<State>>);

/// On drop, all connections are cut, and no more are accepted.
pub struct Proxy {
    shared: Shared,
    pub url: String,
    accepting: tokio::task::AbortHandle,
}

impl Proxy {
    /// Between the clients of its [`pool`](Self::pool) and the server of this URL.
    pub async fn to(url: &str) -> Self {
        let (scheme, rest) = url.split_once("://").expect("a URL");
        let (authority, database) = rest.split_once('/').expect("a URL with a database");
        let (user, host) = authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
        assert!(!host.is_empty(), "{url} names a host: the proxy speaks TCP");
        // Without TLS: encrypted data is not split into the chunks of the protocol.
        let (port, plain) =
            if scheme.starts_with("postgres") { (5432, "sslmode=disable") } else { (3306, "ssl-mode=DISABLED") };
        let plain = format!("{}{plain}", if database.contains('?') { '&' } else { '?' });
        let server = if host.contains(':') { host.to_owned() } else { format!("{host}:{port}") };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let user = user.map(|user| format!("{user}@")).unwrap_or_default();
        let shared = Shared(Arc::new(watch::Sender::new(State::default())));
        let accepting = tokio::spawn(traffic::accept(listener, shared.clone(), server)).abort_handle();
        Self { shared, url: format!("{scheme}://{user}{address}/{database}{plain}"), accepting }
    }

    /// A pool that reaches its database through this proxy. It connects when it is first used.
    pub fn pool<DB: TestDatabase>(&self, connections: u32) -> sqlx::Pool<DB> {
        let options = PoolOptions::new().max_connections(connections).test_before_acquire(false);
        options.connect_lazy(&self.url).unwrap()
    }

    /// Lets the given number of chunks pass, then holds all that follow, on every connection.
    pub fn hold_after(&self, way: Way, chunks: usize) {
        self.shared.0.send_modify(|state| {
            state.left[way as usize] = Some(chunks);
            state.only = None;
        });
    }

    /// Holds everything on the existing connections. They stay open, and nothing is delivered on
    /// them. New connections pass.
    pub fn silence(&self) {
        self.shared.0.send_modify(|state| {
            state.left = [Some(0); 2];
            state.only = Some((0..state.accepted).collect());
        });
    }

    /// Holds everything on connections that do not exist yet, so that none can be opened.
    pub fn hold_new(&self) {
        self.shared.0.send_modify(|state| {
            state.left = [Some(0); 2];
            state.only = Some((state.accepted..state.accepted + 1000).collect());
        });
    }

    /// From now on delays the server's first reply on each connection.
    pub fn delay_first(&self, delay: Duration) {
        self.shared.0.send_modify(|state| state.delay = delay);
    }

    /// From now on delays every reply of the server, as a network does.
    pub fn delay_each(&self, latency: Duration) {
        self.shared.0.send_modify(|state| state.latency = latency);
    }

    /// Holds everything on the connections that listen. They stay open, and nothing is delivered on
    /// them.
    pub fn swallow_listeners(&self) {
        self.shared.0.send_modify(|state| {
            state.left = [Some(0); 2];
            state.only = Some(state.listeners.clone());
        });
    }

    pub fn hold(&self, way: Way) {
        self.hold_after(way, 0);
    }

    /// Neither answers nor closes connections, old or new.
    pub fn hold_everything(&self) {
        self.hold(Way::Requests);
        self.hold(Way::Replies);
    }

    /// Returns how many chunks have come in this direction, those that are held included.
    pub fn seen(&self, way: Way) -> usize {
        self.shared.0.borrow().seen[way as usize]
    }

    /// Returns on how many connections a request was held. The end of a connection is no request.
    pub fn asked_in_silence(&self) -> usize {
        self.shared.0.borrow().asked.len()
    }

    /// Returns how many connections are open, and how many requests have come on each at least.
    pub fn carried(&self) -> (usize, usize) {
        let open = &self.shared.0.borrow().open;
        (open.len(), open.values().min().copied().unwrap_or_default())
    }

    /// Returns how many connections have been accepted.
    pub fn accepted(&self) -> u64 {
        self.shared.0.borrow().accepted
    }

    /// Waits until a chunk is held. When a reply is held, the server has executed the request.
    pub async fn held(&self, way: Way) {
        let mut states = self.shared.0.subscribe();
        let held = states.wait_for(|state| state.held.iter().any(|held| held.0 == way));
        timeout(PATIENCE, held).await.unwrap_or_else(|_| panic!("no {way:?} came to be held")).unwrap();
    }

    /// Runs `work`. Runs `between` once a chunk is held in this direction, after the given number
    /// has passed.
    pub async fn during<T>(
        &self,
        way: Way,
        after: usize,
        work: impl Future<Output = T>,
        between: impl AsyncFnOnce(&Self),
    ) -> T {
        self.hold_after(way, after);
        self.while_held(way, work, between).await
    }

    /// Runs `work`. Runs `between` once a chunk is held in this direction.
    pub async fn while_held<T>(&self, way: Way, work: impl Future<Output = T>, between: impl AsyncFnOnce(&Self)) -> T {
        let between = async {
            self.held(way).await;
            between(self).await;
        };
        in_time(Box::pin(work), Box::pin(between)).await
    }

    /// From now on replaces one text with another of the same length, in every request and reply.
    pub fn replace(&self, text: &'static str, with: &'static str) {
        assert_eq!(text.len(), with.len());
        self.shared.0.send_modify(|state| state.replaced = Some((text, with)));
    }

    /// Lets the next error of PostgreSQL that contains this text pass, and holds what its
    /// connection replies after that. For the client, the transaction has then not ended.
    pub fn hold_after_error(&self, text: &'static str) {
        self.shared.0.send_modify(|state| state.failing = Some(text));
    }

    /// Continues to hold the connections on which a chunk is held. All others, and new ones, pass.
    pub fn let_others_pass(&self) {
        self.shared.0.send_modify(|state| state.only = Some(state.held.iter().map(|held| held.1).collect()));
    }

    /// Lets everything pass, the held chunks first.
    pub fn open(&self) {
        self.shared.0.send_modify(|state| state.left = [None; 2]);
    }

    /// Cuts all connections. Held chunks are lost. New connections pass.
    pub fn cut(&self) {
        self.shared.0.send_modify(|state| {
            state.cut_below = state.accepted;
            state.left = [None; 2];
            state.held.clear();
        });
    }
}

impl Proxy {
    /// Cuts all connections, and waits until none of them passes anything any more.
    pub async fn cut_off(&self) {
        self.cut();
        let mut states = self.shared.0.subscribe();
        let off = states.wait_for(|state| state.open.keys().all(|open| *open >= state.cut_below));
        timeout(PATIENCE, off).await.expect("the connections end").unwrap();
    }
}

/// Runs both, and returns what the first one does.
async fn in_time<T>(work: Local<'_, T>, between: Local<'_, ()>) -> T {
    let both = async { join!(work, between).0 };
    timeout(PATIENCE, both).await.expect("it ends")
}

type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

impl Shared {
    fn record_held_request(&self, number: u64) {
        self.0.send_if_modified(|state| state.holds(Way::Requests, number) && state.asked.insert(number));
    }

    /// Waits while chunks of this connection are held.
    async fn pass(&self, way: Way, number: u64) {
        let mut held = false;
        self.0.send_modify(|state| {
            state.seen[way as usize] += 1;
            held = state.holds(way, number);
            if held {
                state.held.push((way, number));
            } else if let Some(left) = state.left[way as usize].as_mut().filter(|left| **left > 0) {
                *left -= 1;
            }
        });
        if held {
            let is_cut = |state: &State| number < state.cut_below;
            let mut states = self.0.subscribe();
            // `self` owns the sender, so that `wait_for` cannot fail.
            let state = states.wait_for(|state| is_cut(state) || !state.holds(way, number)).await;
            if state.is_ok_and(|state| is_cut(&state)) {
                std::future::pending::<()>().await;
            }
            self.0.send_modify(|state| state.held.retain(|held| *held != (way, number)));
        }
    }
}

impl<DB: TestDatabase> TestDb<DB> {
    pub async fn proxy(&self) -> Proxy {
        Proxy::to(&self.url).await
    }
}
