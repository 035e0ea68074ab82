//! The options that the comparing scenarios share.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use crate::database::Kind;

/// The databases.
#[derive(Args, Clone)]
pub struct Databases {
    /// A database to measure; all four unless given.
    #[arg(long = "database", value_name = "NAME")]
    pub databases: Vec<Kind>,
}

impl Databases {
    /// The selected databases that are available, with their servers.
    pub fn servers(&self) -> Vec<(Kind, String)> {
        let kinds = if self.databases.is_empty() { &Kind::ALL[..] } else { &self.databases };
        kinds.iter().filter_map(|&kind| Some((kind, kind.url()?))).collect()
    }
}

/// The databases, and the file for the raw figures.
#[derive(Args, Clone)]
pub struct Common {
    #[command(flatten)]
    pub on: Databases,
    /// Appends the figures of each round to this file.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
}

/// How contenders alternate.
#[derive(Args, Clone)]
pub struct Rounds {
    #[command(flatten)]
    pub common: Common,
    /// How many rounds each contender runs; the median counts.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// How long a round is, in seconds.
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    pub seconds: Duration,
    /// How long a first round is that does not count, in seconds.
    #[arg(long, default_value = "0.3", value_parser = seconds)]
    pub warm_up: Duration,
    /// The most connections of a pool.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub connections: u32,
    /// Only these contenders, by name.
    #[arg(long = "contender", value_name = "NAME")]
    contenders: Vec<String>,
}

impl Rounds {
    pub fn wants(&self, contender: &str) -> bool {
        self.contenders.is_empty() || self.contenders.iter().any(|wanted| wanted == contender)
    }
}

/// A duration as a number of seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// The URL of a server that is not SQL, if the variable is set.
pub fn url(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|url| !url.is_empty())
}
