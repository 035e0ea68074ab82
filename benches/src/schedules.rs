//! Schedules: the statements and the rate of runs with nothing to do, the cost of idling, how long
//! after its tick a run starts while processes are killed, and a run beside a cycle of the lock.

use std::{
    collections::BTreeMap,
    process::Stdio,
    time::{Duration, SystemTime},
};

use clap::Args;
use rowlock::admin::RunStatus;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, Command},
    sync::mpsc,
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    contender::URL,
    database::{Kind, Observer, Site, at_own_site, on, patient_pool, pool},
    durability,
    error::Error,
    options::{Databases, seconds},
    report::shown,
    speak::{Speak, fill},
    statistics::{Summary, millis, ratio},
    ticker::{Job, Word},
};

/// How long processes may take to begin, and to end.
const PATIENCE: Duration = Duration::from_secs(120);
/// Schedules that are due again at once.
const BUSY: usize = 200;
/// The schedules of the part with kills.
const TICKING: usize = 20;
/// After this time, an instance no longer reads all rows at each of its heartbeats.
const SETTLED: Duration = Duration::from_secs(25);
/// The pause between two ticks of those, in milliseconds.
const EACH_MS: i64 = 1_000;
/// The most schedules of one process.
const MOST: usize = 10_000;
/// A slot that is not reached, in seconds since 1970: the year 2099.
const FAR: i64 = 4_070_908_800;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    on: Databases,
    /// How long each part is, in seconds.
    #[arg(long, default_value = "5", value_parser = seconds)]
    seconds: Duration,
    /// How long the part with kills is, in seconds.
    #[arg(long, default_value = "20", value_parser = seconds)]
    kills: Duration,
    /// The pause between two kills, in seconds.
    #[arg(long, default_value = "0.8", value_parser = seconds)]
    every: Duration,
    /// How many processes run the schedules.
    #[arg(long, default_value_t = 8)]
    workers: usize,
    /// How many schedules there are while nothing is due.
    #[arg(long, value_delimiter = ',', default_values_t = [20, 20_000])]
    idle: Vec<usize>,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let Options { workers, every, .. } = options;
    println!(
        "{workers} processes. statements a run: of all of them, with their looks, renewals and transactions, as the server counts them (of the whole server on MySQL and MariaDB; SQLite counts none)."
    );
    println!("run/cycle: the rate of one schedule in one process, to that of acquire and release by one task.");
    println!(
        "start: from the tick to the first start of its work, in ms, of {TICKING} schedules a second beside a SIGKILL every {every:?}."
    );
    for (kind, server) in options.on.servers() {
        on!(kind, measure(kind, &server, options))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options) -> Result<(), Error> {
    at_own_site::<DB>(server, async |site| {
        durability::show::<DB>(kind, site).await?;
        let (workers, time) = (options.workers, options.seconds);
        let many = busy::<DB>(kind, site, (BUSY, workers), time).await?;
        let statements = many.statements.and_then(|count| ratio(count as f64, many.runs as f64));
        println!("runs a second: {:.0}; statements a run: {}", many.per_second(many.runs), shown(statements, 2));
        let one = busy::<DB>(kind, site, (1, 1), time).await?;
        let cycles = cycles::<DB>(kind, site, time).await?;
        println!(
            "one schedule: {:.0} runs a second; lock: {:.0} cycles; run/cycle {:.2}",
            one.per_second(one.runs),
            cycles.per_second(cycles.runs),
            one.per_second(one.runs) / cycles.per_second(cycles.runs)
        );
        // SQLite counts no statements.
        for &schedules in options.idle.iter().filter(|_| kind != Kind::Sqlite) {
            let idle = idle::<DB>(kind, site, schedules, options).await?;
            let rate = idle.statements.map(|count| idle.per_second(count));
            println!("idle with {schedules}: {} statements a second", shown(rate, 1));
        }
        beside_kills::<DB>(kind, site, options).await
    })
    .await
}

/// What all processes counted within a time.
struct Counted {
    runs: i64,
    statements: Option<i64>,
    time: Duration,
}

impl Counted {
    fn per_second(&self, count: i64) -> f64 {
        count as f64 / self.time.as_secs_f64()
    }
}

/// Replaces all schedules by these, with this slot in seconds since 1970.
async fn refill<DB: Speak>(kind: Kind, site: &Site, job: Job, count: usize, slot: i64) -> Result<(), Error> {
    let pool = patient_pool::<DB>(&site.url, 1).await?;
    for table in ["t_resource_schedule", "t_resource_schedule_run"] {
        DB::script(&pool, format!("DELETE FROM {table}")).await?;
    }
    let spec = match job {
        Job::Busy => "every 100ms",
        Job::Idle => "every 86400s",
        Job::Ticking | Job::Cycles => "every 1s",
    };
    let slot = match kind {
        Kind::Sqlite => format!("{slot} * 1000000"),
        Kind::Postgres => format!("to_timestamp({slot})"),
        Kind::Mysql | Kind::Mariadb => format!("'1970-01-01' + INTERVAL {slot} SECOND"),
    };
    let rows = (0..count).map(|number| format!("('s{number}', '{spec}', 'UTC', {slot}, {slot})"));
    fill(&pool, "t_resource_schedule (name, spec, zone, slot, due_at)", rows).await?;
    pool.close().await;
    Ok(())
}

/// Runs with nothing to do, of schedules with more ticks behind them than are run in this time.
async fn busy<DB: Speak>(
    kind: Kind,
    site: &Site,
    (schedules, workers): (usize, usize),
    time: Duration,
) -> Result<Counted, Error> {
    let now = i64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs())?;
    let mut total = Counted { runs: 0, statements: Some(0), time: Duration::ZERO };
    // One schedule catches up on at most a thousand ticks.
    let parts = if schedules == 1 { time.as_secs().max(1) } else { 1 };
    for _ in 0..parts {
        refill::<DB>(kind, site, Job::Busy, schedules, now - 90).await?;
        let mut crew = Crew::start(kind, site, Job::Busy, &vec![(0, schedules); workers]).await?;
        let counted = crew
            .counted::<DB>(Duration::from_millis(100), time / u32::try_from(parts)? / if parts > 1 { 4 } else { 1 });
        let counted = counted.await?;
        crew.end().await?;
        total.runs += counted.runs;
        total.statements = total.statements.zip(counted.statements).map(|(sum, more)| sum + more);
        total.time += counted.time;
    }
    Ok(total)
}

async fn cycles<DB: Speak>(kind: Kind, site: &Site, time: Duration) -> Result<Counted, Error> {
    let mut crew = Crew::start(kind, site, Job::Cycles, &[(0, 0)]).await?;
    let counted = crew.counted::<DB>(Duration::from_millis(300), time).await?;
    crew.end().await?;
    Ok(counted)
}

/// Nothing is due. A process knows at most [`MOST`] schedules, so of more each knows a part.
async fn idle<DB: Speak>(kind: Kind, site: &Site, schedules: usize, options: &Options) -> Result<Counted, Error> {
    refill::<DB>(kind, site, Job::Idle, schedules, FAR).await?;
    let parts = schedules.div_ceil(MOST);
    let part = |worker: usize| (worker % parts * MOST, schedules.min((worker % parts + 1) * MOST));
    let known: Vec<(usize, usize)> = (0..options.workers).map(part).collect();
    let mut crew = Crew::start(kind, site, Job::Idle, &known).await?;
    let counted = crew.counted::<DB>(SETTLED, 2 * options.seconds).await?;
    crew.end().await?;
    Ok(counted)
}

/// A process is killed and replaced again and again.
async fn beside_kills<DB: Speak>(kind: Kind, site: &Site, options: &Options) -> Result<(), Error> {
    let now = i64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs())?;
    refill::<DB>(kind, site, Job::Ticking, TICKING, now + 4).await?;
    let mut crew = Crew::start(kind, site, Job::Ticking, &vec![(0, TICKING); options.workers]).await?;
    let (mut starts, mut kills) = (BTreeMap::<_, Vec<i64>>::new(), 0);
    let until = Instant::now() + options.kills;
    let mut kill_at = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        if let Ok(Some(word)) = timeout_at(kill_at.min(until), crew.words.recv()).await {
            if let Word::Begins { schedule, slot, late } = word? {
                starts.entry((schedule, slot)).or_default().push(late * 1_000);
            }
            continue;
        }
        let victim = fastrand::usize(..crew.children.len());
        crew.kill(victim).await?;
        crew.add((0, TICKING)).await?;
        kills += 1;
        // Not in step with the ticks.
        kill_at += options.every.mul_f64(0.5 + fastrand::f64());
    }
    // What is under way is finished.
    sleep(Duration::from_secs(3)).await;
    crew.end().await?;
    let (ticks, succeeded) = history::<DB>(site).await?;
    let hit = |of: &(usize, i64)| starts.get(of).is_some_and(|starts| starts.len() > 1);
    // The tick after one whose run was killed waits for the lease of that run.
    let (behind, others): (Vec<_>, Vec<_>) =
        starts.iter().partition(|((schedule, slot), _)| hit(&(*schedule, slot - EACH_MS)));
    let first = |starts: Vec<(&(usize, i64), &Vec<i64>)>| Summary::of(starts.iter().map(|(_, late)| late[0]).collect());
    let (hits, behind, others) = (starts.keys().filter(|of| hit(of)).count(), first(behind), first(others));
    let part = |of: &Summary, percent| millis(of.percentile(percent).unwrap_or_default());
    println!(
        "{kills} kills: start p50 {:.0} ms, p99 {:.0} ms, longest {:.0} ms of {} ticks; {hits} runs were killed, and {} ticks waited for their leases, at most {:.0} ms; {ticks} ticks ended, {succeeded} succeeded once",
        part(&others, 50),
        part(&others, 99),
        part(&others, 100),
        others.count(),
        behind.count(),
        part(&behind, 100),
    );
    Ok(())
}

/// Returns how many slots the history has from the first to the last of each schedule, and how many
/// of them succeeded exactly once.
async fn history<DB: Speak>(site: &Site) -> Result<(i64, usize), Error> {
    let schedules = rowlock::Schedules::new(pool::<DB>(&site.url, 1).await?).share_pool();
    let (mut slots, mut once) = (0, 0);
    for number in 0..TICKING {
        let mut succeeded: BTreeMap<i64, usize> = BTreeMap::new();
        for run in schedules.history(&format!("s{number}"), 100_000).await? {
            *succeeded.entry(run.slot.timestamp()).or_default() += usize::from(run.status == RunStatus::Succeeded);
        }
        // A tick that was killed at the end has no success yet.
        while succeeded.last_entry().is_some_and(|last| *last.get() == 0) {
            succeeded.pop_last();
        }
        let (first, last) = (succeeded.keys().next(), succeeded.keys().next_back());
        slots += first.zip(last).map_or(0, |(first, last)| last - first + 1);
        once += succeeded.values().filter(|count| **count == 1).count();
    }
    Ok((slots, once))
}

/// The processes of one measurement.
struct Crew<'a> {
    kind: Kind,
    site: &'a Site,
    job: Job,
    children: Vec<(Child, Option<ChildStdin>)>,
    sender: mpsc::Sender<Result<Word, Error>>,
    words: mpsc::Receiver<Result<Word, Error>>,
}

impl<'a> Crew<'a> {
    async fn start(kind: Kind, site: &'a Site, job: Job, known: &[(usize, usize)]) -> Result<Self, Error> {
        eprintln!("schedules {}: {job:?}, {} processes", kind.name(), known.len());
        let (sender, words) = mpsc::channel(10_000);
        let mut crew = Self { kind, site, job, children: Vec::new(), sender, words };
        for &known in known {
            crew.add(known).await?;
        }
        let mut ready = 0;
        while ready < known.len() {
            ready += usize::from(crew.next().await? == Word::Ready);
        }
        Ok(crew)
    }

    async fn next(&mut self) -> Result<Word, Error> {
        timeout(PATIENCE, self.words.recv()).await?.ok_or("the processes are gone")?
    }

    async fn add(&mut self, (from, to): (usize, usize)) -> Result<(), Error> {
        let job = match self.job {
            Job::Busy => "busy",
            Job::Idle => "idle",
            Job::Ticking => "ticking",
            Job::Cycles => "cycles",
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["ticker", "--database", self.kind.name(), "--job", job, "--from", &from.to_string()]);
        command.args(["--to", &to.to_string()]).env(URL, &self.site.url);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().ok_or("a pipe")?);
        let sender = self.sender.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stdout).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if sender.send(serde_json::from_str(&line).map_err(Into::into)).await.is_err() {
                    return;
                }
            }
        });
        self.children.push((child, stdin));
        Ok(())
    }

    async fn kill(&mut self, place: usize) -> Result<(), Error> {
        let (mut child, _) = self.children.remove(place);
        Ok(child.kill().await?)
    }

    /// How many runs have begun so far.
    async fn runs(&mut self) -> Result<i64, Error> {
        for (_, stdin) in &mut self.children {
            stdin.as_mut().ok_or("a pipe")?.write_all(b"count\n").await?;
        }
        let mut runs = 0;
        for _ in 0..self.children.len() {
            let Word::Counted { runs: more } = self.next().await? else {
                return Err("a process does not count".into());
            };
            runs += more;
        }
        Ok(runs)
    }

    async fn counted<DB: Speak>(&mut self, warm_up: Duration, time: Duration) -> Result<Counted, Error> {
        let observer = Observer::<DB>::new(self.site).await?;
        sleep(warm_up).await;
        let (begun, runs, statements) = (Instant::now(), self.runs().await?, observer.statements().await?);
        sleep(time).await;
        let (runs, statements) = (self.runs().await? - runs, observer.since(statements).await?);
        Ok(Counted { runs, statements, time: begun.elapsed() })
    }

    async fn end(mut self) -> Result<(), Error> {
        for (child, stdin) in &mut self.children {
            drop(stdin.take());
            timeout(PATIENCE, child.wait()).await??;
        }
        Ok(())
    }
}
