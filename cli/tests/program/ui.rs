//! A running `rowlock ui`, and requests to it that say exactly what a test wants.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::Command,
    time::timeout,
};

use crate::program::{Started, at, start};

/// What a browser may make of text from the database.
pub const SCRIPT: &str = "<script>document.title='owned'</script>";
pub const ESCAPED: &str = "&lt;script&gt;document.title='owned'&lt;/script&gt;";

pub struct Ui {
    pub program: Started,
    /// `127.0.0.1:PORT`.
    pub address: String,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    #[track_caller]
    pub fn with(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let mut pairs = self.head.lines().filter_map(|line| line.split_once(": "));
        pairs.find(|(header, _)| header.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Returns the value of a hidden field of the form.
    #[track_caller]
    pub fn field(&self, name: &str) -> String {
        let start = format!("name=\"{name}\" value=\"");
        let (_, rest) = self.body.split_once(&start).unwrap_or_else(|| panic!("no field {name}: {self:?}"));
        rest.split_once('"').unwrap().0.to_owned()
    }
}

/// Starts the page on the test's own database, on a free port.
pub async fn open<DB: TestDatabase>(db: &TestDb<DB>, words: &str) -> Ui {
    open_at(&db.url, words).await
}

/// Starts the page on the database of this URL.
pub async fn open_at(url: &str, words: &str) -> Ui {
    open_by(at(url, &format!("ui --listen 127.0.0.1:0 {words}"), &[])).await
}

/// Starts the page by a command of the test's own.
pub async fn open_by(command: Command) -> Ui {
    let mut program = start(command);
    program.says("/\n", 1).await;
    let address = program.said().trim().trim_start_matches("http://").trim_end_matches('/').to_owned();
    Ui { program, address }
}

impl Ui {
    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[("Host", &self.address)], "").await
    }

    /// Sends the form as a browser does from a page of this server.
    pub async fn post(&self, path: &str, headers: &[(&str, &str)], form: &str) -> Answer {
        let origin = format!("http://{}", self.address);
        let own = [("Host", self.address.as_str()), ("Origin", &origin)];
        self.send("POST", path, &[&own, headers].concat(), form).await
    }

    /// Sends exactly these headers.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut stream = self.begin(method, path, headers, body).await;
        let mut text = String::new();
        let read = timeout(2 * PATIENCE, stream.read_to_string(&mut text)).await;
        read.unwrap_or_else(|_| panic!("{method} {path}: no answer")).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_owned(), body: body.to_owned() }
    }

    /// Sends a request whose answer is not awaited.
    pub async fn begin(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let form = "Content-Type: application/x-www-form-urlencoded";
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{headers}{form}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Opens the events of a page.
    pub async fn events(&self, path: &str) -> Events {
        let stream = self.begin("GET", path, &[("Host", &self.address)], "").await;
        Events(BufReader::new(stream))
    }
}

/// The events of a page, as they arrive.
pub struct Events(BufReader<TcpStream>);

impl Events {
    /// Returns the part of the page that the next event has.
    pub async fn next(&mut self) -> String {
        let data = async {
            let mut line = String::new();
            loop {
                line.clear();
                assert!(self.0.read_line(&mut line).await.unwrap() > 0, "the events ended");
                if let Some(data) = line.strip_prefix("data: ") {
                    return serde_json::from_str::<Value>(data).unwrap().as_str().unwrap().to_owned();
                }
            }
        };
        timeout(2 * PATIENCE, data).await.expect("an event")
    }

    /// Waits until the page shows something.
    pub async fn until(&mut self, what: &str, holds: impl Fn(&str) -> bool) {
        let mut last = String::new();
        let found = timeout(3 * PATIENCE, async {
            while !holds(&last) {
                last = self.next().await;
            }
        });
        assert!(found.await.is_ok(), "{what}");
    }

    /// Reads events for some time, and returns how many there were.
    pub async fn drain(&mut self, time: Duration) -> usize {
        let mut read = 0;
        let _ = timeout(time, async {
            loop {
                self.next().await;
                read += 1;
            }
        })
        .await;
        read
    }
}
