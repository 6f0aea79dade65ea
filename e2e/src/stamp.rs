//! Caching of what is built, by the content of what it is built from.
//!
//! In: a name, the inputs (files, folders, words) and a function that builds. Out: the path of the artefact
//! `CACHE/bin/NAME-HASH`, built only when no such file exists. Two builders of the same artefact wait for each
//! other, and a build that was interrupted leaves nothing that looks finished.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// The folder of everything that is built once and kept: `POINTSMAN_CACHE`, or `pointsman` in the user's cache.
pub fn cache_dir() -> Result<PathBuf> {
    let from = |variable: &str| std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("POINTSMAN_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|dir| dir.join("pointsman")))
        .or_else(|| from("HOME").map(|dir| dir.join(".cache/pointsman")))
        .context("no folder for the cache: set POINTSMAN_CACHE, XDG_CACHE_HOME or HOME")
}

/// The root of the repository that this was compiled in.
#[must_use]
pub fn repository() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// The hash of all that an artefact depends on.
#[derive(Default, Clone)]
pub struct Inputs(Sha256);

impl Inputs {
    /// No inputs yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a word: a version, a flag, a format.
    #[must_use]
    pub fn word(mut self, word: &str) -> Self {
        self.0.update(word.len().to_le_bytes());
        self.0.update(word);
        self
    }

    /// Adds a file's content, or every file of a folder with its relative path.
    pub fn path(mut self, path: &Path) -> Result<Self> {
        for file in files(path)? {
            let relative = file.strip_prefix(path).unwrap_or(&file);
            self = self.word(&relative.to_string_lossy());
            let mut reader = File::open(&file).with_context(|| format!("reading {}", file.display()))?;
            let mut buffer = vec![0; 1 << 16];
            loop {
                let n = reader.read(&mut buffer).with_context(|| format!("reading {}", file.display()))?;
                if n == 0 {
                    break;
                }
                self.0.update(&buffer[..n]);
            }
        }
        Ok(self)
    }

    /// The hash, short enough for a file name.
    #[must_use]
    pub fn hash(self) -> String {
        use std::fmt::Write;
        self.0.finalize().iter().take(8).fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// The regular files under `path`, or `path` itself, in a fixed order.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut entries = fs::read_dir(path)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .with_context(|| format!("listing {}", path.display()))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    let mut found = Vec::new();
    for entry in entries {
        let kind = entry.file_type()?;
        if kind.is_dir() {
            found.extend(files(&entry.path())?);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Returns the artefact `name` made of `inputs`, after having `build` write it if it is not there yet.
pub async fn cached<F>(name: &str, inputs: Inputs, build: impl FnOnce(PathBuf) -> F) -> Result<PathBuf>
where
    F: Future<Output = Result<()>>,
{
    let dir = cache_dir()?.join("bin");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let (stem, extension) = name.split_once('.').map_or((name, String::new()), |(s, e)| (s, format!(".{e}")));
    let artefact = dir.join(format!("{stem}-{}{extension}", inputs.hash()));
    if artefact.exists() {
        return Ok(artefact);
    }
    let _lock = lock(&dir.join(format!(".{stem}.lock"))).await?;
    if !artefact.exists() {
        // What an interrupted build left is overwritten: only the holder of the lock writes here.
        let unfinished = dir.join(format!(".{stem}.unfinished"));
        build(unfinished.clone()).await.with_context(|| format!("building {name}"))?;
        fs::rename(&unfinished, &artefact).with_context(|| format!("keeping {}", artefact.display()))?;
    }
    Ok(artefact)
}

/// Waits for the exclusive lock on the file `path`; it is released when the returned file is dropped, and by the
/// kernel when this process dies.
pub async fn lock(path: &Path) -> Result<File> {
    let file = File::options().create(true).append(true).open(path);
    let file = file.with_context(|| format!("opening the lock {}", path.display()))?;
    if file.try_lock().is_ok() {
        return Ok(file);
    }
    let waiting = path.to_owned();
    eprintln!("  waiting for another process to release {}", waiting.display());
    tokio::task::spawn_blocking(move || file.lock().map(|()| file))
        .await?
        .with_context(|| format!("locking {}", waiting.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_tell_words_and_files_apart() {
        let dir = tempfile::tempdir().unwrap();
        let hash = || Inputs::new().path(dir.path()).unwrap().hash();
        fs::write(dir.path().join("a"), "1").unwrap();
        let one = hash();
        assert_eq!(one, hash());
        fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
        assert_ne!(one, hash());
        assert_ne!(Inputs::new().word("ab").word("c").hash(), Inputs::new().word("a").word("bc").hash());
    }
}
