//! A reader that has stopped reading the program's output stops nothing else.

use std::{
    io::{PipeReader, PipeWriter, Read as _},
    os::fd::OwnedFd,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    net::unix::pipe::Sender,
    process::{Child, Command},
    time::timeout,
};

use crate::{
    program::{Program as _, STAYS, Stage, hear_all_signals},
    program_cron::{ended_as, job, runs},
    program_terminal::state,
};

harness::tests!(
    sqlite(
        renewals_and_signals_need_no_reader,
        a_loss_stops_the_command_though_stderr_is_not_read,
        the_jobs_of_cron_need_no_reader,
        cron_ends_though_its_output_is_not_read
    ),
    sqlite.long(a_claim_that_is_not_read_ends_at_a_signal)
);

/// A pipe that is full, so that each write to it blocks.
async fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    let writer = Sender::from_owned_fd(OwnedFd::from(writer)).unwrap();
    writer.writable().await.unwrap();
    let page = [b'x'; 4096];
    while writer.try_write(&page).is_ok() {}
    (reader, writer.into_blocking_fd().unwrap().into())
}

/// A program whose output is not read.
struct Unread {
    child: Child,
    /// The reader of both streams.
    reader: PipeReader,
}

impl Unread {
    async fn start(mut command: Command) -> Self {
        hear_all_signals();
        let (reader, writer) = full_pipe().await;
        command.stdout(Stdio::from(writer.try_clone().unwrap())).stderr(Stdio::from(writer)).kill_on_drop(true);
        Self { child: command.spawn().unwrap(), reader }
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|id| Pid::from_raw(i32::try_from(id).unwrap())).unwrap();
        kill_process(pid, signal).unwrap();
    }

    async fn ended(&mut self) -> ExitStatus {
        timeout(PATIENCE, self.child.wait()).await.expect("the program ends").unwrap()
    }

    /// Reads everything from now on, until no process is left that could write.
    fn read(&self) -> std::thread::JoinHandle<String> {
        let mut reader = self.reader.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            text
        })
    }
}

/// Each renewal is an event with `-vv`. The wait is three leases long.
async fn renewals_and_signals_need_no_reader<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut job = Unread::start(db.command("run k -vv --lease 4s -- sh -c", &[STAYS, stage.path()])).await;
    let holder = stage.up().await;
    db.rowlock("run k --wait 12s -- true", &[]).await.with(75);
    assert_eq!(db.show("k").await["holder"], holder.as_str());
    job.signal(Signal::TERM);
    assert_eq!(job.ended().await.code(), Some(143));
}

async fn a_loss_stops_the_command_though_stderr_is_not_read<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = format!(r#"echo $$ > "$0/pid"; {STAYS}"#);
    let mut job =
        Unread::start(db.command("run k --lease 2s --stop-timeout 1s -- sh -c", &[&script, stage.path()])).await;
    stage.up().await;
    let command = crate::program::read(&stage.file("pid"));
    db.rowlock("release k --force", &[]).await.with(0);
    eventually("the command is gone", async || state(&command).is_none()).await;
    assert_eq!(job.ended().await.code(), Some(74));
}

/// The command writes more than the pipes and the program hold. What is lost is told once the
/// reader reads again.
async fn the_jobs_of_cron_need_no_reader<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let line = "0".repeat(1000);
    let script = format!("yes {line} | head -n 1000; yes {line} | head -n 1000 >&2");
    let file = job(&stage, "k", "after = \"1h\"\nlease = \"5s\"", &script);
    let mut cron = Unread::start(db.command("cron", &[file.to_str().unwrap()])).await;
    ended_as(&db, "k", "succeeded").await;
    assert_eq!(runs(&db, "k").await.len(), 1, "its lease was renewed");
    let text = cron.read();
    // Lines that are dropped are told after the next line that is written.
    tokio::time::sleep(Duration::from_millis(500)).await;
    cron.signal(Signal::TERM);
    assert_eq!(cron.ended().await.code(), Some(0));
    let text = text.join().unwrap();
    assert!(text.contains("jobs.toml: 1 job\n"), "what was said first is kept");
    for stream in ["stdout", "stderr"] {
        assert!(text.contains(&format!("rowlock: {stream} was not read, ")), "{stream}");
    }
}

/// Starts a claim that cannot be printed, and waits until it is taken.
async fn unread_claim<DB: TestDatabase>(db: &TestDb<DB>, words: &str) -> Unread {
    let mut command = db.command(words, &[]);
    command.stdin(Stdio::piped());
    let program = Unread::start(command).await;
    let is_held = async || db.rowlock("show k --json", &[]).await.out.contains("\"held\"");
    eventually("the key is held", is_held).await;
    program
}

/// The claim is renewed until the program is asked to stop. Under the article's rules, a claim that
/// was abandoned would wait for an operator.
async fn a_claim_that_is_not_read_ends_at_a_signal<DB: TestDatabase>(db: TestDb<DB>) {
    for words in ["acquire k --rules article --lease 4s", "hold k --rules article --lease 4s"] {
        let mut program = unread_claim(&db, words).await;
        db.rowlock("run k --wait 9s -- true", &[]).await.with(75);
        program.signal(Signal::TERM);
        assert_eq!(program.ended().await.code(), Some(143));
        db.rowlock("run k --rules article -- true", &[]).await.with(0);
    }
}

async fn cron_ends_though_its_output_is_not_read<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "after = \"1h\"", "echo begins");
    let mut cron = Unread::start(db.command("cron", &[file.to_str().unwrap()])).await;
    ended_as(&db, "k", "succeeded").await;
    cron.signal(Signal::TERM);
    assert_eq!(cron.ended().await.code(), Some(0));
}
