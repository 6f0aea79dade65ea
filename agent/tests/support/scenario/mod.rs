//! Scenarios: what a behaviour looks like from outside, in files that every mode runs.
//!
//! In: a file of `agent/tests/scenarios`; its form is described in that folder's README. Out: a [`Scenario`], steps of
//! changes with the packets that are tried after each. Nothing here knows rules or sockets: unit tests ask the plan and
//! walk rendered rules with the packets, kernel tests send them.

mod expand;
mod file;
pub mod hosts;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use pointsman_agent::model::{Change, Protocol};
use pointsman_agent::plan::Packet;
use pointsman_crds::NodeProxyConfiguration;
use pointsman_crds::proxy_node_status::IpFamily;
use pointsman_crds::settings::Mode;

use hosts::Host;

/// One file.
#[derive(Debug)]
pub struct Scenario {
    /// The file's name without its ending.
    pub name: String,
    /// What the node has before the first step.
    pub start: Vec<Change>,
    /// Addresses that the node has besides those of [`hosts::node_addresses`].
    pub more_addresses: Vec<IpAddr>,
    pub steps: Vec<Step>,
}

/// Something happens, then packets are tried.
#[derive(Debug)]
pub struct Step {
    pub what: String,
    pub changes: Vec<Change>,
    /// The configuration that holds from here on.
    pub config: NodeProxyConfiguration,
    /// How long nothing happens before the packets; only matters to real ones.
    pub wait_seconds: u64,
    pub cases: Vec<Case>,
    /// TCP connections that are opened after the packets, and must live until the end.
    pub streams: Vec<Stream>,
    /// Modes in which those that were opened earlier end with this step.
    pub cut: Vec<Mode>,
}

/// A connection that lives on.
#[derive(Debug)]
pub struct Stream {
    pub from: &'static Host,
    pub to: SocketAddr,
}

/// One kind of packet.
#[derive(Clone, Debug)]
pub struct Case {
    pub family: IpFamily,
    pub from: &'static Host,
    /// The source, where it is not the one that the sender would choose.
    pub source: Option<IpAddr>,
    pub to: SocketAddr,
    pub protocol: Protocol,
    /// The line of the file, counted within its step.
    pub row: usize,
    expected: Expected,
    /// Modes in which something else is expected.
    unless: Vec<(Mode, Expected)>,
}

/// What becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// It reaches all of these and nobody else; if it is sticky, always the same one.
    Reach { ends: Vec<End>, sticky: Sticky },
    /// The sender is told at once that nobody is there.
    Refused,
    /// It vanishes.
    Dropped,
    /// It goes where it would go without a proxy.
    Untouched,
}

/// Whether a sender stays with its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sticky {
    No,
    Yes,
    /// As long as it comes back within this time.
    ForSeconds(u64),
}

/// One endpoint that is reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    pub host: &'static str,
    pub port: u16,
    /// Whether it sees an address of the node as source.
    pub masquerade: bool,
}

impl Case {
    /// What is expected where no mode has a reason to differ.
    pub fn usually(&self) -> &Expected {
        &self.expected
    }

    pub fn expected(&self, mode: Mode) -> &Expected {
        let other = self.unless.iter().find(|(which, _)| *which == mode);
        other.map_or(&self.expected, |(_, expected)| expected)
    }

    /// The packet, as it reaches the node or leaves a process on it.
    pub fn packet(&self, local: &BTreeSet<IpAddr>) -> Packet {
        let is_local = |address: &IpAddr| address.is_loopback() || local.contains(address);
        let destination = self.to.ip();
        let source = self.source.unwrap_or_else(|| {
            // A node speaks to itself with the address that it speaks to.
            if self.from.interface.is_none() && is_local(&destination) {
                destination
            } else {
                self.from.address(self.family)
            }
        });
        Packet {
            interface: self.from.interface.map(ToOwned::to_owned),
            source,
            source_is_local: is_local(&source),
            destination,
            destination_is_local: is_local(&destination),
            protocol: self.protocol,
            port: self.to.port(),
        }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}/{}", self.from.name, self.to, self.protocol)?;
        self.source.map_or(Ok(()), |source| write!(f, " as {source}"))
    }
}

/// All files, in order of their names.
pub fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let entries = std::fs::read_dir(folder).expect("the folder is there").flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect();
    files.sort();
    files
}

impl Scenario {
    /// Reads a file; an error names it and says what is wrong where.
    pub fn load(path: &Path) -> Result<Self, String> {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
        Self::parse(&name, &text).map_err(|error| format!("{name}.yaml: {error}"))
    }

    /// Reads the text of a file.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        let file: file::File = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        expand::expand(name, file)
    }
}
