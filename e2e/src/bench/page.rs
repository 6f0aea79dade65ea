//! The page of published results.
//!
//! In: the page, a section and what was measured. Out: the page with that replaced, and nothing else. A section is between two
//! marks; in a section with tables of several sizes, a mark begins each, and a run replaces those that it has measured.

use std::path::Path;

use anyhow::{Context, Result};

use super::objects::Size;

/// Begins the table of a size; it ends with the next one, or with the section.
const TABLE: &str = "<!-- table ";

/// A section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Unique on the page.
    pub name: String,
    /// What it begins with, if it is new.
    pub heading: String,
}

/// Writes the page at `path` anew, changed by `change`.
pub fn rewrite(path: &Path, change: impl FnOnce(&str) -> String) -> Result<()> {
    let page = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    std::fs::write(path, change(&page)).with_context(|| format!("writing {}", path.display()))
}

/// `page` with `table` in a section, in place of the one of this size, if there is one; by size.
#[must_use]
pub fn with_table(page: &str, section: &Section, size: Size, table: &str) -> String {
    let old = find(page, &section.name)
        .map_or_else(|| format!("{}\n\n", section.heading), |(_, old, _)| old.to_owned());
    let mut parts = old.split(TABLE);
    let start = parts.next().unwrap_or_default().trim_end();
    let mut tables: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once(" -->\n")).collect();
    let key = size.key();
    tables.retain(|(of, _)| *of != key);
    tables.push((&key, table));
    tables.sort_by_key(|(of, _)| numbers(of));
    let mut content = start.to_owned();
    for (of, text) in tables {
        content = format!("{content}\n\n{TABLE}{of} -->\n{}", text.trim_end());
    }
    with_section(page, &section.name, &(content + "\n"))
}

/// Of a [`Size::key`].
fn numbers(key: &str) -> Vec<u32> {
    key.split('x').filter_map(|number| number.parse().ok()).collect()
}

/// `page` with the section called `name` replaced by `content`, or with the section at its end.
#[must_use]
pub fn with_section(page: &str, name: &str, content: &str) -> String {
    let (before, after) = match find(page, name) {
        Some((before, _, after)) => (before.to_owned(), after),
        None => (format!("{}\n\n", page.trim_end()), "\n"),
    };
    let (begin, end) = marks(name);
    format!("{before}{begin}{content}{end}{after}")
}

/// What is before, in and after a section.
fn find<'a>(page: &'a str, name: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let (begin, end) = marks(name);
    let (before, rest) = page.split_once(&begin)?;
    let (content, after) = rest.split_once(&end)?;
    Some((before, content, after))
}

fn marks(name: &str) -> (String, String) {
    (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_replaced_or_added() {
        let page = with_section("# Page\n", "a", "one\n");
        assert_eq!(page, "# Page\n\n<!-- begin a -->\none\n<!-- end a -->\n");
        let page = with_section(&page, "a, b", "two\n");
        let page = with_section(&format!("{page}\nBy hand.\n"), "a", "three\n");
        assert_eq!(
            page,
            "# Page\n\n<!-- begin a -->\nthree\n<!-- end a -->\n\n<!-- begin a, b -->\ntwo\n<!-- end a, b -->\n\nBy hand.\n"
        );
        // An editor may have taken the last line's end.
        assert_eq!(with_section(page.trim_end(), "a, b", "four\n").matches("end a, b").count(), 1);
    }

    #[test]
    fn a_table_replaces_that_of_its_size_and_leaves_the_others() {
        let section = Section { name: "a".to_owned(), heading: "### A".to_owned() };
        let size = |services, endpoints| Size::new(services, endpoints).unwrap();
        let mut page = "# Page\n".to_owned();
        for (of, table) in
            [(size(5000, 3), "five\n"), (size(10_000, 3), "ten\n"), (size(5000, 50), "fifty\n")]
        {
            page = with_table(&page, &section, of, table);
        }
        let page = page.replace("### A\n", "### A\n\nBy hand.\n") + "\nAfter.\n";
        let page = with_table(&page, &section, size(1000, 3), "one\n");
        let page = with_table(&page, &section, size(5000, 3), "\nFIVE\n");
        assert_eq!(
            page,
            "# Page\n\n<!-- begin a -->\n### A\n\nBy hand.\n\n<!-- table 1000x3 -->\none\n\n<!-- table 5000x3 -->\n\nFIVE\n\n\
             <!-- table 5000x50 -->\nfifty\n\n<!-- table 10000x3 -->\nten\n<!-- end a -->\n\nAfter.\n"
        );
    }
}
