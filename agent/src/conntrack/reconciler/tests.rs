//! When a run is due, and what it must still know.

use proptest::prelude::*;

use super::super::serving::{Frontend, NodePort};
use super::*;

fn reconciler() -> Reconciler {
    Reconciler::new(IpFamily::IPv4)
}

fn frontend(last: u8) -> Frontend {
    Frontend::new(([10, 96, 0, last], 53).into(), Protocol::Udp)
}

fn endpoints(lasts: &[u8]) -> Endpoints {
    Endpoints::new(lasts.iter().map(|last| ([10, 244, 0, *last], 53).into()))
}

/// A state in which everything was reconciled once.
fn settled() -> Reconciler {
    let mut reconciler = reconciler();
    reconciler.set(frontend(1), endpoints(&[1, 2]));
    reconciler.set(NodePort::new(30053, Protocol::Udp), endpoints(&[1, 2]));
    run(&mut reconciler, true);
    assert_eq!(reconciler.begin(), None);
    reconciler
}

fn run(reconciler: &mut Reconciler, succeeded: bool) {
    let job = reconciler.begin().expect("a run is due");
    reconciler.finish(job, succeeded);
}

#[test]
fn nothing_is_due_without_frontends() {
    assert_eq!(reconciler().begin(), None);
}

// ids: CT-8 REG-48370
#[test]
fn ct_8_a_new_frontend_or_a_first_endpoint_makes_a_run_due() {
    let mut reconciler = settled();
    reconciler.set(frontend(2), endpoints(&[]));
    run(&mut reconciler, true);
    reconciler.set(frontend(2), endpoints(&[7]));
    run(&mut reconciler, true);
    assert_eq!(reconciler.begin(), None);
}

#[test]
fn more_endpoints_and_repetitions_cost_nothing() {
    let mut reconciler = settled();
    reconciler.set(frontend(1), endpoints(&[2, 1]));
    reconciler.set(frontend(1), endpoints(&[1, 2, 3]));
    assert_eq!(reconciler.begin(), None);
    assert!(reconciler.serving().frontends[&frontend(1)].contains(&([10, 244, 0, 3], 53).into()));
}

// ids: REG-126130
#[test]
fn an_endpoint_that_left_makes_a_run_due_until_one_succeeds() {
    let mut reconciler = settled();
    reconciler.set(frontend(1), endpoints(&[2]));
    run(&mut reconciler, false);
    run(&mut reconciler, false);
    let job = reconciler.begin().unwrap();
    assert_eq!((job.family, job.protocols.as_slice()), (IpFamily::IPv4, [Protocol::Udp].as_slice()));
    reconciler.finish(job, true);
    assert_eq!(reconciler.begin(), None);
}

#[test]
fn ct_6_a_removed_frontend_is_kept_until_a_run_succeeds() {
    let mut reconciler = settled();
    reconciler.remove(frontend(1));
    reconciler.remove(NodePort::new(30053, Protocol::Udp));
    run(&mut reconciler, false);
    assert!(reconciler.serving().frontends.is_empty());
    assert!(reconciler.serving().removed_frontends.contains(&frontend(1)));
    assert_eq!(reconciler.serving().removed_node_ports.len(), 1);
    run(&mut reconciler, true);
    assert_eq!(*reconciler.serving(), Serving::default());
    assert_eq!(reconciler.begin(), None);
}

#[test]
fn ct_6_a_frontend_can_be_removed_that_was_never_set() {
    let mut reconciler = reconciler();
    reconciler.remove(frontend(9));
    let job = reconciler.begin().unwrap();
    assert!(job.serving.removed_frontends.contains(&frontend(9)));
}

#[test]
fn a_frontend_that_comes_back_is_no_longer_removed() {
    let mut reconciler = settled();
    reconciler.remove(frontend(1));
    reconciler.set(frontend(1), endpoints(&[1]));
    assert!(reconciler.serving().removed_frontends.is_empty());
    run(&mut reconciler, true);
    assert_eq!(reconciler.serving().frontends.len(), 1);
}

#[test]
fn what_changes_during_a_run_is_not_covered_by_it() {
    let mut reconciler = settled();
    reconciler.remove(frontend(1));
    let job = reconciler.begin().unwrap();
    reconciler.remove(frontend(2));
    // The same frontend came back and went again; entries of between may exist.
    reconciler.set(frontend(1), endpoints(&[5]));
    reconciler.remove(frontend(1));
    assert!(!job.serving.removed_frontends.contains(&frontend(2)), "a job does not change");
    reconciler.finish(job, true);
    let removed = &reconciler.serving().removed_frontends;
    assert!(removed.contains(&frontend(1)) && removed.contains(&frontend(2)));
    run(&mut reconciler, true);
    assert_eq!(reconciler.begin(), None);
}

#[test]
fn a_job_that_was_never_finished_stays_due() {
    let mut reconciler = settled();
    reconciler.remove(frontend(1));
    drop(reconciler.begin());
    assert!(reconciler.begin().is_some());
}

#[test]
fn protocols_are_due_on_their_own() {
    let mut reconciler = settled();
    let tcp = Frontend::new(([10, 96, 0, 1], 80).into(), Protocol::Tcp);
    reconciler.set(tcp, endpoints(&[1]));
    assert_eq!(reconciler.begin().unwrap().protocols, [Protocol::Tcp]);
    run(&mut reconciler, true);
    for still in [&[1, 2][..], &[2], &[3], &[]] {
        reconciler.set(tcp, endpoints(still));
        assert_eq!(reconciler.begin(), None, "{still:?}: connections end by themselves");
    }
    reconciler.set(tcp, endpoints(&[3]));
    assert_eq!(reconciler.begin().unwrap().protocols, [Protocol::Tcp], "the first one came back");
    run(&mut reconciler, true);
    reconciler.remove(tcp);
    assert_eq!(reconciler.begin(), None);
    assert!(!reconciler.serving().concerns(Protocol::Tcp));
    reconciler.touch_all();
    assert_eq!(reconciler.begin().unwrap().protocols, Protocol::ALL);
}

#[test]
fn new_node_addresses_make_a_run_due() {
    let mut reconciler = settled();
    let addresses = Some(HashSet::from([[192, 168, 1, 5].into()]));
    reconciler.set_node_addresses(addresses.clone());
    run(&mut reconciler, true);
    reconciler.set_node_addresses(addresses);
    assert_eq!(reconciler.begin(), None);
}

#[test]
fn finishing_does_not_copy_the_state() {
    let mut reconciler = settled();
    reconciler.remove(frontend(1));
    let before = Arc::as_ptr(&reconciler.serving);
    run(&mut reconciler, true);
    assert_eq!(Arc::as_ptr(&reconciler.serving), before);
}

#[test]
fn a_job_beside_the_bookkeeping_looks_at_the_protocols_it_has() {
    let mut serving = Serving::default();
    serving.removed_frontends.insert(frontend(1));
    assert_eq!(Job::new(IpFamily::IPv4, serving).protocols, [Protocol::Udp]);
}

#[derive(Clone, Debug)]
enum Step {
    Set(u8, Vec<u8>),
    Remove(u8),
    Run(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..4_u8, proptest::collection::vec(0..4_u8, 0..3)).prop_map(|(f, e)| Step::Set(f, e)),
        (0..4_u8).prop_map(Step::Remove),
        any::<bool>().prop_map(Step::Run),
    ]
}

proptest! {
    /// Whatever happens: a frontend that existed and does not is remembered until a run has seen it, and once runs succeed
    /// nothing is left over.
    // ids: TRK-3
    #[test]
    fn nothing_is_forgotten_and_nothing_leaks(steps in proptest::collection::vec(step(), 0..40)) {
        let mut reconciler = reconciler();
        let mut gone: HashSet<u8> = HashSet::new();
        for step in steps {
            match step {
                Step::Set(f, e) => {
                    reconciler.set(frontend(f), endpoints(&e));
                    gone.remove(&f);
                }
                Step::Remove(f) => {
                    reconciler.remove(frontend(f));
                    gone.insert(f);
                }
                Step::Run(succeeded) => {
                    if let Some(job) = reconciler.begin() {
                        reconciler.finish(job, succeeded);
                        if succeeded {
                            gone.clear();
                        }
                    }
                }
            }
            let expected: HashSet<_> = gone.iter().map(|f| frontend(*f)).collect();
            prop_assert_eq!(&reconciler.serving().removed_frontends, &expected);
            prop_assert!(expected.is_empty() || reconciler.begin().is_some());
        }
        if let Some(job) = reconciler.begin() {
            reconciler.finish(job, true);
        }
        prop_assert_eq!(reconciler.begin(), None);
        prop_assert!(reconciler.removed.is_empty() && reconciler.changed.is_empty());
    }
}
