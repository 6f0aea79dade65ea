//! Writing small files.
//!
//! In: a path and a text. Out: the file holds the text, and never held a part of it.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Writes a file that only its owner reads, whole or not at all. What is there already is left alone: several
/// commands may open one cluster at the same time, and kube-proxy ends when its file is written again.
pub fn write(path: &Path, text: &str) -> Result<()> {
    use std::io::Write;
    if fs::read_to_string(path).is_ok_and(|there| there == text) {
        return Ok(());
    }
    let unfinished = path.with_extension(format!("unfinished-{}", std::process::id()));
    let mut options = fs::File::options();
    options.create(true).truncate(true).write(true).mode(0o600);
    options
        .open(&unfinished)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&unfinished, path))
        .with_context(|| format!("writing {}", path.display()))
}
