//! Runs the examples of other crates as a user does, and kills their processes.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use harness::{Need, PATIENCE, TestDatabase, TestDb, eventually};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::TcpStream,
    process::{Child, ChildStdout},
    time::{sleep, timeout},
};
use uuid::Uuid;

use crate::examples::{are_built, example};

/// The built examples.
const ECOSYSTEM: Need =
    Need { what: "cargo build -p rowlock-example-ecosystem --examples", is_met: |_| are_built(&NAMES) };
const NAMES: [&str; 4] = ["apalis_layer", "sea_orm_pool", "sqlx_0_8", "web"];

harness::tests!(postgres[ECOSYSTEM](
    a_web_service_makes_each_payment_once_while_instances_die,
    a_task_of_apalis_runs_on_one_instance,
    sea_orm_shares_its_pool,
    the_commit_of_another_driver_depends_on_the_claim,
));

struct Instance {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Instance {
    fn start<DB: TestDatabase>(db: &TestDb<DB>, name: &str, arguments: &[&str]) -> Self {
        let mut command = example(name, arguments);
        // An unread pipe would block the instance once it is full.
        let mut process = command.env("DATABASE_URL", &db.url).stderr(Stdio::inherit()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    /// Returns what follows `prefix` in the first line that begins with it.
    async fn line(&mut self, prefix: &str) -> String {
        let found = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("the example has ended");
                if let Some(rest) = line.strip_prefix(prefix) {
                    return rest.to_owned();
                }
            }
        };
        timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("no line {prefix:?}"))
    }

    /// Returns all that it says until it ends by itself.
    async fn says(mut self) -> String {
        let mut said = String::new();
        while let Some(line) = timeout(PATIENCE, self.lines.next_line()).await.expect("it ends").unwrap() {
            said += &line;
            said.push('\n');
        }
        assert!(self.process.wait().await.unwrap().success(), "{said}");
        said
    }
}

/// Returns what follows `prefix` in the next line of any instance that begins with it, and which
/// instance wrote it.
async fn next_line(running: &mut [Instance; 3], prefix: &str) -> (String, usize) {
    let [one, two, three] = running;
    tokio::select! {
        line = one.line(prefix) => (line, 0),
        line = two.line(prefix) => (line, 1),
        line = three.line(prefix) => (line, 2),
    }
}

/// Sends a payment, and returns the status of the reply, if there is one.
async fn send(address: SocketAddr, id: Uuid, amount: u32) -> Option<u16> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let path = format!("/payments/{id}?account=alice&amount={amount}");
    let request = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.ok()?;
    reply.split(' ').nth(1)?.parse().ok()
}

const PAYERS: usize = 8;
const PAYMENTS: usize = 20;

/// Each payer sends a payment to one instance after another until it is told that it was made.
async fn pay(instances: Arc<Mutex<Vec<SocketAddr>>>) {
    for _ in 0..PAYMENTS {
        let id = Uuid::new_v4();
        loop {
            let address = fastrand::choice(instances.lock().unwrap().iter().copied()).unwrap();
            match send(address, id, 1).await {
                Some(200 | 201) => break,
                None | Some(503) => sleep(Duration::from_millis(50)).await,
                other => panic!("{other:?}"),
            }
        }
    }
}

async fn serve<DB: TestDatabase>(db: &TestDb<DB>) -> (Instance, SocketAddr) {
    let mut instance = Instance::start(db, "web", &["127.0.0.1:0"]);
    let address = instance.line("listening on ").await.parse().unwrap();
    (instance, address)
}

async fn a_web_service_makes_each_payment_once_while_instances_die<DB: TestDatabase>(db: TestDb<DB>) {
    let mut started = Vec::new();
    for _ in 0..3 {
        started.push(serve(&db).await);
    }
    let addresses = Arc::new(Mutex::new(started.iter().map(|(_, address)| *address).collect::<Vec<_>>()));
    let mut instances = started.into_iter().map(|(instance, _)| instance);
    let mut running = std::array::from_fn(|_| instances.next().unwrap());
    let payers: Vec<_> = (0..PAYERS).map(|_| harness::spawn(pay(addresses.clone()))).collect();
    for _ in 0..2 {
        let (_, by) = next_line(&mut running, "settled ").await;
        running[by].process.kill().await.unwrap();
        let (next, address) = serve(&db).await;
        addresses.lock().unwrap()[by] = address;
        running[by] = next;
    }
    for payer in payers {
        timeout(PATIENCE, payer).await.expect("all payments are made").unwrap();
    }
    let made = i64::try_from(PAYERS * PAYMENTS).unwrap();
    assert_eq!(db.number("SELECT balance FROM account").await, Some(1_000 - made));
    assert_eq!(db.number("SELECT count(*) FROM payment").await, Some(made));
    let settled = "SELECT CAST(sum(payments) AS bigint) FROM settlement";
    eventually("all payments are settled", async || db.number(settled).await == Some(made)).await;
    let address = addresses.lock().unwrap()[0];
    assert_eq!(send(address, Uuid::new_v4(), 10_000).await, Some(402));
    assert_eq!(db.number("SELECT balance FROM account").await, Some(1_000 - made));
}

/// Of three workers, one runs each tick, also after one of them was killed.
async fn a_task_of_apalis_runs_on_one_instance<DB: TestDatabase>(db: TestDb<DB>) {
    let mut running = [(); 3].map(|()| Instance::start(&db, "apalis_layer", &[]));
    let mut ticks: BTreeMap<String, usize> = BTreeMap::new();
    for number in 0..4 {
        let (tick, by) = next_line(&mut running, "ran the tick ").await;
        *ticks.entry(tick).or_default() += 1;
        if number == 1 {
            running[by].process.kill().await.unwrap();
            running[by] = Instance::start(&db, "apalis_layer", &[]);
        }
    }
    assert!(ticks.len() == 4 && ticks.values().all(|times| *times == 1), "{ticks:?}");
}

async fn sea_orm_shares_its_pool<DB: TestDatabase>(db: TestDb<DB>) {
    let said = Instance::start(&db, "sea_orm_pool", &[]).says().await;
    for part in ["imported the price 10 under token ", "imported the price 20 under token ", "earlier holder: false"] {
        assert!(said.contains(part), "{part:?}: {said}");
    }
    assert_eq!(said.matches(": true").count(), 2, "{said}");
    assert_eq!(db.number("SELECT price FROM price_list").await, Some(20));
}

async fn the_commit_of_another_driver_depends_on_the_claim<DB: TestDatabase>(db: TestDb<DB>) {
    let said = Instance::start(&db, "sqlx_0_8", &[]).says().await;
    assert!(said.contains("wrote under token ") && said.contains("refused after the release: "), "{said}");
    assert_eq!(db.number("SELECT count(*) FROM report").await, Some(1));
}
