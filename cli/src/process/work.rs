//! The process of the command and its descendants: started, suspended, stopped.

use std::{
    ffi::OsString,
    fmt,
    io::{PipeReader, PipeWriter, Read as _},
    os::fd::AsRawFd as _,
    path::PathBuf,
    pin::pin,
    process::ExitStatus,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, getpgid, kill_process, kill_process_group, test_kill_process_group},
};
use tokio::{
    process::{Child, Command},
    signal::unix::SignalKind,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    args::process::Beginning,
    exit::{self, Failure},
    out,
    process::{
        child::{self, code, wait_failed},
        descendants::{self, Process},
        find::this_program,
        signals::{SOON, StopSignals, listen, received},
        surroundings::OF_CLAIMS,
    },
};

/// The interval at which the command's descendants are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the interval at which those that were killed are checked. One that may not be signalled,
/// or that waits for a disk, may go on for hours.
pub fn check_interval(refused: Option<Pid>, began: Instant) -> Duration {
    if refused.is_some() || began.elapsed() > SOON { SOON } else { CHECK_INTERVAL }
}

/// The processes that receive signals.
#[derive(Clone, Copy)]
struct Target {
    pid: Option<Pid>,
    /// Whether the command has a group of its own. On a terminal it shares the group of the front,
    /// which the terminal signals by itself.
    own_group: bool,
}

impl Target {
    /// Sends a signal. Returns a process that may not be signalled, if there is any.
    fn send(self, signal: Signal) -> Option<Pid> {
        self.send_to(signal, |_| true)
    }

    fn send_to(self, signal: Signal, counts: impl Fn(&Process) -> bool) -> Option<Pid> {
        match descendants::alive() {
            Some(mut processes) => {
                processes.retain(counts);
                descendants::send(&processes, signal)
            }
            None => {
                let send = if self.own_group { kill_process_group } else { kill_process };
                self.pid.filter(|pid| descendants::is_refused(send(*pid, signal)) && !cfg!(target_vendor = "apple"))
            }
        }
    }

    /// Returns whether any process of the command exists for which `counts` holds. Without `/proc`,
    /// any process of its own group counts.
    fn is_left(self, counts: impl Fn(&Process) -> bool) -> bool {
        let any_left = || match descendants::alive() {
            Some(processes) => processes.iter().any(&counts),
            None => self.own_group && self.pid.is_some_and(|pid| is_in_use(test_kill_process_group(pid))),
        };
        // The check is made twice: it takes time, and a process whose parent ends during the check
        // may be missing from the tree.
        any_left() || any_left()
    }
}

/// Returns whether a group that was tested has processes, also if none of them may be signalled. On
/// macOS, the latter is the reply for a group whose processes have all ended, too.
fn is_in_use(tested: Result<(), Errno>) -> bool {
    tested.is_ok() || (tested == Err(Errno::PERM) && !cfg!(target_vendor = "apple"))
}

/// How a command ended. Nothing that it has started is left.
pub enum End {
    /// It ended by itself, with this exit code.
    Exited(u8),
    /// It could not be started.
    NotStarted(Failure),
    /// A signal asked it to stop, and it ended with this exit code.
    Stopped(u8),
    /// It ran for longer than this timeout, and was stopped.
    TooLong(Duration),
    /// Its claim was lost, and it was stopped.
    Lost,
}

pub struct Work {
    /// What its messages begin with. It is empty below `rowlock cron`, which adds the job's name.
    key: String,
    /// How long the command may take to stop.
    stop_timeout: Duration,
    child: Child,
    target: Target,
    /// The pipe over which the stub reports that the command could not be started. The stub opens
    /// the write end itself.
    report: (PipeReader, PipeWriter),
    /// Whether it was said that a process may not be signalled.
    is_told: bool,
    _tasks: JoinSet<()>,
}

impl Work {
    /// Starts the command. Behind a front, it is in the front's group.
    pub fn start(
        key: &str,
        stop_timeout: Duration,
        program: PathBuf,
        words: &[OsString],
        environment: &[(&str, String)],
        beginning: &Beginning,
        front: Option<Pid>,
    ) -> Result<Self, Failure> {
        let cannot = |error: std::io::Error| {
            Failure::new(exit::NOT_EXECUTABLE, format_args!("the command could not be started: {error}"))
        };
        descendants::leave_earlier_ones();
        descendants::become_subreaper();
        let report = std::io::pipe().map_err(cannot)?;
        let mut command = Command::new(this_program()?);
        command
            .arg0("rowlock")
            .kill_on_drop(true)
            .arg("exec")
            .arg(std::process::id().to_string())
            .arg(report.1.as_raw_fd().to_string())
            .arg(program)
            .args(beginning.words())
            .arg("--")
            .args(words);
        if !environment.is_empty() {
            for name in OF_CLAIMS {
                command.env_remove(name);
            }
        }
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        let group = front.map(|front| getpgid(Some(front))).transpose().map_err(|error| cannot(error.into()))?;
        command.process_group(group.map_or(0, |group| group.as_raw_nonzero().get()));
        let child = command.spawn().map_err(cannot)?;
        let target = Target { pid: child::pid(&child), own_group: front.is_none() };
        let mut tasks = JoinSet::new();
        tasks.spawn(handle_signals(target)?);
        if let Some((front, group)) = front.and_then(Process::read).zip(group) {
            tasks.spawn(continue_when_orphaned(front, group));
        }
        Ok(Self { key: key.to_owned(), stop_timeout, child, target, report, is_told: false, _tasks: tasks })
    }

    /// Waits for the command's end, a signal, the end of its time, or the loss of its claim, and
    /// stops the command unless it has ended. The claim is still renewed while the command stops.
    /// `too_long` and `lost` return what is said of a command that is stopped for that.
    pub async fn until_end(
        &mut self,
        stop: &mut StopSignals,
        timeout: Option<Duration>,
        too_long: fn(Duration) -> String,
        lost: impl Future<Output = &'static str>,
    ) -> Result<End, Failure> {
        let (on_terminal, stop_timeout, mut lost) = (self.is_on_terminal(), self.stop_timeout, pin!(lost));
        let status = tokio::select! {
            // A command that has ended is recorded as it ended, whatever comes at the same moment.
            biased;
            status = self.wait() => status?,
            signal = stop.for_command(on_terminal, stop_timeout) => {
                self.forward(signal);
                return Ok(End::Stopped(code(self.wait_or_kill(stop).await?)));
            }
            limit = expired(timeout) => {
                self.stop_because(too_long(limit), stop).await?;
                return Ok(End::TooLong(limit));
            }
            why = &mut lost => {
                self.stop_because(format_args!("{why}; stopping the command"), stop).await?;
                return Ok(End::Lost);
            }
        };
        if let Some(failure) = self.failure() {
            return Ok(End::NotStarted(failure));
        }
        let code = code(status);
        let is_stopped = code != exit::OK && stop.has_stopped_the_command(stop_timeout).await;
        let is_lost = self.wait_or_stop_leftovers(stop, lost).await;
        Ok(match is_stopped {
            _ if is_lost => End::Lost,
            true => End::Stopped(code),
            false => End::Exited(code),
        })
    }

    /// Stops the command, and says why.
    async fn stop_because(&mut self, why: impl fmt::Display, stop: &mut StopSignals) -> Result<(), Failure> {
        // The signal is sent before the message, which may wait a moment for its reader.
        self.forward(Signal::TERM);
        self.say(why);
        self.wait_or_kill(stop).await.map(drop)
    }

    /// Waits for the command itself.
    pub async fn wait(&mut self) -> Result<ExitStatus, Failure> {
        self.child.wait().await.map_err(wait_failed)
    }

    /// Waits for the processes that the command has left behind in its session. After the stop
    /// timeout, at a signal, or at the loss of the claim, those processes are stopped. Daemons are
    /// not affected. Returns whether the claim was lost. The command has ended, and nothing else
    /// that happens here changes how.
    pub async fn wait_or_stop_leftovers(
        &mut self,
        stop: &mut StopSignals,
        lost: impl Future<Output = &'static str>,
    ) -> bool {
        let of_session = |process: &Process| !process.is_daemon();
        let (target, stop_timeout) = (self.target, self.stop_timeout);
        let gone = async || {
            while target.is_left(of_session) {
                sleep(CHECK_INTERVAL).await;
            }
        };
        let has_to_stop = async {
            if stop.asked().is_none() {
                let _ = stop.next().await;
            }
        };
        let mut is_lost = false;
        let are_gone = tokio::select! {
            biased;
            gone = timeout(stop_timeout, gone()) => gone.is_ok(),
            () = has_to_stop => false,
            why = lost => {
                is_lost = true;
                self.say(format_args!("{why} after the command had ended: stopping what it had left running"));
                false
            }
        };
        if are_gone {
            return false;
        }
        let refused = target.send_to(Signal::TERM, of_session);
        target.send_to(Signal::CONT, of_session);
        self.tell_refused(refused);
        if timeout(stop_timeout, gone()).await.is_err() {
            self.kill_those(of_session).await;
        }
        self.say(match self.is_told {
            true => "what the command had left running has ended",
            false => "stopped what the command had left running",
        });
        is_lost
    }

    /// Returns why the command did not start, if it did not.
    pub fn failure(&mut self) -> Option<Failure> {
        let length = rustix::io::ioctl_fionread(&self.report.0).unwrap_or_default();
        let mut text = vec![0; usize::try_from(length).unwrap_or_default()];
        self.report.0.read_exact(&mut text).ok()?;
        (!text.is_empty()).then(|| Failure::new(exit::NOT_EXECUTABLE, String::from_utf8_lossy(&text)))
    }

    /// Returns whether the keys of a terminal reach the command by themselves.
    fn is_on_terminal(&self) -> bool {
        !self.target.own_group
    }

    /// Passes on a signal that asks the command to stop. On a terminal, the command has already
    /// received those of the keys (SIGINT, SIGQUIT).
    pub fn forward(&mut self, signal: Signal) {
        let is_sent = self.target.own_group || ![Signal::INT, Signal::QUIT].contains(&signal);
        let refused = is_sent.then(|| self.target.send(signal)).flatten();
        // A stopped process handles other signals only after SIGCONT.
        self.target.send(Signal::CONT);
        self.tell_refused(refused);
    }

    /// Says once that a process may not be signalled.
    fn tell_refused(&mut self, refused: Option<Pid>) {
        if let Some(pid) = refused.filter(|_| !self.is_told) {
            self.is_told = true;
            self.say(descendants::not_permitted(pid));
        }
    }

    /// Says what happened to the command.
    fn say(&self, what: impl fmt::Display) {
        match self.key.as_str() {
            "" => out::print_notice(what),
            key => out::print_error(format_args!("{key}: {what}")),
        }
    }

    /// Waits until the command and all its descendants have ended. Processes that remain after the
    /// stop timeout are killed. Those that may not be signalled are waited for.
    pub async fn wait_or_kill(&mut self, stop: &mut StopSignals) -> Result<ExitStatus, Failure> {
        let stop_timeout = self.stop_timeout;
        let ended = async {
            let mut status = None;
            while status.is_none() || self.target.is_left(|_| true) {
                tokio::select! {
                    ended = self.child.wait(), if status.is_none() => status = Some(ended),
                    () = sleep(CHECK_INTERVAL), if status.is_some() => {}
                    // A further signal is passed on again.
                    signal = stop.next() => self.forward(signal),
                }
            }
        };
        if timeout(stop_timeout, ended).await.is_err() {
            let refused = self.target.send(Signal::KILL);
            let but = if refused.is_some() { " what may be signalled" } else { "" };
            self.say(format_args!("not ended within {stop_timeout:?}: killed{but}"));
            self.tell_refused(refused);
        }
        self.wait_and_kill_descendants().await
    }

    /// Kills the command and all its descendants.
    pub async fn kill(&mut self) -> Result<ExitStatus, Failure> {
        self.target.send(Signal::KILL);
        self.wait_and_kill_descendants().await
    }

    /// Waits for the command, which ends, and kills its descendants.
    async fn wait_and_kill_descendants(&mut self) -> Result<ExitStatus, Failure> {
        let status = self.wait().await?;
        self.kill_those(|_| true).await;
        Ok(status)
    }

    /// Kills until no process is left. A process that is created during one round is found in the
    /// next.
    async fn kill_those(&mut self, counts: impl Fn(&Process) -> bool) {
        let began = Instant::now();
        while self.target.is_left(&counts) {
            let refused = self.target.send_to(Signal::KILL, &counts);
            self.tell_refused(refused);
            sleep(check_interval(refused, began)).await;
        }
    }
}

/// Waits for orphans that have ended, and passes on SIGTSTP and SIGCONT. The lease is renewed while
/// the command is suspended, since the command has not ended.
fn handle_signals(target: Target) -> Result<impl Future<Output = ()>, Failure> {
    let mut children = listen(SignalKind::child())?;
    let mut suspend = listen(SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut resume = listen(SignalKind::from_raw(Signal::CONT.as_raw()))?;
    Ok(async move {
        loop {
            tokio::select! {
                () = received(&mut children) => {
                    descendants::reap(|child| Some(child) == target.pid);
                    // Many orphans may end at the same time.
                    sleep(CHECK_INTERVAL).await;
                }
                () = received(&mut suspend) => drop(target.send(Signal::TSTP)),
                () = received(&mut resume) => drop(target.send(Signal::CONT)),
            }
        }
    })
}

/// Continues a stopped job that no shell can continue, as the system otherwise does. Here the
/// system does not, since this process has a child in the job and is outside of it.
async fn continue_when_orphaned(front: Process, group: Pid) {
    // A job whose shell has ended receives SIGHUP. One without a shell (`ssh -t host rowlock ...`)
    // is only continued, since it must not stay suspended.
    let signals: &[Signal] = if descendants::has_shell(group) { &[Signal::HUP, Signal::CONT] } else { &[Signal::CONT] };
    loop {
        sleep(SOON).await;
        if Process::read(front.pid).is_some_and(|now| now.is_stopped()) && !descendants::has_shell(group) {
            for signal in signals {
                let _ = kill_process_group(group, *signal);
            }
        }
    }
}

/// Waits until the time of a command is over, and returns how long it was.
pub async fn expired(limit: Option<Duration>) -> Duration {
    match limit {
        Some(limit) => sleep(limit).await,
        None => std::future::pending().await,
    }
    limit.unwrap_or_default()
}
