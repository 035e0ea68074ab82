//! The time from the call of `release` to the return of the next holder's `acquire`, on one key for
//! which many tasks wait.

use std::{collections::BTreeMap, io::Write as _, process::Stdio, time::Duration};

use clap::Args;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    contender::{URL, Word},
    database::{Bench, Kind, Observer, Site, at_own_site, on},
    error::Error,
    options::Databases,
    statistics::{Summary, millis, now},
};

/// How long the processes may take to begin, and to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// How far the order of the calls may differ from that of the recorded times, in nanoseconds: the
/// system may preempt a thread in between.
const UNNOTICED: i64 = 20_000_000;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    on: Databases,
    /// How long each measurement lasts, after as many seconds of warming up as `--warm-up` says.
    #[arg(long, default_value_t = 2)]
    seconds: u64,
    #[arg(long, default_value_t = 1)]
    warm_up: u64,
    /// How long a task holds the key, in milliseconds.
    #[arg(long, value_delimiter = ',', default_values_t = [5, 50])]
    hold_ms: Vec<u64>,
    /// How many tasks want the key.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 20, 200])]
    waiters: Vec<usize>,
    /// Only the measurements with this many processes: 1, or more than 1.
    #[arg(long)]
    processes: Option<usize>,
    /// Only the measurements with fair locks, or only those without.
    #[arg(long)]
    fair: Option<bool>,
}

/// The settings of one measurement.
#[derive(Clone, Copy)]
struct Setup {
    kind: Kind,
    fair: bool,
    processes: usize,
    waiters: usize,
    hold_ms: u64,
}

impl Setup {
    /// A key of its own for each measurement, unaffected by the previous one.
    fn key(&self) -> String {
        format!("{}/{}/{}/{}", self.fair, self.processes, self.waiters, self.hold_ms)
    }
}

/// A holder, as reported by its process.
#[derive(Clone, Copy)]
struct Holder {
    process: usize,
    asked: i64,
    acquired: i64,
    released: Option<i64>,
}

/// All reports, and when the measurement began and ended.
#[derive(Default)]
struct Record {
    holders: BTreeMap<i64, Holder>,
    /// The times since which the tasks without the key have asked.
    waiting: Vec<i64>,
    window: (i64, i64),
    statements: Option<i64>,
}

impl Record {
    /// Adds a report. Returns the token of a claim that was granted.
    fn add(&mut self, process: usize, word: Word) -> Result<Option<i64>, Error> {
        match word {
            Word::Granted { token, asked, acquired } => {
                self.holders.insert(token, Holder { process, asked, acquired, released: None });
                return Ok(Some(token));
            }
            Word::Released { token, at } => {
                self.holders.get_mut(&token).ok_or("released what was not granted")?.released = Some(at);
            }
            Word::Waiting { asked } => self.waiting.push(asked),
            Word::Ready => return Err(format!("out of place: {word:?}").into()),
        }
        Ok(None)
    }
}

pub async fn run(options: &Options, log: Option<&str>) -> Result<(), Error> {
    println!(
        "From the call of release to the next acquire's return, in ms; with several processes only where the next holder is another process."
    );
    println!(
        "all: all hand-overs; statements: for each of them, as the server counts (MySQL, MariaDB: of the whole server); longest: a task waited"
    );
    for (kind, server) in options.on.servers() {
        on!(kind, measure(kind, &server, options, log))?;
    }
    Ok(())
}

async fn measure<DB: Bench>(kind: Kind, server: &str, options: &Options, log: Option<&str>) -> Result<(), Error> {
    println!(
        "\n{:<9}{:<6}{:>5}{:>8}{:>6}{:>7}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}{:>11}{:>11}",
        kind.name(),
        "order",
        "hold",
        "waiters",
        "procs",
        "all",
        "counted",
        "min",
        "median",
        "p90",
        "p99",
        "max",
        "statements",
        "longest"
    );
    at_own_site::<DB>(server, async |site| lines::<DB>(kind, site, options, log).await).await
}

async fn lines<DB: Bench>(kind: Kind, site: &Site, options: &Options, log: Option<&str>) -> Result<(), Error> {
    let observer = Observer::<DB>::new(site).await?;
    for &hold_ms in &options.hold_ms {
        for several in [false, true] {
            for fair in [false, true] {
                for &waiters in &options.waiters {
                    let processes = if several { waiters.min(4) } else { 1 };
                    let wanted = options.processes.is_none_or(|wanted| (wanted > 1) == several)
                        && options.fair.is_none_or(|wanted| wanted == fair);
                    if wanted {
                        let setup = Setup { kind, fair, processes, waiters, hold_ms };
                        eprintln!(
                            "{} fair={fair} hold={hold_ms}ms waiters={waiters} processes={processes}",
                            kind.name()
                        );
                        let mut contest = Contest::start(setup, site, log).await?;
                        let record = contest.measure(options, &observer).await;
                        let ended = contest.end(record?).await?;
                        show(setup, &ended);
                    }
                }
            }
        }
    }
    Ok(())
}

/// The processes of one measurement.
struct Contest {
    children: Vec<(Child, Option<ChildStdin>)>,
    words: mpsc::Receiver<(usize, Result<Word, Error>)>,
}

impl Contest {
    async fn start(setup: Setup, site: &Site, log: Option<&str>) -> Result<Self, Error> {
        let (sender, words) = mpsc::channel(1000);
        let mut contest = Self { children: Vec::new(), words };
        for process in 0..setup.processes {
            let share = setup.waiters / setup.processes + usize::from(process < setup.waiters % setup.processes);
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["contender", "--database", setup.kind.name(), "--tasks", &share.to_string()]);
            command.args(["--key", &setup.key(), "--hold-ms", &setup.hold_ms.to_string()]).env(URL, &site.url);
            if setup.fair {
                command.arg("--fair");
            }
            if let Some(log) = log {
                command.args(["--log", log]);
            }
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
            let (stdin, stdout) = (child.stdin.take(), child.stdout.take().ok_or("a pipe")?);
            tokio::spawn(listen(process, stdout, sender.clone()));
            contest.children.push((child, stdin));
        }
        for _ in 0..setup.processes {
            let word = timeout(PATIENCE, contest.words.recv()).await?;
            match word.ok_or("the processes are gone")?.1? {
                Word::Ready => {}
                other => return Err(format!("instead of being ready: {other:?}").into()),
            }
        }
        Ok(contest)
    }

    async fn tell(&mut self, line: &str) -> Result<(), Error> {
        for (_, stdin) in &mut self.children {
            stdin.as_mut().ok_or("a pipe")?.write_all(format!("{line}\n").as_bytes()).await?;
        }
        Ok(())
    }

    async fn measure<DB: Bench>(&mut self, options: &Options, observer: &Observer<DB>) -> Result<Record, Error> {
        let mut record = Record::default();
        let begin = Instant::now() + Duration::from_secs(options.warm_up);
        self.tell("go").await?;
        self.follow(&mut record, begin).await?;
        let (from, before) = (now(), observer.statements().await?);
        self.follow(&mut record, begin + Duration::from_secs(options.seconds)).await?;
        record.window = (from, now());
        record.statements = observer.since(before).await?;
        Ok(record)
    }

    /// Records the reports until then, and forwards grants to the processes.
    async fn follow(&mut self, record: &mut Record, until: Instant) -> Result<(), Error> {
        while let Ok(word) = timeout_at(until, self.words.recv()).await {
            let (process, word) = word.ok_or("the processes are gone")?;
            if let Some(token) = record.add(process, word?)? {
                self.tell(&format!("granted {token}")).await?;
            }
        }
        Ok(())
    }

    /// Stops all processes, and records their remaining reports.
    async fn end(mut self, mut record: Record) -> Result<Record, Error> {
        for (_, stdin) in &mut self.children {
            drop(stdin.take());
        }
        let rest = async {
            while let Some((process, word)) = self.words.recv().await {
                record.add(process, word?)?;
            }
            for (child, _) in &mut self.children {
                let status = child.wait().await?;
                if !status.success() {
                    return Err(format!("a process failed: {status}").into());
                }
            }
            Ok::<_, Error>(())
        };
        timeout(PATIENCE, rest).await??;
        Ok(record)
    }
}

async fn listen(process: usize, stdout: ChildStdout, sender: mpsc::Sender<(usize, Result<Word, Error>)>) {
    let mut lines = BufReader::new(stdout).lines();
    loop {
        let word = match lines.next_line().await {
            Ok(Some(line)) => serde_json::from_str(&line).map_err(Into::into),
            Ok(None) => return,
            Err(error) => Err(error.into()),
        };
        if sender.send((process, word)).await.is_err() {
            return;
        }
    }
}

/// The results of the sequence of holders.
#[derive(Debug, Default, PartialEq, Eq)]
struct Findings {
    all: usize,
    counted: Vec<i64>,
    longest: i64,
    /// How many times two held the key at once.
    overlaps: usize,
    /// How many times, within one process, a task that asked earlier by more than [`UNNOTICED`] was
    /// served later.
    overtaken: usize,
}

fn find(setup: Setup, record: &Record) -> Findings {
    let mut found = Findings::default();
    let (from, to) = record.window;
    let holders: Vec<Holder> = record.holders.values().copied().collect();
    for pair in holders.windows(2) {
        let [last, next] = [pair[0], pair[1]];
        let Some(released) = last.released else { continue };
        found.overlaps += usize::from(next.acquired < released);
        if next.acquired < from || next.acquired > to {
            continue;
        }
        found.all += 1;
        // A task that asks after the release finds the key free.
        if next.asked < released && (setup.processes == 1 || last.process != next.process) {
            found.counted.push(next.acquired - released);
        }
    }
    for process in 0..setup.processes {
        let own: Vec<Holder> = holders.iter().copied().filter(|holder| holder.process == process).collect();
        found.overtaken += own.windows(2).filter(|pair| pair[1].asked + UNNOTICED < pair[0].asked).count();
    }
    let served = holders.iter().filter(|holder| holder.acquired >= from).map(|holder| holder.acquired - holder.asked);
    let unserved = record.waiting.iter().map(|asked| (to - asked).max(0));
    found.longest = served.chain(unserved).max().unwrap_or_default();
    found
}

fn show(setup: Setup, record: &Record) {
    let found = find(setup, record);
    let each = match record.statements {
        Some(count) if found.all > 0 => format!("{:.2}", count as f64 / found.all as f64),
        _ => "-".to_owned(),
    };
    let summary = Summary::of(found.counted);
    println!(
        "{:<9}{:<6}{:>5}{:>8}{:>6}{:>7}{:>7}{summary}{:>11}{:>11.2}",
        setup.kind.name(),
        if setup.fair { "fair" } else { "-" },
        setup.hold_ms,
        setup.waiters,
        setup.processes,
        found.all,
        summary.count(),
        each,
        millis(found.longest),
    );
    if found.overlaps > 0 || found.overtaken > 0 {
        println!("  WRONG: {} overlaps, {} overtaken within a process", found.overlaps, found.overtaken);
    }
    let _ = std::io::stdout().flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(holders: &[(usize, i64, i64, i64)]) -> Record {
        let holder =
            |&(process, asked, acquired, released)| Holder { process, asked, acquired, released: Some(released) };
        let holders = (1..).zip(holders.iter().map(holder)).collect();
        Record { holders, window: (0, 1000), ..Record::default() }
    }

    fn across(processes: usize) -> Setup {
        Setup { kind: Kind::Sqlite, fair: false, processes, waiters: 2, hold_ms: 5 }
    }

    #[test]
    fn only_hand_overs_to_another_process_that_waited_are_counted() {
        let record = record(&[(0, 0, 10, 20), (1, 5, 27, 40), (1, 30, 42, 50), (0, 55, 60, 70)]);
        let found = find(across(2), &record);
        assert_eq!((found.all, found.counted, found.overlaps), (3, vec![7], 0));
        assert_eq!(find(across(1), &record).counted, vec![7, 2]);
    }

    #[test]
    fn two_holders_at_once_are_told() {
        assert_eq!(find(across(2), &record(&[(0, 0, 10, 20), (1, 5, 15, 40)])).overlaps, 1);
    }

    #[test]
    fn a_waiter_served_after_later_ones_is_reported() {
        let late = record(&[(0, 30_000_000, 10, 20), (0, 1_000_000, 30, 40)]);
        assert_eq!(find(across(1), &late).overtaken, 1);
        assert_eq!(find(across(2), &record(&[(0, 30_000_000, 10, 20), (1, 1_000_000, 30, 40)])).overtaken, 0);
    }
}
