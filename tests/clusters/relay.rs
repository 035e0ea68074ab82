//! A balancer in front of a cluster: each connection goes to the next server that answers.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::Instant,
};

pub struct Relay {
    address: SocketAddr,
    way: Arc<Way>,
}

struct Way {
    servers: Mutex<Vec<SocketAddr>>,
    /// The next COMMIT is executed, and its reply is lost with the connection.
    loses: AtomicBool,
    lost: watch::Sender<bool>,
    /// No connection is accepted until this is false.
    closed: watch::Sender<bool>,
    /// A connection that was idle for longer is forgotten: it passes nothing more, and neither side
    /// is told.
    longest_idle: Mutex<Duration>,
}

impl Relay {
    pub async fn before(urls: &[String]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let way = Arc::new(Way {
            servers: Mutex::new(urls.iter().map(|url| address_of(url)).collect()),
            loses: AtomicBool::new(false),
            lost: watch::Sender::new(false),
            closed: watch::Sender::new(false),
            longest_idle: Mutex::new(Duration::MAX),
        });
        tokio::spawn(serve(listener, way.clone()));
        Self { address, way }
    }

    /// Sets the servers of new connections. Open connections are unaffected.
    pub fn turn_to(&self, urls: &[String]) {
        *self.way.servers.lock().unwrap() = urls.iter().map(|url| address_of(url)).collect();
    }

    /// Loses the reply to the next COMMIT, and accepts no connection after that until it is
    /// [opened](Self::open).
    pub fn lose_a_commit(&self) {
        self.way.loses.store(true, SeqCst);
    }

    /// Waits until that has happened.
    pub async fn lost(&self) {
        self.way.lost.subscribe().wait_for(|lost| *lost).await.unwrap();
    }

    pub fn open(&self) {
        self.way.closed.send_replace(false);
    }

    /// Forgets connections that are idle for longer, without a word to either side.
    pub fn forget_idle(&self, longest_idle: Duration) {
        *self.way.longest_idle.lock().unwrap() = longest_idle;
    }

    /// The same URL, through the relay.
    pub fn url(&self, url: &str) -> String {
        url.replace(&address_of(url).to_string(), &self.address.to_string())
    }
}

impl Way {
    /// Does not return for a connection that has been idle for too long.
    async fn forget(&self, last: Instant) {
        if last.elapsed() > *self.longest_idle.lock().unwrap() {
            std::future::pending::<()>().await;
        }
    }
}

fn address_of(url: &str) -> SocketAddr {
    let (_, rest) = url.split_once('@').expect("a URL with a user");
    rest.split('/').next().unwrap().parse().unwrap()
}

async fn serve(listener: TcpListener, way: Arc<Way>) {
    for first in 0.. {
        let (client, _) = listener.accept().await.unwrap();
        client.set_nodelay(true).unwrap();
        tokio::spawn(pass(client, first, way.clone()));
    }
}

async fn pass(mut client: TcpStream, first: usize, way: Arc<Way>) {
    way.closed.subscribe().wait_for(|closed| !closed).await.unwrap();
    let servers = way.servers.lock().unwrap().clone();
    for place in 0..servers.len() {
        if let Ok(mut server) = TcpStream::connect(servers[(first + place) % servers.len()]).await
            && is_there(&client, &server).await
        {
            server.set_nodelay(true).unwrap();
            until_a_commit_is_lost(&mut client, &mut server, &way).await.ok();
            return;
        }
    }
}

/// Whether a connection that was accepted is one to the server. What accepts it in the server's
/// name closes it if there is none. MySQL is the first to send, with PostgreSQL it is the client.
async fn is_there(client: &TcpStream, server: &TcpStream) -> bool {
    let (mut asked, mut said) = ([0], [0]);
    tokio::select! {
        _ = client.peek(&mut asked) => true,
        length = server.peek(&mut said) => length.is_ok_and(|length| length > 0),
    }
}

async fn until_a_commit_is_lost(client: &mut TcpStream, server: &mut TcpStream, way: &Way) -> std::io::Result<()> {
    let (mut asked, mut said) = ([0; 4096], [0; 4096]);
    let mut last = Instant::now();
    loop {
        tokio::select! {
            length = client.read(&mut asked) => {
                let asked = &asked[..length?];
                way.forget(last).await;
                last = Instant::now();
                server.write_all(asked).await?;
                if asked.windows(6).any(|word| word == b"COMMIT") && way.loses.swap(false, SeqCst) {
                    // The reply is not passed on.
                    let _lost = server.read(&mut said).await?;
                    way.closed.send_replace(true);
                    way.lost.send_replace(true);
                    return Ok(());
                }
                if asked.is_empty() {
                    return Ok(());
                }
            }
            length = server.read(&mut said) => {
                let said = &said[..length?];
                if said.is_empty() {
                    return Ok(());
                }
                way.forget(last).await;
                last = Instant::now();
                client.write_all(said).await?;
            }
        }
    }
}
