//! Connections while the endpoints of their Service change as fast as the kernel takes it: one packet looks several maps up, and a
//! transaction may come between two of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use pointsman_agent::model::{Change, Protocol};
use serde_json::json;

use crate::support::lab::Lab;
use crate::support::traffic::{Answer, PATIENT, ask};
use crate::support::world::{FAMILIES, Way, World, block_on, cluster_ip, slice, spec};

const CONNECTIONS: usize = 25_000;
/// At a time.
const CLIENTS: usize = 16;

/// Connects from a pod; returns what was no answer.
async fn connect(clients: usize, connections: usize) -> Vec<Answer> {
    let begun = Arc::new(AtomicUsize::new(0));
    let client = || {
        let begun = Arc::clone(&begun);
        async move {
            let mut failed = Vec::new();
            while begun.fetch_add(1, Ordering::Relaxed) < connections {
                match ask(None, cluster_ip(), Protocol::Tcp, PATIENT).await {
                    Answer::From(..) => {}
                    other => failed.push(other),
                }
            }
            failed
        }
    };
    let all = futures::future::join_all((0..clients).map(|_| client())).await;
    all.into_iter().flatten().collect()
}

#[test]
fn no_connection_of_25000_is_lost_while_endpoints_change_all_the_time() {
    let sequence: [&[&str]; 6] = [
        &["a", "b", "c", "d"],
        &["a", "d", "c"],
        &["d", "c"],
        &["a", "d", "c"],
        &["a", "b", "c", "d", "r", "s", "t", "remote"],
        &["a"],
    ];
    for affinity in ["None", "ClientIP"] {
        let Some(lab) = Lab::new() else { return };
        let mut world = World::new(&lab, Way::Nftables);
        let mut spec = spec();
        spec["sessionAffinity"] = json!(affinity);
        world.service("web", spec);
        world.endpoints("web", sequence[0]);
        world.settle();
        let slices = sequence.map(|pods| slice("web", FAMILIES[0], pods));
        let done = Arc::new(AtomicBool::new(false));
        let clients = {
            let done = Arc::clone(&done);
            lab.spawn("pod", move || {
                let failed = block_on(connect(CLIENTS, CONNECTIONS));
                done.store(true, Ordering::Relaxed);
                failed
            })
        };
        let (begun, mut changes) = (Instant::now(), 0_u32);
        while !done.load(Ordering::Relaxed) {
            for slice in &slices {
                world.apply(Change::SliceApplied(Box::new(slice.clone())));
                world.sync();
                changes += 1;
            }
        }
        let failed = clients.join().unwrap();
        let rate = f64::from(changes) / begun.elapsed().as_secs_f64();
        println!("affinity {affinity}: {changes} changes, {rate:.0} a second");
        assert_eq!(failed, [], "of {CONNECTIONS} with affinity {affinity}");
        // 830 on two cores that ten others want.
        assert!(rate > 300.0, "{changes} changes, {rate:.0} a second");
        assert_eq!(world.differences(), Vec::<String>::new());
    }
}
