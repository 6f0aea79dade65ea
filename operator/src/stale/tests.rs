use super::*;
use crate::decide::{World, assignments, layers, work};
use crate::fixtures::{agent_reports, at, base, world, write};

/// Node n1 with its report, which no agent has written to yet.
fn new_node() -> World {
    let mut world = world(&[base()], &[("n1", "")]);
    let work = work(&world, &assignments(&world, &layers(&world).unwrap()), &at(0));
    write(&mut world, &work);
    world
}

struct Clock {
    liveness: Liveness,
    start: Instant,
}

impl Clock {
    fn new() -> Self {
        Self { liveness: Liveness::default(), start: Instant::now() }
    }

    /// What is marked when `world` is looked at `seconds` after the start.
    fn marks(&mut self, world: &World, seconds: u64) -> Vec<Mark> {
        let now = self.start + Duration::from_secs(seconds);
        self.liveness.observe(&world.reports, &world.pods, now);
        self.liveness.marks(&world.reports, now, &at(i64::try_from(seconds).unwrap()))
    }
}

fn pod(world: &mut World, ready: bool) {
    let record = PodRecord { node: "n1".to_owned(), ready };
    world.pods.insert("agent-1".to_owned(), Arc::new(record));
}

fn set(world: &mut World, mark: &Mark) {
    let report = Arc::make_mut(world.reports.get_mut(&mark.node).unwrap());
    report.state = mark.state.to_owned();
    report.conditions.clone_from(&mark.conditions);
}

fn of_type<'a>(mark: &'a Mark, type_: &str) -> &'a Condition {
    mark.conditions.iter().find(|condition| condition.type_ == type_).unwrap()
}

#[test]
fn a_node_is_unknown_from_the_start_and_is_told_so_once() {
    let mut world = new_node();
    let mut clock = Clock::new();
    let marks = clock.marks(&world, 0);
    let [mark] = marks.as_slice() else { panic!("{marks:?}") };
    assert_eq!((mark.state, mark.resource_version.as_str()), (STATE_UNKNOWN, "1"));
    assert_eq!(of_type(mark, "Ready").reason, "AgentUnreachable");
    assert_eq!(of_type(mark, "ConfigApplied").reason, "NeverReported");
    set(&mut world, mark);
    assert!(clock.marks(&world, 100_000).is_empty());
}

#[test]
fn a_silent_agent_is_stale_after_two_heartbeats_and_a_grace() {
    let mut world = new_node();
    let mut clock = Clock::new();
    agent_reports(&mut world, "n1", "Ready", 0);
    assert!(clock.marks(&world, 0).is_empty());
    assert!(clock.marks(&world, 660).is_empty());
    let marks = clock.marks(&world, 661);
    assert_eq!(marks[0].state, STATE_STALE);
    assert_eq!(of_type(&marks[0], "Ready").status, ConditionStatus::Unknown);
    set(&mut world, &marks[0]);
    assert!(clock.marks(&world, 700).is_empty(), "told once");
    agent_reports(&mut world, "n1", "Ready", 1);
    assert!(clock.marks(&world, 701).is_empty());
    assert!(clock.marks(&world, 701 + 660).is_empty(), "a new heartbeat starts a new term");
}

#[test]
fn the_nodes_clock_does_not_matter() {
    let mut world = new_node();
    let mut clock = Clock::new();
    for turn in 0..10 {
        // A clock that runs backwards, years off.
        agent_reports(&mut world, "n1", "Ready", -100_000_000 - turn);
        assert!(clock.marks(&world, u64::try_from(turn).unwrap() * 300).is_empty());
    }
}

#[test]
fn our_own_writes_are_no_sign_of_life() {
    let mut world = new_node();
    let mut clock = Clock::new();
    agent_reports(&mut world, "n1", "Ready", 0);
    clock.marks(&world, 0);
    let report = Arc::make_mut(world.reports.get_mut("n1").unwrap());
    report.resource_version = "99".to_owned();
    report.spec.pool = Some("other".to_owned());
    clock.marks(&world, 600);
    assert_eq!(clock.marks(&world, 661)[0].resource_version, "99");
}

#[test]
fn a_pod_that_stays_down_makes_a_claim_of_health_stale() {
    let mut world = new_node();
    let mut clock = Clock::new();
    agent_reports(&mut world, "n1", "Ready", 0);
    pod(&mut world, true);
    clock.marks(&world, 0);
    pod(&mut world, false);
    assert!(clock.marks(&world, 10).is_empty());
    assert!(clock.marks(&world, 100).is_empty());
    assert_eq!(clock.marks(&world, 101)[0].state, STATE_STALE);
    pod(&mut world, true);
    assert!(clock.marks(&world, 102).is_empty());
    pod(&mut world, false);
    assert!(clock.marks(&world, 150).is_empty());
    world.pods.clear();
    assert_eq!(clock.marks(&world, 241).len(), 1, "gone is as good as down");
}

#[test]
fn an_agent_that_admits_a_fault_or_has_written_since_is_not_silent() {
    let mut world = new_node();
    let mut clock = Clock::new();
    agent_reports(&mut world, "n1", "Degraded", 0);
    pod(&mut world, false);
    clock.marks(&world, 0);
    assert!(clock.marks(&world, 500).is_empty(), "its pod is down because of the fault it reports");
    agent_reports(&mut world, "n1", "Ready", 1);
    clock.marks(&world, 501);
    assert!(clock.marks(&world, 700).is_empty(), "it has written since the pod went down");
}

#[test]
fn where_no_pod_was_ever_seen_only_heartbeats_count() {
    let mut world = new_node();
    let mut clock = Clock::new();
    agent_reports(&mut world, "n1", "Ready", 0);
    clock.marks(&world, 0);
    assert!(clock.marks(&world, 600).is_empty());
}
