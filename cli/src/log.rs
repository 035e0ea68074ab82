//! The program's log, on stderr: events of the library and of jobs, as text or as JSON.

use std::{
    collections::HashMap,
    fmt::Debug,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use tracing::{
    Event, Level, Metadata,
    callsite::Identifier,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer as _,
    filter::{FilterExt as _, LevelFilter, Targets, filter_fn},
    layer::{Context, Filter, SubscriberExt as _},
    registry,
    util::SubscriberInitExt as _,
};

use crate::out;

/// What has failed for a while, and works again.
const RECOVERED: &str = "rowlock::recovered";
/// How often a warning of something that is tried again is written.
const SELDOM: Duration = Duration::from_secs(60);

/// Lets a warning of each attempt at something pass once a minute, whatever it concerns: while a
/// database is away, each run and each lease has the same cause. What is said once for a failure,
/// and "tried until" it is over, passes.
#[derive(Default)]
struct Seldom(Mutex<HashMap<Identifier, Instant>>);

impl<S> Filter<S> for Seldom {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let (now, mut last) = (Instant::now(), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        if event.metadata().target() == RECOVERED {
            // What fails after that is another failure.
            last.clear();
        }
        let mut retries = Retries(false);
        event.record(&mut retries);
        if *event.metadata().level() != Level::WARN || !retries.0 {
            return true;
        }
        let before = last.get(&event.metadata().callsite()).copied();
        let passes = before.is_none_or(|before| now.duration_since(before) >= SELDOM);
        if passes {
            last.insert(event.metadata().callsite(), now);
        }
        passes
    }
}

/// Whether the message of an event is that of one attempt of several.
struct Retries(bool);

impl Visit for Retries {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            let text = format!("{value:?}");
            self.0 = text.ends_with("trying again") || text.ends_with("the wait continues");
        }
    }
}

/// The runs of `cron`.
pub const RUNS: &str = "rowlock::cron";
/// What operators change on the command line.
const OPERATOR: &str = "rowlock::operator";

#[derive(Debug, Args)]
pub struct LogArguments {
    /// Print events on stderr; twice: all events
    #[arg(long, short, action = clap::ArgAction::Count, global = true, conflicts_with = "log_level")]
    pub verbose: u8,
    /// The events on stderr: a level (error, warn, info, debug, trace, off), also for a part, such
    /// as warn,rowlock::cron=off [default: warn, and info of
    /// rowlock::cron, rowlock::operator and rowlock::recovered]
    #[arg(long, value_name = "LEVELS", value_parser = levels, global = true)]
    pub log_level: Option<Targets>,
    /// How stderr is written; as JSON, each line is an object, also what commands of `cron` write
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Text, global = true)]
    pub log_format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// Reads levels. One without a part is that of the program and the library, not of the driver,
/// which repeats parts of the URL.
fn levels(text: &str) -> Result<Targets, String> {
    let part = |part: &str| {
        let (target, level) = part.split_once('=').unwrap_or(("rowlock", part));
        let wrong = |_| format!("{part:?} has no level; write it like info, or warn,rowlock::cron=off");
        level.trim().parse::<LevelFilter>().map(|level| (target.trim().to_owned(), level)).map_err(wrong)
    };
    text.split(',').map(part).collect()
}

/// Sends events to stderr.
pub fn init(arguments: &LogArguments) {
    let of = |level: Level| Targets::new().with_target("rowlock", level);
    let levels = arguments.log_level.clone().unwrap_or_else(|| match arguments.verbose {
        // A forced release is a warning for an application, but not for the user who has just
        // requested it.
        0 => {
            let levels = of(Level::WARN).with_target("rowlock::lease::admin", Level::ERROR);
            [RUNS, OPERATOR, RECOVERED].into_iter().fold(levels, |levels, part| levels.with_target(part, Level::INFO))
        }
        1 => of(Level::INFO),
        _ => of(Level::DEBUG),
    });
    let lines = tracing_subscriber::fmt::layer().with_writer(|| out::Stderr).with_ansi(false);
    // A stderr that cannot be written must not cause a panic.
    let lines = lines.log_internal_errors(false);
    // An event says by itself what it concerns.
    let levels = filter_fn(|metadata| metadata.is_event()).and(levels).and(Seldom::default());
    match arguments.log_format {
        Format::Text => registry().with(lines.with_filter(levels)).init(),
        Format::Json => {
            out::write_objects();
            registry().with(lines.json().flatten_event(true).with_filter(levels)).init();
        }
    }
}
