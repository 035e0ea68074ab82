//! Tables that are longer than a page.

use maud::{Markup, html};

use crate::ui::text::grouped;

/// One page of the rows that were found.
pub struct Shown<'a, T> {
    pub rows: &'a [T],
    /// The number of the page, from 1, and of the last one.
    page: usize,
    last: usize,
}

impl<'a, T> Shown<'a, T> {
    /// Returns the page with this number, or the nearest one, of pages with so many rows.
    pub fn new(found: &'a [T], page: usize, rows: usize) -> Self {
        let last = found.len().div_ceil(rows).max(1);
        let page = page.clamp(1, last);
        Self { rows: found.chunks(rows).nth(page - 1).unwrap_or_default(), page, last }
    }

    /// Links to the first, the previous, the next and the last page.
    pub fn links(&self, address: impl Fn(usize) -> String) -> Markup {
        let Self { page, last, .. } = *self;
        let link = |name: &str, to: usize| match to == page || to < 1 || to > last {
            true => html! { span { (name) } },
            false => html! { a href=(address(to)) { (name) } },
        };
        html! {
            @if last > 1 {
                nav.pages aria-label="Pages of the table" {
                    (link("First", 1)) (link("Previous", page.saturating_sub(1)))
                    strong { (grouped(page)) " of " (grouped(last)) }
                    (link("Next", page + 1)) (link("Last", last))
                }
            }
        }
    }
}
