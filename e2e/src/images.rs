//! The images that the cluster itself needs: pause, CoreDNS and the test server.
//!
//! In: the programs of [`crate::artifacts`], whose paths tell their content, and a few of this machine. Out:
//! archives in the cache.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::archive::{self, Files, Image};
use crate::artifacts;
use crate::command::{command, output};
use crate::node::PAUSE_IMAGE;
use crate::stamp::{Inputs, cached};

/// The image of CoreDNS.
pub const COREDNS_IMAGE: &str = "docker.io/pointsman/coredns:dev";

/// The image of the test server, which also has a shell, curl and nc.
pub const TEST_SERVER_IMAGE: &str = "docker.io/pointsman/test-server:dev";

/// Changes with the form of the images, so that older ones in the cache are not used.
const FORM: &str = "1";

/// The image that holds each pod's namespaces.
pub async fn pause() -> Result<PathBuf> {
    let server = artifacts::testserver().await?;
    let files = Files::new().program("testserver", &server);
    build(
        "pause",
        PAUSE_IMAGE,
        &["/testserver", "pause"],
        files,
        Inputs::new().word(&server.to_string_lossy()),
    )
    .await
}

/// CoreDNS.
pub async fn coredns() -> Result<PathBuf> {
    let coredns = artifacts::coredns().await?;
    let files = Files::new().program("coredns", &coredns);
    build("coredns", COREDNS_IMAGE, &["/coredns"], files, Inputs::new().word(&coredns.to_string_lossy()))
        .await
}

/// The test server, with the tools that a person wants in a pod.
pub async fn test_server() -> Result<PathBuf> {
    let server = artifacts::testserver().await?;
    let busybox = Path::new("/bin/busybox");
    let mut files = Files::new()
        .program("usr/bin/testserver", &server)
        .program("bin/busybox", busybox)
        .text("etc/passwd", "root:x:0:0:root:/:/bin/sh\n")
        .text("etc/nsswitch.conf", "hosts: files dns\n")
        .directory("tmp", 0o1777);
    let mut inputs = Inputs::new().word(&server.to_string_lossy()).path(busybox)?;
    let curl = (Path::new("/usr/bin/curl"), "usr/bin/curl");
    let nc = (Path::new("/bin/nc.openbsd"), "bin/nc");
    for (from, to) in [curl, nc] {
        files = files.program(to, from).libraries_of(from).await?;
        inputs = inputs.path(from)?;
    }
    // Debian's static busybox crashes when its wget or nslookup resolves a name.
    let applets = output(&mut command(busybox, ["--list"])).await?;
    for applet in applets.lines().filter(|applet| !["busybox", "wget", "nslookup", "nc"].contains(applet)) {
        files = files.link(&format!("bin/{applet}"), "busybox");
    }
    build("test-server", TEST_SERVER_IMAGE, &["/usr/bin/testserver", "serve"], files, inputs).await
}

async fn build(
    name: &str,
    reference: &str,
    entrypoint: &[&str],
    files: Files,
    inputs: Inputs,
) -> Result<PathBuf> {
    let image = Image {
        reference: reference.to_owned(),
        entrypoint: entrypoint.iter().map(|&word| word.to_owned()).collect(),
        user: None,
    };
    let inputs = inputs.word(FORM).word(&format!("{image:?}"));
    cached(&format!("image-{name}.tar"), inputs, async |to| {
        let layer = to.with_extension("layer");
        files.write(&layer)?;
        archive::write(&to, &image, std::slice::from_ref(&layer))?;
        std::fs::remove_file(layer).map_err(Into::into)
    })
    .await
}
