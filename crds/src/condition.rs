//! Conditions as `metav1.Condition` has them, with the bounds of our schemas.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a [`Condition`] says of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// Nobody can say.
    Unknown,
}

impl fmt::Display for ConditionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        })
    }
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

/// One observation about an object, as in `metav1.Condition`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What is observed, such as Ready.
    #[serde(rename = "type")]
    #[schemars(length(max = 64))]
    pub type_: String,
    /// Whether it holds.
    pub status: ConditionStatus,
    /// Why, in one CamelCase word for programs.
    #[schemars(length(min = 1, max = 64), regex(pattern = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"))]
    pub reason: String,
    /// Why, for people.
    #[schemars(length(max = 1024))]
    pub message: String,
    /// When status last changed.
    pub last_transition_time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time,
    /// The generation of the object that this was observed for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
}

/// Replaces or adds `new` in `conditions`. The transition time stays if the status does.
///
/// Returns whether anything but the transition time changed.
pub fn set_condition(conditions: &mut Vec<Condition>, mut new: Condition) -> bool {
    let Some(old) = conditions.iter_mut().find(|old| old.type_ == new.type_) else {
        conditions.push(new);
        return true;
    };
    if old.status == new.status {
        new.last_transition_time = old.last_transition_time.clone();
    }
    let changed = *old != new;
    *old = new;
    changed
}
