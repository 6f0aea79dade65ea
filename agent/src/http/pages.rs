//! Pages for people: `/statusz` and `/flagz`, as all components of Kubernetes have them (KEP-4827, KEP-4828).
//!
//! In: what does not change while the agent runs, two moments. Out: plain text, whose form promises nothing to programs.

use std::fmt::Write;

use k8s_openapi::jiff::Timestamp;

use crate::status::build::Identity;

/// What the metrics port answers.
pub(super) const PATHS: [&str; 7] =
    ["/configz", "/flagz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz"];

fn head(what: &str) -> String {
    format!(
        "pointsman-agent {what}\nWarning: for people; programs must not rely on the form of this page.\n\n"
    )
}

/// Since when which version runs, and what else can be asked.
pub(super) fn statusz(identity: &Identity, started: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(started).as_secs().max(0);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let mut page = head("statusz");
    let _ = writeln!(page, "Started: {started}");
    let _ = writeln!(page, "Up: {hours} hr {minutes:02} min {:02} sec", seconds % 60);
    let _ = writeln!(page, "Binary version: {}", identity.version);
    let _ = writeln!(page, "Paths: {}", PATHS.join(" "));
    page
}

/// What the agent was started with.
pub(super) fn flagz(identity: &Identity) -> String {
    let mut page = head("flagz");
    for (flag, value) in &identity.flags {
        let _ = writeln!(page, "{flag}={value}");
    }
    page
}
