//! Removing everything of ours, and nothing else.
//!
//! In: the tools and the families. Out: our chains, the ways to them and our sets are gone. [`Connections`] that are translated
//! go on: one rule without effect stays behind as an anchor until they have ended. The built-in chains of nat stay anyway.

use std::sync::Mutex;

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::warn;

use super::batch::{Batch, Script, Section};
use super::dataplane::Written;
use super::runner::{Failure, Runner, failure};
use super::saved::{ours_in_filter, ours_in_nat};
use super::sets::Set;
use super::shared::{ANCHOR_CHAIN, ANCHOR_RULE, JUMPS};
use super::tools::Tools;
use crate::conntrack::Connections;
use crate::kernel::SyncError;

/// Removes everything of ours in these families: the ways in first, then the chains. Touches nothing else; what is not
/// there is no error. Returns whether an anchor is left; calling this again removes it once it is not needed.
pub async fn cleanup(
    tools: &Tools,
    families: &[IpFamily],
    connections: Connections,
) -> Result<bool, SyncError> {
    let mut first = None;
    let mut anchored = false;
    for family in families {
        let ear = Mutex::default();
        let runner = Runner::new(tools, &ear, *family);
        match remove_family(&runner, connections).await {
            Ok(left) => anchored |= left,
            Err(error) => {
                warn!(?family, %error, "not everything could be removed");
                first.get_or_insert(failure(*family, &error));
            }
        }
    }
    first.map_or(Ok(anchored), Err)
}

async fn remove_family(runner: &Runner<'_>, connections: Connections) -> Result<bool, Failure> {
    let anchored = connections.need_anchor(runner.family()).await;
    set_anchor(runner, anchored).await?;
    // Filter first: without its rules nothing is refused, without those of nat nothing is served (mode-switching §4).
    for table in ["filter", "nat"] {
        let ours = if table == "nat" { ours_in_nat } else { ours_in_filter };
        let saved = runner.read(table).await?;
        let mut section = Section::new(table);
        for jump in JUMPS.iter().filter(|jump| jump.table == table) {
            saved.jumps(jump).for_each(|rule| section.delete_rule(jump.from, rule));
        }
        let mut script = Script::default();
        section.finish(&mut script);
        if !script.text.is_empty() {
            runner.restore(&script).await?;
        }
        let mut chains = saved.ours(ours);
        // A chain that others' rules lead to can be emptied, not removed.
        for name in saved.needed_by_others(table, JUMPS, ours) {
            warn!(family = ?runner.family(), table, chain = %name, "other programs' rules lead to this chain; it is left empty");
            chains.remove(&name);
            let mut section = Section::new(table);
            section.chain(name, &[]);
            let mut script = Script::default();
            section.finish(&mut script);
            runner.restore(&script).await?;
        }
        let mut batch = Batch::default();
        if table == "nat" {
            batch.stale = chains;
        } else {
            batch.filter_stale = chains;
        }
        runner.write(batch, false, &mut Written::default()).await?;
    }
    runner.remove_mangle_canary().await;
    runner.destroy_sets::<Set>().await;
    Ok(anchored)
}

/// Adds the anchor, or removes it.
async fn set_anchor(runner: &Runner<'_>, wanted: bool) -> Result<(), Failure> {
    let filter = runner.read("filter").await?;
    let mut section = Section::new("filter");
    let mut there = filter.anchors().peekable();
    if !wanted {
        there.for_each(|rule| section.delete_rule(ANCHOR_CHAIN, rule));
    } else if there.peek().is_none() {
        section.append_rule(ANCHOR_CHAIN, ANCHOR_RULE);
    }
    let mut script = Script::default();
    section.finish(&mut script);
    if script.text.is_empty() { Ok(()) } else { runner.restore(&script).await }
}
