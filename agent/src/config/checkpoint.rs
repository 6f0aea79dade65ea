//! The configuration in force, on the node's disk.
//!
//! In: a [`Candidate`] that the kernel holds. Out: the same after a restart, so that the agent works while the API server
//! or the operator is away. A checkpoint that cannot be read counts as absent: the ConfigMap is then waited for.

use std::io::Write;
use std::path::{Path, PathBuf};

use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::node_config::{NodeConfigError, config_hash};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Candidate;

const FILE: &str = "config.json";

/// Why a checkpoint was not written or not read.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The disk.
    #[error("{action} {path:?}: {error}; check that the directory is on a writable volume with free space")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// Not what we write.
    #[error("{path:?} is damaged ({why}); it is ignored and will be replaced")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Written by an agent that knew more or less than this one.
    #[error("{path:?} holds a configuration that this agent cannot obey ({error}); it is ignored")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        error: NodeConfigError,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    revision: String,
    hash: String,
    content: String,
}

/// Where the checkpoint of one agent lives.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    directory: PathBuf,
}

impl Checkpoint {
    /// A checkpoint in `directory`, which is created when first written to.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Writes `candidate` so that a crash at any moment leaves either the old or the new one.
    pub fn store(&self, candidate: &Candidate) -> Result<(), CheckpointError> {
        let path = self.directory.join(FILE);
        let failed = |action| {
            let path = path.clone();
            move |error| CheckpointError::Io { action, path, error }
        };
        let stored = Stored {
            revision: candidate.revision.clone(),
            hash: candidate.hash.clone(),
            content: candidate.content.clone(),
        };
        let bytes = serde_json::to_vec_pretty(&stored)
            .map_err(|error| CheckpointError::Damaged { path: path.clone(), why: error.to_string() })?;
        std::fs::create_dir_all(&self.directory).map_err(failed("creating the directory of"))?;
        let temporary = self.directory.join(format!("{FILE}.new"));
        let mut file = std::fs::File::create(&temporary).map_err(failed("writing"))?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed("writing"))?;
        std::fs::rename(&temporary, &path).map_err(failed("replacing"))?;
        std::fs::File::open(&self.directory).and_then(|dir| dir.sync_all()).map_err(failed("replacing"))
    }

    /// Removes it.
    pub fn remove(&self) -> Result<(), CheckpointError> {
        let path = self.directory.join(FILE);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(CheckpointError::Io { action: "removing", path, error })
            }
            _ => Ok(()),
        }
    }

    /// Reads what [`Checkpoint::store`] wrote; nothing if it never did.
    pub fn load(&self) -> Result<Option<Candidate>, CheckpointError> {
        let path = self.directory.join(FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CheckpointError::Io { action: "reading", path, error }),
        };
        let stored: Stored = match serde_json::from_slice(&bytes) {
            Ok(stored) => stored,
            Err(error) => return Err(CheckpointError::Damaged { path, why: error.to_string() }),
        };
        if config_hash(&stored.content) != stored.hash {
            return Err(CheckpointError::Damaged {
                path,
                why: "its hash does not match its content".to_owned(),
            });
        }
        match NodeProxyConfiguration::parse(&stored.content, Some(&stored.hash)) {
            Ok(config) => Ok(Some(Candidate {
                revision: stored.revision,
                hash: stored.hash,
                content: stored.content,
                config,
            })),
            Err(error) => Err(CheckpointError::Refused { path, error }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{candidate, sample};
    use super::*;

    #[test]
    fn what_was_stored_comes_back_and_the_last_one_wins() {
        let directory = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::new(&directory.path().join("deeper"));
        assert!(checkpoint.load().unwrap().is_none());
        let mut second = sample();
        second.masquerade.bit = 15;
        for config in [sample(), second] {
            let candidate = candidate("default", config);
            checkpoint.store(&candidate).unwrap();
            assert_eq!(checkpoint.load().unwrap(), Some(candidate));
        }
    }

    #[test]
    fn every_damage_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::new(directory.path());
        checkpoint.store(&candidate("default", sample())).unwrap();
        let file = directory.path().join(FILE);
        let bytes = std::fs::read(&file).unwrap();
        for end in (0..bytes.len()).step_by(97) {
            std::fs::write(&file, &bytes[..end]).unwrap();
            assert!(checkpoint.load().is_err(), "cut at {end}");
        }
        let edited = String::from_utf8(bytes).unwrap().replace("bit: 14", "bit: 15");
        std::fs::write(&file, edited).unwrap();
        let error = checkpoint.load().unwrap_err().to_string();
        assert!(error.contains("hash"), "{error}");
    }

    #[test]
    fn a_disk_that_cannot_be_written_says_what_to_check() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a-file");
        std::fs::write(&file, "").unwrap();
        let error = Checkpoint::new(&file).store(&candidate("default", sample())).unwrap_err().to_string();
        assert!(error.contains("writable volume"), "{error}");
    }
}
