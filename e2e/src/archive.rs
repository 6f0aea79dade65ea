//! Container images as docker-archive tars, written without a builder, a registry or Docker.
//!
//! In: an image's name and entrypoint, and its layers as tars or as lists of files. Out: a file for
//! `ctr images import` (and for `docker load`), the same bytes for the same input.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::command::{command, output};

/// What an image says of itself.
#[derive(Debug, Clone, Default)]
pub struct Image {
    /// Full name with tag, such as `docker.io/pointsman/pause:dev`.
    pub reference: String,
    /// The program and its first arguments.
    pub entrypoint: Vec<String>,
    /// The user (and group) it runs as, if not root.
    pub user: Option<String>,
}

/// The content of a layer: what is at each path, in order.
#[derive(Debug, Default)]
pub struct Files(BTreeMap<String, Content>);

#[derive(Debug)]
enum Content {
    Copy(PathBuf, u32),
    Text(String),
    Link(String),
    Directory(u32),
}

impl Files {
    /// No files.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A program of this machine at `to`.
    #[must_use]
    pub fn program(mut self, to: &str, from: &Path) -> Self {
        self.0.insert(to.into(), Content::Copy(from.to_owned(), 0o755));
        self
    }

    /// A text file.
    #[must_use]
    pub fn text(mut self, to: &str, text: &str) -> Self {
        self.0.insert(to.into(), Content::Text(text.into()));
        self
    }

    /// A symbolic link, unless there is something already.
    #[must_use]
    pub fn link(mut self, to: &str, target: &str) -> Self {
        self.0.entry(to.into()).or_insert_with(|| Content::Link(target.into()));
        self
    }

    /// A directory with these permissions.
    #[must_use]
    pub fn directory(mut self, to: &str, mode: u32) -> Self {
        self.0.insert(to.into(), Content::Directory(mode));
        self
    }

    /// The shared libraries that `program` of this machine loads, where its loader looks for them.
    pub async fn libraries_of(mut self, program: &Path) -> Result<Self> {
        let listed = output(command("ldd", [program]).env("LC_ALL", "C")).await?;
        for library in libraries(&listed) {
            let from = fs::canonicalize(library)
                .with_context(|| format!("{library}, which {} needs", program.display()))?;
            self.0.insert(library.trim_start_matches('/').into(), Content::Copy(from, 0o755));
        }
        Ok(self)
    }

    /// Writes them as a layer.
    pub fn write(&self, layer: &Path) -> Result<()> {
        let file = File::create(layer).with_context(|| format!("creating {}", layer.display()))?;
        let mut tar = Builder::new(file);
        for (to, content) in &self.0 {
            let to = to.trim_start_matches('/');
            Self::append(&mut tar, to, content).with_context(|| format!("adding {to} to an image"))?;
        }
        tar.into_inner()
            .and_then(|mut file| file.flush())
            .with_context(|| format!("writing {}", layer.display()))
    }

    fn append(tar: &mut Builder<File>, to: &str, content: &Content) -> Result<()> {
        let mut header = Header::new_gnu();
        header.set_mtime(0);
        match content {
            Content::Copy(from, mode) => {
                let file = File::open(from).with_context(|| format!("reading {}", from.display()))?;
                header.set_size(file.metadata()?.len());
                header.set_mode(*mode);
                tar.append_data(&mut header, to, file)?;
            }
            Content::Text(text) => {
                header.set_size(text.len() as u64);
                header.set_mode(0o644);
                tar.append_data(&mut header, to, text.as_bytes())?;
            }
            Content::Link(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_size(0);
                tar.append_link(&mut header, to, target)?;
            }
            Content::Directory(mode) => {
                header.set_entry_type(EntryType::Directory);
                header.set_size(0);
                header.set_mode(*mode);
                tar.append_data(&mut header, to, std::io::empty())?;
            }
        }
        Ok(())
    }
}

/// The paths in the output of ldd.
fn libraries(listed: &str) -> impl Iterator<Item = &str> {
    listed.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
}

/// Writes the archive `to` of an image with these layers (uncompressed tars), the lowest first.
pub fn write(to: &Path, image: &Image, layers: &[PathBuf]) -> Result<()> {
    ensure!(image.reference.contains(':'), "{}: an image needs a tag", image.reference);
    let digests = layers.iter().map(|layer| digest(layer)).collect::<Result<Vec<_>>>()?;
    let diff_ids: Vec<String> = digests.iter().map(|digest| format!("sha256:{digest}")).collect();
    let configuration = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": {
            "Entrypoint": image.entrypoint,
            "User": image.user.as_deref().unwrap_or_default(),
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let configuration = serde_json::to_vec(&configuration)?;
    let configuration_name = format!("{}.json", hex(&Sha256::digest(&configuration)));
    let layer_names: Vec<String> = digests.iter().map(|digest| format!("{digest}/layer.tar")).collect();
    let manifest =
        json!([{"Config": configuration_name, "RepoTags": [image.reference], "Layers": layer_names}]);

    let file = File::create(to).with_context(|| format!("creating {}", to.display()))?;
    let mut tar = Builder::new(file);
    let mut append = |name: &str, size: u64, data: &mut dyn Read| {
        let mut header = Header::new_gnu();
        header.set_size(size);
        header.set_mode(0o644);
        header.set_mtime(0);
        tar.append_data(&mut header, name, data).with_context(|| format!("writing {}", to.display()))
    };
    append(&configuration_name, configuration.len() as u64, &mut configuration.as_slice())?;
    for (name, layer) in layer_names.iter().zip(layers) {
        let mut file = File::open(layer).with_context(|| format!("reading {}", layer.display()))?;
        append(name, file.metadata()?.len(), &mut file)?;
    }
    let manifest = serde_json::to_vec(&manifest)?;
    append("manifest.json", manifest.len() as u64, &mut manifest.as_slice())?;
    tar.into_inner().and_then(|mut file| file.flush()).with_context(|| format!("writing {}", to.display()))
}

fn digest(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = file.read(&mut buffer).with_context(|| format!("reading {}", path.display()))?;
        if n == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..n]);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        use std::fmt::Write;
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_input_gives_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let files = Files::new().text("etc/b", "b").link("a", "etc/b").directory("tmp", 0o1777);
        files.write(&path("layer.tar")).unwrap();
        let image = Image { reference: "example/x:1".into(), entrypoint: vec!["/a".into()], user: None };
        for name in ["one.tar", "two.tar"] {
            write(&path(name), &image, &[path("layer.tar")]).unwrap();
        }
        assert_eq!(fs::read(path("one.tar")).unwrap(), fs::read(path("two.tar")).unwrap());
        let mut archive = tar::Archive::new(File::open(path("one.tar")).unwrap());
        let names: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names.len(), 3);
        assert!(names[1].ends_with("/layer.tar") && names[2] == "manifest.json", "{names:?}");
    }

    #[test]
    fn libraries_are_read_from_ldd() {
        let listed = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(libraries(listed).collect::<Vec<_>>(), expected);
    }
}
