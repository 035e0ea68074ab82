//! One command of `rowlock cron`, with the process above it.

use std::{
    ffi::OsString,
    os::unix::process::ExitStatusExt as _,
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::sys::signal;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader},
    process::{Child, Command},
    task::JoinSet,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    database::Source,
    exit,
    out::{self, NOTICE},
    process::{
        child::{self, code, wait_failed},
        descendants,
        find::this_program,
        orphans::Mark,
    },
    schedule::{file::Job, output::Tail, supervise::STOPPED},
    secrets,
    writer::Writer,
};

/// How long the end of a command waits for output. Daemons of the command may keep its streams
/// open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);
/// The longest line that is passed on as one.
const LINE: u64 = 64 * 1024;
/// How many bytes of the last line of stderr are recorded with a failure.
const RECORDED: usize = 200;
/// How much longer than the stop timeout the process above a command may take to stop it.
const MARGIN: Duration = Duration::from_secs(5);

/// The processes above commands, for which this module waits.
static OWN: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Waits for orphans of commands that have ended.
pub fn reap_orphans() {
    let own = OWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    descendants::reap(|child| own.contains(&child));
}

/// A variable of a command.
pub type Variable = (&'static str, String);

/// What all commands of the program share.
#[derive(Clone)]
pub struct Shared {
    /// The database, of which a job may ask for the URL.
    pub source: Arc<Source>,
    /// How long a command that is to stop may take.
    pub stop_timeout: Duration,
    /// All commands are to stop.
    pub stop: CancellationToken,
    /// The commands, and what follows them.
    pub commands: TaskTracker,
}

/// A command, and the process above it.
pub struct Started {
    child: Child,
    pub pid: Option<Pid>,
    pub mark: Mark,
    /// How long the command may take to stop.
    stop_timeout: Duration,
    output: JoinSet<()>,
    /// The last line of stderr that is not blank.
    last_line: LastLine,
    pub tail: Tail,
}

type LastLine = Arc<Mutex<String>>;

impl Started {
    /// Starts a command of a job.
    pub fn start(words: &[OsString], job: &Job, variables: &[Variable], shared: &Shared) -> Result<Self, String> {
        let (name, surroundings, stop_timeout) = (job.schedule.name(), &job.terms.surroundings, shared.stop_timeout);
        let database_url = surroundings.database_url.then(|| shared.source.url_of_commands());
        let cannot = |error: std::io::Error| format!("the command cannot be started: {error}");
        let mut command = Command::new(this_program().map_err(|failure| failure.to_string())?);
        surroundings.apply(&mut command, database_url.as_deref());
        command
            .arg0("rowlock")
            .arg("supervise")
            // A text of a long duration would have months, which are refused.
            .args([std::process::id().to_string(), format!("{}ms", stop_timeout.as_millis())])
            .arg(format!("--job={name}"))
            .args(surroundings.beginning.words())
            .arg("--")
            .args(words)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // The keys of a terminal reach this program alone.
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(cannot)?;
        let (mut output, last_line, tail) = (JoinSet::new(), LastLine::default(), Tail::new(job.terms.keep_output));
        if let Some(from) = child.stdout.take() {
            output.spawn(pass_on(name.to_owned(), from, ("stdout", &out::STDOUT), tail.clone(), None));
        }
        if let Some(from) = child.stderr.take() {
            let last_line = Some(last_line.clone());
            output.spawn(pass_on(name.to_owned(), from, ("stderr", &out::STDERR), tail.clone(), last_line));
        }
        let pid = child::pid(&child);
        OWN.lock().unwrap_or_else(PoisonError::into_inner).extend(pid);
        // A `rowlock run` within the command sets a token of its own.
        let variables = variables.iter().filter(|(name, _)| *name != "ROWLOCK_TOKEN");
        let mark = Mark::new(name, pid, variables.map(|(name, value)| format!("{name}={value}")).collect());
        Ok(Self { child, pid, mark, stop_timeout, output, last_line, tail })
    }

    /// Waits for the command's end. If the process above the command was ended by a signal, what it
    /// had started is killed.
    pub async fn ended(&mut self) -> Ended {
        let status = self.child.wait().await;
        if status.as_ref().is_ok_and(|status| status.signal().is_some()) {
            self.mark.kill().await;
        }
        Ended::new(status)
    }

    /// Asks the process above the command to stop it.
    fn terminate(&self) {
        self.send(Signal::TERM);
        // A stopped process handles other signals only after SIGCONT.
        self.send(Signal::CONT);
    }

    fn send(&self, signal: Signal) {
        // The process may have ended already; the error is ignored.
        let _ = child::pid(&self.child).map(|pid| kill_process(pid, signal));
    }

    /// Stops the command. The process above it kills what is left after the stop timeout, and is
    /// killed itself if it does not, unless it waits for what may not be signalled. Returns the end
    /// of a command that had ended by itself, so that only what it had left running was stopped.
    pub async fn stop(&mut self) -> Option<Ended> {
        self.terminate();
        while timeout(self.stop_timeout.saturating_add(MARGIN), self.child.wait()).await.is_err() {
            if !self.pid.is_some_and(descendants::has_refused) {
                self.send(Signal::KILL);
                break;
            }
        }
        let ended = self.ended().await;
        self.last_output().await;
        matches!(ended.code, Some(code) if code != STOPPED).then_some(ended)
    }

    /// Waits a moment for what the command wrote last.
    pub async fn last_output(&mut self) {
        let _ = timeout(LAST_OUTPUT, async { while self.output.join_next().await.is_some() {} }).await;
        // The output of daemons is passed on for as long as they live.
        self.output.detach_all();
    }

    /// Returns an error with what the command said last.
    pub fn with_last_line(&self, error: String) -> String {
        let line = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.is_empty() { error } else { format!("{error}: {line}") }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        own.retain(|pid| Some(*pid) != self.pid);
    }
}

/// How a command ended.
pub struct Ended {
    /// The exit code; `None` if the process above the command was killed.
    pub code: Option<u8>,
    pub result: Result<(), String>,
}

impl Ended {
    fn new(status: std::io::Result<ExitStatus>) -> Self {
        let status = match status {
            Ok(status) => status,
            Err(error) => return Self { code: None, result: Err(wait_failed(error).to_string()) },
        };
        match (code(status), status.signal()) {
            (_, Some(signal)) => {
                let error = format!("the command was stopped: signal {signal} ended the process above it");
                Self { code: None, result: Err(error) }
            }
            (code @ exit::OK, None) => Self { code: Some(code), result: Ok(()) },
            (code, None) => Self { code: Some(code), result: Err(described(code)) },
        }
    }
}

/// Describes an exit code. Of a command that a signal ended, it is that of a shell.
fn described(code: u8) -> String {
    let signal = code.checked_sub(exit::SIGNAL).and_then(|number| signal::Signal::try_from(i32::from(number)).ok());
    match signal {
        Some(signal) => format!("exit code {code} ({signal})"),
        None => format!("exit code {code}"),
    }
}

/// Returns a line as the history has it, unless it is blank.
fn recorded(line: &str) -> Option<String> {
    let line = out::printable(line.trim());
    let end = line.floor_char_boundary(RECORDED);
    Some(line[..end].to_owned()).filter(|line| !line.is_empty())
}

/// Passes output on by lines. If it cannot be written, or is not read any more, it is dropped,
/// since the command must not wait for a reader that is gone.
async fn pass_on(
    job: String,
    from: impl AsyncRead + Unpin,
    (stream, to): (&str, &'static Writer),
    tail: Tail,
    last_line: Option<LastLine>,
) {
    let mut from = BufReader::new(from);
    let mut held = Vec::new();
    loop {
        let mut said = std::mem::take(&mut held);
        match (&mut from).take(LINE).read_until(b'\n', &mut said).await {
            Ok(0) | Err(_) if said.is_empty() => return,
            // The line is cut here, perhaps within a password, which is found in the next part.
            Ok(read) if read as u64 == LINE && !said.ends_with(b"\n") => {
                let begun = secrets::begun(&said).max(secrets::begun_of(&said, NOTICE));
                held = said.split_off(said.len() - begun);
            }
            _ => {}
        }
        // What the process above the command says may follow a line that has no end.
        let notice = last_line.as_ref().and_then(|_| said.windows(NOTICE.len()).position(|part| part == NOTICE));
        let mut notice = said.split_off(notice.unwrap_or(said.len()));
        notice.drain(..NOTICE.len().min(notice.len()));
        secrets::mask(&mut said);
        secrets::mask(&mut notice);
        tail.add(&said);
        if let Some((last_line, said)) = last_line.as_ref().zip(recorded(&String::from_utf8_lossy(&said))) {
            *last_line.lock().unwrap_or_else(PoisonError::into_inner) = said;
        }
        for text in [said, notice] {
            if !text.is_empty() {
                // One write for each line, so that the lines of several commands do not mix.
                to.pass(&of_job(&job, stream, &text)).await;
            }
        }
    }
}

/// Returns a line of a job's output: behind the job's name, or as an object.
fn of_job(job: &str, stream: &str, text: &[u8]) -> Vec<u8> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    match out::is_json() {
        true => out::object("INFO", json!({ "job": job, "stream": stream, "message": String::from_utf8_lossy(text) })),
        false => [format!("{}: ", out::printable(job)).as_bytes(), text, b"\n"].concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is kept of these bytes on stderr, and the last line that is recorded.
    async fn kept(bytes: &[u8]) -> (String, String) {
        static TO: Writer = Writer::new(|| Box::new(std::io::sink()), |_| ());
        let (tail, last_line) = (Tail::new(1 << 20), LastLine::default());
        pass_on("k".to_owned(), bytes, ("stderr", &TO), tail.clone(), Some(last_line.clone())).await;
        let last_line = last_line.lock().unwrap().clone();
        (String::from_utf8(tail.take().unwrap_or_default()).unwrap(), last_line)
    }

    #[tokio::test]
    async fn output_is_no_notice() {
        for text in ["\x1e{\"a\":1}\n", "a\x1eb\x1erow\n", "rowlock\n"] {
            let printable = out::printable(text.trim());
            assert_eq!(kept(text.as_bytes()).await, (text.to_owned(), printable.clone()));
            let with_notice = [text.trim_end().as_bytes(), NOTICE, b"rowlock: stopped\n"].concat();
            assert_eq!(kept(&with_notice).await, (text.trim_end().to_owned(), printable));
        }
    }

    /// The cut is at each place of the password.
    #[tokio::test]
    async fn a_password_across_the_cut_of_a_line_is_masked() {
        let (line, secret) = (usize::try_from(LINE).unwrap(), "of-two-parts");
        secrets::keep(std::iter::once(secret.to_owned()));
        for before in line - secret.len() - 1..=line {
            let (x, y) = ("x".repeat(before), "y".repeat(line));
            for (said, kept_of_it) in [("of-two-parts", "***"), ("of-two-party", "of-two-party"), ("of-tw", "of-tw")] {
                let text = kept(format!("{x}{said}{y}{said}").as_bytes()).await.0;
                assert!(text == format!("{x}{kept_of_it}{y}{kept_of_it}"), "{said} after {before}");
            }
        }
    }

    #[test]
    fn the_code_of_a_signal_has_its_name() {
        for (code, text) in [
            (1, "exit code 1"),
            (128, "exit code 128"),
            (137, "exit code 137 (SIGKILL)"),
            (143, "exit code 143 (SIGTERM)"),
            (139, "exit code 139 (SIGSEGV)"),
            (255, "exit code 255"),
        ] {
            assert_eq!(described(code), text);
        }
    }
}
