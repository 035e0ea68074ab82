//! The output of figures: rows of a Markdown table on stdout, and a file of comma-separated values
//! with those of every round.

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    path::Path,
};

use crate::{
    error::Error,
    statistics::{median, ratio},
};

/// The figures of one round, or of one run where there are no rounds. Empty where nothing was
/// measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Line {
    pub scenario: String,
    pub server: String,
    pub contender: String,
    pub tasks: usize,
    /// Rows, accounts or keys.
    pub size: usize,
    pub round: usize,
    pub per_second: Option<f64>,
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
    pub attempts: Option<f64>,
    pub wal_bytes: Option<f64>,
    /// The processor time of the measuring process, in which the clients are.
    pub processor_us: Option<f64>,
    pub connections: Option<f64>,
    pub bytes_per_lease: Option<f64>,
    pub statements_per_100: Option<f64>,
}

/// The medians of a contender's rounds.
pub struct Row {
    pub line: Line,
    /// The median of the rounds' rates, each divided by that of the base in the same round.
    pub ratio: Option<f64>,
}

impl Row {
    pub fn new(own: &[Line], base: Option<&[Line]>) -> Self {
        let of = |figure: fn(&Line) -> Option<f64>| median(own.iter().filter_map(figure));
        let line = Line {
            per_second: of(|line| line.per_second),
            p50_us: of(|line| line.p50_us),
            p99_us: of(|line| line.p99_us),
            attempts: of(|line| line.attempts),
            wal_bytes: of(|line| line.wal_bytes),
            processor_us: of(|line| line.processor_us),
            ..own.first().cloned().unwrap_or_default()
        };
        let pairs = own.iter().zip(base.unwrap_or_default());
        Self { line, ratio: median(pairs.filter_map(|(own, base)| ratio(own.per_second?, base.per_second?))) }
    }
}

const HEADER: &str = "scenario,server,contender,tasks,size,round,per_second,p50_us,p99_us,attempts,wal_bytes,processor_us,connections,bytes_per_lease,statements_per_100_renewals";

impl Line {
    fn figures(&self) -> [Option<f64>; 9] {
        let Self { per_second, p50_us, p99_us, attempts, wal_bytes, processor_us, .. } = *self;
        let Self { connections, bytes_per_lease, statements_per_100, .. } = *self;
        [
            per_second,
            p50_us,
            p99_us,
            attempts,
            wal_bytes,
            processor_us,
            connections,
            bytes_per_lease,
            statements_per_100,
        ]
    }

    /// None of the names contains a comma.
    fn to_csv(&self) -> String {
        let Self { scenario, server, contender, tasks, size, round, .. } = self;
        let figures = self.figures().map(|figure| figure.map(|figure| figure.to_string()).unwrap_or_default());
        format!("{scenario},{server},{contender},{tasks},{size},{round},{}", figures.join(","))
    }

    fn from_csv(text: &str) -> Result<Self, Error> {
        let fields: Vec<&str> = text.split(',').collect();
        let [scenario, server, contender, tasks, size, round, figures @ ..] = &fields[..] else {
            return Err(format!("too few values: {text}").into());
        };
        let figure = |text: &&str| if text.is_empty() { Ok(None) } else { text.parse().map(Some) };
        let figures: Vec<Option<f64>> = figures.iter().map(figure).collect::<Result<_, _>>()?;
        let &[
            per_second,
            p50_us,
            p99_us,
            attempts,
            wal_bytes,
            processor_us,
            connections,
            bytes_per_lease,
            statements_per_100,
        ] = &figures[..]
        else {
            return Err(format!("not as many values as the header names: {text}").into());
        };
        Ok(Self {
            scenario: (*scenario).to_owned(),
            server: (*server).to_owned(),
            contender: (*contender).to_owned(),
            tasks: tasks.parse()?,
            size: size.parse()?,
            round: round.parse()?,
            per_second,
            p50_us,
            p99_us,
            attempts,
            wal_bytes,
            processor_us,
            connections,
            bytes_per_lease,
            statements_per_100,
        })
    }
}

/// All lines of a file.
pub fn read(path: &Path) -> Result<Vec<Line>, Error> {
    let text = std::fs::read_to_string(path)?;
    let mut lines = text.lines();
    if lines.next() != Some(HEADER) {
        return Err(format!("{} does not begin with {HEADER}", path.display()).into());
    }
    lines.map(Line::from_csv).collect()
}

/// Which figures a scenario's table shows, besides the rate and the latencies.
#[derive(Clone, Copy, Default)]
pub struct Shown {
    /// What the rate counts.
    pub counted: &'static str,
    /// What the size counts.
    pub size: Option<&'static str>,
    pub attempts: bool,
    pub wal: bool,
    /// The base of the ratio in the last column.
    pub base: &'static str,
}

pub struct Report {
    csv: Option<File>,
    shown: Shown,
}

impl Report {
    pub fn new(csv: Option<&Path>, shown: Shown) -> Result<Self, Error> {
        Ok(Self { csv: csv.map(open).transpose()?, shown })
    }

    /// The head of the table.
    pub fn head(&self) {
        let Shown { counted, base, .. } = self.shown;
        let names = ["p50 ms", "p99 ms"].map(str::to_owned);
        let mut names = [vec![format!("{counted}/s")], names.into()].concat();
        names.extend(self.shown.attempts.then(|| "attempts".to_owned()));
        names.extend(self.shown.wal.then(|| "WAL bytes".to_owned()));
        names.push("client µs".to_owned());
        names.push(format!("to {base}"));
        let size = self.shown.size.map(|size| format!(" {size} |")).unwrap_or_default();
        println!("\n| server | tasks |{size} contender | {} |", names.join(" | "));
        let size = self.shown.size.map(|_| "---:|").unwrap_or_default();
        println!("|---|---:|{size}---|{}", "---:|".repeat(names.len()));
    }

    pub fn row(&self, row: &Row) {
        let Row { line, ratio } = row;
        let millis = |micros: Option<f64>| shown(micros.map(|micros| micros / 1e3), 2);
        let mut figures = vec![shown(line.per_second, 0), millis(line.p50_us), millis(line.p99_us)];
        figures.extend(self.shown.attempts.then(|| shown(line.attempts, 2)));
        figures.extend(self.shown.wal.then(|| shown(line.wal_bytes, 0)));
        figures.push(shown(line.processor_us, 1));
        figures.push(shown(*ratio, 2));
        let size = self.shown.size.map(|_| format!(" {} |", line.size)).unwrap_or_default();
        println!("| {} | {} |{size} {} | {} |", line.server, line.tasks, line.contender, figures.join(" | "));
        let _ = std::io::stdout().flush();
    }

    pub fn line(&mut self, line: &Line) -> Result<(), Error> {
        if let Some(csv) = &mut self.csv {
            writeln!(csv, "{}", line.to_csv())?;
        }
        Ok(())
    }
}

pub fn shown(figure: Option<f64>, decimals: usize) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.decimals$}"))
}

/// Appends to what other runs have written. The names of the columns are at the start of the file,
/// once.
fn open(path: &Path) -> Result<File, Error> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    match text.lines().next() {
        None => writeln!(file, "{HEADER}")?,
        Some(HEADER) => {}
        Some(_) => return Err(format!("{} has other columns", path.display()).into()),
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line {
            scenario: "cycles".into(),
            server: "postgres".into(),
            contender: "article".into(),
            tasks: 16,
            size: 3,
            round: 4,
            per_second: Some(1234.5),
            p99_us: Some(0.25),
            statements_per_100: Some(7.0),
            ..Line::default()
        }
    }

    #[test]
    fn a_line_is_read_as_it_was_written() -> Result<(), Error> {
        assert_eq!(Line::from_csv(&line().to_csv())?, line());
        assert_eq!(HEADER.split(',').count(), line().to_csv().split(',').count());
        Ok(())
    }

    #[test]
    fn runs_append_to_one_file_with_one_header() -> Result<(), Error> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("figures.csv");
        for _ in 0..2 {
            Report::new(Some(&path), Shown::default())?.line(&line())?;
        }
        assert_eq!(read(&path)?, [line(), line()]);
        std::fs::write(&path, "other,columns\n")?;
        assert!(Report::new(Some(&path), Shown::default()).is_err() && read(&path).is_err());
        Ok(())
    }
}
