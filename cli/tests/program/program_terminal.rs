//! The program on a terminal, under a shell with job control: real key presses, real signals.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use harness::{TestDatabase, TestDb, eventually};
use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
};

use tokio::time::sleep;

use crate::{
    program::{PROGRAM, Program as _, Stage, hear_all_signals, read},
    program_cron::{cron, job, runs},
};

harness::tests!(
    everywhere(a_suspended_command_whose_claim_is_lost_does_not_go_on),
    sqlite(
        a_command_may_read_the_terminal,
        the_interrupt_key_reaches_the_command_once,
        a_command_handles_one_interrupt_and_a_second_one_ends_it
    ),
    everywhere.each(a_terminal_shows_who_holds_the_key),
    sqlite(
        on_a_terminal_descendants_do_not_outlive_the_claim,
        a_terminal_that_is_closed_ends_the_command,
        without_a_shell_nothing_stays_suspended,
        the_suspend_key_does_not_stop_cron,
        a_wait_on_a_terminal_is_an_object_if_the_log_is,
        an_interrupted_command_begins_no_min_interval
    ),
    everywhere.long(a_command_that_is_suspended_keeps_its_key)
);

const INTERRUPT: &str = "\x03";
const SUSPEND: &str = "\x1a";

/// A command that writes its process id into `up`, and works until the file `go` exists. While it
/// works, the file `ticks` grows.
pub const TICKS: &str =
    r#"echo $$ > "$0/new"; mv "$0/new" "$0/up"; while [ ! -e "$0/go" ]; do echo >> "$0/ticks"; sleep 0.05; done"#;

/// A program on a terminal of its own, usually an interactive shell. On drop, the terminal is
/// closed.
struct Terminal {
    keys: File,
    shell: Child,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn new<DB: TestDatabase>(db: &TestDb<DB>) -> Self {
        Self::of(db, &["bash", "--norc", "--noprofile", "--noediting", "-i"])
    }

    fn of<DB: TestDatabase>(db: &TestDb<DB>, program: &[&str]) -> Self {
        hear_all_signals();
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let line = File::from(ioctl_tiocgptpeer(&master, flags).unwrap());
        let mut shell = Command::new("setsid");
        shell.arg("--ctty").args(program);
        shell.env("DATABASE_URL", &db.url).env("ROWLOCK", PROGRAM).env("HISTFILE", "/dev/null");
        shell.stdin(line.try_clone().unwrap()).stdout(line.try_clone().unwrap()).stderr(Stdio::from(line));
        let shell = shell.spawn().unwrap();
        let keys = File::from(master);
        let screen = Arc::new(Mutex::new(Vec::new()));
        // A terminal that is not read blocks the processes that write to it.
        let (mut line, seen) = (keys.try_clone().unwrap(), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = line.read(&mut bytes) {
                seen.lock().unwrap().extend_from_slice(&bytes[..n]);
            }
        });
        Self { keys, shell, screen }
    }

    fn types(&self, keys: &str) {
        (&self.keys).write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the terminal has shown this text.
    async fn shows(&self, text: &str) {
        let seen = || String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned();
        eventually(&format!("{text:?} is shown"), async || seen().contains(text)).await;
    }

    fn enters(&self, line: &str) {
        self.types(&format!("{line}\n"));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let screen = self.screen.lock().unwrap().clone();
            let _ = std::io::stderr().write_all(&screen);
        }
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

fn stat(pid: &str, field: usize) -> Option<String> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).ok()?;
    Some(stat.rsplit_once(") ")?.1.split(' ').nth(field)?.to_owned())
}

/// The state of a process, such as `T` for stopped. `None` if the process does not exist or is a
/// zombie.
pub fn state(pid: &str) -> Option<char> {
    stat(pid, 0)?.chars().next().filter(|state| *state != 'Z')
}

fn parent(pid: &str) -> String {
    stat(pid, 1).unwrap()
}

/// A shell whose child was stopped between `vfork` and `exec` waits for the child, and is not
/// itself marked as stopped.
pub fn is_stopped(pid: &str) -> bool {
    let children = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    match state(pid) {
        Some('T') => true,
        Some('D') => children().split_whitespace().any(|child| state(child) == Some('T')),
        _ => false,
    }
}

pub fn signal(pid: &str, signal: Signal) {
    kill_process(Pid::from_raw(pid.trim().parse().unwrap()).unwrap(), signal).unwrap();
}

async fn ended_well<DB: TestDatabase>(db: &TestDb<DB>) {
    eventually("the key is free, and the run succeeded", async || {
        let row = db.show("k").await;
        row["state"] == "free" && row["status"] == "S"
    })
    .await;
}

async fn ticks_on(stage: &Stage) {
    let length = || std::fs::metadata(stage.file("ticks")).map_or(0, |file| file.len());
    let before = length();
    eventually("the command works", async || length() > before).await;
}

/// As `ssh`, `sudo` and `psql` do: in a pipeline, and from the background before `fg`.
async fn a_command_may_read_the_terminal<DB: TestDatabase>(db: TestDb<DB>) {
    let reads = r#""$ROWLOCK" run k -- sh -c 'echo $$ > "$0/new"; mv "$0/new" "$0/up"; read word < /dev/tty; echo "$word" > "$0/word"'"#;
    for (before, after) in [("true |", ""), ("", "| cat"), ("true |", "&")] {
        let (terminal, stage) = (Terminal::new(&db), Stage::new());
        terminal.enters(&format!("{before} {reads} {} {after}", stage.path()));
        let command = stage.up().await;
        if after == "&" {
            // The whole job is stopped when one of its processes reads the terminal. A shell that
            // has not yet noticed the stop would not continue the job.
            let front = parent(&parent(&command));
            eventually("the job is stopped", async || is_stopped(&command) && is_stopped(&front)).await;
            terminal.enters("fg");
        }
        terminal.enters("hello");
        let word = stage.file("word");
        eventually("the command has read a line", async || word.exists() && read(&word) == "hello").await;
        ended_well(&db).await;
    }
}

async fn a_command_that_is_suspended_keeps_its_key<DB: TestDatabase>(db: TestDb<DB>) {
    for before in ["sleep 1000 |", ""] {
        let (terminal, stage) = (Terminal::new(&db), Stage::new());
        terminal.enters(&format!(r#"{before} "$ROWLOCK" run k --lease 4s -- sh -c '{TICKS}' {}"#, stage.path()));
        let command = stage.up().await;
        terminal.types(SUSPEND);
        eventually("the command is stopped", async || is_stopped(&command)).await;
        // The wait is two leases long.
        let refused = db.rowlock("run k --wait 9s -- true", &[]).await.with(75);
        assert!(refused.err.contains("held"), "{refused:?}");
        assert!(is_stopped(&command), "{:?}", state(&command));
        terminal.enters("fg");
        ticks_on(&stage).await;
        stage.go();
        ended_well(&db).await;
        terminal.types(INTERRUPT);
    }
}

async fn a_suspended_command_whose_claim_is_lost_does_not_go_on<DB: TestDatabase>(db: TestDb<DB>) {
    let (terminal, stage) = (Terminal::new(&db), Stage::new());
    terminal.enters(&format!(
        r#"sleep 1000 | "$ROWLOCK" run k --lease 1s --stop-timeout 200ms -- sh -c 'trap "" TERM; {TICKS}' {}"#,
        stage.path()
    ));
    let command = stage.up().await;
    terminal.types(SUSPEND);
    eventually("the command is stopped", async || is_stopped(&command)).await;
    db.rowlock("release k --force", &[]).await.with(0);
    eventually("the command is gone", async || state(&command).is_none()).await;
}

async fn the_interrupt_key_reaches_the_command_once<DB: TestDatabase>(db: TestDb<DB>) {
    let (terminal, stage) = (Terminal::new(&db), Stage::new());
    let counts = r#"trap 'echo >> "$0/interrupts"; touch "$0/go"' INT; touch "$0/up"; while [ ! -e "$0/go" ]; do sleep 0.05; done; sleep 0.5; exit 7"#;
    std::fs::write(stage.file("counts"), counts).unwrap();
    terminal.enters(&format!(r#""$ROWLOCK" run k -- sh -c "$(cat {0}/counts)" {0}; echo $? > {0}/code"#, stage.path()));
    stage.up().await;
    terminal.types(INTERRUPT);
    let code = stage.file("code");
    eventually("it has ended", async || code.exists() && !read(&code).is_empty()).await;
    assert_eq!((read(&code).as_str(), std::fs::read(stage.file("interrupts")).unwrap().len()), ("7", 1));
}

/// The first key press is the command's own affair. The second one stops it as SIGTERM does, and
/// the stop timeout counts from there.
async fn a_command_handles_one_interrupt_and_a_second_one_ends_it<DB: TestDatabase>(db: TestDb<DB>) {
    let handles = format!(r#"trap 'echo >> "$0/interrupts"' INT; trap 'touch "$0/asked"' TERM; {TICKS}"#);
    for twice in [false, true] {
        let (terminal, stage) = (Terminal::new(&db), Stage::new());
        std::fs::write(stage.file("handles"), &handles).unwrap();
        terminal.enters(&format!(
            r#""$ROWLOCK" run k --lease 1h --stop-timeout 2s -- sh -c "$(cat {0}/handles)" {0}; echo $? > {0}/code"#,
            stage.path()
        ));
        let command = stage.up().await;
        let interrupts = async |times: u64| {
            let length = || std::fs::metadata(stage.file("interrupts")).map_or(0, |file| file.len());
            eventually("it is interrupted", async || length() >= times).await;
        };
        terminal.types(INTERRUPT);
        interrupts(1).await;
        if twice {
            terminal.types(INTERRUPT);
            // The program sees two signals as one if they come before it runs, and counts those of
            // one stop timeout. So there may be another one, but no three of them in that time.
            eventually("it is asked to stop", async || {
                tokio::time::sleep(std::time::Duration::from_millis(1_200)).await;
                let is_asked = stage.file("asked").exists();
                if !is_asked {
                    terminal.types(INTERRUPT);
                }
                is_asked
            })
            .await;
            eventually("the command is gone", async || state(&command).is_none()).await;
        } else {
            // Longer than the stop timeout.
            tokio::time::sleep(std::time::Duration::from_secs(3)).await;
            ticks_on(&stage).await;
            assert!(!stage.file("asked").exists(), "the command was left alone");
            terminal.types(INTERRUPT);
            interrupts(2).await;
            ticks_on(&stage).await;
            stage.go();
        }
        let code = stage.file("code");
        eventually("it has ended", async || code.exists() && !read(&code).is_empty()).await;
        assert_eq!(read(&code), if twice { "137" } else { "0" });
        let row = db.show("k").await;
        let expected = if twice { ("expired", "P") } else { ("free", "S") };
        assert_eq!((row["state"].as_str().unwrap(), row["status"].as_str().unwrap()), expected);
    }
}

/// Each holder has a line. Without a terminal there is none.
async fn a_terminal_shows_who_holds_the_key<DB: TestDatabase>(db: TestDb<DB>) {
    for command in ["run k --wait forever", "lead k"] {
        let claim = db.rowlock("acquire k --lease 1h --label node-1", &[]).await.with(0).json();
        let (terminal, stage) = (Terminal::new(&db), Stage::new());
        terminal.enters(&format!(r#""$ROWLOCK" {command} -- sh -c '{TICKS}' {}"#, stage.path()));
        let since = db.show("k").await["since"].as_str().unwrap()[..10].to_owned();
        terminal.shows(&format!("rowlock: k: held by node-1 since {since}")).await;
        let mut unseen = db.start("run k --wait 2s -- true", &[]);
        unseen.complains("refused").await;
        assert!(!unseen.ended().await.with(75).err.contains("waiting"));
        db.set("k", "client_ip = 'node-2'").await;
        terminal.shows(&format!("Z; waiting\r\nrowlock: k: held by node-2 since {since}")).await;
        db.rowlock("release k --holder", &[claim["holder"].as_str().unwrap()]).await.with(0);
        stage.up().await;
        stage.go();
        ended_well(&db).await;
    }
}

async fn a_wait_on_a_terminal_is_an_object_if_the_log_is<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("acquire k --lease 1h --label node-1", &[]).await.with(0);
    let terminal = Terminal::new(&db);
    terminal.enters(r#""$ROWLOCK" --log-format json run k --wait forever -- true"#);
    terminal.shows("{\"level\":\"INFO\",\"message\":\"k: held by node-1 since 2").await;
    terminal.types(INTERRUPT);
}

/// The command receives the key press before the program does, and has ended by then.
async fn an_interrupted_command_begins_no_min_interval<DB: TestDatabase>(db: TestDb<DB>) {
    for round in 0..4 {
        let (terminal, stage, key) = (Terminal::new(&db), Stage::new(), format!("k{round}"));
        let command = format!(r#""$ROWLOCK" run {key} --min-interval 1h -- sh -c '{TICKS}' {}"#, stage.path());
        terminal.enters(&command);
        stage.up().await;
        terminal.types(INTERRUPT);
        db.rowlock(&format!("run {key} --min-interval 1h --wait 10s -- true"), &[]).await.with(0);
    }
}

/// The claim is given up only when every descendant of the command has ended.
async fn on_a_terminal_descendants_do_not_outlive_the_claim<DB: TestDatabase>(db: TestDb<DB>) {
    for own_session in ["", "setsid "] {
        let (terminal, stage) = (Terminal::new(&db), Stage::new());
        let child = format!("trap '' TERM\n{TICKS}");
        std::fs::write(stage.file("child"), child).unwrap();
        let starts = format!(r#"{own_session}sh -c "$(cat "$0/child")" "$0" & wait"#);
        terminal.enters(&format!(
            r#""$ROWLOCK" run k --lease 1h --stop-timeout 300ms -- sh -c '{starts}' {0} & echo $! > {0}/pid"#,
            stage.path()
        ));
        let grandchild = stage.up().await;
        signal(&read(&stage.file("pid")), Signal::TERM);
        let lock = db.lock();
        eventually("the claim is given up", async || {
            lock.inspect("k").await.unwrap().unwrap().state != rowlock::admin::LockState::Held
        })
        .await;
        assert_eq!(state(&grandchild), None, "it works beside the next holder");
    }
}

/// As under `ssh -t host rowlock ...`: no shell could continue what the key press has suspended.
async fn without_a_shell_nothing_stays_suspended<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let command = [PROGRAM, "run", "k", "--lease", "1h", "--", "sh", "-c", TICKS, stage.path()];
    let terminal = Terminal::of(&db, &command);
    let command = stage.up().await;
    // The command is continued after at most one second.
    eventually("the command was stopped", async || {
        terminal.types(SUSPEND);
        is_stopped(&command)
    })
    .await;
    ticks_on(&stage).await;
    stage.go();
    ended_well(&db).await;
}

/// The commands of `rowlock cron` are in groups of their own, and would go on without renewals.
async fn the_suspend_key_does_not_stop_cron<DB: TestDatabase>(db: TestDb<DB>) {
    let (terminal, stage) = (Terminal::new(&db), Stage::new());
    let file = job(&stage, "k", "after = \"1h\"\nlease = \"4s\"", TICKS);
    terminal.enters(&format!(r#""$ROWLOCK" cron {}"#, file.to_str().unwrap()));
    stage.up().await;
    terminal.types(SUSPEND);
    std::fs::remove_file(stage.file("up")).unwrap();
    let other = cron(&db, "", &file);
    // Three leases.
    sleep(Duration::from_secs(12)).await;
    assert!(!stage.file("up").exists(), "the other instance runs it beside the first");
    stage.go();
    eventually("the run has ended", async || {
        let runs = runs(&db, "k").await;
        runs.iter().any(|run| run["status"] == "succeeded" && run["attempt"] == 1)
    })
    .await;
    terminal.types(INTERRUPT);
    other.stopped().await;
}

/// A shell that exits ends its job, also a stopped one.
async fn a_terminal_that_is_closed_ends_the_command<DB: TestDatabase>(db: TestDb<DB>) {
    for suspended in [false, true] {
        let (terminal, stage) = (Terminal::new(&db), Stage::new());
        terminal.enters(&format!(r#""$ROWLOCK" run k --lease 1h -- sh -c '{TICKS}' {}"#, stage.path()));
        let command = stage.up().await;
        if suspended {
            terminal.types(SUSPEND);
            eventually("the command is stopped", async || is_stopped(&command)).await;
        }
        drop(terminal);
        eventually("the command is gone", async || state(&command).is_none()).await;
        db.rowlock("run k --wait 10s -- true", &[]).await.with(0);
    }
}
