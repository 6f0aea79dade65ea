//! Connections that our rules have translated, when these go.
//!
//! The kernel has their translation, but it tracks packets only while somebody's rules ask for that, and translates only while
//! there are chains that do. Where ours were the last, something without effect stays behind as an anchor until those
//! connections have ended (mode-switching §2: without it every stream breaks).

use pointsman_crds::proxy_node_status::IpFamily;
use tracing::info;

use super::{Entry, has};

/// What keeps translated connections going when our rules are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connections {
    /// Nothing that we know of: leave an anchor while there are any.
    Anchor,
    /// Other rules of ours, in the same families.
    Covered,
}

impl Connections {
    /// Whether an anchor must be left: a TCP connection is translated. If the kernel does not say, there might be one.
    pub async fn need_anchor(self, family: IpFamily) -> bool {
        if self == Self::Covered {
            return false;
        }
        let asked = tokio::task::spawn_blocking(move || has(family, Entry::is_translated_connection)).await;
        match asked {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                info!(?family, %error, "connections cannot be listed");
                true
            }
            Err(_) => true,
        }
    }
}
