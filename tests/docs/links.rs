//! The links of the Markdown files, as GitHub shows them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use mdbook_markdown::pulldown_cmark::{BrokenLink, Event, LinkType, Options, Parser, Tag, TagEnd};
use url::Url;

use crate::{assert_none, files, html, repository, shown};

/// A Markdown file's links, each with its line, and the anchors of its headings.
#[derive(Default)]
pub struct Document {
    pub links: Vec<(usize, String)>,
    anchors: BTreeSet<String>,
    undefined: Vec<(usize, String)>,
}

pub fn read(file: &Path) -> Document {
    let text = std::fs::read_to_string(file).unwrap();
    let line = |offset: usize| text[..offset].matches('\n').count() + 1;
    let mut document = Document::default();
    // `[a][b]` without a definition of `b` is shown as it stands. `[a]` alone may be meant that
    // way.
    let mut undefined = Vec::new();
    let without_definition = |link: BrokenLink<'_>| {
        if link.link_type != LinkType::Shortcut {
            undefined.push((line(link.span.start), link.reference.to_string()));
        }
        None
    };
    let options = Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES | Options::ENABLE_STRIKETHROUGH;
    let parser = Parser::new_with_broken_link_callback(&text, options, Some(without_definition));

    let mut heading = None;
    for (event, range) in parser.into_offset_iter() {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let slug = slug(&heading.take().unwrap_or_default());
                let mut numbered = (1..).map(|number| format!("{slug}-{number}"));
                let mut anchor = slug.clone();
                while !document.anchors.insert(anchor) {
                    anchor = numbered.next().unwrap();
                }
            }
            Event::Text(text) | Event::Code(text) => heading.iter_mut().for_each(|heading| heading.push_str(&text)),
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                document.links.push((line(range.start), dest_url.to_string()));
            }
            Event::Html(html) | Event::InlineHtml(html) => {
                let found = html::attributes(&html);
                document.links.extend(found.links.into_iter().map(|link| (line(range.start), link)));
                document.anchors.extend(found.anchors);
            }
            _ => {}
        }
    }
    document.undefined = undefined;
    document
}

/// The anchor that GitHub derives from a heading.
fn slug(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Where a link of a file leads.
pub enum Target {
    /// A file or folder inside the folder that was checked, and an anchor in it.
    Inside(PathBuf, Option<String>),
    External(Url),
}

pub fn target(from: &Path, link: &str, folder: &Path) -> Result<Target, String> {
    let base = Url::from_file_path(from).map_err(|()| format!("{} is not absolute", from.display()))?;
    let url = base.join(link).map_err(|error| format!("{link}: {error}"))?;
    if url.scheme() != "file" {
        return Ok(Target::External(url));
    }
    let path = url.to_file_path().map_err(|()| format!("{link} is not a path"))?;
    if !path.starts_with(folder) {
        return Err(format!("{link} leads out of the folder"));
    }
    if !path.exists() {
        return Err(format!("{link} does not exist"));
    }
    Ok(Target::Inside(path, link.split_once('#').map(|(_, anchor)| anchor.to_owned())))
}

/// The links of all Markdown files in the folder that lead nowhere.
fn problems(folder: &Path) -> Vec<String> {
    let documents: BTreeMap<_, _> = files(folder, "md").into_iter().map(|file| (file.clone(), read(&file))).collect();
    let problem = |from: &Path, link: &str| match target(from, link, folder) {
        Ok(Target::Inside(path, Some(anchor))) => {
            let known = documents.get(&path).is_some_and(|document| document.anchors.contains(&anchor));
            (!known).then(|| format!("{link}: {} has no such heading", shown(&path, folder)))
        }
        Ok(Target::Inside(_, None)) => None,
        Ok(Target::External(url)) => {
            let valid = url.scheme() == "https" && url.has_host();
            (!valid).then(|| format!("{link} is not an https link"))
        }
        Err(problem) => Some(problem),
    };
    let mut problems = Vec::new();
    for (file, document) in &documents {
        let at = |line| format!("{}:{line}: ", shown(file, folder));
        problems.extend(document.undefined.iter().map(|(line, label)| at(*line) + label + " has no definition"));
        for (line, link) in document.links.iter().filter(|(_, link)| !link.is_empty()) {
            problems.extend(problem(file, link).map(|problem| at(*line) + &problem));
        }
    }
    problems
}

#[test]
fn links_lead_to_files_and_headings() {
    assert_none(&problems(&repository()));
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    std::fs::create_dir(root.join("docs")).unwrap();
    std::fs::write(
        root.join("README.md"),
        "# A `--flag`, and an _adverb_\n## Twice\n## Twice\n\
         [1](#a---flag-and-an-adverb) [2](#a--flag-and-an-adverb)\n\
         [3](docs/page.md#own), [4](docs/page.md#other), [5](docs), [6](docs/pages.md)\n\
         [7](https://example.org/) [8](http://example.org/) [9](https://[) ![10](none.svg)\n\
         <a href=\"none.md\">11</a> [12][none] [13] `[14](none.md)`\n",
    )
    .unwrap();
    std::fs::write(
        root.join("docs/page.md"),
        "<a id=\"own\"></a>\n\n[1](../README.md#twice-1) [2](../README.md#twice-2) [3](../../README.md)\n",
    )
    .unwrap();
    let expected = [
        "README.md:7: none has no definition",
        "README.md:4: #a--flag-and-an-adverb: README.md has no such heading",
        "README.md:5: docs/page.md#other: docs/page.md has no such heading",
        "README.md:5: docs/pages.md does not exist",
        "README.md:6: http://example.org/ is not an https link",
        "README.md:6: https://[: invalid IPv6 address",
        "README.md:6: none.svg does not exist",
        "README.md:7: none.md does not exist",
        "docs/page.md:3: ../README.md#twice-2: README.md has no such heading",
        "docs/page.md:3: ../../README.md leads out of the folder",
    ];
    assert_eq!(problems(&root), expected);
}
