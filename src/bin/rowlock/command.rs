//! `rowlock run`: a command that runs while its key is held.

use std::{
    ffi::OsStr,
    io::IsTerminal as _,
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    pin::pin,
    process::ExitStatus,
    time::{Duration, Instant},
};

use rowlock::{Attempt, Claim, Database, Error, Lease, LeaseLock, Status};
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};
use tokio::{
    process::{Child, Command},
    signal::unix::{Signal as Signals, SignalKind, signal},
    time::{sleep, timeout},
};

use crate::{
    args::Run,
    exit::{self, Failure},
    out,
};

/// How long a signal leaves to the last word to the database.
const SOON: Duration = Duration::from_secs(1);
/// How often is looked whether the command's descendants are gone.
const LOOK: Duration = Duration::from_millis(20);

pub async fn run<DB: Database>(lock: LeaseLock<DB>, run: Run) -> Result<u8, Failure> {
    // Looked for first: a key that is taken for nothing would close its window.
    let program = find(&run.command)?;
    let mut asked = Asked::listen()?;
    let attempt = tokio::select! {
        attempt = lock.acquire(run.key.as_str(), run.terms.wait) => attempt?,
        signal = asked.next() => {
            lock.shutdown(run.grace).await;
            return Ok(exit::SIGNAL + number(signal));
        }
    };
    let lease = match attempt {
        Attempt::Acquired(lease) => lease,
        Attempt::Refused(refusal) => {
            out::complain(format_args!("refused: {refusal}"));
            return Ok(if run.skip_ok { exit::OK } else { exit::REFUSED });
        }
    };
    let started = Instant::now();
    let work = match Work::start(program, &run, lease.claim()) {
        Ok(work) => work,
        Err(failure) => {
            drop(lease);
            asked.or_soon(lock.shutdown(run.grace)).await;
            return Err(failure);
        }
    };
    let (code, outcome) = supervise(&lock, lease, work, &mut asked, run.grace).await?;
    tracing::info!(key = %run.key, outcome, code, wall = ?started.elapsed(), "command");
    Ok(code)
}

/// Waits for the command's end, a signal, or the loss of the lease; the exit code, and what it came to.
async fn supervise<DB: Database>(
    lock: &LeaseLock<DB>,
    lease: Lease<DB>,
    mut work: Work,
    asked: &mut Asked,
    grace: Duration,
) -> Result<(u8, &'static str), Failure> {
    let key = lease.key().clone();
    tokio::select! {
        biased;
        status = work.child.wait() => {
            let code = code(status.map_err(lost_sight)?);
            let (status, outcome) = if code == exit::OK { (Status::Succeeded, "succeeded") } else { (Status::Failed, "failed") };
            match asked.or_soon(lease.release(status)).await {
                Some(Ok(())) => {}
                Some(Err(error @ Error::Lost { .. })) => return Err(error.into()),
                // The command has ended, and how is its to say; the next one waits for the lease's end at most.
                None => out::complain(format_args!("{key}: its end was not recorded: asked to stop before it was")),
                Some(Err(error)) => out::complain(format_args!("{key}: its end was not recorded: {error:?}")),
            }
            Ok((code, outcome))
        }
        signal = asked.next() => {
            // The lease is still renewed while the command takes its leave.
            let status = work.stop(signal, asked, grace).await?;
            drop(lease);
            asked.or_soon(lock.shutdown(grace)).await;
            Ok((code(status), "stopped"))
        }
        () = lease.lost() => {
            out::complain(format_args!("{key}: lost; stopping the command"));
            work.stop(Signal::TERM, asked, grace).await?;
            Ok((exit::LOST, "lost"))
        }
    }
}

fn find(command: &[impl AsRef<OsStr>]) -> Result<PathBuf, Failure> {
    let name = command.first().map(AsRef::as_ref).unwrap_or_default();
    which::which(name).map_err(|_| {
        let there = name.as_encoded_bytes().contains(&b'/') && std::path::Path::new(name).exists();
        let (code, why) =
            if there { (exit::NOT_EXECUTABLE, "cannot be run") } else { (exit::NOT_FOUND, "command not found") };
        Failure::new(code, format_args!("{}: {why}", name.display()))
    })
}

/// The command's process; its descendants too, unless it shares a terminal with this program.
struct Work {
    child: Child,
    pid: Option<Pid>,
    /// On a terminal it stays in the foreground, where Ctrl-C reaches it by itself.
    on_terminal: bool,
}

impl Work {
    fn start(program: PathBuf, run: &Run, claim: &Claim) -> Result<Self, Failure> {
        let on_terminal = std::io::stdin().is_terminal();
        let mut command = Command::new(this_program()?);
        command
            .arg0("rowlock")
            .kill_on_drop(true)
            .arg("exec")
            .arg(std::process::id().to_string())
            .arg(program)
            .arg("--")
            .args(&run.command);
        command
            .env("ROWLOCK_KEY", claim.key.as_str())
            .env("ROWLOCK_TOKEN", claim.token.to_string())
            .env("ROWLOCK_HOLDER", claim.holder.to_string());
        if !on_terminal {
            command.process_group(0);
        }
        let child = command.spawn().map_err(|error| Failure::new(exit::NOT_EXECUTABLE, error))?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Ok(Self { child, pid, on_terminal })
    }

    /// Passes a signal on, and kills what is still there after the grace, descendants too.
    async fn stop(&mut self, signal: Signal, asked: &mut Asked, grace: Duration) -> Result<ExitStatus, Failure> {
        if !(self.on_terminal && signal == Signal::INT) {
            self.send(signal);
        }
        let ended = async {
            let mut status = None;
            while status.is_none() || is_left(self.pid, self.on_terminal) {
                tokio::select! {
                    ended = self.child.wait(), if status.is_none() => status = Some(ended),
                    () = sleep(LOOK), if status.is_some() => {}
                    // Asked again: passed on again.
                    signal = asked.next() => send(self.pid, self.on_terminal, signal),
                }
            }
        };
        if timeout(grace, ended).await.is_err() {
            self.send(Signal::KILL);
        }
        self.child.wait().await.map_err(lost_sight)
    }

    fn send(&self, signal: Signal) {
        send(self.pid, self.on_terminal, signal);
    }
}

fn send(pid: Option<Pid>, on_terminal: bool, signal: Signal) {
    let Some(pid) = pid else { return };
    // One that has ended meanwhile is not there any more, and need not be.
    let _ = if on_terminal { kill_process(pid, signal) } else { kill_process_group(pid, signal) };
}

/// Whether anything that the command has started is still in its process group.
fn is_left(pid: Option<Pid>, on_terminal: bool) -> bool {
    !on_terminal && pid.is_some_and(|pid| test_kill_process_group(pid).is_ok())
}

/// This very program, also if its file was replaced while it waited for the key.
fn this_program() -> Result<PathBuf, Failure> {
    if cfg!(target_os = "linux") {
        return Ok("/proc/self/exe".into());
    }
    std::env::current_exe().map_err(|error| Failure::new(exit::NOT_EXECUTABLE, error))
}

/// The signals by which the program is asked to stop. One that was ignored when it began, as by `nohup`,
/// stays ignored, by the command too.
struct Asked {
    terminate: Option<Signals>,
    interrupt: Option<Signals>,
    hang_up: Option<Signals>,
}

impl Asked {
    fn listen() -> Result<Self, Failure> {
        let ignored = ignored_signals();
        let listen = |kind: SignalKind| match ignored >> (kind.as_raw_value() - 1) & 1 {
            0 => signal(kind).map(Some).map_err(|error| Failure::new(exit::NOT_EXECUTABLE, error)),
            _ => Ok(None),
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            () = came(&mut self.terminate) => Signal::TERM,
            () = came(&mut self.interrupt) => Signal::INT,
            () = came(&mut self.hang_up) => Signal::HUP,
        }
    }

    /// Waits for what is to be told to the database; not for long when asked to stop meanwhile, as that may be out of reach.
    async fn or_soon<T>(&mut self, told: impl Future<Output = T>) -> Option<T> {
        let mut told = pin!(told);
        tokio::select! {
            biased;
            told = &mut told => return Some(told),
            _ = self.next() => {}
        }
        timeout(SOON, told).await.ok()
    }
}

async fn came(signals: &mut Option<Signals>) {
    match signals {
        Some(signals) => drop(signals.recv().await),
        None => std::future::pending().await,
    }
}

/// A bit for each, where the system tells.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

fn number(signal: Signal) -> u8 {
    u8::try_from(signal.as_raw()).unwrap_or_default()
}

/// The command's exit code as a shell tells it.
fn code(status: ExitStatus) -> u8 {
    let number = |code| u8::try_from(code).unwrap_or(u8::MAX);
    status.code().map(number).or_else(|| status.signal().map(|signal| exit::SIGNAL + number(signal))).unwrap_or(u8::MAX)
}

fn lost_sight(error: std::io::Error) -> Failure {
    Failure::new(exit::NOT_EXECUTABLE, format_args!("the command's end was not seen: {error}"))
}
