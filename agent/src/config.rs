//! The node's own ConfigMap, judged.
//!
//! In: the ConfigMap as the API server has it, or nothing where there is none. Out: an [`Assessment`]: which revision is
//! assigned, the configuration if it can be obeyed, why not if it cannot, and whether somebody has tampered with it.
//! A configuration that cannot be obeyed never replaces the one in force.

pub mod checkpoint;

use k8s_openapi::api::core::v1::ConfigMap;
use pointsman_crds::names::{
    ANNOTATION_BREAK_GLASS, ANNOTATION_CONFIG_HASH, CONFIG_KEY, LABEL_POOL, LABEL_REVISION,
    NODE_CONFIG_NAMESPACE,
};
use pointsman_crds::node_config::{NodeConfigError, config_hash, revision};
use pointsman_crds::{NodeProxyConfiguration, ProxyConfiguration};

/// Why a configuration is not obeyed: reason and message of the condition ConfigApplied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// One word for programs.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

/// Whether the bytes are the operator's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tampering {
    /// They are.
    #[default]
    None,
    /// They are not, and nobody has taken responsibility.
    HashMismatch(String),
    /// Somebody has edited them in an emergency and said why.
    BreakGlass(String),
}

/// A configuration that can be obeyed.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name, from the operator.
    pub revision: String,
    /// Hash of its bytes, computed here.
    pub hash: String,
    /// Its bytes.
    pub content: String,
    /// What they say.
    pub config: NodeProxyConfiguration,
}

/// The judgement on a node's ConfigMap.
#[derive(Clone, Debug, PartialEq)]
pub struct Assessment {
    /// The revision that the ConfigMap names; none if there is no ConfigMap.
    pub assigned: Option<String>,
    /// What to do.
    pub outcome: Result<Candidate, Rejection>,
    /// Whose bytes they are.
    pub tampering: Tampering,
}

/// Judges the node's ConfigMap.
#[must_use]
pub fn assess(map: Option<&ConfigMap>) -> Assessment {
    let Some(map) = map else { return missing() };
    let annotation = |key: &str| map.metadata.annotations.as_ref().and_then(|all| all.get(key));
    let label = |key: &str| map.metadata.labels.as_ref().and_then(|all| all.get(key));
    let content = map.data.as_ref().and_then(|data| data.get(CONFIG_KEY)).map_or("", String::as_str);
    let hash = config_hash(content);
    // The operator labels every ConfigMap that it writes; one written by hand still needs a name to report.
    // So does an edit in an emergency, which leaves the label of what was there before.
    let annotated = annotation(ANNOTATION_CONFIG_HASH).map_or("nothing", String::as_str);
    let break_glass = annotation(ANNOTATION_BREAK_GLASS);
    let edited = break_glass.is_some() && annotated != hash;
    let assigned = label(LABEL_REVISION)
        .filter(|revision| !revision.is_empty() && !edited)
        .cloned()
        .unwrap_or_else(|| revision(label(LABEL_POOL).map_or("unknown", String::as_str), &hash));
    let parsed = NodeProxyConfiguration::parse(content, break_glass.is_none().then_some(annotated));
    let tampering = match (&parsed, break_glass) {
        (_, Some(why)) if edited => Tampering::BreakGlass(format!("edited by hand under break-glass: {why}")),
        (_, Some(why)) => {
            Tampering::BreakGlass(format!("not edited, but open to edits under break-glass: {why}"))
        }
        (Err(error @ NodeConfigError::HashMismatch { .. }), None) => {
            Tampering::HashMismatch(error.to_string())
        }
        _ => Tampering::None,
    };
    let outcome = match parsed {
        Ok(config) => Ok(Candidate { revision: assigned.clone(), hash, content: content.to_owned(), config }),
        Err(error) => Err(Rejection::from(&error)),
    };
    Assessment { assigned: Some(assigned), outcome, tampering }
}

/// The judgement on a ConfigMap that is not even a ConfigMap.
#[must_use]
pub fn assess_malformed(error: &str) -> Assessment {
    Assessment {
        assigned: None,
        outcome: Err(Rejection {
            reason: "Unreadable",
            message: format!("the node's ConfigMap cannot be read: {error}; it is ignored"),
        }),
        tampering: Tampering::None,
    }
}

fn missing() -> Assessment {
    Assessment {
        assigned: None,
        outcome: Err(Rejection {
            reason: "Missing",
            message: format!(
                "there is no ConfigMap for this node in {NODE_CONFIG_NAMESPACE}; the configuration in force is kept; check \
                 that pointsman-operator runs and that a {} named default exists",
                <ProxyConfiguration as kube::Resource>::kind(&()),
            ),
        }),
        tampering: Tampering::None,
    }
}

impl From<&NodeConfigError> for Rejection {
    fn from(error: &NodeConfigError) -> Self {
        let reason = match error {
            NodeConfigError::Unreadable(_) => "Unreadable",
            NodeConfigError::UnsupportedField(_) => "UnsupportedField",
            NodeConfigError::UnsupportedVersion { .. } => "UnsupportedVersion",
            NodeConfigError::HashMismatch { .. } => "HashMismatch",
            NodeConfigError::TooLarge(_) => "TooLarge",
            NodeConfigError::Invalid(_) => "Invalid",
        };
        Self { reason, message: error.to_string() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use pointsman_crds::ProxySettings;
    use pointsman_crds::proxy_configuration::Drift;
    use pointsman_crds::settings::Mode;
    use std::collections::BTreeMap;

    /// A complete configuration in mode iptables.
    pub(crate) fn sample() -> NodeProxyConfiguration {
        let settings = ProxySettings { mode: Some(Mode::Iptables), ..ProxySettings::default() };
        NodeProxyConfiguration::complete(&settings, Drift::default()).unwrap()
    }

    /// `config` as it would come out of a ConfigMap.
    pub(crate) fn candidate(pool: &str, config: NodeProxyConfiguration) -> Candidate {
        let content = config.render().unwrap();
        let hash = config_hash(&content);
        Candidate { revision: revision(pool, &hash), hash, content, config }
    }

    fn map(content: &str, hash: &str, break_glass: Option<&str>) -> ConfigMap {
        let mut map = ConfigMap::default();
        map.metadata.labels = Some(BTreeMap::from([
            (LABEL_REVISION.to_owned(), "edge-0123456789".to_owned()),
            (LABEL_POOL.to_owned(), "edge".to_owned()),
        ]));
        let mut annotations = BTreeMap::from([(ANNOTATION_CONFIG_HASH.to_owned(), hash.to_owned())]);
        annotations.extend(break_glass.map(|why| (ANNOTATION_BREAK_GLASS.to_owned(), why.to_owned())));
        map.metadata.annotations = Some(annotations);
        map.data = Some(BTreeMap::from([(CONFIG_KEY.to_owned(), content.to_owned())]));
        map
    }

    #[test]
    fn a_sound_configuration_is_a_candidate() {
        let content = sample().render().unwrap();
        let judged = assess(Some(&map(&content, &config_hash(&content), None)));
        assert_eq!(judged.assigned.as_deref(), Some("edge-0123456789"));
        assert_eq!(judged.tampering, Tampering::None);
        let candidate = judged.outcome.unwrap();
        assert_eq!((candidate.config, candidate.hash), (sample(), config_hash(&content)));
    }

    // ids: CFG-2 CFG-18
    #[test]
    fn bad_input_is_refused_with_its_reason() {
        let good = sample().render().unwrap();
        let signed = |content: &str| map(content, &config_hash(content), None);
        let mut bit = sample();
        bit.masquerade.bit = 40;
        let bit = bit.render().unwrap();
        // In the middle of a text in quotes.
        let cut = &good[..good.find("127.0.0.1").unwrap() + 4];
        for (name, map, reason) in [
            ("truncated", signed(cut), "Unreadable"),
            ("truncated on the way", map(cut, &config_hash(&good), None), "HashMismatch"),
            ("empty", signed(""), "UnsupportedVersion"),
            ("binary", signed("\u{1}\u{2}{{{"), "Unreadable"),
            ("unknown field", signed(&format!("{good}colour: red\n")), "UnsupportedField"),
            ("unknown mode", signed(&good.replace("mode: iptables", "mode: magic")), "UnsupportedField"),
            ("another version", signed(&good.replace("v1alpha1", "v2")), "UnsupportedVersion"),
            ("wrong hash", map(&good, "sha256:00", None), "HashMismatch"),
            ("no hash", map(&good, "", None), "HashMismatch"),
            ("too large", signed(&format!("{good}# {}", "x".repeat(20_000))), "TooLarge"),
            ("values out of range", signed(&bit), "Invalid"),
            ("no data", ConfigMap { data: None, ..signed("") }, "UnsupportedVersion"),
        ] {
            let judged = assess(Some(&map));
            let rejection = judged.outcome.unwrap_err();
            assert_eq!(rejection.reason, reason, "{name}: {}", rejection.message);
            assert_eq!(
                matches!(judged.tampering, Tampering::HashMismatch(_)),
                reason == "HashMismatch",
                "{name}"
            );
            assert_eq!(judged.assigned.as_deref(), Some("edge-0123456789"), "{name}");
        }
    }

    #[test]
    fn a_deleted_config_map_is_missing() {
        let judged = assess(None);
        assert_eq!(judged.assigned, None);
        assert_eq!(judged.outcome.unwrap_err().reason, "Missing");
    }

    #[test]
    fn break_glass_is_obeyed_in_spite_of_the_hash_and_reported() {
        let content = sample().render().unwrap();
        let judged = assess(Some(&map(&content, "sha256:00", Some("incident 7"))));
        let named = revision("edge", &config_hash(&content));
        assert_eq!(judged.outcome.as_ref().unwrap().revision, named, "the label names what was there before");
        assert_eq!(judged.assigned, Some(named));
        let says = |judged: &Assessment, what: &str| match &judged.tampering {
            Tampering::BreakGlass(why) => why.starts_with(what) && why.contains("incident 7"),
            _ => false,
        };
        assert!(says(&judged, "edited by hand"));
        let judged = assess(Some(&map(&content, &config_hash(&content), Some("incident 7"))));
        assert_eq!(judged.assigned.as_deref(), Some("edge-0123456789"));
        assert!(says(&judged, "not edited"));
        // Break-glass excuses the hash, not nonsense.
        let judged = assess(Some(&map("mode: [", "sha256:00", Some("incident 7"))));
        assert_eq!(judged.outcome.unwrap_err().reason, "Unreadable");
    }

    #[test]
    fn without_a_label_the_revision_comes_from_the_content() {
        let content = sample().render().unwrap();
        let mut unlabelled = map(&content, &config_hash(&content), None);
        unlabelled.metadata.labels = None;
        assert_eq!(assess(Some(&unlabelled)).assigned, Some(revision("unknown", &config_hash(&content))));
    }
}
