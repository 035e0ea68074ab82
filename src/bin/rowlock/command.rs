//! `rowlock run`: a command that runs while its key is held.

use std::{
    ffi::OsStr,
    io::IsTerminal as _,
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::ExitStatus,
    time::{Duration, Instant},
};

use rowlock::{Attempt, Claim, Database, Error, Grant, LeaseLock, ResourceLock as _, ResourceLockExt as _, Status};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::{
    process::{Child, Command},
    signal::unix::{Signal as Signals, SignalKind, signal},
    time::timeout,
};

use crate::{
    args::Run,
    exit::{self, Failure},
    out,
};

pub async fn run<DB: Database>(lock: LeaseLock<DB>, run: Run) -> Result<u8, Failure> {
    // Looked for first: a key that is taken for nothing would close its window.
    let program = find(&run.command)?;
    let mut asked = Asked::listen()?;
    let attempt = tokio::select! {
        attempt = lock.acquire(run.key.as_str(), run.terms.wait) => attempt?,
        signal = asked.next() => {
            lock.shutdown().await;
            return Ok(exit::SIGNAL + number(signal));
        }
    };
    let grant = match attempt {
        Attempt::Acquired(grant) => grant,
        Attempt::Refused(refusal) => {
            out::complain(format_args!("refused: {refusal}"));
            return Ok(if run.skip_ok { exit::OK } else { exit::REFUSED });
        }
    };
    let started = Instant::now();
    let work = Work::start(program, &run, grant.claim())?;
    let (code, outcome) = supervise(&lock, grant, work, &mut asked, run.grace).await?;
    tracing::info!(key = %run.key, outcome, code, wall = ?started.elapsed(), "command");
    Ok(code)
}

/// Waits for the command's end, a signal, or the loss of the lease; the exit code, and what it came to.
async fn supervise<DB: Database>(
    lock: &LeaseLock<DB>,
    grant: Grant<DB>,
    mut work: Work,
    asked: &mut Asked,
    grace: Duration,
) -> Result<(u8, &'static str), Failure> {
    let key = grant.key().clone();
    tokio::select! {
        biased;
        status = work.child.wait() => {
            let code = code(status.map_err(lost_sight)?);
            let (status, outcome) = if code == exit::OK { (Status::Succeeded, "succeeded") } else { (Status::Failed, "failed") };
            match lock.release(grant, status).await {
                Ok(()) => {}
                Err(error @ Error::Lost { .. }) => return Err(error.into()),
                // The command has ended, and how is its to say; the next one waits for the lease's end at most.
                Err(error) => out::complain(format_args!("{key}: its end was not recorded: {error}")),
            }
            Ok((code, outcome))
        }
        signal = asked.next() => {
            // The lease is still renewed while the command takes its leave.
            let status = work.stop(signal, asked, grace).await?;
            drop(grant);
            lock.shutdown().await;
            Ok((code(status), "stopped"))
        }
        () = grant.lost() => {
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
        let own = std::env::current_exe().map_err(|error| Failure::new(exit::NOT_EXECUTABLE, error))?;
        let on_terminal = std::io::stdin().is_terminal();
        let mut command = Command::new(own);
        command.arg("exec").arg(std::process::id().to_string()).arg(program).arg("--").args(&run.command);
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

    /// Passes a signal on, and kills what is still there after the grace.
    async fn stop(&mut self, signal: Signal, asked: &mut Asked, grace: Duration) -> Result<ExitStatus, Failure> {
        if !(self.on_terminal && signal == Signal::INT) {
            self.send(signal);
        }
        let ended = async {
            loop {
                tokio::select! {
                    status = self.child.wait() => return status,
                    // Asked again: passed on again.
                    signal = asked.next() => send(self.pid, self.on_terminal, signal),
                }
            }
        };
        match timeout(grace, ended).await {
            Ok(status) => status.map_err(lost_sight),
            Err(_) => {
                self.send(Signal::KILL);
                self.child.wait().await.map_err(lost_sight)
            }
        }
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

/// The signals by which the program is asked to stop.
struct Asked {
    terminate: Signals,
    interrupt: Signals,
    hang_up: Signals,
}

impl Asked {
    fn listen() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).map_err(|error| Failure::new(exit::NOT_EXECUTABLE, error));
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.hang_up.recv() => Signal::HUP,
        }
    }
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
