//! ARCHITECTURE.md: it is short, has each module of `src/` with the modules that it calls, shows
//! the pictures, and names files that exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use crate::{assert_none, cited::tables, files, links, repository, shown};

/// A page that is read in five minutes.
const LINES: usize = 200;

type Modules = BTreeMap<String, BTreeSet<String>>;

/// The first names of the paths that begin with `crate`, outside of comments and tests.
fn imported(text: &str) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let code: String =
        code.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| line.to_owned() + "\n").collect();
    let word = |text: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap().to_owned();
    let mut names = BTreeSet::new();
    for (at, found) in code.match_indices("crate::") {
        let rest = &code[at + found.len()..];
        let Some(tree) = rest.strip_prefix('{') else {
            names.insert(word(rest));
            continue;
        };
        let (mut depth, mut begins) = (1, true);
        for (at, c) in tree.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => begins = true,
                _ if begins && !c.is_whitespace() => {
                    names.insert(word(&tree[at..]));
                    begins = false;
                }
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    names
}

/// The modules of `src`, and for each of them those that it calls.
fn modules(src: &Path) -> Modules {
    let folders = std::fs::read_dir(src).unwrap().map(|entry| entry.unwrap()).filter(|entry| entry.path().is_dir());
    let names: BTreeSet<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    let calls = |module: &String| {
        let code = files(&src.join(module), "rs").into_iter().filter(|file| !shown(file, src).contains("_tests"));
        let called = code.flat_map(|file| imported(&std::fs::read_to_string(file).unwrap()));
        called.filter(|name| name != module && names.contains(name)).collect()
    };
    names.iter().map(|module| (module.clone(), calls(module))).collect()
}

/// The modules that the page has in its table of modules, and those that it says they call.
fn described(page: &str) -> Modules {
    let (tables, _) = tables(page);
    let rows = tables.iter().filter(|table| table.heading == "Modules").flat_map(|table| &table.rows);
    let module = |code: &String| code.trim_end_matches('/').to_owned();
    rows.filter_map(|row| Some((module(row[0].code.first()?), row.last()?.code.iter().map(module).collect()))).collect()
}

/// The code of the page that has the form of a path and that is not in `src/` nor in the root.
fn absent(root: &Path, page: &str) -> Vec<String> {
    let (tables, outside) = tables(page);
    let cells = tables.into_iter().flat_map(|table| table.rows).flatten().flat_map(|cell| cell.code);
    let is_path = |code: &String| (code.contains('/') || code.ends_with(".rs")) && !code.contains([' ', ':']);
    let exists = |path: &str| {
        let servers = ["postgres", "mysql", "sqlite"].map(|server| path.replace('*', server));
        servers.iter().all(|path| root.join("src").join(path).exists() || root.join(path).exists())
    };
    let named = outside.into_iter().map(|(_, code)| code).chain(cells).filter(is_path);
    named.filter(|path| !exists(path)).map(|path| format!("{path} does not exist")).collect()
}

fn problems(root: &Path) -> Vec<String> {
    let page = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let mut problems = absent(root, &page);
    let lines = page.lines().count();
    if lines >= LINES {
        problems.push(format!("the page has {lines} lines of fewer than {LINES}"));
    }
    let (modules, mut described) = (modules(&root.join("src")), described(&page));
    for (module, calls) in modules {
        match described.remove(&module) {
            None => problems.push(format!("the table of modules has no `{module}/`")),
            Some(said) if said != calls => {
                problems.push(format!("`{module}/` calls {calls:?}, and the page says {said:?}"));
            }
            Some(_) => {}
        }
    }
    problems.extend(described.keys().map(|module| format!("`{module}/` is no module")));
    let links = links::read(&root.join("ARCHITECTURE.md")).links;
    let shown = |name: &String| links.iter().any(|(_, link)| link == name);
    let pictures = files(&root.join("docs/pictures"), "svg").into_iter().map(|file| crate::shown(&file, root));
    problems.extend(pictures.filter(|name| !shown(name)).map(|name| format!("the page does not show {name}")));
    problems
}

#[test]
fn the_architecture_is_that_of_the_code() {
    let root = repository();
    assert!(modules(&root.join("src"))["lease"].contains("session"), "imports are found");
    assert_none(&problems(&root));
}

#[test]
fn another_architecture_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let write = |name: &str, text: &str| {
        std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
        std::fs::write(root.join(name), text).unwrap();
    };
    write("src/key.rs", "");
    write(
        "src/lease/mod.rs",
        "use crate::{\n    key::Key,\n    store::{Database, queue::Other},\n};\n// crate::queue\n",
    );
    write("src/lease/some_tests.rs", "use crate::queue::Queue;\n");
    write("src/queue/mod.rs", "#[cfg(test)]\nmod tests {\n    use crate::lease::Lease;\n}\n");
    write("src/store/mod.rs", "fn any() -> crate::queue::Any {}\n");
    write("docs/pictures/key.svg", "");
    let page = "## Modules\n\n| module | | calls |\n|---|---|---|\n| `lease/` | | `store/` |\n| `queue/` | | |\n| `store/` | | `queue/` |\n\n\
                ![The path](docs/pictures/key.svg) of `key.rs` and `lease/mod.rs` in `src/lease/`, `cargo test`, `a::b/c`\n";
    write("ARCHITECTURE.md", page);
    assert_none(&problems(root));

    let page = page.replace("| `queue/` | | |\n", "| `gone/` | | |\n").replace("| | `store/` |", "| | `queue/` |");
    let page = page
        .replace("`key.rs`", "`keys.rs`, `lease/*/claim.rs`")
        .replace("![The path](docs/pictures/key.svg)", "The path");
    write("ARCHITECTURE.md", &(page + &"\n".repeat(LINES)));
    let expected = [
        "keys.rs does not exist",
        "lease/*/claim.rs does not exist",
        "gone/ does not exist",
        "the page has 209 lines of fewer than 200",
        "`lease/` calls {\"store\"}, and the page says {\"queue\"}",
        "the table of modules has no `queue/`",
        "`gone/` is no module",
        "the page does not show docs/pictures/key.svg",
    ];
    assert_eq!(problems(root), expected);
}
