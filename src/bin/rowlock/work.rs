//! The command's process and its descendants: begun, suspended, stopped.

use std::{
    io::{PipeReader, PipeWriter, Read as _},
    os::{fd::AsRawFd as _, unix::process::ExitStatusExt as _},
    path::PathBuf,
    process::ExitStatus,
    time::Duration,
};

use rustix::process::{Pid, Signal, getpgid, kill_process, kill_process_group, test_kill_process_group};
use tokio::{
    process::{Child, Command},
    signal::unix::SignalKind,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    args::Run,
    descendants::{self, Process},
    exit::{self, Failure},
    front::this_program,
    out,
    signals::{Asked, SOON, came, listen},
};
use rowlock::Claim;

/// How often is looked whether the command's descendants are gone.
const LOOK: Duration = Duration::from_millis(20);

/// What signals are sent to.
#[derive(Clone, Copy)]
struct Target {
    pid: Option<Pid>,
    /// On a terminal it shares the group of the front, which the terminal signals by itself.
    own_group: bool,
}

impl Target {
    fn send(self, signal: Signal) {
        self.send_to(signal, |_| true);
    }

    fn send_to(self, signal: Signal, counts: impl Fn(&Process) -> bool) {
        match descendants::alive() {
            Some(processes) => processes.into_iter().filter(counts).for_each(|process| process.send(signal)),
            None => {
                let send = if self.own_group { kill_process_group } else { kill_process };
                // One that has ended in the meantime is not there, and need not be.
                let _ = self.pid.map(|pid| send(pid, signal));
            }
        }
    }

    /// Whether anything that the command has started is there, and `counts`.
    fn is_left(self, counts: impl Fn(&Process) -> bool) -> bool {
        let look = || match descendants::alive() {
            Some(processes) => processes.iter().any(&counts),
            None => self.own_group && self.pid.is_some_and(|pid| test_kill_process_group(pid).is_ok()),
        };
        // Twice: a look takes its time, and a process whose parent ends within it may belong to none.
        look() || look()
    }
}

pub struct Work {
    child: Child,
    target: Target,
    /// Where the command's beginning tells that it failed, and the other end, which it opens.
    report: (PipeReader, PipeWriter),
    _attendants: JoinSet<()>,
}

impl Work {
    /// Begins the command; behind a front, in its group.
    pub fn start(program: PathBuf, run: &Run, claim: &Claim, front: Option<Pid>) -> Result<Self, Failure> {
        let cannot = |error: std::io::Error| Failure::new(exit::NOT_EXECUTABLE, error);
        descendants::adopt();
        let report = std::io::pipe().map_err(cannot)?;
        let mut command = Command::new(this_program()?);
        command
            .arg0("rowlock")
            .kill_on_drop(true)
            .arg("exec")
            .arg(std::process::id().to_string())
            .arg(report.1.as_raw_fd().to_string())
            .arg(program)
            .arg("--")
            .args(&run.command);
        command
            .env("ROWLOCK_KEY", claim.key.as_str())
            .env("ROWLOCK_TOKEN", claim.token.to_string())
            .env("ROWLOCK_HOLDER", claim.holder.to_string());
        let group = front.map(|front| getpgid(Some(front))).transpose().map_err(|error| cannot(error.into()))?;
        command.process_group(group.map_or(0, |group| group.as_raw_nonzero().get()));
        let child = command.spawn().map_err(cannot)?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let target = Target { pid, own_group: front.is_none() };
        let mut attendants = JoinSet::new();
        attendants.spawn(attend(target)?);
        if let Some((front, group)) = front.and_then(Process::look).zip(group) {
            attendants.spawn(continue_when_orphaned(front, group));
        }
        Ok(Self { child, target, report, _attendants: attendants })
    }

    /// Waits for the command, and for what it leaves behind in its session: that is stopped when it has taken
    /// longer than the grace. Daemons are let alone.
    pub async fn ended(&mut self, key: &str, grace: Duration) -> Result<ExitStatus, Failure> {
        let status = self.child.wait().await.map_err(lost_sight)?;
        let of_session = |process: &Process| !process.is_daemon();
        let gone = async || {
            while self.target.is_left(of_session) {
                sleep(LOOK).await;
            }
        };
        if timeout(grace, gone()).await.is_err() {
            self.target.send_to(Signal::TERM, of_session);
            self.target.send_to(Signal::CONT, of_session);
            if timeout(grace, gone()).await.is_err() {
                self.kill(of_session).await;
            }
            // Last, as a stderr that is not read would keep this waiting.
            out::complain(format_args!("{key}: stopped what the command had left running"));
        }
        Ok(status)
    }

    /// Why the command did not begin, if it did not.
    pub fn failure(&mut self) -> Option<Failure> {
        let told = rustix::io::ioctl_fionread(&self.report.0).unwrap_or_default();
        let mut text = vec![0; usize::try_from(told).unwrap_or_default()];
        self.report.0.read_exact(&mut text).ok()?;
        (!text.is_empty()).then(|| Failure::new(exit::NOT_EXECUTABLE, String::from_utf8_lossy(&text)))
    }

    /// Passes a signal on that asks the command to stop. Those of the terminal's keys it has already.
    pub fn pass_on(&self, signal: Signal) {
        if self.target.own_group || ![Signal::INT, Signal::QUIT].contains(&signal) {
            self.target.send(signal);
        }
        // A stopped process hears of nothing else.
        self.target.send(Signal::CONT);
    }

    /// Waits until the command and all its descendants are gone; what is there after the grace is killed.
    pub async fn stopped(&mut self, key: &str, asked: &mut Asked, grace: Duration) -> Result<ExitStatus, Failure> {
        let ended = async {
            let mut status = None;
            while status.is_none() || self.target.is_left(|_| true) {
                tokio::select! {
                    ended = self.child.wait(), if status.is_none() => status = Some(ended),
                    () = sleep(LOOK), if status.is_some() => {}
                    // Asked again: passed on again.
                    signal = asked.next() => self.pass_on(signal),
                }
            }
        };
        if timeout(grace, ended).await.is_err() {
            self.target.send(Signal::KILL);
            out::complain(format_args!("{key}: not ended within {grace:?}: killed"));
        }
        let status = self.child.wait().await.map_err(lost_sight)?;
        self.kill(|_| true).await;
        Ok(status)
    }

    /// Kills until nothing is left: what is being born in one round is there in the next.
    async fn kill(&self, counts: impl Fn(&Process) -> bool) {
        while self.target.is_left(&counts) {
            self.target.send_to(Signal::KILL, &counts);
            sleep(LOOK).await;
        }
    }
}

/// Waits for orphans that have ended, and passes on what suspends and continues. The lease is renewed all the while: a command that
/// is suspended has not ended.
fn attend(target: Target) -> Result<impl Future<Output = ()>, Failure> {
    let mut children = listen(SignalKind::child())?;
    let mut suspend = listen(SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut resume = listen(SignalKind::from_raw(Signal::CONT.as_raw()))?;
    Ok(async move {
        loop {
            tokio::select! {
                () = came(&mut children) => {
                    descendants::bury(target.pid);
                    // They may come in crowds.
                    sleep(LOOK).await;
                }
                () = came(&mut suspend) => target.send(Signal::TSTP),
                () = came(&mut resume) => target.send(Signal::CONT),
            }
        }
    })
}

/// Does for a job that no shell can continue what the system does. The system does not, as this process, outside of the job,
/// has a child in it.
async fn continue_when_orphaned(front: Process, group: Pid) {
    // A job whose shell has ended is hung up. One that never had a shell (`ssh -t host rowlock ...`) is not to be suspended.
    let signals: &[Signal] = if descendants::has_shell(group) { &[Signal::HUP, Signal::CONT] } else { &[Signal::CONT] };
    loop {
        sleep(SOON).await;
        if Process::look(front.pid()).is_some_and(|now| now.is_stopped()) && !descendants::has_shell(group) {
            for signal in signals {
                let _ = kill_process_group(group, *signal);
            }
        }
    }
}

/// A process's exit code as a shell tells it.
pub fn code(status: ExitStatus) -> u8 {
    let number = |code: i32| u8::try_from(code).unwrap_or(u8::MAX);
    let signal = || status.signal().map(|signal| exit::SIGNAL.saturating_add(number(signal)));
    status.code().map(number).or_else(signal).unwrap_or(u8::MAX)
}

pub fn lost_sight(error: std::io::Error) -> Failure {
    Failure::new(exit::NOT_EXECUTABLE, format_args!("the command's end was not seen: {error}"))
}
