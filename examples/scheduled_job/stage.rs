//! The parent's side: it starts instances, sends them signals, and prints what they say.

use std::{
    io::{self, Read as _},
    process::{self, Stdio},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdin, Command},
    sync::mpsc,
    time::timeout,
};

use crate::Result;

/// How long the parent waits for something to happen.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Stage {
    url: String,
    started: Instant,
    sender: mpsc::UnboundedSender<Line>,
    lines: mpsc::UnboundedReceiver<Line>,
}

/// What an instance says: what happens, under which token, and more about it.
pub struct Line {
    pub node: String,
    pub what: String,
    token: String,
    pub detail: String,
}

/// A process that is an instance.
pub struct Instance {
    pub node: String,
    process: Child,
    /// The instance ends when this is closed, which it is however the parent ends.
    _stdin: Option<ChildStdin>,
}

impl Instance {
    pub async fn signal(&self, signal: &str) -> Result<()> {
        let id = self.process.id().ok_or("it has ended")?.to_string();
        let sent = Command::new("kill").args([signal, &id]).status().await?;
        if sent.success() { Ok(()) } else { Err(format!("kill {signal} {id} failed").into()) }
    }

    pub async fn kill(&mut self) -> Result<()> {
        Ok(self.process.kill().await?)
    }

    async fn ended(mut self) -> Result<()> {
        let status = self.process.wait().await?;
        if status.success() { Ok(()) } else { Err(format!("{} failed: {status}", self.node).into()) }
    }
}

/// Ends this instance when its parent has ended.
pub fn end_with_parent() {
    thread::spawn(|| {
        // The parent writes nothing.
        let _ = io::stdin().read(&mut [0]);
        process::exit(1)
    });
}

/// Says something to the parent.
pub fn say(what: &str, token: impl std::fmt::Display, detail: &str) {
    println!("{what}\t{token}\t{detail}");
}

pub fn heading(text: &str) {
    println!("\n{text}");
}

impl Stage {
    pub fn new(url: &str) -> Self {
        let (sender, lines) = mpsc::unbounded_channel();
        Self { url: url.to_owned(), started: Instant::now(), sender, lines }
    }

    /// Starts this program again. The words say which instance it is.
    pub fn start(&self, node: &str, words: &[&str]) -> Result<Instance> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("instance").args(words).env("DATABASE_URL", &self.url);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let mut lines = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
        let (name, sender) = (node.to_owned(), self.sender.clone());
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let mut fields = line.split('\t').map(str::to_owned);
                let mut next = || fields.next().unwrap_or_default();
                let _ = sender.send(Line { node: name.clone(), what: next(), token: next(), detail: next() });
            }
        });
        Ok(Instance { node: node.to_owned(), _stdin: process.stdin.take(), process })
    }

    /// Prints lines up to the first one that is of interest, and returns it.
    pub async fn until(&mut self, is_it: impl Fn(&Line) -> bool) -> Result<Line> {
        loop {
            let line = timeout(PATIENCE, self.lines.recv()).await.ok().flatten().ok_or("nothing happens any more")?;
            self.print(&line);
            if is_it(&line) {
                return Ok(line);
            }
        }
    }

    /// Waits for instances to end, and prints the rest of their lines.
    pub async fn wait(&mut self, instances: Vec<Instance>) -> Result<()> {
        for instance in instances {
            instance.ended().await?;
        }
        // Their last lines may still be in the pipe.
        while let Ok(Some(line)) = timeout(Duration::from_millis(100), self.lines.recv()).await {
            self.print(&line);
        }
        Ok(())
    }

    /// Prints what the parent has done to an instance.
    pub fn note(&self, node: &str, what: &str, detail: &str) {
        let (node, what, detail) = (node.to_owned(), what.to_owned(), detail.to_owned());
        self.print(&Line { node, what, token: String::new(), detail });
    }

    fn print(&self, Line { node, what, token, detail }: &Line) {
        println!("{:>7}  {node:<8}  {what:<8}  {token:<17}  {detail}", self.started.elapsed().as_millis());
    }
}
