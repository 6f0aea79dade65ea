//! Reads a table back.
//!
//! In: a connection and the name of a table. Out: what the kernel holds in it, in the types that were written. Nothing of
//! other tables is looked at. All of it is of one moment: reading starts over when the table was changed meanwhile. Changes of other
//! tables do not matter, so that a busy neighbour cannot keep us from reading; to tell them apart, the kernel's notices are read.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, SockFlag, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

use super::connection::Connection;
use super::error::Error;
use super::notices;
use super::ruleset::{Counted, Elements, Name, Rule, Rules, Ruleset, Statement, Table, VerdictMap};
use super::wire::{self, DecodeError, ReadElement};
use crate::netlink::socket::{ANSWER_WITHIN, errno, receive};

/// Nobody but us changes the table often.
const ATTEMPTS: u32 = 10;

/// What the kernel holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// What was understood. Maps that packets write are declared, but without their elements.
    pub ruleset: Ruleset,
    /// What is nothing of ours, and why: somebody else has changed it.
    pub foreign: BTreeMap<Object, String>,
}

/// A part of a table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Object {
    /// The table itself.
    Table,
    /// A set's declaration.
    Set(Name),
    /// The elements of a set.
    Elements(Name),
    /// A chain itself.
    Chain(Name),
    /// The rules of a chain.
    Rules(Name),
}

impl Connection {
    /// Reads a table, or `None` if it is not there.
    pub fn read(&mut self, table: &Table) -> Result<Option<Installed>, Error> {
        for _ in 0..ATTEMPTS {
            let mut changes = Changes::new(table)?;
            let before = self.generation(table)?;
            let Some(flags) = self.flags(table)? else { return Ok(None) };
            let mut reading = Reading::new(table);
            if flags != 0 {
                // No packet enters a dormant one.
                reading.installed.foreign.insert(Object::Table, format!("flags {flags:#x}"));
            }
            let complete = match reading.everything(self) {
                Ok(complete) => complete,
                // Deleted while it was read.
                Err(Error::NotListed { errno: Errno::ENOENT, .. }) => false,
                Err(error) => return Err(error),
            };
            let after = self.generation(table)?;
            if complete && (after == before || !changes.until(after)?) {
                return Ok(Some(reading.installed));
            }
        }
        Err(Error::Disturbed(ATTEMPTS))
    }
}

impl Connection {
    /// The elements of some sets, and nothing else. Changes meanwhile may be seen or not.
    pub fn elements(&mut self, table: &Table, sets: &[&'static str]) -> Result<Ruleset, Error> {
        let mut reading = Reading::new(table);
        for set in sets {
            reading.elements(self, &Name::from(*set), false, false, None)?;
        }
        Ok(reading.installed.ruleset)
    }

    /// What the first rule of a chain that counts has counted; `None` if there is none.
    pub fn counted(&mut self, table: &Table, chain: &str) -> Result<Option<Counted>, Error> {
        let mut found = None;
        self.dump(
            wire::GET_RULE,
            table,
            "rules",
            |to| {
                to.string(wire::TABLE, &table.name);
                to.string(wire::RULE_CHAIN, chain);
            },
            |payload| {
                let counted = wire::rule_counter(payload, chain)?;
                found = found.or(counted);
                Ok(())
            },
        )?;
        Ok(found)
    }
}

/// Changes of a table from a moment on.
struct Changes<'a> {
    socket: OwnedFd,
    table: &'a Table,
    buffer: Vec<u8>,
}

impl<'a> Changes<'a> {
    fn new(table: &'a Table) -> Result<Self, Error> {
        let open = || -> std::io::Result<OwnedFd> {
            let socket = notices::subscribe(SockFlag::empty())?;
            setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_WITHIN))?;
            Ok(socket)
        };
        let socket = open().map_err(|error| Error::Open(errno(&error)))?;
        Ok(Self { socket, table, buffer: vec![0; notices::DATAGRAM] })
    }

    /// Whether there was any, or may have been one, up to this transaction. The kernel sends its notices a moment after it
    /// made a transaction visible, so this waits for them.
    fn until(&mut self, generation: u32) -> Result<bool, Error> {
        loop {
            match receive(&self.socket, &mut self.buffer, MsgFlags::empty()) {
                Ok(datagram) => {
                    let told = notices::read(datagram, self.table, None)?;
                    if told.touched {
                        return Ok(true);
                    }
                    // Numbers begin anew after the last one.
                    if told.generation.is_some_and(|told| told.wrapping_sub(generation) < u32::MAX / 2) {
                        return Ok(false);
                    }
                }
                Err(Errno::ENOBUFS) => return Ok(true),
                Err(errno) => return Err(Error::Socket { doing: "reading notices of", errno }),
            }
        }
    }
}

struct Reading<'a> {
    table: &'a Table,
    installed: Installed,
    /// Elements of the maps that are in rules, by the names that the kernel gave them.
    inline: BTreeMap<Name, Vec<ReadElement>>,
}

impl<'a> Reading<'a> {
    fn new(table: &'a Table) -> Self {
        let ruleset = Ruleset::new(table.clone());
        Self { table, installed: Installed { ruleset, foreign: BTreeMap::new() }, inline: BTreeMap::new() }
    }

    /// Whether everything was listed. Only the chains of all tables are one list, in which others can shift ours.
    fn everything(&mut self, connection: &mut Connection) -> Result<bool, Error> {
        let chains = self.chains(connection)?;
        self.sets(connection)?;
        self.rules(connection)?;
        Ok(chains)
    }

    fn sets(&mut self, connection: &mut Connection) -> Result<(), Error> {
        let table = self.table;
        let mut sets = Vec::new();
        connection.dump(
            wire::GET_SET,
            table,
            "sets",
            |to| to.string(wire::TABLE, &table.name),
            |payload| {
                sets.push(wire::set(payload, table.family)?);
                Ok(())
            },
        )?;
        for wire::ReadSet { name, inline, count, set } in sets {
            let interval = set.as_ref().is_ok_and(|set| set.flags.interval);
            let dynamic = set.as_ref().is_ok_and(|set| set.flags.dynamic);
            match set {
                Ok(set) if !inline => self.installed.ruleset.add_set(set),
                Ok(_) => {}
                Err(error) => {
                    // A set in a rule comes and goes with that, and makes it foreign.
                    if !inline {
                        self.installed.foreign.insert(Object::Set(name), error.to_string());
                    }
                    continue;
                }
            }
            if !dynamic {
                self.elements(connection, &name, interval, inline, count)?;
            }
        }
        Ok(())
    }

    fn elements(
        &mut self,
        connection: &mut Connection,
        set: &Name,
        interval: bool,
        inline: bool,
        count: Option<u32>,
    ) -> Result<(), Error> {
        // By key; a range has its end at an own key.
        let mut elements: Vec<ReadElement> = Vec::new();
        // For some time after a large load the kernel rearranges its hash table, and a list made meanwhile lacks elements:
        // without a word, since no transaction is to blame. But each element of each list is there.
        for _ in 0..ATTEMPTS {
            let before = elements.len();
            self.list_elements(connection, set, &mut elements)?;
            let by_key = |read: &ReadElement| (read.element.key, read.is_end);
            elements.sort_unstable_by_key(by_key);
            elements.dedup_by_key(|read| by_key(read));
            let complete = count.and_then(|count| usize::try_from(count).ok()) == Some(elements.len());
            if interval || complete || elements.len() == before {
                break;
            }
        }
        if inline {
            self.inline.insert(set.clone(), elements);
            return Ok(());
        }
        let elements: Elements = if interval {
            wire::ranges(elements).into_iter().collect()
        } else {
            elements.into_iter().map(|read| read.element).collect()
        };
        if !elements.is_empty() {
            self.installed.ruleset.elements.insert(set.clone(), elements);
        }
        Ok(())
    }

    fn list_elements(
        &mut self,
        connection: &mut Connection,
        set: &Name,
        elements: &mut Vec<ReadElement>,
    ) -> Result<(), Error> {
        let (table, foreign) = (self.table, &mut self.installed.foreign);
        connection.dump(
            wire::GET_ELEMENT,
            table,
            "elements",
            |to| {
                to.string(wire::TABLE, &table.name);
                to.string(wire::SET_NAME, set);
            },
            |payload| {
                match wire::elements(payload) {
                    Ok(read) => elements.extend(read),
                    Err(DecodeError::Foreign(why)) => {
                        foreign.insert(Object::Elements(set.clone()), why);
                    }
                    Err(error) => return Err(error.into()),
                }
                Ok(())
            },
        )?;
        Ok(())
    }

    fn chains(&mut self, connection: &mut Connection) -> Result<bool, Error> {
        let (table, installed) = (self.table, &mut self.installed);
        connection.dump(
            wire::GET_CHAIN,
            table,
            "chains",
            // Kernels list the chains of all tables nevertheless.
            |to| to.string(wire::TABLE, &table.name),
            |payload| {
                if wire::table_of(payload)?.1 != table.name {
                    return Ok(());
                }
                match wire::chain(payload)? {
                    (_, Ok(chain)) => installed.ruleset.add_chain(chain, []),
                    (name, Err(error)) => {
                        installed.foreign.insert(Object::Chain(name), error.to_string());
                    }
                }
                Ok(())
            },
        )
    }

    fn rules(&mut self, connection: &mut Connection) -> Result<(), Error> {
        let table = self.table;
        let mut rules = Vec::new();
        connection.dump(
            wire::GET_RULE,
            table,
            "rules",
            |to| to.string(wire::TABLE, &table.name),
            |payload| {
                rules.push(wire::rule(payload, table.family)?);
                Ok(())
            },
        )?;
        for (chain, rule) in rules {
            let rule = rule.and_then(|mut rule| {
                self.fill_in(&mut rule)?;
                Ok(rule)
            });
            match (rule, self.installed.ruleset.chains.get_mut(&chain)) {
                (Ok(rule), Some(Rules { rules, .. })) => rules.push(rule),
                (Ok(_), None) => {}
                (Err(error), _) => {
                    self.installed.foreign.insert(Object::Rules(chain), error.to_string());
                }
            }
        }
        Ok(())
    }

    /// Puts the elements of maps without a name into the rules that use them.
    fn fill_in(&self, rule: &mut Rule) -> Result<(), DecodeError> {
        for statement in &mut rule.statements {
            let set = match statement {
                Statement::VerdictMap { map: VerdictMap::Named(name), .. } => name,
                Statement::Lookup { set, .. } => set,
                _ => continue,
            };
            let Some(elements) = self.inline.get(set) else { continue };
            let cases = wire::cases(elements.clone());
            let foreign = || DecodeError::Foreign("a set without a name".to_owned());
            match statement {
                Statement::VerdictMap { map, .. } => *map = VerdictMap::Inline(cases.ok_or_else(foreign)?),
                _ => return Err(foreign()),
            }
        }
        Ok(())
    }
}
