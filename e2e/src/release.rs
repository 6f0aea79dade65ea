//! Pointsman's own container images, built without a registry, a builder or Docker.
//!
//! In: the crates of this workspace and Debian packages. Out: docker-archive tars. The agent's image is a slim
//! Debian with the tools that the agent runs; the operator's holds its binary and the libraries it loads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::archive::{self, Files, Image};
use crate::command::{command, output};
use crate::stamp::{Inputs, cached, repository};

/// What the agent runs: both flavours of iptables, ipset, and modprobe for its init container.
const AGENT_PACKAGES: &str = "iptables,ipset,kmod";

/// Removed from the agent's image: nothing in a container reads it.
const SLIM: [&str; 12] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/i18n",
    "usr/share/lintian",
    "usr/share/bash-completion",
    "usr/share/bug",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log",
];

/// Builds the base: `sh -c BASE sh ROOT TAR SUITE PACKAGES SLIM [MIRROR]`, in a mount namespace of its own, so that
/// nothing stays mounted when it is interrupted. In memory, because dpkg waits for the disk after every file.
const BASE: &str = r#"
set -e
root=$1 tar=$2 suite=$3 packages=$4 slim=$5
shift 5
mount -t tmpfs -o mode=755 tmpfs "$root"
if ! debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$@"; then
    tail -n 20 "$root/debootstrap/debootstrap.log" >&2
    exit 1
fi
cd "$root"
rm -rf $slim
tar --sort=name --numeric-owner --mtime=@0 --one-file-system --exclude='./dev/*' --exclude='./proc/*' -cf "$tar" .
"#;

/// An image of Pointsman.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// What runs on every node.
    Agent,
    /// What turns ProxyConfigurations into node configurations.
    Operator,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 2] = [Self::Agent, Self::Operator];

    /// `agent` or `operator`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Operator => "operator",
        }
    }

    fn binary(self) -> String {
        format!("pointsman-{}", self.name())
    }
}

/// The version of this workspace, which is the images' tag unless another is given.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The cargo profile of the binaries: `POINTSMAN_PROFILE`, or release. With `dev` an edit is in an image in
/// seconds instead of minutes.
#[must_use]
pub fn profile() -> String {
    std::env::var("POINTSMAN_PROFILE")
        .ok()
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "release".into())
}

/// Builds the images of both parts.
pub async fn build_all() -> Result<Vec<PathBuf>> {
    let mut archives = Vec::new();
    for part in Part::ALL {
        archives.push(build(part, VERSION, &profile()).await?);
    }
    Ok(archives)
}

/// Builds the image `docker.io/pointsman/PART:TAG` of binaries in a cargo profile, and returns its archive.
pub async fn build(part: Part, tag: &str, profile: &str) -> Result<PathBuf> {
    let binary = compile(part, profile).await?;
    let entrypoint = format!("/usr/local/bin/{}", part.binary());
    let mut files = Files::new().program(&entrypoint[1..], &binary);
    let mut layers = Vec::new();
    // Inits and one container of the agent are root; the operator never is.
    let user = (part == Part::Operator).then(|| "65532:65532".to_owned());
    match part {
        Part::Agent => layers.push(debian_base(AGENT_PACKAGES).await?),
        Part::Operator => {
            let passwd = "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n";
            files = files.text("etc/passwd", passwd).text("etc/nsswitch.conf", "hosts: files dns\n");
            files = files.directory("tmp", 0o1777).libraries_of(&binary).await?;
        }
    }
    let image = Image {
        reference: format!("docker.io/pointsman/{}:{tag}", part.name()),
        entrypoint: vec![entrypoint],
        user,
    };
    let mut inputs = Inputs::new().word("1").word(&format!("{image:?} {layers:?}")).path(&binary)?;
    if part == Part::Operator {
        inputs = inputs.path(Path::new("/etc/debian_version"))?;
    }
    cached(&format!("image-{}.tar", part.name()), inputs, async |to| {
        let own = to.with_extension("layer");
        files.write(&own)?;
        layers.push(own.clone());
        archive::write(&to, &image, &layers)?;
        fs::remove_file(own).map_err(Into::into)
    })
    .await
}

/// Compiles the binary of a part; cargo knows whether there is anything to do.
pub async fn compile(part: Part, profile: &str) -> Result<PathBuf> {
    let package = part.binary();
    compile_target(&package, "--bin", &package, profile).await
}

/// Compiles a binary (`--bin`) or an example (`--example`) of a package.
pub async fn compile_target(package: &str, kind: &str, name: &str, profile: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build =
        command(cargo, ["build", "--profile", profile, "--locked", "--message-format=json", "--package"]);
    // Under `cargo test` they describe the test's package; build scripts that read them would compile everything anew.
    for (name, _) in std::env::vars_os() {
        let described = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];
        if described.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            build.env_remove(name);
        }
    }
    eprintln!("  compiling {name} with the profile {profile} (minutes the first time)");
    let messages = output(build.args([package, kind, name]).current_dir(repository())).await?;
    // Cargo says where the binary is: CARGO_TARGET_DIR and the user's configuration may move it.
    let executable = messages.lines().rev().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == name).then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    executable.with_context(|| format!("cargo built {name}, but named no executable"))
}

/// A layer with a minimal Debian and these packages, of the release that this machine runs: the binaries are
/// linked against its libraries.
async fn debian_base(packages: &str) -> Result<PathBuf> {
    let release = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
    let field = |name: &str| release.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let (Some("debian"), Some(suite)) = (field("ID=").as_deref(), field("VERSION_CODENAME=")) else {
        bail!("images are built on Debian, as their base is: use the Containerfile elsewhere");
    };
    let inputs = Inputs::new().word(BASE).word(&suite).word(packages).word(&SLIM.join(" "));
    cached("debian-base.tar", inputs, async |to| {
        if !Path::new("/usr/sbin/debootstrap").exists() {
            bail!("debootstrap is missing: apt-get install debootstrap (hack/image does it by itself)");
        }
        eprintln!("  building the Debian base of the agent's image (once; about a minute)");
        let root = to.with_extension("root");
        fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
        let mut build = command("unshare", ["--mount", "sh", "-c", BASE, "sh"]);
        build.args([root.as_path(), &to]).args([suite.as_str(), packages, &SLIM.join(" ")]);
        build.args(mirror(&suite).await);
        output(&mut build).await?;
        fs::remove_dir(&root).with_context(|| format!("removing {}", root.display()))
    })
    .await
}

/// The mirror that this machine's own apt uses for the suite.
async fn mirror(suite: &str) -> Option<String> {
    let format = "$(SITE) $(CODENAME) $(COMPONENT)";
    let mut apt = command("apt-get", ["indextargets", "--format", format, "Created-By: Packages"]);
    let targets = output(&mut apt).await.ok()?;
    targets.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let address = fields.next()?;
        (fields.next() == Some(suite) && fields.next() == Some("main")).then(|| address.to_owned())
    })
}
