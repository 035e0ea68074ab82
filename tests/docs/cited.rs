//! The tests that the pages cite: each of them is in the sources, under the name that it is cited
//! by.
//!
//! A test of a suite is listed in `tests!` of its module, another one has an attribute. The names
//! are those under which the tests are run, `module::name`; those of the Python client are the
//! names of its functions.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use mdbook_markdown::pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::{assert_none, files, repository, shown};

/// The tests of the sources.
#[derive(Default)]
pub struct Tests {
    names: BTreeSet<String>,
    modules: BTreeSet<String>,
    /// The words of the models, whose tests have the names of values.
    modelled: BTreeSet<String>,
}

impl Tests {
    pub fn of(root: &Path) -> Self {
        let mut tests = Self::default();
        for folder in ["src", "cli", "tests"].map(|folder| root.join(folder)).iter().filter(|folder| folder.exists()) {
            for file in files(folder, "rs") {
                tests.add(&file, &std::fs::read_to_string(&file).unwrap());
            }
        }
        let python = root.join("clients/python/tests");
        for file in if python.exists() { files(&python, "py") } else { Vec::new() } {
            let text = std::fs::read_to_string(&file).unwrap();
            let names =
                text.lines().filter_map(|line| line.trim_start().trim_start_matches("async ").strip_prefix("def "));
            tests.names.extend(names.map(word).filter(|name| name.starts_with("test_")).map(str::to_owned));
        }
        tests
    }

    fn add(&mut self, file: &Path, text: &str) {
        if file.components().any(|part| part.as_os_str() == "model") {
            self.modelled.extend(text.split(|c: char| !is_of_word(c)).map(str::to_owned));
        }
        let module = module(file, text);
        let mut found: Vec<&str> = text.match_indices("tests!").flat_map(|(at, _)| listed(&text[at..])).collect();
        let mut lines = text.lines().map(str::trim_start);
        while let Some(line) = lines.next() {
            if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
                let function = lines.by_ref().find_map(|line| line.split("fn ").nth(1));
                found.extend(function.map(word));
            }
        }
        if !found.is_empty() {
            self.names.extend(found.iter().map(|name| format!("{module}::{name}")));
            self.modules.insert(module);
        }
    }

    /// Whether this names a test, or, as `module` or `module::`, all tests of a module.
    pub fn has(&self, cited: &str) -> bool {
        let model = cited.starts_with("model::") || cited.contains("::caught::");
        let last = cited.rsplit("::").next().unwrap_or_default();
        self.names.contains(cited)
            || self.modules.contains(cited.strip_suffix("::").unwrap_or(cited))
            || model && (last == "…" || self.modelled.contains(last))
    }
}

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The word at the beginning.
fn word(text: &str) -> &str {
    &text[..text.find(|c| !is_of_word(c)).unwrap_or(text.len())]
}

/// The module that a file's tests are run under: that of the file, unless the file names another.
fn module(file: &Path, text: &str) -> String {
    let named = text.split("format!(\"").skip(1).find_map(|rest| {
        let module = word(rest);
        rest[module.len()..].starts_with("::{name}\"").then(|| module.to_owned())
    });
    let stem = |path: &Path| path.file_stem().unwrap().to_string_lossy().into_owned();
    named.unwrap_or_else(|| match stem(file) {
        name if name == "mod" => stem(file.parent().unwrap()),
        name => name,
    })
}

/// The names in the list that follows `tests!`: those that a comma or the end of a group follows.
/// The words before a group, and in brackets, are none.
fn listed(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let (mut depth, mut at) = (0, "tests!".len());
    while let Some(c) = text[at..].chars().next() {
        if c.is_ascii_alphabetic() {
            let name = word(&text[at..]);
            at += name.len();
            if depth > 0 && text[at..].trim_start().starts_with([',', ')']) {
                names.push(name);
            }
            continue;
        }
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            '/' if text[at..].starts_with("//") => at += text[at..].find('\n').unwrap_or_default(),
            _ => {}
        }
        if depth == 0 && c != ' ' {
            break;
        }
        at += c.len_utf8();
    }
    names
}

/// A cell of a table: its text without the code, and its code.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    pub line: usize,
    pub text: String,
    pub code: Vec<String>,
}

/// A table, and the heading that it stands under.
#[derive(Debug, Default)]
pub struct Table {
    pub heading: String,
    pub head: Vec<Cell>,
    pub rows: Vec<Vec<Cell>>,
}

/// The tables of a page, and the code that stands outside of them.
pub fn tables(text: &str) -> (Vec<Table>, Vec<(usize, String)>) {
    let (mut tables, mut outside) = (Vec::<Table>::new(), Vec::new());
    let (mut heading, mut in_heading, mut cells) = (String::new(), false, Vec::<Cell>::new());
    let mut in_cell = false;
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        let line = text[..range.start].matches('\n').count() + 1;
        match event {
            Event::Start(Tag::Heading { .. }) => (in_heading, heading) = (true, String::new()),
            Event::End(TagEnd::Heading(_)) => in_heading = false,
            Event::Start(Tag::Table(_)) => tables.push(Table { heading: heading.clone(), ..Table::default() }),
            Event::Start(Tag::TableCell) => {
                in_cell = true;
                cells.push(Cell { line, ..Cell::default() });
            }
            Event::End(TagEnd::TableCell) => in_cell = false,
            Event::End(TagEnd::TableHead) => tables.last_mut().unwrap().head = std::mem::take(&mut cells),
            Event::End(TagEnd::TableRow) => tables.last_mut().unwrap().rows.push(std::mem::take(&mut cells)),
            Event::Text(text) | Event::Code(text) if in_heading => heading.push_str(&text),
            Event::Text(text) if in_cell => cells.last_mut().unwrap().text.push_str(&text),
            Event::Code(code) if in_cell => cells.last_mut().unwrap().code.push(code.to_string()),
            Event::Code(code) => outside.push((line, code.to_string())),
            _ => {}
        }
    }
    (tables, outside)
}

/// Whether code is written as the name of a test is: lower case, with colons or `test_`.
fn names_a_test(code: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let mut parts = code.split("::").peekable();
    let paths = code.contains("::") && parts.next().is_some_and(|first| !first.is_empty() && first.chars().all(plain));
    paths && parts.all(|part| part.chars().all(|c| plain(c) || c.is_ascii_uppercase() || c == '…'))
        || code.starts_with("test_") && code.chars().all(plain)
}

/// What a page cites that is no test. All code in a column of tests names tests. If the column's
/// head has code, that is the module.
fn not_found(tests: &Tests, file: &Path, text: &str) -> Vec<String> {
    let (tables, outside) = tables(text);
    let mut cited: Vec<_> = outside.into_iter().filter(|(_, code)| names_a_test(code)).collect();
    for table in &tables {
        for (place, cell) in table.rows.iter().flat_map(|row| row.iter().enumerate()) {
            let head = table.head.get(place);
            let module = head.and_then(|head| head.code.first()).filter(|module| module.ends_with("::"));
            let of_tests = head.is_some_and(|head| head.text.trim_start().starts_with("test"));
            let code = cell.code.iter().filter(|code| of_tests && !code.contains(['/', '.']) || names_a_test(code));
            cited.extend(code.map(|code| match module {
                Some(module) => (cell.line, format!("{module}{code}")),
                None => (cell.line, code.clone()),
            }));
        }
    }
    let absent = cited.into_iter().filter(|(_, code)| !tests.has(code));
    absent.map(|(line, code)| format!("{}:{line}: {code} is no test", file.display())).collect()
}

/// The pages that cite tests.
const PAGES: [&str; 2] = ["docs/guarantees.md", "docs/faults.md"];

#[test]
fn each_test_that_is_cited_exists() {
    let root = repository();
    let tests = Tests::of(&root);
    assert!(tests.names.len() > 1000, "{} tests", tests.names.len());
    let problems = PAGES.iter().flat_map(|page| {
        let path = root.join(page);
        not_found(&tests, Path::new(&shown(&path, &root)), &std::fs::read_to_string(&path).unwrap())
    });
    assert_none(&problems.collect::<Vec<_>>());
}

#[test]
fn tests_that_are_absent_are_found() {
    let mut tests = Tests::default();
    tests.add(
        Path::new("tests/contract/acquire.rs"),
        "harness::tests!(\n    everywhere[DIRECT](first, second), // third,\n    sqlite.alone(last)\n);\n\
         fn fourth() {}\n#[tokio::test]\nasync fn fifth() {}\n",
    );
    tests.add(Path::new("checker_tests.rs"), "format!(\"checker::{name}\") \n tests!(one,\n two);\n");
    tests.add(Path::new("tests/model/checks.rs"), "enum Mutant { Late }");
    let all = ["acquire::fifth", "acquire::first", "acquire::last", "acquire::second", "checker::one", "checker::two"];
    assert_eq!(tests.names.iter().collect::<Vec<_>>(), all);
    let page = "`acquire::first` and `acquire::third`, `acquire`, `Rules::Article`, `cargo test`, `model::caught::Late`,\n\
                `model::caught::Early`, `permits::caught::…`, `test_absent`\n\n\
                | guarantee | tests | model |\n|---|---|---|\n\
                | `what::so_ever` | `acquire`, `acquire::`, `gone`, `acquire::gone` | `gone` |\n\n\
                | rule | tests of the checker (`checker::`) |\n|---|---|\n| one | `one`, `three` |\n";
    let expected = [
        "page.md:1: acquire::third is no test",
        "page.md:2: model::caught::Early is no test",
        "page.md:2: test_absent is no test",
        "page.md:6: what::so_ever is no test",
        "page.md:6: gone is no test",
        "page.md:6: acquire::gone is no test",
        "page.md:10: checker::three is no test",
    ];
    assert_eq!(not_found(&tests, &PathBuf::from("page.md"), page), expected);
}
