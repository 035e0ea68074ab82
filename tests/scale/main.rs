//! Runs one scenario in simulated time: cargo run --release -p rowlock-scale -- --help

#![allow(clippy::print_stdout, missing_docs)]

use std::time::Duration;

use clap::{Parser, ValueEnum};
use rowlock_scale::{
    assumptions::{Conditions, Database, FAIL_OVER, Fault, Loss},
    run::{Scenario, Setup, run},
};

#[derive(Clone, Copy, ValueEnum)]
enum What {
    Held,
    Waiting,
    Election,
    Successions,
}

#[derive(Clone, Copy, ValueEnum)]
enum Trouble {
    None,
    /// All connections are closed for 30 s.
    Refused,
    /// No connection answers for 30 s.
    Silent,
    /// Statements take ten times as long for 30 s.
    BrownOut,
    /// Messages take ten times as long for 30 s.
    SlowNetwork,
    /// An instance dies.
    Death,
}

#[derive(Parser)]
struct Options {
    scenario: What,
    #[arg(long, value_enum, default_value = "none")]
    trouble: Trouble,
    #[arg(long, default_value_t = 1000)]
    instances: usize,
    #[arg(long, default_value_t = 100_000)]
    keys: usize,
    /// Waiters are served in the order of their tickets.
    #[arg(long)]
    fair: bool,
    /// The lease in seconds.
    #[arg(long, default_value_t = 30.0)]
    lease: f64,
    /// Polls, and needs more statements, as on MySQL and MariaDB.
    #[arg(long)]
    mysql: bool,
    #[arg(long, default_value_t = 8)]
    cores: usize,
    /// The most connections of the server.
    #[arg(long, default_value_t = 20_000)]
    connections: usize,
    /// The median round trip in microseconds.
    #[arg(long, default_value_t = 600)]
    round_trip: u64,
    /// How long a commit waits at the median, in microseconds.
    #[arg(long, default_value_t = 1_000)]
    commit: u64,
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// When the trouble begins, in seconds.
    #[arg(long, default_value_t = 115)]
    begin: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() {
    let options = Options::parse();
    let database = if options.mysql { Database::mysql } else { Database::postgres };
    let mut conditions = Conditions::new(database(options.cores, options.connections));
    (conditions.round_trip, conditions.database.commit) = (options.round_trip, options.commit);
    let begin = options.begin * 1_000_000;
    let fault = match options.trouble {
        Trouble::None | Trouble::Death => None,
        Trouble::Refused => Some(Fault::FailOver(Loss::Refused)),
        Trouble::Silent => Some(Fault::FailOver(Loss::Silent)),
        Trouble::BrownOut => Some(Fault::BrownOut),
        Trouble::SlowNetwork => Some(Fault::SlowNetwork),
    };
    conditions.fault = fault.map(|fault| (fault, begin, begin + FAIL_OVER));
    let scenario = match options.scenario {
        What::Held => Scenario::Held,
        What::Waiting => Scenario::Waiting,
        What::Election => Scenario::Election,
        What::Successions => Scenario::Successions,
    };
    let mut setup = Setup::new(scenario, options.instances, options.keys, conditions);
    setup.lease = Duration::from_secs_f64(options.lease);
    setup.death = matches!(options.trouble, Trouble::Death).then_some(begin);
    setup.fair = options.fair;
    (setup.end, setup.seed) = (options.seconds * 1_000_000, options.seed);
    print!("{}", run(setup));
}
