//! What this kernel can do.
//!
//! In: a connection. Out: the features that are missing, each with the kernel's error. Each is tried alone, in a table that
//! no packet enters and that is deleted by the transaction that makes it: nothing is left behind, whatever happens. Only
//! whether sets count, which is asked where it is wanted, takes a table that is there for a moment.

use std::fmt;
use std::time::Duration;

use nix::errno::Errno;
use pointsman_crds::proxy_node_status::IpFamily;

use super::connection::Connection;
use super::error::Error;
use super::ruleset::{
    Chain, ChainType, Columns, DynamicOperation, Element, Hook, Operation, Origin, Rule, Ruleset, Set,
    Statement, TCP, Table, Transaction, Tuple, Type, Value, Verdict, key, set_mark, set_priority,
};

const TABLE: &str = "pointsman-probe";

/// Something that a table of ours needs of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// Tables of the family.
    Tables,
    /// Chains that let pass and drop.
    FilterChains,
    /// Chains that translate addresses.
    NatChains,
    /// Maps whose keys and data have several columns.
    Maps,
    /// Maps that hold verdicts, with a name and in a rule.
    VerdictMaps,
    /// Sets of ranges.
    Ranges,
    /// Maps that packets add to, with timeouts.
    DynamicMaps,
    /// Packets delete from such a map.
    DynamicDelete,
    /// Values looked up in a map become priority and mark.
    Meta,
    /// Random numbers.
    Random,
    /// What an address is to this node.
    AddressTypes,
    /// State and status of connections.
    Conntrack,
    /// DNAT to what a map holds.
    Dnat,
    /// Masquerading with random ports.
    Masquerade,
    /// Refusing.
    Reject,
    /// Counting.
    Counter,
}

impl Feature {
    const ALL: [Self; 16] = [
        Self::Tables,
        Self::FilterChains,
        Self::NatChains,
        Self::Maps,
        Self::VerdictMaps,
        Self::Ranges,
        Self::DynamicMaps,
        Self::DynamicDelete,
        Self::Meta,
        Self::Random,
        Self::AddressTypes,
        Self::Conntrack,
        Self::Dnat,
        Self::Masquerade,
        Self::Reject,
        Self::Counter,
    ];

    fn try_in(self, table: &mut Ruleset) {
        let address = match table.table.family {
            IpFamily::IPv4 => Tuple::new().address([192, 0, 2, 1]),
            IpFamily::IPv6 => Tuple::new().address([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
        };
        let word = |word| Tuple::new().word(word);
        let endpoints = || {
            let key = Columns::Types(vec![Type::Protocol, Type::Integer]);
            Set::map("map", key, Columns::Types(vec![Type::Address, Type::Port]))
        };
        let words = || {
            Set::map("map", Columns::Typeof(vec![Value::Priority]), Columns::Typeof(vec![Value::Priority]))
        };
        let mut rules = Vec::new();
        match self {
            Self::Tables => {}
            Self::FilterChains => {
                table.add_chain(Chain::base("base", ChainType::Filter, Hook::Forward, 0), []);
            }
            Self::NatChains => {
                table.add_chain(Chain::base("base", ChainType::Nat, Hook::Prerouting, -101), []);
            }
            Self::Maps => {
                table.add_set(endpoints());
                let element = Element::new(Tuple::new().protocol(TCP).word(1)).with_data(address.port(80));
                table.add_element("map", element);
            }
            Self::VerdictMaps => {
                table.add_set(Set::vmap("map", Columns::Typeof(vec![Value::Priority])));
                table.add_element("map", Element::new(word(1)).with_verdict(Verdict::Drop));
                rules.push(Rule::new([key([Value::Priority]).vmap("map")]));
                rules.push(Rule::new([key([Value::Priority]).vmap_of([(word(1), Verdict::Return)])]));
            }
            Self::Ranges => {
                table.add_set(Set::new("set", Columns::Types(vec![Type::Address])).interval());
                table.add_element("set", Element::range(address, address.highest()));
                rules.push(Rule::new([key([Value::SourceAddress]).not_in_set("set")]));
            }
            Self::DynamicMaps => {
                table.add_set(words().dynamic(16));
                rules.push(Rule::new([dynamic(DynamicOperation::Update, Some(Duration::from_hours(3)))]));
            }
            Self::DynamicDelete => {
                table.add_set(words().dynamic(16));
                rules.push(Rule::new([dynamic(DynamicOperation::Delete, None)]));
            }
            Self::Meta => {
                table.add_set(words());
                let group = Value::Priority.and(0xf_ffff);
                rules.push(Rule::new([set_priority(key([group]).map("map")), set_mark(Value::Mark.or(1))]));
            }
            Self::Random => rules.push(Rule::new([Value::Random { below: 2 }.equals(word(1))])),
            Self::AddressTypes => {
                rules.push(Rule::new([
                    Value::SourceType.equals(word(Value::LOCAL)),
                    Value::DestinationType.equals(word(Value::LOCAL)),
                ]));
            }
            Self::Conntrack => {
                rules.push(Rule::new([
                    Value::CtState.has(Value::CT_NEW),
                    Value::CtStatus.has(Value::CT_DNAT),
                ]));
            }
            Self::Dnat => {
                table.add_set(endpoints());
                rules.push(Rule::new([key([Value::Protocol, Value::Random { below: 2 }]).dnat("map")]));
            }
            Self::Masquerade => rules.push(Rule::new([Statement::Masquerade { fully_random: true }])),
            Self::Reject => rules.push(Rule::new([Statement::Reject])),
            Self::Counter => rules.push(Rule::new([Statement::Counter])),
        }
        if !rules.is_empty() {
            table.add_chain(Chain::new("chain"), rules);
        }
    }
}

fn dynamic(operation: DynamicOperation, timeout: Option<Duration>) -> Statement {
    let data = Some(Value::Priority);
    Statement::Dynamic { operation, set: "map".into(), key: key([Value::Priority]), timeout, data }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tables => "tables",
            Self::FilterChains => "filter chains",
            Self::NatChains => "nat chains",
            Self::Maps => "maps with concatenated keys",
            Self::VerdictMaps => "verdict maps",
            Self::Ranges => "interval sets",
            Self::DynamicMaps => "maps updated by packets",
            Self::DynamicDelete => "deletion from maps by packets",
            Self::Meta => "setting the priority and mark of packets",
            Self::Random => "random numbers",
            Self::AddressTypes => "fib lookups of address types",
            Self::Conntrack => "connection tracking state",
            Self::Dnat => "DNAT to what a map holds",
            Self::Masquerade => "masquerade fully-random",
            Self::Reject => "reject",
            Self::Counter => "counters",
        })
    }
}

/// A feature that this kernel does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which.
    pub feature: Feature,
    /// The kernel's error.
    pub errno: Errno,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nftables: the kernel does not have {}: {}", self.feature, self.errno.desc())
    }
}

/// Tries everything; an error means that the kernel cannot be asked at all.
pub fn probe(connection: &mut Connection, family: IpFamily) -> Result<Vec<Missing>, Error> {
    let mut missing = Vec::new();
    for feature in Feature::ALL {
        let table = Table::new(family, TABLE);
        let mut ruleset = Ruleset::new(table.clone());
        feature.try_in(&mut ruleset);
        let mut transaction = Transaction::default();
        transaction.push(Operation::AddDormantTable, Origin::NONE);
        let load = ruleset.load().operations;
        transaction.operations.extend(load.into_iter().filter(|(op, _)| *op != Operation::AddTable));
        transaction.push(Operation::DeleteTable, Origin::NONE);
        match connection.apply(&table, &transaction) {
            Ok(()) => {}
            Err(Error::Refused(refusals)) => {
                let errno = refusals.first().map_or(Errno::EOPNOTSUPP, |refusal| refusal.errno);
                missing.push(Missing { feature, errno });
            }
            Err(Error::RefusedWhole(errno)) if errno != Errno::EPERM => {
                missing.push(Missing { feature, errno });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(missing)
}

/// Whether sets can count. Kernels before 5.7 take the declaration of one that does, and leave that out without a word: so it is
/// read back, from a table that is deleted thereafter.
pub fn counts(connection: &mut Connection, family: IpFamily) -> Result<bool, Error> {
    let table = Table::new(family, TABLE);
    let mut ruleset = Ruleset::new(table.clone());
    ruleset.add_set(Set::new("set", Columns::Types(vec![Type::Address])).counting());
    let mut transaction = Transaction::default();
    // Whatever a probe that was killed has left.
    for operation in [Operation::AddDormantTable, Operation::DeleteTable, Operation::AddDormantTable] {
        transaction.push(operation, Origin::NONE);
    }
    transaction
        .operations
        .extend(ruleset.sets.values().map(|set| (Operation::AddSet(set.clone()), Origin::NONE)));
    match connection.apply(&table, &transaction) {
        Err(Error::Refused(_)) => return Ok(false),
        applied => applied?,
    }
    let read = connection.read(&table);
    let mut transaction = Transaction::default();
    transaction.push(Operation::DeleteTable, Origin::NONE);
    connection.apply(&table, &transaction)?;
    Ok(read?.is_some_and(|read| read.ruleset == ruleset))
}
