//! The command of one run of `rowlock cron`.
//!
//! The library drops the work of a run that is lost. The command has to be stopped then, which
//! takes time, so the command is in a task of its own and the work only waits for it.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rowlock::{Database, Tick};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader},
    process::{Child, Command},
    sync::{Semaphore, mpsc, oneshot, watch},
    task::{JoinHandle, JoinSet},
    time::timeout,
};

use crate::{
    out,
    process::{
        child::{self, code, wait_failed},
        descendants,
        find::this_program,
        orphans::Mark,
        work::expired,
    },
    schedule::{environment, file::Job, supervise::STOPPED},
    writer::Writer,
};

/// How long the end of a run waits for output. Daemons of the command may keep its streams open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);
/// The longest line that is passed on as one.
const LINE: u64 = 64 * 1024;
/// How many bytes of the last line of stderr are recorded with a failure.
const RECORDED: usize = 200;

/// What all commands of the program share.
#[derive(Clone)]
pub struct Shared {
    /// How long a command that is to stop may take.
    pub grace: Duration,
    /// How many commands may run. Those of an earlier file count too.
    pub runs: Arc<Semaphore>,
    /// Turns true when all commands are to stop.
    pub stop: watch::Receiver<bool>,
    /// Each command holds a sender, so that the channel closes after the last one.
    pub commands: mpsc::WeakSender<()>,
}

/// The work of a tick: starts the command, and waits for its end.
pub async fn run<DB: Database>(job: Arc<Job>, tick: Tick<DB>, shared: Shared) -> Result<(), String> {
    let (reply, ended) = oneshot::channel();
    let permit = shared.runs.clone().acquire_owned().await;
    let Some(counted) = shared.commands.upgrade() else { return std::future::pending().await };
    let started = Started::start(&job, &environment(&tick), shared.grace)?;
    // The run keeps its leases until the command has ended.
    let going_on = tick.going_on();
    // The command counts until the library has its result, which is recorded then.
    let taken = counted.clone();
    let mark = started.mark.clone();
    let watching = tokio::spawn(async move {
        started.watch(job, shared.stop, reply).await;
        drop((counted, going_on, permit));
    });
    let ended = ended.await;
    drop(taken);
    match ended {
        Ok(result) => result,
        Err(_) => without_reply(watching, &mark).await,
    }
}

/// The command was stopped with the program: the run has not failed, and is handed back. Otherwise
/// the task that watched it has panicked.
async fn without_reply(watching: JoinHandle<()>, mark: &Mark) -> Result<(), String> {
    match watching.await {
        Ok(()) => std::future::pending().await,
        Err(error) => {
            mark.kill().await;
            Err(format!("the command was stopped: rowlock failed while it watched it: {error}"))
        }
    }
}

/// The processes above commands, for which this module waits.
static OWN: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Waits for orphans of commands that have ended.
pub fn reap_orphans() {
    let own = OWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    descendants::reap(|child| own.contains(&child));
}

/// A command, and the process above it.
struct Started {
    child: Child,
    pid: Option<Pid>,
    mark: Mark,
    output: JoinSet<()>,
    /// The last line of stderr that is not blank.
    last_line: LastLine,
}

type LastLine = Arc<Mutex<String>>;

impl Started {
    fn start(job: &Job, environment: &[(&'static str, String)], grace: Duration) -> Result<Self, String> {
        let name = job.schedule.name();
        let cannot = |error: std::io::Error| format!("the command cannot be started: {error}");
        let program: PathBuf = this_program().map_err(|failure| failure.to_string())?;
        let mut command = Command::new(program);
        command
            .arg0("rowlock")
            .arg("supervise")
            .args([std::process::id().to_string(), humantime::format_duration(grace).to_string()])
            .arg(format!("--job={name}"))
            .arg("--")
            .args(&job.command)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // The keys of a terminal reach this program alone.
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(cannot)?;
        let (mut output, last_line) = (JoinSet::new(), LastLine::default());
        if let Some(from) = child.stdout.take() {
            output.spawn(pass_on(name.to_owned(), from, &out::STDOUT, None));
        }
        if let Some(from) = child.stderr.take() {
            output.spawn(pass_on(name.to_owned(), from, &out::STDERR, Some(last_line.clone())));
        }
        let pid = child::pid(&child);
        OWN.lock().unwrap_or_else(PoisonError::into_inner).extend(pid);
        // A `rowlock run` within the command sets a token of its own.
        let variables = environment.iter().filter(|(name, _)| *name != "ROWLOCK_TOKEN");
        let mark = Mark::new(pid, variables.map(|(name, value)| format!("{name}={value}")).collect());
        Ok(Self { child, pid, mark, output, last_line })
    }

    /// Waits for the command's end, and stops it when its run is lost, takes too long, or ends with
    /// the program.
    async fn watch(
        mut self,
        job: Arc<Job>,
        mut stop: watch::Receiver<bool>,
        mut reply: oneshot::Sender<Result<(), String>>,
    ) {
        let name = job.schedule.name();
        let (result, by_itself) = tokio::select! {
            biased;
            status = self.ended() => {
                let by_itself = status.as_ref().is_ok_and(|status| status.code().is_some());
                (result_of(status), by_itself)
            }
            () = async { drop(stop.wait_for(|stop| *stop).await) } => match self.stop().await {
                Some(result) => (result, true),
                // Without a reply, the run is not recorded.
                None => return,
            },
            () = reply.closed() => {
                self.terminate();
                out::print_error(format_args!("{name}: lost; stopping the command"));
                self.stop().await;
                return;
            }
            limit = expired(job.timeout) => match self.stop().await {
                Some(result) => (result, true),
                None => (Err(format!("stopped after its timeout of {limit:?}")), false),
            },
        };
        self.last_output().await;
        if let Err(error) = &result {
            out::print_error(format_args!("{name}: {error}"));
        }
        // Of a command that was stopped, the cause is known.
        let _ = reply.send(result.map_err(|error| if by_itself { self.with_last_line(error) } else { error }));
    }

    /// Adds what the command said last to the error that is recorded.
    fn with_last_line(&self, error: String) -> String {
        let line = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.is_empty() { error } else { format!("{error}: {line}") }
    }

    /// Waits for the process above the command, which stops what the command has started. If a
    /// signal has ended that process, this one does so.
    async fn ended(&mut self) -> std::io::Result<ExitStatus> {
        let status = self.child.wait().await?;
        if status.signal().is_some() {
            self.mark.kill().await;
        }
        Ok(status)
    }

    /// Asks the process above the command to stop it.
    fn terminate(&self) {
        // The process may have ended already; the error is ignored.
        let _ = child::pid(&self.child).map(|pid| kill_process(pid, Signal::TERM));
    }

    /// Stops the command. The process above it kills what is left after the grace period. Returns
    /// the result of a command that had ended by itself, so that only what it had left running was
    /// stopped.
    async fn stop(&mut self) -> Option<Result<(), String>> {
        self.terminate();
        let status = self.ended().await;
        self.last_output().await;
        let code = status.as_ref().ok().and_then(ExitStatus::code)?;
        (code != i32::from(STOPPED)).then(|| result_of(status))
    }

    async fn last_output(&mut self) {
        let _ = timeout(LAST_OUTPUT, async { while self.output.join_next().await.is_some() {} }).await;
        // The output of daemons is passed on for as long as they live.
        self.output.detach_all();
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        own.retain(|pid| Some(*pid) != self.pid);
    }
}

fn result_of(status: std::io::Result<ExitStatus>) -> Result<(), String> {
    let status = status.map_err(|error| wait_failed(error).to_string())?;
    match (code(status), status.signal()) {
        (_, Some(signal)) => Err(format!("the command was stopped: signal {signal} ended the process above it")),
        (0, None) => Ok(()),
        (code, None) => Err(format!("exit code {code}")),
    }
}

/// Returns a line as the history has it, unless it is blank.
fn recorded(line: &[u8]) -> Option<String> {
    let line = String::from_utf8_lossy(line);
    let line = out::printable(line.trim());
    let end = line.floor_char_boundary(RECORDED);
    Some(line[..end].to_owned()).filter(|line| !line.is_empty())
}

/// Passes output on by lines, each behind the job's name. If it cannot be written, or is not read
/// any more, it is dropped, since the command must not wait for a reader that is gone.
async fn pass_on(name: String, from: impl AsyncRead + Unpin, to: &'static Writer, last_line: Option<LastLine>) {
    let mut from = BufReader::new(from);
    let prefix = format!("{}: ", out::printable(&name));
    loop {
        let mut line = prefix.clone().into_bytes();
        match (&mut from).take(LINE).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if let Some((last_line, said)) = last_line.as_ref().zip(recorded(&line[prefix.len()..])) {
            *last_line.lock().unwrap_or_else(PoisonError::into_inner) = said;
        }
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        // One write for each line, so that the lines of several commands do not mix.
        to.pass(&line).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_run_that_is_not_watched_any_more_has_failed() {
        let watching = tokio::spawn(async { panic!("a fault") });
        let mark = Mark::new(None, vec!["ROWLOCK_JOB=none".to_owned()]);
        let failed = timeout(Duration::from_secs(20), without_reply(watching, &mark)).await.unwrap();
        assert!(failed.is_err_and(|error| error.contains("a fault")));
        let ended = tokio::spawn(async {});
        let handed_back = timeout(Duration::from_millis(50), without_reply(ended, &mark)).await;
        assert!(handed_back.is_err(), "it has no result");
    }
}
