//! Classes: how one of the endpoints of a group is chosen.
//!
//! In: numbers of endpoints and timeouts in use. Out: one chain per distinct pair, tens in a whole cluster, which serves all
//! groups alike: the group is in the packet's word.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use super::delta::Delta;
use super::fixed::{AFFINITY, CLASSES, ENDPOINTS, SLOTS, STICKY};
use super::ids::Ids;
use super::word::{self, CHOICE, GROUP, LOCAL};
use crate::nftables::ruleset::{
    Chain, DynamicOperation, Element, Key, Operation, Origin, Rule, Rules, Statement, Transaction, Tuple,
    Value, Verdict, goto, key, set_priority,
};

/// Classes that nothing uses and that are kept all the same: counts go up and down.
const IDLE: usize = 64;
/// Classes with affinity at most, so that Services with odd timeouts cannot use up what the others need.
const MOST_WITH_AFFINITY: usize = 2048;

/// How an endpoint is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    /// Among how many.
    indices: u32,
    /// For how many seconds a client stays with it.
    timeout: Option<u32>,
    /// Only among those on this node. Without affinity it makes no difference.
    local: bool,
}

impl Class {
    pub(super) fn new(indices: usize, timeout: Option<u32>, local: bool) -> Self {
        let indices = u32::try_from(indices).unwrap_or(u32::MAX);
        Self { indices, timeout, local: local && timeout.is_some() }
    }

    /// The class whose chain has this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        let class = if let Some(indices) = name.strip_prefix('n') {
            Self { indices: indices.parse().ok()?, timeout: None, local: false }
        } else {
            let (rest, local) = name.strip_suffix("-local").map_or((name, false), |rest| (rest, true));
            let (indices, timeout) = rest.strip_prefix('s')?.split_once('-')?;
            Self { indices: indices.parse().ok()?, timeout: Some(timeout.parse().ok()?), local }
        };
        (class.indices > 0 && class.to_string() == name).then_some(class)
    }

    /// The `classes` element that leads to its chain.
    fn element(self, number: u32) -> Element {
        Element::new(Tuple::new().word(word::with(number, 0)))
            .with_verdict(Verdict::Goto(self.to_string().into()))
    }

    fn pick(self) -> String {
        format!("{self}-pick")
    }

    /// Its chain, and the one that it uses.
    fn chains(self) -> Vec<Rules> {
        let chain = |name: String, rules: Vec<Vec<Statement>>| Rules {
            chain: Chain::new(name),
            rules: rules.into_iter().map(Rule::new).collect(),
        };
        match self.timeout {
            None => vec![chain(self.to_string(), self.choose())],
            Some(timeout) => {
                let timeout = Duration::from_secs(timeout.into());
                vec![chain(self.pick(), self.stick(timeout)), chain(self.to_string(), self.remember(timeout))]
            }
        }
    }

    fn choose(self) -> Vec<Vec<Statement>> {
        let by = |below| vec![random(below).dnat(ENDPOINTS)];
        let mut rules = vec![vec![set_priority(Value::Priority.and(GROUP))], by(self.indices)];
        if self.indices > 1 {
            // Reached only if a commit between two lookups of this packet took the index away. Index 0 is always there.
            rules.push(by(1));
        }
        rules
    }

    /// What affinity is keyed by: the group without the local bit, shared by all frontends and policies.
    fn group(self) -> u32 {
        if self.local { GROUP & !LOCAL } else { GROUP }
    }

    fn forget_slot(self) -> Vec<Statement> {
        vec![set_priority(Value::Priority.and(self.group()))]
    }

    fn keep(self, timeout: Duration) -> Statement {
        Statement::Dynamic {
            operation: DynamicOperation::Update,
            set: AFFINITY.into(),
            key: key([Value::SourceAddress, Value::Priority.and(self.group())]),
            timeout: Some(timeout),
            data: Some(Value::Priority),
        }
    }

    fn set_local(self) -> Option<Vec<Statement>> {
        self.local.then(|| vec![set_priority(Value::Priority.or(LOCAL))])
    }

    /// A client that is known goes where it went, if that endpoint is still there.
    fn remember(self, timeout: Duration) -> Vec<Vec<Statement>> {
        let client = || key([Value::SourceAddress, Value::Priority]);
        let forget = Statement::Dynamic {
            operation: DynamicOperation::Delete,
            set: AFFINITY.into(),
            key: client(),
            timeout: None,
            data: Some(Value::Priority),
        };
        let mut rules = vec![
            self.forget_slot(),
            vec![set_priority(client().map(AFFINITY))],
            vec![without_slot(), goto(self.pick())],
            vec![self.keep(timeout)],
        ];
        rules.extend(self.set_local());
        rules.push(vec![to_slot()]);
        rules.extend([self.forget_slot(), vec![forget], vec![goto(self.pick())]]);
        rules
    }

    /// A client that is not known gets an endpoint by chance, and keeps it. If two packets of one client do so at the same
    /// time, both take what the first has written.
    fn stick(self, timeout: Duration) -> Vec<Vec<Statement>> {
        let known = key([Value::SourceAddress, Value::Priority]).map(AFFINITY);
        let by = |below| set_priority(random(below).map(SLOTS));
        let with_slot = Value::Priority.and(CHOICE).differs(Tuple::new().word(0));
        let mut rules: Vec<_> = self.set_local().into_iter().collect();
        rules.extend([
            vec![by(self.indices)],
            vec![with_slot, self.keep(timeout)],
            self.forget_slot(),
            vec![set_priority(known)],
        ]);
        // Without an entry, the map must be full: the client is served all the same.
        let again = self.set_local().into_iter().chain([vec![by(self.indices)]]);
        rules.extend(again.map(|rule| [vec![without_slot()], rule].concat()));
        rules.extend(self.set_local());
        rules.push(vec![to_slot()]);
        if self.indices > 1 {
            rules.push(self.forget_slot());
            rules.extend(self.set_local());
            rules.push(vec![by(1)]);
            rules.extend(self.set_local());
            rules.push(vec![to_slot()]);
        }
        rules
    }
}

/// The name of its chain: `n3`, `s3-10800`, `s3-10800-local`.
impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.timeout {
            None => write!(f, "n{}", self.indices),
            Some(timeout) => {
                write!(f, "s{}-{timeout}{}", self.indices, if self.local { "-local" } else { "" })
            }
        }
    }
}

fn random(below: u32) -> Key {
    key([Value::Protocol, Value::Priority, Value::Random { below }])
}

fn without_slot() -> Statement {
    Value::Priority.and(CHOICE).equals(Tuple::new().word(0))
}

fn to_slot() -> Statement {
    key([Value::Protocol, Value::Priority]).dnat(STICKY)
}

#[derive(Clone, Debug)]
struct Used {
    number: u32,
    users: usize,
}

/// The classes in the table.
#[derive(Clone, Debug)]
pub(super) struct Classes {
    known: BTreeMap<Class, Used>,
    numbers: Ids<Class>,
    /// Without users, the longest unused first.
    idle: VecDeque<Class>,
    /// Nothing leads to their chains any more.
    retired: BTreeSet<Class>,
}

impl Classes {
    pub(super) fn new() -> Self {
        Self {
            known: BTreeMap::new(),
            numbers: Ids::new(word::CLASSES),
            idle: VecDeque::new(),
            retired: BTreeSet::new(),
        }
    }

    /// Takes over a class of the kernel; without a number, its chain only.
    pub(super) fn found(&mut self, class: Class, number: Option<u32>) {
        match number {
            Some(number) if !self.known.contains_key(&class) && self.numbers.claim(number, class) => {
                self.known.insert(class, Used { number, users: 0 });
                self.idle.push_back(class);
            }
            _ if self.known.contains_key(&class) => {}
            _ => {
                self.retired.insert(class);
            }
        }
    }

    /// The number of a class for one more user, or `None` if there are too many classes.
    pub(super) fn acquire(&mut self, class: Class, delta: &mut Delta, origin: Origin) -> Option<u32> {
        if let Some(used) = self.known.get_mut(&class) {
            if used.users == 0 {
                self.idle.retain(|idle| *idle != class);
            }
            used.users += 1;
            return Some(used.number);
        }
        let with_affinity = || self.known.keys().filter(|known| known.timeout.is_some()).count();
        if class.timeout.is_some() && with_affinity() >= MOST_WITH_AFFINITY {
            return None;
        }
        let number = self.numbers.take(class)?;
        if !self.retired.remove(&class) {
            class.chains().into_iter().for_each(|chain| delta.chain(chain, origin));
        }
        delta.add(CLASSES, class.element(number), origin);
        self.known.insert(class, Used { number, users: 1 });
        Some(number)
    }

    /// One user less.
    pub(super) fn release(&mut self, class: Class) {
        if let Some(used) = self.known.get_mut(&class) {
            used.users -= 1;
            if used.users == 0 {
                self.idle.push_back(class);
            }
        }
    }

    /// Takes the verdicts away of those that were not used for longest.
    pub(super) fn retire(&mut self, delta: &mut Delta) {
        while self.idle.len() > IDLE
            && let Some(class) = self.idle.pop_front()
            && let Some(used) = self.known.remove(&class)
        {
            self.numbers.free(used.number);
            delta.remove(CLASSES, class.element(used.number), Origin::NONE);
            self.retired.insert(class);
        }
    }

    /// Removes the chains of retired classes.
    pub(super) fn sweep(&mut self) -> Transaction {
        let mut transaction = Transaction::default();
        for class in std::mem::take(&mut self.retired) {
            // The one that leads to the other comes first.
            for chain in class.chains().into_iter().rev() {
                transaction.push(Operation::DeleteChain(chain.chain.name), Origin::NONE);
            }
        }
        transaction
    }

    /// All chains of classes.
    pub(super) fn chains(&self) -> impl Iterator<Item = Rules> {
        self.known.keys().chain(&self.retired).flat_map(|class| class.chains())
    }

    /// All elements of `classes`.
    pub(super) fn elements(&self) -> impl Iterator<Item = Element> {
        self.known.iter().map(|(class, used)| class.element(used.number))
    }
}
