//! The pictures of `docs/pictures`: each is drawn from the text beside it, and names files that
//! exist.
//!
//! A text has a line for each lane, box and arrow:
//!
//! ```text
//! title: what the picture shows
//! about: the same for readers who do not see it
//! lane NAME: its heading
//! box NAME LANE ROW KIND: FILE, FILE | a line of text | another one
//! arrow FROM TO: a label, which may be absent
//! down FROM TO: an arrow that first leads down
//! ```
//!
//! A file is named as it lies in `src/`. A `*` stands for each database.

use std::{collections::BTreeMap, fmt::Write as _, path::Path};

use crate::{assert_none, files, repository, shown};

const LANE: i32 = 222;
const BETWEEN: i32 = 36;
const MARGIN: i32 = 24;
const HEAD: i32 = 72;
const LINE: i32 = 17;
/// The space above and below the text of a box.
const PADDING: i32 = 9;
const ROW_GAP: i32 = 24;
/// How far apart the arrows at one side of a box are.
const APART: i32 = 16;
/// The most characters of a line in a box, in the widest of the usual fonts.
const MOST: usize = 31;
const SERVERS: [&str; 3] = ["postgres", "mysql", "sqlite"];

/// The colours are those of a light page, and of a dark one where the reader prefers that. The
/// picture has its own background, so that it can be read on any page.
const STYLE: &str = "
text { font: 12.5px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 17px; font-weight: 600 } .head { font-weight: 600 } .label, .key { font-size: 11.5px; fill: #59636e }
.label { stroke: #ffffff; stroke-width: 4px; paint-order: stroke } .file { font: 600 12px ui-monospace, monospace }
.page { fill: #ffffff; stroke: #d1d9e0 } .lane { fill: #f6f8fa }
.code { fill: #ffffff; stroke: #818b98 } .pure { fill: #dafbe1; stroke: #1a7f37 } .sql { fill: #ddf4ff; stroke: #0969da }
.arrow { fill: none; stroke: #59636e; stroke-width: 1.3px } .tip { fill: #59636e }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .label, .key { fill: #9198a1 } .label { stroke: #0d1117 }
.page { fill: #0d1117; stroke: #3d444d } .lane { fill: #151b23 }
.code { fill: #0d1117; stroke: #656c76 } .pure { fill: #12261e; stroke: #3fb950 } .sql { fill: #121d2f; stroke: #4493f8 }
.arrow { stroke: #9198a1 } .tip { fill: #9198a1 }
}
";

struct Item {
    lane: usize,
    row: usize,
    kind: String,
    files: Vec<String>,
    lines: Vec<String>,
}

struct Arrow {
    from: String,
    to: String,
    label: String,
    /// It leads down or up first, and then to the side.
    first_down: bool,
}

#[derive(Default)]
struct Picture {
    title: String,
    about: String,
    lanes: Vec<(String, String)>,
    boxes: BTreeMap<String, Item>,
    arrows: Vec<Arrow>,
}

impl Picture {
    fn read(text: &str) -> Result<Self, String> {
        let mut picture = Self::default();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (words, rest) = line.split_once(": ").unwrap_or((line, ""));
            let rest = rest.to_owned();
            match words.split(' ').collect::<Vec<_>>()[..] {
                ["title"] => picture.title = rest,
                ["about"] => picture.about = rest,
                ["lane", name] => picture.lanes.push((name.to_owned(), rest)),
                ["box", name, lane, row, kind @ ("code" | "pure" | "sql")] => {
                    let lane = picture.lanes.iter().position(|(known, _)| known == lane);
                    let (Some(lane), Ok(row)) = (lane, row.parse()) else {
                        return Err(format!("{line}: no such place"));
                    };
                    let mut lines = rest.split(" | ").map(str::to_owned);
                    let files = lines.next().unwrap_or_default().split(", ").map(str::to_owned).collect();
                    let item = Item { lane, row, kind: kind.to_owned(), files, lines: lines.collect() };
                    if let Some(long) = item.files.iter().chain(&item.lines).find(|text| text.chars().count() > MOST) {
                        return Err(format!("{long} is longer than a box"));
                    }
                    picture.boxes.insert(name.to_owned(), item);
                }
                [arrow @ ("arrow" | "down"), from, to] => {
                    if let Some(name) = [from, to].iter().find(|name| !picture.boxes.contains_key(**name)) {
                        return Err(format!("{line}: no box {name}"));
                    }
                    let (from, to) = (from.to_owned(), to.to_owned());
                    picture.arrows.push(Arrow { from, to, label: rest, first_down: arrow == "down" });
                }
                _ => return Err(format!("{line} is not understood")),
            }
        }
        Ok(picture)
    }

    /// The files that boxes name and that do not exist.
    fn missing(&self, src: &Path) -> Vec<String> {
        let named = self.boxes.values().flat_map(|item| &item.files);
        let exist = |file: &str| SERVERS.iter().all(|server| src.join(file.replace('*', server)).is_file());
        named.filter(|file| !exist(file)).map(|file| format!("src/{file} does not exist")).collect()
    }

    /// Where each box lies: left, top, and height.
    fn places(&self) -> (BTreeMap<&str, (i32, i32, i32)>, i32) {
        let height = |item: &Item| 2 * PADDING + LINE * i32::try_from(item.files.len() + item.lines.len()).unwrap();
        let (mut places, mut top) = (BTreeMap::new(), HEAD + 28);
        for row in 1..=self.boxes.values().map(|item| item.row).max().unwrap_or_default() {
            let of_row = || self.boxes.iter().filter(move |(_, item)| item.row == row);
            let highest = of_row().map(|(_, item)| height(item)).max().unwrap_or_default();
            for (name, item) in of_row() {
                let left = MARGIN + i32::try_from(item.lane).unwrap() * (LANE + BETWEEN);
                places.insert(name.as_str(), (left, top + (highest - height(item)) / 2, height(item)));
            }
            top += highest + ROW_GAP;
        }
        (places, top)
    }

    /// The places, counted from the middle, of an arrow among those at the same side of a box.
    fn offset(&self, name: &str, at: usize) -> i32 {
        let side = |arrow: &Arrow| {
            let (from, to) = (&self.boxes[&arrow.from], &self.boxes[&arrow.to]);
            let (own, other) = if arrow.from == name { (from, to) } else { (to, from) };
            let elbow = from.lane != to.lane && from.row != to.row;
            // At the end of its second part, and at its own end if that is the first part.
            let is_upright = from.lane == to.lane || elbow && (arrow.first_down == (arrow.from == name));
            ((arrow.from == name || arrow.to == name) && !is_upright).then_some(own.lane < other.lane)
        };
        let Some(own) = side(&self.arrows[at]) else { return 0 };
        let same = (0..self.arrows.len()).filter(|other| side(&self.arrows[*other]) == Some(own)).collect::<Vec<_>>();
        let place = same.iter().position(|other| *other == at).unwrap();
        (2 * i32::try_from(place).unwrap() - i32::try_from(same.len()).unwrap() + 1) * APART / 2
    }

    fn arrow(&self, at: usize, places: &BTreeMap<&str, (i32, i32, i32)>, svg: &mut String) {
        let arrow = &self.arrows[at];
        let (a, b) = (&self.boxes[&arrow.from], &self.boxes[&arrow.to]);
        let (from, to) = (places[arrow.from.as_str()], places[arrow.to.as_str()]);
        let offsets = [self.offset(&arrow.from, at), self.offset(&arrow.to, at)];
        let middle = |(left, top, height): (i32, i32, i32)| (left + LANE / 2, top + height / 2);
        let edge = |(left, _, _): (i32, i32, i32), right: bool| left + if right { LANE } else { 0 };
        let end = |(_, top, height): (i32, i32, i32), below: bool| top + if below { height } else { 0 };
        let (right, below) = (a.lane < b.lane, a.row < b.row);
        let (path, label) = if a.lane == b.lane {
            let (x, y, to) = (middle(from).0, end(from, below), end(to, !below));
            (format!("M{x},{y}V{to}"), (x + 7, (y + to) / 2 + 4, "start"))
        } else if a.row == b.row {
            let y = middle(from).1 + offsets.into_iter().max_by_key(|offset| offset.abs()).unwrap();
            let (x, to) = (edge(from, right), edge(to, !right));
            (format!("M{x},{y}H{to}"), ((x + to) / 2, y - 5, "middle"))
        } else if arrow.first_down {
            let (x, y) = (middle(from).0, middle(to).1 + offsets[1]);
            (format!("M{x},{}V{y}H{}", end(from, below), edge(to, !right)), (x + 7, y - 5, "start"))
        } else {
            let (x, y) = (middle(to).0, middle(from).1 + offsets[0]);
            (format!("M{},{y}H{x}V{}", edge(from, right), end(to, !below)), (x + 7, end(to, !below) - 30, "start"))
        };
        writeln!(svg, "<path class=\"arrow\" d=\"{path}\" marker-end=\"url(#tip)\"/>").unwrap();
        if !arrow.label.is_empty() {
            text(svg, "label", (label.0, label.1), label.2, &arrow.label);
        }
    }

    fn draw(&self) -> String {
        let (places, bottom) = self.places();
        let lanes = i32::try_from(self.lanes.len()).unwrap();
        let (width, height) = (2 * MARGIN + lanes * LANE + (lanes - 1) * BETWEEN, bottom + 44);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             role=\"img\" aria-labelledby=\"title about\">\n<title id=\"title\">{}</title>\n<desc id=\"about\">{}</desc>\n\
             <style>{STYLE}</style>\n<defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"7.5\" refY=\"4\" markerWidth=\"8\" \
             markerHeight=\"8\" markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path class=\"tip\" d=\"M0,0L8,4L0,8z\"/></marker></defs>\n\
             <rect class=\"page\" x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n",
            escaped(&self.title),
            escaped(&self.about),
            width - 1,
            height - 1,
        );
        text(&mut svg, "title", (MARGIN, 34), "start", &self.title);
        for (lane, (_, heading)) in (0..).zip(&self.lanes) {
            let left = MARGIN + lane * (LANE + BETWEEN);
            let (x, high) = (left - 10, bottom - HEAD + 10);
            writeln!(
                svg,
                "<rect class=\"lane\" x=\"{x}\" y=\"{}\" width=\"{}\" height=\"{high}\" rx=\"6\"/>",
                HEAD - 16,
                LANE + 20
            )
            .unwrap();
            text(&mut svg, "head", (left + LANE / 2, HEAD + 8), "middle", heading);
        }
        for (name, item) in &self.boxes {
            let (left, top, height) = places[name.as_str()];
            let kind = &item.kind;
            writeln!(
                svg,
                "<rect class=\"{kind}\" x=\"{left}\" y=\"{top}\" width=\"{LANE}\" height=\"{height}\" rx=\"5\"/>"
            )
            .unwrap();
            let files = item.files.iter().map(|file| ("file", file));
            for (place, (class, line)) in (1..).zip(files.chain(item.lines.iter().map(|line| ("text", line)))) {
                text(&mut svg, class, (left + 9, top + PADDING + LINE * place - 4), "start", line);
            }
        }
        for at in 0..self.arrows.len() {
            self.arrow(at, &places, &mut svg);
        }
        let mut x = MARGIN;
        for (kind, meaning) in [("code", "sends and waits"), ("pure", "decides: pure"), ("sql", "SQL")] {
            writeln!(
                svg,
                "<rect class=\"{kind}\" x=\"{x}\" y=\"{}\" width=\"18\" height=\"12\" rx=\"3\"/>",
                height - 27
            )
            .unwrap();
            text(&mut svg, "key", (x + 24, height - 17), "start", meaning);
            x += 136;
        }
        svg + "</svg>\n"
    }
}

fn text(svg: &mut String, class: &str, (x, y): (i32, i32), anchor: &str, text: &str) {
    let anchor = if anchor == "start" { String::new() } else { format!(" text-anchor=\"{anchor}\"") };
    writeln!(svg, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\"{anchor}>{}</text>", escaped(text)).unwrap();
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// What is wrong with the pictures of a repository, which are drawn first if `draws`.
fn problems(root: &Path, draws: bool) -> Vec<String> {
    let folder = root.join("docs/pictures");
    let mut problems = Vec::new();
    for source in files(&folder, "txt") {
        let (name, file) = (shown(&source, &folder), source.with_extension("svg"));
        let picture = match Picture::read(&std::fs::read_to_string(&source).unwrap()) {
            Ok(picture) => picture,
            Err(problem) => {
                problems.push(format!("{name}: {problem}"));
                continue;
            }
        };
        problems.extend(picture.missing(&root.join("src")).into_iter().map(|problem| format!("{name}: {problem}")));
        if draws {
            std::fs::write(&file, picture.draw()).unwrap();
        }
        if std::fs::read_to_string(&file).ok() != Some(picture.draw()) {
            problems.push(format!("{name}: scripts/pictures draws another picture than {}", shown(&file, &folder)));
        }
    }
    problems
}

#[test]
fn pictures_are_those_of_their_texts_and_name_files() {
    let root = repository();
    assert!(files(&root.join("docs/pictures"), "txt").len() >= 2);
    assert_none(&problems(&root, std::env::var_os("ROWLOCK_DRAW").is_some()));
}

#[test]
fn pictures_that_are_wrong_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    std::fs::create_dir_all(root.join("docs/pictures")).unwrap();
    for server in SERVERS {
        std::fs::create_dir_all(root.join("src/store").join(server)).unwrap();
        std::fs::write(root.join("src/store").join(server).join("claim.rs"), "").unwrap();
    }
    std::fs::write(root.join("src/rules.rs"), "").unwrap();
    std::fs::remove_file(root.join("src/store/mysql/claim.rs")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(root.join("docs/pictures").join(name), text).unwrap();
    let one = "title: One\nlane a: A\nbox rules a 1 pure: rules.rs | a < b\n";
    write("one.txt", one);
    assert_none(&problems(root, true));
    let drawn = std::fs::read_to_string(root.join("docs/pictures/one.svg")).unwrap();
    assert!(drawn.contains("<title id=\"title\">One</title>") && drawn.contains("a &lt; b"), "{drawn}");

    write("one.txt", &one.replace("a < b", "a > b"));
    write("two.txt", &format!("{one}box claim a 2 sql: store/*/claim.rs, gone.rs\narrow rules claim\n"));
    write("two.svg", "");
    write("wrong1.txt", &format!("{one}arrow rules absent\n"));
    write("wrong2.txt", &format!("{one}box rules b 1 pure: rules.rs\n"));
    write("wrong3.txt", &format!("{one}circle rules\n"));
    write("wrong4.txt", &format!("{one}box long a 1 pure: rules.rs | a line that no box has enough room for\n"));
    let expected = [
        "one.txt: scripts/pictures draws another picture than one.svg",
        "two.txt: src/store/*/claim.rs does not exist",
        "two.txt: src/gone.rs does not exist",
        "two.txt: scripts/pictures draws another picture than two.svg",
        "wrong1.txt: arrow rules absent: no box absent",
        "wrong2.txt: box rules b 1 pure: rules.rs: no such place",
        "wrong3.txt: circle rules is not understood",
        "wrong4.txt: a line that no box has enough room for is longer than a box",
    ];
    assert_eq!(problems(root, false), expected);
}
