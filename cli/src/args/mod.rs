//! The command line.

pub mod claims;
pub mod keys;
pub mod process;
pub mod schedules;
pub mod source;
pub mod values;

use std::{path::PathBuf, sync::LazyLock, time::Duration};

use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, parser::ValueSource};
use clap_complete::Shell;
use rowlock::{Key, Schedule};

use crate::{
    args::{
        claims::{Hold, Lead, Leader, Run, Terms},
        keys::{Changes, List, MinInterval, Release, Renew, Show, Watch},
        process::{Stub, Supervise},
        schedules::{Cron, Instances, Named, Next, Runs, Trigger, Until},
        source::{Migrate, SourceArguments},
        values::{duration, key},
    },
    log::LogArguments,
};

/// The version of the program, and that of the time zones that it brings.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (time zones {})", env!("CARGO_PKG_VERSION"), Schedule::zones_release()));

const EXITS: &str = "Exit codes: 0 done, 2 bad arguments, 69 database unreachable or failed, 70 tick given up, 73 output cannot be written, 74 claim lost, \
75 refused, 78 table missing or unusable; run: the command's own, 124 after --timeout, 128+n if signal n ended it, 126 not executable, 127 not found.";

const CRON: &str = "Examples: rowlock cron /etc/rowlock/jobs.toml
          rowlock cron --check --next 3 /etc/rowlock/jobs.toml    # runs nothing, and needs no database

A file with one job; each section is a job:

[nightly-report]
cron = \"30 2 * * *\"                           # or: every = \"30s\", after = \"10m\"
zone = \"Europe/Berlin\"                        # default: UTC
command = [\"/opt/app/report\", \"--full\"]       # no shell reads it
retry = 3                                      # default: 0
timeout = \"2h\"                                 # default: none
# Further keys: catch_up, max, grace, backoff, lease, env, path, cwd, user, umask,
# database_url, on_success, on_failure, enabled, exclusive_with, renamed_from, removed,
# jitter, keep_output, description.
# [defaults] has the keys of all jobs.";

/// Scheduled jobs and locks in the SQL database that an application already has: PostgreSQL, MySQL,
/// MariaDB or SQLite.
#[derive(Debug, Parser)]
#[command(name = "rowlock", version = VERSION.as_str(), after_help = EXITS, disable_help_subcommand = true)]
pub struct Arguments {
    #[command(flatten)]
    pub source: SourceArguments,
    #[command(flatten)]
    pub log: LogArguments,
    /// The process that stands before this one on a terminal
    #[arg(long, hide = true)]
    pub behind: Option<i32>,
    #[command(subcommand)]
    pub action: Action,
}

impl Arguments {
    /// Reads the command line and the variables. If they are wrong, the program ends.
    pub fn read() -> Self {
        let mut program = Self::command();
        let matches = program.get_matches_mut();
        Self::of(&matches).unwrap_or_else(|wrong| wrong.format(&mut program).exit())
    }

    fn of(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut arguments = Self::from_arg_matches(matches)?;
        arguments.source.settle(|name| matches.value_source(name) == Some(ValueSource::CommandLine))?;
        Ok(arguments)
    }
}

#[derive(Debug, Subcommand)]
pub enum Action {
    #[command(flatten)]
    OnTables(TableAction),
    /// Examine the database: the connection, tables, rights, clock, pooler and notifications
    #[command(after_help = "Example: rowlock doctor --json")]
    Doctor {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Print the next ticks of a cron pattern; no database is needed
    #[command(after_help = "Example: rowlock next '30 2 * * *' --zone Europe/Berlin")]
    Next(Next),
    /// Print completions for a shell
    #[command(after_help = "Example: rowlock completions bash > /etc/bash_completion.d/rowlock")]
    Completions { shell: Shell },
    /// Write the man pages into a folder, which is created if it does not exist
    #[command(after_help = "Example: rowlock man /usr/local/share/man/man1")]
    Man { folder: PathBuf },
    /// Become a command that dies with its parent
    #[command(hide = true)]
    Exec(Stub),
    /// Run one command of `cron` and stop it with all that it has started
    #[command(hide = true)]
    Supervise(Supervise),
}

/// The actions on the tables of a database.
#[derive(Debug, Subcommand)]
pub enum TableAction {
    /// Create the tables, or add what they lack, and print the statements that did
    #[command(
        after_help = "Examples: rowlock migrate --dry-run    # changes and locks nothing\n          rowlock migrate\n          rowlock migrate --undo --yes"
    )]
    Migrate(Migrate),
    /// Run a command while holding a key, or a tick (a scheduled time) that is due
    #[command(
        after_help = "Examples: rowlock run nightly-report --min-interval 12h -- ./report.sh --all\n          rowlock run nightly-report --cron '30 2 * * *' --zone Europe/Berlin -- ./report.sh"
    )]
    Run(Run),
    /// Wait until this instance leads, run a command while it does, and stop it when it does not
    #[command(after_help = "Example: rowlock lead indexer --lease 10s -- ./indexer --follow")]
    Lead(Lead),
    /// Show which instance leads
    #[command(after_help = "Example: rowlock leader indexer --watch --json")]
    Leader(Leader),
    /// Take a key and print the claim as JSON; it holds until the lease ends, unless it is renewed
    #[command(after_help = "Example: rowlock acquire deploy --lease 10m | jq -r .holder")]
    Acquire {
        /// The key
        #[arg(value_parser = key)]
        key: Key,
        #[command(flatten)]
        terms: Terms,
    },
    /// Hold a key while stdin is open, and print the claim as JSON
    #[command(
        after_help = "Example: coproc rowlock hold deploy; read -r claim <&\"${COPROC[0]}\"    # the key is free when stdin closes"
    )]
    Hold(Hold),
    /// Extend a claim, and print it as JSON
    #[command(after_help = "Example: rowlock renew deploy --holder 0b9f6a52-3a4e-4c58-9d3c-2f1f6f0f7c11 --lease 10m")]
    Renew(Renew),
    /// End a claim: with its holder's id, or by force
    #[command(
        after_help = "Examples: rowlock release deploy --holder 0b9f6a52-3a4e-4c58-9d3c-2f1f6f0f7c11 --status S\n          rowlock release deploy --force"
    )]
    Release(Release),
    /// List keys: who holds what, since when, until when
    #[command(after_help = "Example: rowlock list --claimed")]
    List(List),
    /// Show one key: its claim, how long it lasted, the permits or readers of that name, and the
    /// last runs of the schedule of that name
    #[command(after_help = "Example: rowlock show nightly-report --json")]
    Show(Show),
    /// List what operators changed, the last change first: who, when, and from whom
    #[command(after_help = "Examples: rowlock changes\n          rowlock changes nightly-report --json")]
    Changes(Changes),
    /// Show the list, live
    #[command(after_help = "Example: rowlock watch --claimed")]
    Watch(Watch),
    /// Delete rows of keys that were not used for so long: never one that is held, failed, or
    /// within its minimum interval (the column `time`, an hour at least, and --min-interval); or
    /// old runs, with their output, and old changes of operators
    #[command(
        after_help = "Examples: rowlock forget --older-than 30d\n          rowlock forget --runs --older-than 90d"
    )]
    Forget {
        /// How long ago they were released, or the runs ended, at least
        #[arg(long, value_name = "D", value_parser = duration)]
        older_than: Duration,
        /// Delete the runs of schedules instead, and changes of operators; the last success of each
        /// schedule stays
        #[arg(long, conflicts_with = "min_interval")]
        runs: bool,
        #[command(flatten)]
        judged_by: MinInterval,
    },
    /// Run the jobs of a file at their times, each tick on one of the machines that do so
    #[command(after_help = CRON)]
    Cron(Cron),
    /// List schedules: their times, what runs, what is next
    #[command(after_help = "Example: rowlock schedules --json")]
    Schedules {
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    /// List the last runs of a schedule, or of all schedules
    #[command(
        after_help = "Examples: rowlock runs nightly-report --limit 100\n          rowlock runs --unsuccessful --since 24h\n          rowlock runs --running\n          rowlock runs nightly-report --stats"
    )]
    Runs(Runs),
    /// Say why a schedule does not run: what it waits for, who runs it, how it ended last
    #[command(after_help = "Example: rowlock why nightly-report")]
    Why(Named),
    /// Print what a run of a schedule has printed: the end of both streams, 64 KiB at most
    #[command(
        after_help = "Examples: rowlock output nightly-report\n          rowlock output nightly-report --attempt 1"
    )]
    Output(schedules::Output),
    /// Stop the tick of a schedule that was begun, wherever it runs: it ends as failed, and is not
    /// tried again
    #[command(after_help = "Example: rowlock stop nightly-report")]
    Stop(Named),
    /// Skip the next tick of a schedule, or all ticks up to a time; resume takes it back
    #[command(after_help = "Examples: rowlock skip nightly-report\n          rowlock skip nightly-report --until 8h")]
    Skip(Until),
    /// Pause a schedule: no run begins until it is resumed; one that is under way goes on
    #[command(after_help = "Examples: rowlock pause nightly-report\n          rowlock pause nightly-report --until 8h")]
    Pause(Until),
    /// Resume a schedule; its catch-up decides about the ticks since the pause
    #[command(after_help = "Example: rowlock resume nightly-report")]
    Resume(Named),
    /// Request a run of a schedule now, in addition to its ticks
    #[command(after_help = "Example: rowlock trigger nightly-report")]
    Trigger(Trigger),
    /// Delete a schedule that no instance declares, with its pause, its trigger and its pending
    /// tick; its runs stay in the history
    #[command(after_help = "Example: rowlock remove weekly-export")]
    Remove {
        /// The schedule
        #[arg(value_parser = key)]
        name: Key,
    },
    /// Move the next tick of a schedule to the first one from now on: what was due is skipped,
    /// and one that a wrong clock moved far ahead is corrected
    #[command(after_help = "Example: rowlock reset nightly-report")]
    Reset(Named),
    /// Have the instances of a label end: they claim nothing more, and end after their runs
    #[command(after_help = "Example: rowlock drain worker-3")]
    Drain {
        /// The label of the instances, as `rowlock instances` shows it
        label: String,
    },
    /// List the instances that run schedules: since when, whether they are alive, what they declare
    #[command(
        after_help = "Examples: rowlock instances\n          rowlock instances --forget 0b9f6a52-3a4e-4c58-9d3c-2f1f6f0f7c11"
    )]
    Instances(Instances),
    /// Show locks, jobs and runs as a web page, and metrics for Prometheus at /metrics
    #[cfg(feature = "ui")]
    #[command(after_help = "Example: rowlock ui --listen 127.0.0.1:8080 --allow-changes")]
    Ui(keys::Ui),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the table of options has this one, in a row of the command or of all.
    fn is_in_the_table(table: &str, command: &str, option: &str) -> bool {
        let mut is_of_command = false;
        table.lines().filter_map(|line| line.strip_prefix('|')).any(|row| {
            let mut cells = row.split('|').map(str::trim);
            let (commands, options) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
            if !commands.is_empty() {
                is_of_command = commands.starts_with("all") || commands.contains(&format!("`{command}`"));
            }
            is_of_command && [' ', '`'].iter().any(|end| options.contains(&format!("`--{option}{end}")))
        })
    }

    #[test]
    fn the_reference_has_each_option() {
        let reference = include_str!("../../../docs/cli-reference.md");
        let table = reference.split("\n## ").find(|part| part.starts_with("Options\n")).unwrap();
        for command in Arguments::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let options = command.get_arguments().filter(|argument| !argument.is_hide_set());
            for option in options.filter_map(|argument| argument.get_long()) {
                let name = command.get_name();
                assert!(is_in_the_table(table, name, option), "rowlock {name} --{option}");
            }
        }
    }
}
