//! The built program, run as users run it.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    signal::unix::{SignalKind, signal},
    time::timeout,
};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_rowlock");

/// A command that writes its holder's id into `up`, and runs until the file `go` exists. Its
/// argument zero is its folder.
pub const STAYS: &str =
    r#"echo "$ROWLOCK_HOLDER" > "$0/new"; mv "$0/new" "$0/up"; while [ ! -e "$0/go" ]; do sleep 0.05; done"#;

/// A command without a database URL. `words` are split; `more` are passed unchanged. The program
/// runs in a session of its own, so that it has no terminal, wherever the suite is started.
pub fn rowlock(words: &str, more: &[&str]) -> Command {
    let mut command = Command::new("setsid");
    command.arg(PROGRAM).args(words.split_whitespace()).args(more).stdin(Stdio::null());
    for variable in ["DATABASE_URL", "XDG_STATE_HOME"] {
        command.env_remove(variable);
    }
    // A pattern without a zone would warn on a machine with another one.
    command.env("TZ", "UTC");
    command
}

/// A command on the database of this URL.
pub fn at(url: &str, words: &str, more: &[&str]) -> Command {
    let mut command = rowlock(words, more);
    command.env("DATABASE_URL", url);
    command
}

/// How the program ended, and what it and its command wrote. Both pipes are closed, so no process
/// is left that could write.
#[derive(Debug)]
pub struct Ended {
    /// Negative if a signal ended the program.
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ended {
    #[track_caller]
    pub fn with(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A running program. On drop, the program and its command are killed.
pub struct Started {
    child: Child,
    /// Open until it is closed, if the program has a pipe for stdin.
    stdin: Option<ChildStdin>,
    out: BufReader<ChildStdout>,
    err: BufReader<ChildStderr>,
    heard: Ended,
}

/// A suite that was started by `nohup` or by a shell's `&` ignores signals, and its children would
/// inherit that. A signal with a handler is not inherited as ignored.
pub fn hear_all_signals() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or("0");
    let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
    for kind in [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate(), SignalKind::quit()] {
        if ignored >> (kind.as_raw_value() - 1) & 1 == 1 {
            drop(signal(kind).unwrap());
        }
    }
}

pub fn start(mut command: Command) -> Started {
    hear_all_signals();
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let (stdin, out, err) = (child.stdin.take(), child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let heard = Ended { code: 0, out: String::new(), err: String::new() };
    Started { child, stdin, out: BufReader::new(out), err: BufReader::new(err), heard }
}

impl Started {
    pub fn id(&self) -> u32 {
        self.child.id().expect("it has not been waited for")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(i32::try_from(self.id()).unwrap()).unwrap(), signal).unwrap();
    }

    /// Waits until stderr contains this text.
    pub async fn complains(&mut self, text: &str) {
        let lines = async {
            while !self.heard.err.contains(text) {
                assert!(self.err.read_line(&mut self.heard.err).await.unwrap() > 0, "{:?}", self.heard);
            }
        };
        timeout(PATIENCE, lines).await.unwrap_or_else(|_| panic!("no {text:?} on stderr"));
    }

    /// Waits until stdout contains this text the given number of times.
    pub async fn says(&mut self, text: &str, times: usize) {
        let lines = async {
            while self.heard.out.matches(text).count() < times {
                assert!(self.out.read_line(&mut self.heard.out).await.unwrap() > 0, "{:?}", self.heard);
            }
        };
        timeout(PATIENCE, lines).await.unwrap_or_else(|_| panic!("no {text:?} on stdout"));
    }

    pub fn close_stdin(&mut self) {
        drop(self.stdin.take());
    }

    /// What stdout contains so far.
    pub fn said(&self) -> &str {
        &self.heard.out
    }

    /// What stderr contains so far.
    pub fn complained(&self) -> &str {
        &self.heard.err
    }

    pub fn is_over(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Asks the program to end, and waits until it has, with exit code 0.
    pub async fn stopped(self) -> Ended {
        self.signal(Signal::TERM);
        self.ended().await.with(0)
    }

    pub async fn ended(mut self) -> Ended {
        let end = async {
            let pipes = (self.out.read_to_string(&mut self.heard.out), self.err.read_to_string(&mut self.heard.err));
            let (out, err, status) = tokio::join!(pipes.0, pipes.1, self.child.wait());
            let status = (out.unwrap(), err.unwrap(), status.unwrap()).2;
            self.heard.code = status.code().unwrap_or_else(|| -status.signal().unwrap());
        };
        let ended = timeout(PATIENCE, end).await;
        assert!(ended.is_ok(), "it, or one of its descendants, lives on: {:?}", self.heard);
        self.heard
    }
}

pub async fn ended(command: Command) -> Ended {
    start(command).ended().await
}

/// The program on the test's own database.
pub trait Program {
    fn command(&self, words: &str, more: &[&str]) -> Command;

    fn start(&self, words: &str, more: &[&str]) -> Started {
        start(self.command(words, more))
    }

    /// Runs the program to its end.
    async fn rowlock(&self, words: &str, more: &[&str]) -> Ended {
        self.start(words, more).ended().await
    }

    /// Runs the program as the operator ann.
    async fn by_ann(&self, words: &str, more: &[&str]) -> Ended {
        let mut command = self.command(words, more);
        command.env_remove("SUDO_USER").env("USER", "ann");
        ended(command).await
    }

    async fn show(&self, key: &str) -> Value {
        self.rowlock("show --json", &[key]).await.with(0).json()
    }
}

impl<DB: TestDatabase> Program for TestDb<DB> {
    fn command(&self, words: &str, more: &[&str]) -> Command {
        at(&self.url, words, more)
    }
}

/// The folder in which a command reports that it is up, and in which the test lets it end.
pub struct Stage(tempfile::TempDir);

impl Stage {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Creates a file for which a command waits: it is there with its text.
    pub fn put(&self, name: &str, text: &str) {
        let part = self.file(&format!("{name}.part"));
        std::fs::write(&part, text).unwrap();
        std::fs::rename(part, self.file(name)).unwrap();
    }

    /// Waits until the command is up, and returns what it wrote.
    pub async fn up(&self) -> String {
        let file = self.file("up");
        eventually("the command is up", async || file.exists()).await;
        read(&file)
    }

    pub fn go(&self) {
        std::fs::write(self.file("go"), "").unwrap();
    }
}

pub fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap().trim_end().to_owned()
}

/// Allows one second more than the limit.
pub fn within(elapsed: Duration, limit: Duration) {
    assert!(elapsed < limit + Duration::from_secs(1), "{elapsed:?}, not {limit:?} and a second");
}
