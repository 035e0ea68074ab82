//! Every scenario but `scale`, each in a process of its own, so that none is affected by what
//! another left in memory.

use std::{ffi::OsString, process::Stdio};

use clap::Args;
use tokio::process::Command;

use crate::{error::Error, options::Common};

/// The scenarios, and whether they write figures to a file.
const SCENARIOS: [(&str, bool); 11] = [
    ("cycles", true),
    ("crates", true),
    ("deduct", true),
    ("held", true),
    ("refusals", true),
    ("million", true),
    ("once", true),
    ("permits", true),
    ("functions", true),
    ("handover", false),
    ("schedules", false),
];

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,
}

pub async fn run(options: &Options, log: Option<&str>) -> Result<(), Error> {
    let mut failed = Vec::new();
    for (scenario, csv) in SCENARIOS {
        println!("\n## {scenario}\n");
        let mut command = Command::new(std::env::current_exe()?);
        command.args(log.map(|log| format!("--log={log}"))).args(arguments(scenario, csv, &options.common));
        let status = command.stdin(Stdio::null()).kill_on_drop(true).status().await?;
        if !status.success() {
            failed.push(format!("{scenario}: {status}"));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join(", ").into()) }
}

fn arguments(scenario: &str, csv: bool, common: &Common) -> Vec<OsString> {
    let mut arguments = vec![OsString::from(scenario)];
    for kind in &common.on.databases {
        arguments.extend(["--database".into(), kind.name().into()]);
    }
    if let Some(path) = common.csv.as_ref().filter(|_| csv) {
        arguments.extend(["--csv".into(), path.into()]);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::{Arguments, database::Kind, options::Databases};

    #[test]
    fn every_scenario_understands_what_it_is_told() {
        let common = Common { on: Databases { databases: Kind::ALL.into() }, csv: Some("figures.csv".into()) };
        for (scenario, csv) in SCENARIOS {
            let all = [vec!["rowlock-bench".into()], arguments(scenario, csv, &common)].concat();
            assert!(Arguments::try_parse_from(all).is_ok(), "{scenario}");
        }
    }
}
