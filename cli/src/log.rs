//! The program's log, on stderr: events of the library and of jobs, as text or as JSON.

use clap::{Args, ValueEnum};
use tracing::Level;
use tracing_subscriber::{
    Layer as _,
    filter::{FilterExt as _, LevelFilter, Targets, filter_fn},
    layer::SubscriberExt as _,
    registry,
    util::SubscriberInitExt as _,
};

use crate::out;

/// The runs of `cron`.
pub const RUNS: &str = "rowlock::cron";

#[derive(Debug, Args)]
pub struct LogArguments {
    /// Print events on stderr; twice: all events
    #[arg(long, short, action = clap::ArgAction::Count, global = true, conflicts_with = "log_level")]
    pub verbose: u8,
    /// The events on stderr: a level (error, warn, info, debug, trace, off), also for a part, such
    /// as warn,rowlock::cron=off [default: warn,rowlock::cron=info]
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
        0 => of(Level::WARN).with_target("rowlock::lease::admin", Level::ERROR).with_target(RUNS, Level::INFO),
        1 => of(Level::INFO),
        _ => of(Level::DEBUG),
    });
    let lines = tracing_subscriber::fmt::layer().with_writer(|| out::Stderr).with_ansi(false);
    // A stderr that cannot be written must not cause a panic.
    let lines = lines.log_internal_errors(false);
    // An event says by itself what it concerns.
    let levels = filter_fn(|metadata| metadata.is_event()).and(levels);
    match arguments.log_format {
        Format::Text => registry().with(lines.with_filter(levels)).init(),
        Format::Json => {
            out::write_objects();
            registry().with(lines.json().flatten_event(true).with_filter(levels)).init();
        }
    }
}
