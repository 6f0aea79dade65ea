//! The programs that the test cluster runs, built from the Go modules under `e2e/`.
//!
//! In: the modules' sources. Out: paths of static binaries in the cache; a second call builds nothing.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::command::{command, output};
use crate::stamp::{Inputs, cached, repository};

/// etcd and every Kubernetes component, in one binary.
pub async fn controlplane() -> Result<PathBuf> {
    let module = repository().join("e2e/controlplane");
    let version = required_version(&module, "k8s.io/kubernetes")?;
    let (major, minor) = version
        .strip_prefix('v')
        .and_then(|v| v.split_once('.'))
        .and_then(|(major, rest)| rest.split_once('.').map(|(minor, _)| (major.to_owned(), minor.to_owned())))
        .with_context(|| format!("{version}: not a version of Kubernetes"))?;
    // Unstamped, the server calls itself v0.0.0 and clients misread what it can do.
    let stamp = "-X k8s.io/component-base/version";
    let stamps = format!("{stamp}.gitVersion={version} {stamp}.gitMajor={major} {stamp}.gitMinor={minor}");
    go_binary("controlplane", &module, ".", &stamps).await
}

/// Helm.
pub async fn helm() -> Result<PathBuf> {
    let module = repository().join("e2e/helm");
    let version = required_version(&module, "helm.sh/helm/v4")?;
    let stamp = format!("-X helm.sh/helm/v4/internal/version.version={version}");
    go_binary("helm", &module, "helm.sh/helm/v4/cmd/helm", &stamp).await
}

/// CoreDNS with the plugins that a cluster needs.
pub async fn coredns() -> Result<PathBuf> {
    go_binary("coredns", &repository().join("e2e/coredns"), ".", "").await
}

/// The test server, which is also the prober and the pause container.
pub async fn testserver() -> Result<PathBuf> {
    go_binary("testserver", &repository().join("e2e/testserver"), ".", "").await
}

/// Builds `package` of `module` as a static binary.
async fn go_binary(name: &str, module: &Path, package: &str, stamps: &str) -> Result<PathBuf> {
    let go = output(&mut command("go", ["env", "GOVERSION", "GOARCH"]))
        .await
        .context("Go 1.26 or later is needed (https://go.dev/dl): put `go` on the PATH")?;
    let flags = format!("-s -w {stamps}");
    let inputs = Inputs::new().word(&go).word(&flags).word(package).path(module)?;
    cached(name, inputs, async |to| {
        eprintln!("  building {name} (once; the first build of the control plane takes about 8 minutes)");
        let mut go = command("go", ["build", "-trimpath", "-ldflags", flags.trim(), "-o"]);
        go.arg(to).arg(package).current_dir(module).env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=readonly");
        output(&mut go).await.map(drop)
    })
    .await
}

/// The version of `dependency` that the module's go.mod requires.
fn required_version(module: &Path, dependency: &str) -> Result<String> {
    let path = module.join("go.mod");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let mut words = text.lines().map(|line| line.trim_start_matches("require ").split_whitespace());
    words
        .find_map(|mut line| (line.next() == Some(dependency)).then(|| line.next()).flatten())
        .map(str::to_owned)
        .with_context(|| format!("{}: no version of {dependency}", path.display()))
}
