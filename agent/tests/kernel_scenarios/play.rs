//! Plays one scenario: after each step, sends its packets and compares who answered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use futures::StreamExt as _;
use libtest_mimic::{Arguments, Failed, Trial};
use pointsman_agent::model::Protocol;
use pointsman_crds::settings::Mode;

use crate::support::lab::{Lab, NODE, WORLD};
use crate::support::scenario::{self, Case, End, Expected, Scenario, Sticky, hosts};
use crate::support::traffic::{Answer, IMPATIENT, LARGE, PATIENT, Service, Stream, ask, ask_with};
use crate::support::world::{Way, World, block_on};

/// Connections that are tried at once from one namespace.
const AT_ONCE: usize = 8;
/// So many connections show with all but certainty whether there are endpoints that must not be reached, and so many whether
/// one is missing.
const ATTEMPTS: std::ops::RangeInclusive<usize> = 12..=200;

/// Plays every scenario in each of these ways, and ends the process.
pub fn run(ways: &[Way]) {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for path in scenario::files() {
        let scenario = Scenario::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let scenario: &'static Scenario = Box::leak(Box::new(scenario));
        for way in ways.iter().copied() {
            let name = format!("{}::{}", scenario.name.replace('-', "_"), way.to_string().replace('-', "_"));
            trials.push(Trial::test(name, move || {
                let Some(lab) = Lab::new() else { return Ok(()) };
                let wrong = play(&lab, World::over(way.open(&lab)), scenario, way.mode());
                if wrong.is_empty() { Ok(()) } else { Err(Failed::from(wrong.join("\n"))) }
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// What is wrong, one line each.
fn play(lab: &Lab, mut world: World, scenario: &Scenario, mode: Mode) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut streams: Vec<(String, Stream)> = Vec::new();
    for address in &scenario.more_addresses {
        lab.add_node_address(*address);
    }
    for change in &scenario.start {
        world.apply(change.clone());
    }
    answer_where_nobody_should(lab, scenario, world.model.local_addresses());
    for step in &scenario.steps {
        for change in &step.changes {
            world.apply(change.clone());
        }
        world.configure(step.config.clone());
        let mut say = |what: String| wrong.push(format!("{}: {what}", step.what));
        let (_, errors) = world.try_sync();
        for error in errors {
            say(error.to_string());
        }
        for difference in world.differences() {
            say(format!("read back: {difference}"));
        }
        block_on(async { tokio::time::sleep(Duration::from_secs(step.wait_seconds)).await });
        try_all(lab, &step.cases, mode).into_iter().for_each(&mut say);
        let cut = step.cut.contains(&mode);
        for (name, stream) in &mut streams {
            match stream.check() {
                Err(error) if !cut => say(format!("{name}: the connection is dead: {error}")),
                Ok(()) if cut => say(format!("{name}: the connection lives on")),
                _ => {}
            }
        }
        if cut {
            streams.clear();
        }
        for wanted in &step.streams {
            let (name, to) = (format!("{} to {}", wanted.from.name, wanted.to), wanted.to);
            match lab.run(wanted.from.namespace, move || Stream::open(to)) {
                Ok(stream) => streams.push((name, stream)),
                Err(error) => say(format!("{name}: no connection: {error}")),
            }
        }
    }
    wrong
}

/// Whatever no Service takes is answered by the node or the world, so that "untouched" can be seen.
fn answer_where_nobody_should(lab: &Lab, scenario: &Scenario, local: &BTreeSet<IpAddr>) {
    let cases = scenario.steps.iter().flat_map(|step| &step.cases);
    let mut services: BTreeMap<&'static str, BTreeSet<Service>> = BTreeMap::new();
    for case in cases {
        let here = case.to.ip().is_loopback() || local.contains(&case.to.ip());
        let namespace = if here { NODE } else { WORLD };
        let service = Service { name: namespace.to_owned(), to: case.to, protocol: case.protocol };
        services.entry(namespace).or_default().insert(service);
    }
    for (namespace, services) in services {
        lab.serve(namespace, services);
    }
}

/// Tries all packets of a step at once.
fn try_all(lab: &Lab, cases: &[Case], mode: Mode) -> Vec<String> {
    let mut by_namespace: BTreeMap<&'static str, Vec<(usize, Case)>> = BTreeMap::new();
    for (number, case) in cases.iter().enumerate() {
        by_namespace.entry(case.from.namespace).or_default().push((number, case.clone()));
    }
    let threads: Vec<_> = by_namespace
        .into_iter()
        .map(|(namespace, cases)| {
            lab.spawn(namespace, move || {
                block_on(
                    futures::stream::iter(cases)
                        .map(|(number, case)| async move {
                            let answers = attempt(&case, expected(&case, mode), mode).await;
                            (number, case, answers)
                        })
                        .buffer_unordered(AT_ONCE)
                        .collect::<Vec<_>>(),
                )
            })
        })
        .collect();
    let mut results: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    results.sort_by_key(|(number, ..)| *number);
    let mut chosen: BTreeMap<_, String> = BTreeMap::new();
    let mut wrong = Vec::new();
    for (_, case, answers) in results {
        let expected = expected(&case, mode);
        if let Some(what) = judge(&case, expected, &answers, mode) {
            wrong.push(format!("{case}: expected {expected:?}, {what}"));
        }
        // IPVS remembers clients of one virtual server (AFF-5).
        if let Expected::Reach { sticky: Sticky::Yes, .. } = expected
            && mode != Mode::Ipvs
            && let Some(Answer::From(name, _)) = answers.first()
        {
            let first = chosen
                .entry((case.row, case.family, case.from.name, case.source))
                .or_insert_with(|| name.clone());
            if first != name {
                wrong.push(format!("{case}: reached {name}, but {first} by another way"));
            }
        }
    }
    wrong
}

/// A proxy passes TCP and UDP on.
fn expected(case: &Case, mode: Mode) -> &Expected {
    match case.expected(mode) {
        Expected::Reach { .. } if mode == Mode::Userspace && case.protocol == Protocol::Sctp => {
            &Expected::Refused
        }
        other => other,
    }
}

/// The different answers.
async fn attempt(case: &Case, expected: &Expected, mode: Mode) -> BTreeSet<Answer> {
    let source = case.source.or_else(|| case.from.source(&case.to));
    let once = |patience| ask(source, case.to, case.protocol, patience);
    let mut answers = BTreeSet::new();
    match expected {
        Expected::Reach { ends, sticky } => {
            if let Sticky::ForSeconds(seconds) = sticky {
                return returns_and_goes(once, *seconds).await;
            }
            let wanted = if *sticky == Sticky::Yes { 1 } else { ends.len() };
            for number in 1..=*ATTEMPTS.end() {
                // One request in two is larger than a packet.
                let large = number % 2 == 0 && passes_fragments(case, mode);
                let bytes = if large { &LARGE[..] } else { b"?" };
                answers.insert(ask_with(source, case.to, case.protocol, PATIENT, bytes).await);
                if answers.contains(&Answer::Nothing)
                    || (number >= *ATTEMPTS.start() && answers.len() >= wanted)
                {
                    break;
                }
            }
        }
        Expected::Refused | Expected::Untouched => {
            answers.insert(once(PATIENT).await);
        }
        Expected::Dropped => {
            answers.insert(once(IMPATIENT).await);
        }
    }
    answers
}

/// The node sends to its own addresses in large packets, and IPVS refuses those that are too large for the way to the endpoint
/// (`ensure_mtu_is_adequate` in the kernel's `ip_vs_xmit.c`). TCP learns from that, most users of UDP do not.
fn passes_fragments(case: &Case, mode: Mode) -> bool {
    !(mode == Mode::Ipvs && case.protocol == Protocol::Udp && case.from.interface.is_none())
}

/// Comes back in time for longer than the affinity lasts without, then stays away until it is forgotten. All answers, if
/// it stayed and was forgotten; otherwise what contradicts that.
async fn returns_and_goes<F: Future<Output = Answer>>(
    once: impl Fn(Duration) -> F,
    seconds: u64,
) -> BTreeSet<Answer> {
    let mut answers = BTreeSet::from([once(PATIENT).await]);
    for _ in 0..4 * seconds {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if answers.insert(once(PATIENT).await) {
            answers.insert(Answer::Nothing);
            return answers;
        }
    }
    // Whoever is forgotten may be sent to the same endpoint again: one time in two, for two endpoints.
    for _ in 0..12 {
        tokio::time::sleep(Duration::from_millis(1000 * seconds + 500)).await;
        if answers.insert(once(PATIENT).await) {
            break;
        }
    }
    answers
}

fn judge(case: &Case, expected: &Expected, answers: &BTreeSet<Answer>, mode: Mode) -> Option<String> {
    let fine = match expected {
        Expected::Reach { ends, sticky } => {
            let good = answers.iter().all(|answer| ends.iter().any(|end| is(case, end, answer, mode)));
            let all = ends.iter().all(|end| answers.iter().any(|answer| is(case, end, answer, mode)));
            good && (all || (*sticky == Sticky::Yes && answers.len() == 1))
        }
        Expected::Refused => answers.iter().all(|answer| *answer == Answer::Refused),
        Expected::Dropped => answers.iter().all(|answer| *answer == Answer::Nothing),
        Expected::Untouched => answers.iter().all(|answer| {
            matches!(answer, Answer::From(name, source) if [NODE, WORLD].contains(&name.as_str()) && unchanged(case, *source))
        }),
    };
    (!fine).then(|| format!("got {answers:?}"))
}

fn is(case: &Case, end: &End, answer: &Answer, mode: Mode) -> bool {
    let Answer::From(name, source) = answer else { return false };
    let (host, port) =
        name.split_once(':').map_or((name.as_str(), 8080), |(host, port)| (host, port.parse().unwrap()));
    let ours = hosts::node_addresses(case.family).contains(source);
    // What came in and stays on the node passes no POSTROUTING, and is never masqueraded.
    let seen = if mode == Mode::Userspace {
        // The proxy's own connection.
        ours
    } else if end.masquerade {
        ours || (end.host == NODE && unchanged(case, *source))
    } else {
        unchanged(case, *source)
    };
    host == end.host && port == end.port && seen
}

/// Whether the source is the sender's.
fn unchanged(case: &Case, source: IpAddr) -> bool {
    let own = case.source.unwrap_or_else(|| case.from.address(case.family));
    source == own || (case.from.interface.is_none() && source == case.to.ip())
}
