//! What becomes of configurations that the kernel does not take.

use std::time::Duration;

use tokio::time::sleep;

use super::reports::begin;
use crate::config::tests::{candidate, sample};
use crate::config::{Candidate, Rejection};
use crate::kernel::SyncFailure;

fn with_bit(bit: u8) -> Candidate {
    let mut config = sample();
    config.masquerade.bit = bit;
    candidate("default", config)
}

// ids: CFG-18
#[tokio::test(start_paused = true)]
async fn a_configuration_that_the_kernel_does_not_take_gives_way_to_the_last_known_good_one() {
    let rig = begin().await;
    let (good, bad) = (with_bit(sample().masquerade.bit), with_bit(15));
    rig.script.lock().unwrap().refused_bit = Some(15);
    rig.config(bad.clone()).await;
    sleep(Duration::from_secs(20)).await;
    let state = rig.now();
    assert_eq!(state.config.assigned.as_ref(), Some(&bad.revision));
    assert_eq!(state.config.active.as_ref(), Some(&good.revision));
    assert_eq!(state.config.last_known_good.as_ref(), Some(&good.revision));
    assert_eq!((state.consecutive_failures(), state.verified), (0, true), "it serves");
    let (revision, rejection) = state.config.rejected.unwrap();
    assert_eq!((revision.as_ref(), rejection.reason), (Some(&bad.revision), "RolledBackToLastGood"));
    assert!(rejection.message.contains("as told"), "{}", rejection.message);
    let tried = rig.writes().iter().filter(|write| write.masquerade_bit == 15).count();
    assert_eq!(tried, 3);

    // Changes are followed; the same ConfigMap, told again by a new watch, is not tried again.
    rig.service("other").await;
    rig.config(bad.clone()).await;
    sleep(Duration::from_mins(5)).await;
    assert_eq!(
        rig.writes().last().map(|write| (write.masquerade_bit, write.ok)),
        Some((good.config.masquerade.bit, true))
    );
    assert!(rig.now().config.rejected.is_some());
    assert_eq!(rig.writes().iter().filter(|write| write.masquerade_bit == 15).count(), 3);

    // The operator takes it back, or mends it.
    rig.config(good).await;
    rig.settle().await;
    assert!(rig.now().config.rejected.is_none());
    rig.config(with_bit(16)).await;
    sleep(Duration::from_secs(5)).await;
    assert_eq!(rig.now().config.active, Some(with_bit(16).revision));
}

// ids: CFG-18
#[tokio::test(start_paused = true)]
async fn a_configuration_that_was_given_up_is_tried_again_once_another_was_assigned() {
    let rig = begin().await;
    let (good, bad) = (with_bit(sample().masquerade.bit), with_bit(15));
    rig.script.lock().unwrap().refused_bit = Some(15);
    rig.config(bad.clone()).await;
    sleep(Duration::from_secs(20)).await;

    // Damaged and mended again: what was said of it still holds.
    let rolled_back = rig.now().config.rejected.unwrap();
    assert_eq!(rolled_back.1.reason, "RolledBackToLastGood");
    let damaged = Rejection { reason: "HashMismatch", message: "no".to_owned() };
    rig.assess(Some(bad.revision.clone()), Err(damaged)).await;
    rig.settle().await;
    assert_eq!(rig.now().config.rejected.unwrap().1.reason, "HashMismatch");
    rig.config(bad.clone()).await;
    rig.settle().await;
    assert_eq!(rig.now().config.rejected, Some(rolled_back));

    // Taken back, and assigned again after what was wrong with the node is right.
    rig.config(good).await;
    sleep(Duration::from_secs(5)).await;
    rig.script.lock().unwrap().refused_bit = None;
    rig.config(bad.clone()).await;
    sleep(Duration::from_secs(5)).await;
    let state = rig.now();
    assert_eq!((state.config.active, state.config.rejected), (Some(bad.revision), None));
}

#[tokio::test(start_paused = true)]
async fn a_configuration_is_not_blamed_for_a_kernel_that_takes_nothing() {
    let rig = begin().await;
    let new = with_bit(15);
    rig.script.lock().unwrap().failures.extend([SyncFailure::RestoreFailed; 8]);
    rig.config(new.clone()).await;
    sleep(Duration::from_mins(5)).await;
    let state = rig.now();
    assert_eq!(state.config.active.as_ref(), Some(&new.revision));
    assert!(state.config.rejected.is_none() && state.verified);
    let bits: Vec<u8> = rig.writes().iter().rev().take(9).map(|write| write.masquerade_bit).collect();
    let old = sample().masquerade.bit;
    assert_eq!(bits, [15, 15, 15, old, old, old, 15, 15, 15]);
}
