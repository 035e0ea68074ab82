//! The modules of the library, the program and the benchmarks import downwards: there is no circle.
//!
//! A path in the code counts as an import. A name that is re-exported counts as the module that
//! defines it.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

type Graph = BTreeMap<String, BTreeSet<String>>;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The path of a file's module, such as `crate::lease::wait`.
fn module(file: &Path, src: &Path) -> String {
    let path = file.strip_prefix(src).unwrap().with_extension("");
    let parts = path.iter().map(|part| part.to_str().unwrap()).filter(|part| !["lib", "main", "mod"].contains(part));
    ["crate"].into_iter().chain(parts).collect::<Vec<_>>().join("::")
}

/// The lines of a file without its comments and unit tests.
fn code(text: &str) -> impl Iterator<Item = &str> {
    let mut in_tests = false;
    text.lines().filter(move |line| {
        in_tests = (in_tests || line.starts_with("mod tests {")) && *line != "}";
        !in_tests && !line.trim_start().starts_with("//")
    })
}

/// The beginning of a use tree, if the line has one, and whether it is a re-export.
fn used(line: &str) -> Option<(bool, &str)> {
    let (visibility, tree) = line.split_once("use ")?;
    let is_use = ["", "pub", "pub(crate)", "pub(super)"].contains(&visibility.trim());
    // A line of a text may begin with the word too.
    (is_use && tree.ends_with([';', '{'])).then_some((!visibility.trim().is_empty(), tree))
}

/// Adds the paths that a use tree names.
fn paths(tree: &str, prefix: &str, found: &mut Vec<String>) {
    let Some((head, rest)) = tree.split_once('{') else {
        let name = tree.split(" as ").next().unwrap_or_default();
        found.push(format!("{prefix}{}", name.trim()));
        return;
    };
    let (prefix, rest) = (format!("{prefix}{}", head.trim()), rest.trim_end().strip_suffix('}').unwrap());
    let (mut depth, mut start) = (0, 0);
    for (at, c) in rest.char_indices().chain([(rest.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !rest[start..at].trim().is_empty() {
                    paths(rest[start..at].trim(), &prefix, found);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// The paths that a file imports or names in its code, and those that it re-exports.
fn named(text: &str) -> (Vec<String>, Vec<String>) {
    let (mut imports, mut exports, mut lines) = (Vec::new(), Vec::new(), code(text));
    while let Some(line) = lines.next() {
        if let Some((is_export, tree)) = used(line) {
            let mut tree = tree.to_owned();
            while !tree.ends_with(';') {
                tree.push_str(lines.next().unwrap());
            }
            paths(tree.trim_end_matches(';'), "", if is_export { &mut exports } else { &mut imports });
        } else {
            let names = line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
            imports.extend(names.filter(|name| name.contains("::")).map(str::to_owned));
        }
    }
    (imports, exports)
}

/// The modules of a crate, and what each name that is re-exported stands for.
struct Crate {
    modules: BTreeSet<String>,
    exports: BTreeMap<String, String>,
}

impl Crate {
    /// The whole path of what the module `own` names so. `None`: it is of another crate or of the
    /// module itself. `super` is of the latter, because only modules within a file use it.
    fn whole(&self, path: &str, own: &str) -> Option<String> {
        let first = path.split("::").next()?;
        if first == "crate" {
            return Some(path.to_owned());
        }
        self.modules.contains(&format!("{own}::{first}")).then(|| format!("{own}::{path}"))
    }

    /// The module that defines what a path names.
    fn definition<'p>(&'p self, mut path: &'p str) -> &'p str {
        while !self.modules.contains(path) {
            path = match self.exports.get(path) {
                Some(exported) => exported,
                None => path.rsplit_once("::").unwrap().0,
            };
        }
        path
    }
}

/// The imports of all modules in a folder of the repository.
fn graph(src: &str) -> Graph {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join(src);
    let mut found = Vec::new();
    files(&src, &mut found);
    let read = |file: &PathBuf| (module(file, &src), named(&std::fs::read_to_string(file).unwrap()));
    let named: BTreeMap<String, (Vec<String>, Vec<String>)> = found.iter().map(read).collect();
    let mut all = Crate { modules: named.keys().cloned().collect(), exports: BTreeMap::new() };
    for (own, (_, exports)) in &named {
        for path in exports {
            if let (Some(whole), Some((_, name))) = (all.whole(path, own), path.rsplit_once("::")) {
                all.exports.insert(format!("{own}::{name}"), whole);
            }
        }
    }
    let imported = |own: &str, imports: &[String]| {
        let whole = imports.iter().filter_map(|path| all.whole(path, own));
        whole.map(|path| all.definition(&path).to_owned()).filter(|module| module != own).collect()
    };
    named.iter().map(|(own, (imports, _))| (own.clone(), imported(own, imports))).collect()
}

/// A path of imports that leads back to where it began.
fn circle<'g>(graph: &'g Graph, path: &mut Vec<&'g str>, done: &mut BTreeSet<&'g str>) -> Option<Vec<&'g str>> {
    let last = *path.last()?;
    for next in graph.get(last).into_iter().flatten() {
        if let Some(start) = path.iter().position(|module| module == next) {
            return Some(path[start..].to_vec());
        }
        if !done.contains(next.as_str()) {
            path.push(next);
            if let Some(circle) = circle(graph, path, done) {
                return Some(circle);
            }
            path.pop();
        }
    }
    done.insert(last);
    None
}

fn has_no_circle(graph: &Graph) {
    let mut done = BTreeSet::new();
    for module in graph.keys() {
        assert_eq!(circle(graph, &mut vec![module], &mut done), None);
    }
}

#[test]
fn no_module_imports_one_that_imports_it() {
    let graph = graph("src");
    let imports = |one: &str, other: &str| graph[&format!("crate::{one}")].contains(&format!("crate::{other}"));
    assert!(imports("lease::wait", "lease::attempt") && graph.len() > 40, "the imports are found: {graph:?}");
    assert!(imports("store::sqlite", "store::sqlite::row"), "paths in the code are found: {graph:?}");
    assert!(imports("lease::wait", "store::database"), "re-exports are followed: {graph:?}");
    has_no_circle(&graph);
}

#[test]
fn no_module_of_the_program_imports_one_that_imports_it() {
    let graph = graph("cli/src");
    assert!(
        graph["crate::keys::run"].contains("crate::process::work") && graph.len() > 40,
        "the imports are found: {graph:?}"
    );
    has_no_circle(&graph);
}

#[test]
fn no_module_of_the_benchmarks_imports_one_that_imports_it() {
    let graph = graph("benches/src");
    assert!(graph["crate::contest"].contains("crate::report"), "the imports are found: {graph:?}");
    has_no_circle(&graph);
}
