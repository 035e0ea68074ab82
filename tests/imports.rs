//! The modules of the library and of the program import downwards: there is no circle.

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

/// The path of a file's module, such as `lease::wait`.
fn module(file: &Path, src: &Path) -> String {
    let path = file.strip_prefix(src).unwrap().with_extension("");
    let path = path.to_str().unwrap().replace(std::path::MAIN_SEPARATOR, "::");
    path.strip_suffix("::mod").unwrap_or(&path).to_owned()
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

/// What the module imports from its own crate. Indented imports belong to its unit tests.
fn imports(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let statements =
        text.split('\n').enumerate().filter(|(_, line)| line.contains("use crate::") && !line.starts_with(' '));
    for (number, _) in statements {
        let rest = text.split('\n').skip(number).collect::<Vec<_>>().join("\n");
        let tree = rest.split_once("use crate::").unwrap().1.split_once(';').unwrap().0;
        paths(&tree.replace('\n', " "), "", &mut found);
    }
    found
}

/// The imports of all modules in a folder of the repository.
fn graph(src: &str) -> Graph {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join(src);
    let mut found = Vec::new();
    files(&src, &mut found);
    let modules: BTreeSet<String> = found.iter().map(|file| module(file, &src)).collect();
    let imported = |path: &String| {
        let mut path = path.as_str();
        while !modules.contains(path) {
            path = path.rsplit_once("::")?.0;
        }
        Some(path.to_owned())
    };
    let edges = |file: &PathBuf| {
        let own = module(file, &src);
        let imports = imports(&std::fs::read_to_string(file).unwrap());
        let others = imports.iter().filter_map(imported).filter(|other| *other != own).collect();
        (own, others)
    };
    found.iter().map(edges).collect()
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
    assert!(graph["lease::wait"].contains("lease::attempt") && graph.len() > 40, "the imports are found: {graph:?}");
    has_no_circle(&graph);
}

#[test]
fn no_module_of_the_program_imports_one_that_imports_it() {
    let graph = graph("cli/src");
    assert!(graph["keys::run"].contains("process::work") && graph.len() > 40, "the imports are found: {graph:?}");
    has_no_circle(&graph);
}
