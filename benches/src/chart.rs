//! Charts with two logarithmic axes, side by side in one SVG.

use std::fmt::Write as _;

pub struct Chart {
    pub title: String,
    pub series: Vec<Series>,
}

pub struct Series {
    pub name: String,
    /// In the order of x; all of them positive.
    pub points: Vec<(f64, f64)>,
}

impl Chart {
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), series: Vec::new() }
    }
}

impl Series {
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), points: Vec::new() }
    }
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 380.0;
/// The margins around the plot. The names of the series are on the right.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;

/// Distinguishable with most kinds of colour vision.
const COLOURS: [&str; 10] =
    ["#0072b2", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#777777", "#e69f00", "#8c510a", "#6a3d9a", "#000000"];

/// Two side by side.
pub fn draw(charts: &[Chart]) -> String {
    let columns = charts.len().clamp(1, 2);
    let (width, height) = (WIDTH * columns as f64, HEIGHT * charts.len().div_ceil(columns) as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut names: Vec<&str> = Vec::new();
    for series in charts.iter().flat_map(|chart| &chart.series) {
        if !names.contains(&series.name.as_str()) {
            names.push(&series.name);
        }
    }
    for (place, chart) in charts.iter().enumerate() {
        let (column, row) = (place % columns, place / columns);
        let _ = writeln!(svg, "<g transform=\"translate({},{})\">", column as f64 * WIDTH, row as f64 * HEIGHT);
        chart.draw(&mut svg, &names);
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}

/// Maps the logarithm of a value to a position in the picture.
struct Axis {
    from: f64,
    to: f64,
    begin: f64,
    end: f64,
}

impl Axis {
    /// Covers all values, widened to whole powers of `base`.
    fn new(values: impl Iterator<Item = f64>, base: f64, begin: f64, end: f64) -> Self {
        let (mut from, mut to) = (f64::INFINITY, f64::NEG_INFINITY);
        for power in values.filter(|value| *value > 0.0).map(|value| value.log(base)) {
            (from, to) = (from.min(power), to.max(power));
        }
        // A power that is whole except for rounding errors counts as whole.
        let (from, to) = if from > to { (0.0, 1.0) } else { ((from + 1e-9).floor(), (to - 1e-9).ceil()) };
        let (ln, to) = (base.ln(), to.max(from + 1.0));
        Self { from: from * ln, to: to * ln, begin, end }
    }

    fn place(&self, value: f64) -> f64 {
        self.begin + (value.ln() - self.from) / (self.to - self.from) * (self.end - self.begin)
    }

    /// The powers of `base` on this axis.
    fn marks(&self, base: f64) -> impl Iterator<Item = f64> {
        let (from, to) = ((self.from / base.ln()).round() as i32, (self.to / base.ln()).round() as i32);
        (from..=to).map(move |power| base.powi(power))
    }
}

impl Chart {
    /// A name has the same colour in all charts.
    fn draw(&self, svg: &mut String, all: &[&str]) {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let x = Axis::new(points().map(|point| point.0), 2.0, LEFT, right);
        let y = Axis::new(points().map(|point| point.1), 10.0, bottom, TOP);
        let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{}</text>", escaped(&self.title));
        grid(svg, &x, &y);
        let mut names: Vec<(usize, f64)> = Vec::new();
        let colour =
            |name: &str| COLOURS[all.iter().position(|other| *other == name).unwrap_or_default() % COLOURS.len()];
        for (number, series) in self.series.iter().enumerate() {
            line(svg, colour(&series.name), series, &x, &y);
            names.extend(series.points.last().map(|last| (number, y.place(last.1))));
        }
        for (number, place) in apart(names, bottom) {
            let name = &self.series[number].name;
            let (name, colour, place) = (escaped(name), colour(name), place + 4.0);
            let _ = writeln!(svg, "<text x=\"{}\" y=\"{place:.1}\" fill=\"{colour}\">{name}</text>", right + 10.0);
        }
    }
}

fn grid(svg: &mut String, x: &Axis, y: &Axis) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for rate in y.marks(10.0) {
        let place = y.place(rate);
        let _ = writeln!(svg, "<path d=\"M{LEFT},{place:.1}H{right}\" stroke=\"#ddd\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{rate}</text>", LEFT - 6.0, place + 4.0);
    }
    // As many labels as there is room for.
    for tasks in x.marks(2.0).step_by((x.marks(2.0).count() / 9).max(1)) {
        let place = x.place(tasks);
        let _ = writeln!(svg, "<path d=\"M{place:.1},{TOP}V{bottom}\" stroke=\"#eee\"/>");
        let _ = writeln!(svg, "<text x=\"{place:.1}\" y=\"{}\" text-anchor=\"middle\">{tasks}</text>", bottom + 16.0);
    }
    let (middle, below) = (f64::midpoint(LEFT, right), bottom + 34.0);
    let _ = writeln!(svg, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">tasks</text>");
    let middle = f64::midpoint(TOP, bottom);
    let _ = writeln!(
        svg,
        "<text transform=\"translate(13,{middle}) rotate(-90)\" text-anchor=\"middle\">cycles a second</text>"
    );
}

fn line(svg: &mut String, colour: &str, series: &Series, x: &Axis, y: &Axis) {
    let places: Vec<(f64, f64)> = series.points.iter().map(|point| (x.place(point.0), y.place(point.1))).collect();
    let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let width = if series.name.starts_with("rowlock") { 3 } else { 1 };
    let dashes = if series.name == "limit" { " stroke-dasharray=\"5 4\"" } else { "" };
    let path = path.join(" ");
    let _ = writeln!(
        svg,
        "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{dashes}/>"
    );
    for (x, y) in places {
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
    }
}

/// Names beside the ends of their curves, but none on top of another, nor below the picture.
fn apart(mut names: Vec<(usize, f64)>, bottom: f64) -> Vec<(usize, f64)> {
    const LINE: f64 = 15.0;
    names.sort_by(|one, other| one.1.total_cmp(&other.1));
    let mut free = f64::NEG_INFINITY;
    for (_, place) in &mut names {
        *place = place.max(free);
        free = *place + LINE;
    }
    let mut free = bottom;
    for (_, place) in names.iter_mut().rev() {
        *place = place.min(free);
        free = *place - LINE;
    }
    names
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_reaches_from_power_to_power() {
        let axis = Axis::new([30.0, 1000.0].into_iter(), 10.0, 0.0, 200.0);
        assert_eq!(axis.marks(10.0).collect::<Vec<_>>(), [10.0, 100.0, 1000.0]);
        assert!((axis.place(100.0) - 100.0).abs() < 1e-6, "{}", axis.place(100.0));
        assert_eq!(Axis::new([5.0].into_iter(), 10.0, 0.0, 1.0).marks(10.0).collect::<Vec<_>>(), [1.0, 10.0]);
    }

    #[test]
    fn names_keep_apart_and_inside() {
        let names = apart(vec![(0, 100.0), (1, 98.0), (2, 20.0)], 100.0);
        assert_eq!(names, [(2, 20.0), (1, 85.0), (0, 100.0)]);
    }

    #[test]
    fn every_contender_has_a_line_and_a_name() {
        let series = |name: &str, rate| Series { name: name.into(), points: vec![(1.0, rate), (64.0, rate * 8.0)] };
        let chart = Chart { title: "a & b".into(), series: vec![series("rowlock", 90.0), series("limit", 700.0)] };
        let other = Chart { title: "c".into(), series: vec![series("limit", 100.0)] };
        let svg = draw(&[chart, other]);
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<circle").count()), (3, 6));
        assert_eq!(svg.matches(COLOURS[1]).count(), 2 * (1 + 2 + 1), "a line, two points and a name in each chart");
        assert!(svg.contains(">rowlock</text>") && svg.contains(">a &amp; b</text>"));
    }
}
