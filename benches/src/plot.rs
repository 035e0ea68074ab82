//! Draws the figures of `cycles`, a chart for each server: cycles per second over tasks, a curve
//! for each contender.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;

use crate::{
    chart::{Chart, Series, draw},
    error::Error,
    report::{Line, read},
    statistics::median,
};

#[derive(Args)]
pub struct Options {
    /// The file that `cycles --csv` wrote.
    #[arg(long, value_name = "FILE")]
    csv: PathBuf,
    /// The file for the picture.
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
}

pub fn run(options: &Options) -> Result<(), Error> {
    let charts = charts(&read(&options.csv)?);
    if charts.is_empty() {
        return Err(format!("{} has no figures of cycles", options.csv.display()).into());
    }
    std::fs::write(&options.svg, draw(&charts))?;
    eprintln!("{}: {} servers", options.svg.display(), charts.len());
    Ok(())
}

/// Servers and contenders are in the order of the file. A point is the median of all its rounds.
fn charts(lines: &[Line]) -> Vec<Chart> {
    let mut charts: Vec<Chart> = Vec::new();
    let mut rates: BTreeMap<(&str, &str, usize), Vec<f64>> = BTreeMap::new();
    for line in lines.iter().filter(|line| line.scenario == "cycles") {
        let Some(rate) = line.per_second else { continue };
        let chart = place(&mut charts, |chart| chart.title == line.server, || Chart::new(&line.server));
        place(&mut chart.series, |series| series.name == line.contender, || Series::new(&line.contender));
        rates.entry((&line.server, &line.contender, line.tasks)).or_default().push(rate);
    }
    for ((server, contender, tasks), rates) in rates {
        let chart = place(&mut charts, |chart| chart.title == server, || Chart::new(server));
        let series = place(&mut chart.series, |series| series.name == contender, || Series::new(contender));
        series.points.extend(median(rates).map(|rate| (tasks as f64, rate)));
    }
    charts
}

/// Finds the matching element, or creates it.
fn place<T>(all: &mut Vec<T>, is_it: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &mut T {
    let place = all.iter().position(is_it).unwrap_or(all.len());
    if place == all.len() {
        all.push(make());
    }
    &mut all[place]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(server: &str, contender: &str, tasks: usize, rate: f64) -> Line {
        let (scenario, server, contender) = ("cycles".into(), server.into(), contender.into());
        Line { scenario, server, contender, tasks, per_second: Some(rate), ..Line::default() }
    }

    #[test]
    fn a_point_is_the_median_of_its_rounds() {
        let other = Line { scenario: "refusals".into(), ..line("mysql", "single", 1, 1.0) };
        let lines = [
            line("postgres", "single", 16, 200.0),
            line("postgres", "single", 16, 100.0),
            line("postgres", "single", 16, 900.0),
            line("postgres", "single", 1, 50.0),
            line("postgres", "article", 1, 40.0),
            other,
        ];
        let charts = charts(&lines);
        assert_eq!(charts.len(), 1);
        let names: Vec<&str> = charts[0].series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["single", "article"]);
        assert_eq!(charts[0].series[0].points, [(1.0, 50.0), (16.0, 200.0)]);
    }
}
