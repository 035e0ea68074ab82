//! `rowlock cron`: the jobs of a file, until the program is asked to stop.

use std::{path::Path, sync::Arc, time::Duration};

use rowlock::{Database, Schedules, Tick, jobs::Running};
use sqlx::Pool;
use tokio::{
    signal::unix::{Signal as Signals, SignalKind},
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    args::schedules::Cron,
    database::{Source, lock_of_schedules},
    exit::{self, Failure},
    format::brief,
    out,
    process::{
        descendants, service,
        signals::{listen, received},
    },
    schedule::{
        command::{self, Shared},
        file::{self, Jobs},
        job::{self, DATABASE},
    },
};

/// The pause before another attempt if the database failed.
const AGAIN: Duration = Duration::from_secs(5);
/// The pause before another look for commands that this machine cannot run.
const LOOK: Duration = Duration::from_secs(60);
/// How many commands run at the same time, unless the arguments or the file say so.
const MAX_CONCURRENT_RUNS: u32 = 32;

/// Opens the database, and waits until that is possible. An error that does not pass by itself is
/// returned, as is one of the file.
pub async fn open_when_available<T>(cron: &Cron, open: impl AsyncFn() -> Result<T, Failure>) -> Result<T, Failure> {
    // A pipe is empty when it is read again.
    if std::fs::metadata(&cron.file).is_ok_and(|found| !found.is_file()) {
        let text = format_args!("{}: it is no regular file, and could not be read again", cron.file.display());
        return Err(Failure::new(exit::USAGE, text));
    }
    file::read(&cron.file)?;
    let mut signals = CronSignals::listen()?;
    service::begins("it waits for the database");
    tokio::spawn(service::go_on());
    tokio::select! {
        biased;
        _ = signals.stop.received() => Err(Failure::silent(exit::OK)),
        opened = until_it_passes(open) => opened,
    }
}

/// Repeats what fails for a reason that may pass, and says so once for each reason.
async fn until_it_passes<T>(mut what: impl AsyncFnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let mut said = String::new();
    loop {
        match what().await {
            Err(failure) if failure.passes => {
                let why = failure.to_string();
                if why != said {
                    out::print_warning(format_args!("{why}; trying again every {AGAIN:?}"));
                    said = why;
                }
                sleep(AGAIN).await;
            }
            done => return done,
        }
    }
}

pub async fn run<DB: Database>(pool: Pool<DB>, source: Arc<Source>, cron: Cron) -> Result<u8, Failure> {
    out::never_stop();
    descendants::become_subreaper();
    let mut signals = CronSignals::listen()?;
    tokio::spawn(bury(signals.children));
    let jobs = tokio::select! {
        jobs = read(&cron.file) => jobs?,
        _ = signals.stop.received() => return Ok(exit::OK),
    };
    #[cfg(feature = "ui")]
    if let Some(address) = cron.listen {
        crate::ui::serve_numbers(pool.clone(), address, cron.metrics_token_file.as_deref()).await?;
    }
    let (stop, commands) = (CancellationToken::new(), TaskTracker::new());
    let mut instance = Instance {
        pool,
        cron: &cron,
        ordered: CancellationToken::new(),
        shared: Shared { source, stop_timeout: cron.stop_timeout, stop, commands },
        works: TaskTracker::new(),
        jobs: Jobs::default(),
        running: None,
        ending: JoinSet::new(),
        failed: String::new(),
    };
    tokio::select! {
        started = until_it_passes(async || instance.start(jobs.clone()).await) => started?,
        _ = signals.stop.received() => return Ok(exit::OK),
    }
    if signals.hang_up.is_none() {
        out::print_info("SIGHUP is ignored, as nohup does: the file is not read again");
    }
    let mut look = instance.looks_again_at();
    // `None`: nothing has changed.
    let mut reading: JoinSet<Option<Result<Jobs, Failure>>> = JoinSet::new();
    let why = loop {
        tokio::select! {
            signal = signals.stop.received() => break signal,
            () = instance.ordered.cancelled() => {
                break "an operator has ordered that this instance ends";
            }
            () = received(&mut signals.hang_up) => {
                // What is read later is newer, and is answered.
                (reading, look) = (JoinSet::new(), None);
                instance.failed.clear();
                let read = read(&cron.file);
                reading.spawn(async { Some(read.await) });
            }
            () = until(look) => {
                look = None;
                reading.spawn(look_again(instance.jobs.clone()));
            }
            Some(Ok(jobs)) = reading.join_next() => {
                let failed = tokio::select! {
                    failed = async { instance.replace(jobs?).await } => failed,
                    signal = signals.stop.received() => break signal,
                };
                look = if failed.is_some() { None } else { instance.looks_again_at() };
                if let Some(jobs) = failed {
                    reading.spawn(async { sleep(AGAIN).await; Some(Ok(jobs)) });
                }
            }
            Some(_) = instance.ending.join_next() => {}
        }
    };
    instance.say_end(why);
    instance.end(signals.stop).await;
    Ok(exit::OK)
}

/// Waits for orphans of commands, as long as the program runs.
async fn bury(mut children: Option<Signals>) {
    loop {
        received(&mut children).await;
        command::reap_orphans();
    }
}

/// Waits until then, if there is such a time.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Reads the file, and looks for its commands, in another thread: leases are renewed, and signals
/// handled, though a network file system does not reply.
fn read(file: &Path) -> impl Future<Output = Result<Jobs, Failure>> + use<> {
    let file = file.to_owned();
    async move {
        let jobs = spawn_blocking(move || file::read(&file)).await;
        jobs.unwrap_or_else(|error| Err(Failure::new(exit::USAGE, format_args!("the file was not read: {error}"))))
    }
}

/// Looks for the commands of jobs once more. Returns the jobs if this machine can run others now.
async fn look_again(jobs: Jobs) -> Option<Result<Jobs, Failure>> {
    let mut now = jobs.clone();
    let now = spawn_blocking(move || {
        now.look_for_commands();
        now
    });
    let now = now.await.ok()?;
    now.unable().ne(jobs.unable()).then_some(Ok(now))
}

/// The signals of `rowlock cron`.
struct CronSignals {
    /// The program has to wait for the orphans of its commands.
    children: Option<Signals>,
    stop: Stop,
    hang_up: Option<Signals>,
}

struct Stop {
    terminate: Option<Signals>,
    interrupt: Option<Signals>,
}

impl CronSignals {
    fn listen() -> Result<Self, Failure> {
        let children = listen(SignalKind::child())?;
        // Ctrl-Z would suspend this program alone: the commands would go on without renewals. A
        // signal that was listened for once keeps its handler.
        listen(SignalKind::from_raw(rustix::process::Signal::TSTP.as_raw()))?;
        let (terminate, interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        Ok(Self { children, stop: Stop { terminate, interrupt }, hang_up: listen(SignalKind::hangup())? })
    }
}

impl Stop {
    /// Waits for one of the signals, and returns its name.
    async fn received(&mut self) -> &'static str {
        tokio::select! {
            () = received(&mut self.terminate) => "SIGTERM",
            () = received(&mut self.interrupt) => "SIGINT",
        }
    }
}

/// The jobs that run.
struct Instance<'a, DB: Database> {
    pool: Pool<DB>,
    cron: &'a Cron,
    /// An operator has ordered that the instance ends, or one of before a reload.
    ordered: CancellationToken,
    shared: Shared,
    /// The work of each job counts, so that none is left when no instance of the library is.
    works: TaskTracker,
    /// The file whose jobs run.
    jobs: Jobs,
    running: Option<Running>,
    /// The jobs of earlier files, whose runs end.
    ending: JoinSet<()>,
    /// Why the last reload failed.
    failed: String,
}

impl<DB: Database> Instance<'_, DB> {
    /// Starts jobs, and lets those of before end.
    ///
    /// Those of before leave when the new ones are there: they see then which jobs have gone from
    /// the file, and nothing stops if the new ones cannot start. Other times of a job apply at the
    /// next beat.
    async fn start(&mut self, jobs: Jobs) -> Result<(), Failure> {
        let started = self.schedules(&jobs)?.start().await?;
        let changes = if self.running.is_some() { jobs.changes_since(&self.jobs) } else { String::new() };
        self.let_end();
        let (drained, ordered) = (started.drained(), self.ordered.clone());
        tokio::spawn(async move {
            drained.await;
            ordered.cancel();
        });
        self.running = Some(started);
        out::print_info(format_args!("{jobs}{changes}"));
        service::does(&jobs.to_string());
        for why in jobs.unable() {
            out::print_warning(format_args!(
                "{why}; other machines run the job, and this machine checks again every {LOOK:?}"
            ));
        }
        jobs.open_to().chain(jobs.warnings()).for_each(out::print_warning);
        self.jobs = jobs;
        Ok(())
    }

    /// Returns when the commands are looked for again that this machine cannot run.
    fn looks_again_at(&self) -> Option<Instant> {
        self.jobs.unable().next().map(|_| Instant::now() + LOOK)
    }

    fn schedules(&self, jobs: &Jobs) -> Result<Schedules<DB>, Failure> {
        let Cron { label, build, max_concurrent_runs, .. } = self.cron;
        let max_concurrent_runs = max_concurrent_runs.or(jobs.max_concurrent_runs).unwrap_or(MAX_CONCURRENT_RUNS);
        let mut schedules = Schedules::new(self.pool.clone()).max_concurrent_runs(max_concurrent_runs);
        if let Some(running) = &self.running {
            schedules = schedules.in_place_of(running);
        }
        if let Some(label) = label {
            schedules = schedules.label(label);
        }
        if let Some(build) = build {
            schedules = schedules.build(build);
        }
        if let Some(lock) = lock_of_schedules(&self.pool, label.as_deref())? {
            schedules = schedules.lock(lock);
        }
        for name in &jobs.removed {
            schedules = schedules.removed(name.as_str());
        }
        for job in jobs.jobs.iter().filter(|job| job.unable.is_none()) {
            let (job, shared, works) = (Arc::new(job.clone()), self.shared.clone(), self.works.token());
            let schedule = job.schedule.clone().description(&job.about());
            schedules = schedules.on(schedule, move |tick: Tick<DB>| {
                let (job, shared, works) = (job.clone(), shared.clone(), works.clone());
                async move {
                    let result = job::run(job, tick, shared).await;
                    drop(works);
                    result
                }
            });
        }
        Ok(schedules)
    }

    /// Claims nothing more for the jobs that run, and lets their runs end.
    fn let_end(&mut self) {
        if let Some(running) = self.running.take() {
            self.ending.spawn(async { _ = running.shutdown(Duration::MAX).await });
        }
    }

    /// Replaces the jobs by those of the file that was read again. If that fails, the runs and the
    /// commands stay as they are. Returns the jobs if it has to be done again: the database failed,
    /// and may have some of the new times.
    async fn replace(&mut self, jobs: Result<Jobs, Failure>) -> Option<Jobs> {
        let (failed, jobs) = match jobs {
            Ok(jobs) => (self.start(jobs.clone()).await.err(), Some(jobs)),
            Err(wrong) => (Some(wrong), None),
        };
        let Some(failure) = failed else {
            self.failed.clear();
            return None;
        };
        // The tables may have no room for what the file names.
        let Some(jobs) = jobs.filter(|_| failure.code != exit::USAGE) else {
            out::print_error(format_args!("{failure}; the jobs stay as they were"));
            return None;
        };
        let failed = failure.to_string();
        if failed != self.failed {
            out::print_warning(format_args!("{failed}; trying again every {AGAIN:?}"));
        }
        self.failed = failed;
        Some(jobs)
    }

    /// How long runs may go on at the end of the program.
    fn drain(&self) -> Duration {
        self.cron.drain.unwrap_or(self.cron.stop_timeout)
    }

    /// Says why the program ends, and what it waits for.
    fn say_end(&self, why: &str) {
        let runs = match self.shared.commands.len() {
            0 => return out::print_info(format_args!("stopping ({why})")),
            1 => "1 run".to_owned(),
            runs => format!("{runs} runs"),
        };
        out::print_info(format_args!("stopping ({why}): {runs} may continue for {}", brief(self.drain())));
    }

    /// Lets runs end for a while, then stops their commands and hands them back. Another signal
    /// ends the while.
    async fn end(mut self, mut signals: Stop) {
        service::ends("it waits for its commands");
        self.let_end();
        let mut drain = std::pin::pin!(sleep(self.drain()));
        let (Shared { stop, commands, .. }, works, mut ending) = (self.shared, self.works, self.ending);
        let ended = tokio::select! {
            () = async { while ending.join_next().await.is_some() {} } => true,
            () = &mut drain => false,
            _ = signals.received() => false,
        };
        if !ended {
            stop.cancel();
            out::print_info("stopping commands; other instances run their ticks again");
        }
        // The leases are renewed until the commands have stopped. Runs that were lost have commands
        // too.
        commands.close();
        // What follows the last runs goes on for the rest of the drain.
        tokio::select! {
            () = commands.wait() => {}
            () = drain, if ended => {}
            _ = signals.received(), if ended => {}
        }
        stop.cancel();
        commands.wait().await;
        ending.shutdown().await;
        works.close();
        if timeout(DATABASE, works.wait()).await.is_err() {
            out::print_error("runs were not handed back; their leases end by themselves");
        }
    }
}
