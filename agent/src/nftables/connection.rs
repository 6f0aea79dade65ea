//! A netlink socket for nftables: writes transactions, asks, lists.
//!
//! In: a [`Transaction`] or a question. Out: success, or the operations that the kernel refused, with who wanted them.
//!
//! Blocking: the kernel works on a request inside of the call that sends it, for a tenth of a second for a large load, so
//! waiting for readiness would be no gain. [`Client`](super::client::Client) moves it off the async threads.

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;
use nix::sys::socket::MsgFlags;

use super::error::{Error, Refusal};
use super::ruleset::{Operation, Origin, Table, Transaction};
use super::wire::{self, Batch, Segment};
use crate::netlink::socket::explanation;
use crate::netlink::{self, Body, DUMP, Encoder, Header, Message, REQUEST, Socket, SocketError};

/// A limit, not an allocation: a transaction is sent in one piece. 20,000 services take about 10 MiB.
const SEND_BUFFER: usize = 256 << 20;
/// Room for the answers to a transaction in which everything is wrong; a dump waits for its reader by itself.
const RECEIVE_BUFFER: usize = 8 << 20;
/// Refusals reported of one transaction: the first one is the cause, and each service at fault is wanted.
const REFUSALS_AT_MOST: usize = 1000;
/// Messages of which each element is tried alone: their answers, if all are refused, must fit into the receive buffer.
const SEGMENTS_AT_MOST: usize = 16;

/// A socket in the network namespace of the thread that opened it.
pub struct Connection {
    socket: Socket,
}

impl Connection {
    /// Opens a socket.
    pub fn open() -> Result<Self, Error> {
        let socket = Socket::open(NETLINK_NETFILTER, Some(SEND_BUFFER), Some(RECEIVE_BUFFER));
        Ok(Self { socket: socket.map_err(Error::Open)? })
    }

    /// The number of this socket, which the kernel's notices about its transactions carry.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.socket.port()
    }

    /// Makes all changes at once, or none. An error that is not a refusal leaves it open whether they were made.
    pub fn apply(&mut self, table: &Table, transaction: &Transaction) -> Result<(), Error> {
        let mut refused = self.attempt(table, transaction, &[])?;
        // Of several elements in one message the kernel names the first that it refuses, and older ones none: those are
        // tried again, each in a message of its own.
        let apart: Vec<_> =
            refused.iter().filter_map(|refused| refused.segment.clone()).take(SEGMENTS_AT_MOST).collect();
        if !apart.is_empty() {
            refused = self.attempt(table, transaction, &apart)?;
        }
        if refused.is_empty() {
            return Ok(());
        }
        Err(Error::Refused(refused.into_iter().map(|refused| refused.refusal).collect()))
    }

    /// Sends a transaction; what the kernel refuses of it. With several elements in one message, except for those `apart`.
    fn attempt(
        &mut self,
        table: &Table,
        transaction: &Transaction,
        apart: &[Segment],
    ) -> Result<Vec<Refused>, Error> {
        let first = self.socket.next_sequence();
        let batch = Batch::new(table, transaction, first, apart);
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        // One more for the message that ends it.
        self.socket.used(batch.last().wrapping_add(1));
        self.socket.send(&batch.bytes)?;
        let mut answers =
            Answers { batch: &batch, transaction, refused: Vec::new(), whole: None, done: false };
        let mut wait = MsgFlags::empty();
        loop {
            match self.socket.receive(wait) {
                Ok(datagram) => {
                    for message in netlink::messages(datagram) {
                        answers.add(&message?);
                    }
                }
                Err(Errno::EAGAIN) if answers.done => return answers.outcome(),
                Err(errno) => return Err(Error::Socket { doing: "reading an answer of", errno }),
            }
            // All answers are there before the call that sent the batch returns.
            if answers.done {
                wait = MsgFlags::MSG_DONTWAIT;
            }
        }
    }

    /// Whether the table is there.
    pub fn exists(&mut self, table: &Table) -> Result<bool, Error> {
        Ok(self.flags(table)?.is_some())
    }

    /// The flags of the table, or `None` if it is not there.
    pub(super) fn flags(&mut self, table: &Table) -> Result<Option<u32>, Error> {
        let answer = self.ask(wire::GET_TABLE, table, "tables", |to| to.string(wire::TABLE, &table.name));
        match answer {
            Ok(payload) => Ok(Some(wire::table_flags(&payload)?)),
            Err(Error::NotListed { errno: Errno::ENOENT, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The number of the last transaction of this network namespace, whatever its table.
    pub fn generation(&mut self, table: &Table) -> Result<u32, Error> {
        let answer = self.ask(wire::GET_GENERATION, table, "generation", |_| {})?;
        Ok(wire::generation(&answer)?)
    }

    /// The payload of the only answer.
    fn ask(
        &mut self,
        kind: u16,
        table: &Table,
        what: &'static str,
        fill: impl FnOnce(&mut Encoder),
    ) -> Result<Vec<u8>, Error> {
        let sequence = self.socket.next_sequence();
        let mut encoder = Encoder::default();
        encoder.message(Header::new(kind, REQUEST, sequence, table.family), fill);
        let answer = self.socket.ask(sequence, &encoder.finish()).map_err(|error| not_listed(what, error))?;
        Ok(answer.unwrap_or_default())
    }

    /// Hands each message of a list to `each`; whether there was no transaction meanwhile, of whatever table.
    pub(super) fn dump(
        &mut self,
        kind: u16,
        table: &Table,
        what: &'static str,
        fill: impl FnOnce(&mut Encoder),
        each: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let sequence = self.socket.next_sequence();
        let mut encoder = Encoder::default();
        encoder.message(Header::new(kind, REQUEST | DUMP, sequence, table.family), fill);
        self.socket.list(sequence, &encoder.finish(), each).map_err(|error| not_listed(what, error))?
    }
}

fn not_listed(what: &'static str, error: SocketError) -> Error {
    match error {
        SocketError::Refused { errno, .. } => Error::NotListed { what, errno },
        error => error.into(),
    }
}

/// A message that was refused.
struct Refused {
    sequence: u32,
    refusal: Refusal,
    /// Its elements, if there are several.
    segment: Option<Segment>,
}

/// The kernel's answers to a batch.
struct Answers<'a> {
    batch: &'a Batch,
    transaction: &'a Transaction,
    refused: Vec<Refused>,
    whole: Option<Errno>,
    done: bool,
}

impl Answers<'_> {
    fn add(&mut self, message: &Message<'_>) {
        let Body::Outcome { code, rest } = message.body else { return };
        let sequence = message.sequence;
        if sequence == self.batch.last() {
            self.done = true;
        }
        if code == 0 {
            return;
        }
        let errno = Errno::from_raw(code.wrapping_neg());
        let (detail, offset) = if message.explained { explanation(rest) } else { (None, None) };
        if let Some(place) = self.batch.place(self.transaction, sequence, offset) {
            if self.refused.len() < REFUSALS_AT_MOST {
                let (object, origin) = describe(self.transaction, place);
                let refusal = Refusal { object, origin, errno, detail };
                self.refused.push(Refused { sequence, refusal, segment: self.batch.segment(sequence) });
            }
        } else if sequence == self.batch.first || sequence == self.batch.last().wrapping_add(1) {
            // About the messages around the operations, which stand for all of them.
            self.done = true;
            self.whole = Some(errno);
        }
    }

    fn outcome(mut self) -> Result<Vec<Refused>, Error> {
        self.refused.sort_by_key(|refused| refused.sequence.wrapping_sub(self.batch.first));
        match self.whole {
            Some(errno) if self.refused.is_empty() => Err(Error::RefusedWhole(errno)),
            _ => Ok(self.refused),
        }
    }
}

fn describe(transaction: &Transaction, place: wire::Place) -> (String, Option<Origin>) {
    let Some((operation, origin)) = transaction.operations.get(place.operation) else {
        return (String::new(), None);
    };
    let of = |verb: &str, name: &str| format!("to {verb} {name}");
    let object = match operation {
        Operation::AddTable | Operation::AddDormantTable => "to add the table".to_owned(),
        Operation::DeleteTable => "to delete the table".to_owned(),
        Operation::AddChain(chain) => of("add the chain", &chain.name),
        Operation::DeleteChain(name) => of("delete the chain", name),
        Operation::FlushChain(name) => of("flush the chain", name),
        Operation::AddRule { chain, .. } => of("add a rule to", chain),
        Operation::AddSet(set) => of("add the set", &set.name),
        Operation::DeleteSet(name) => of("delete the set", name),
        Operation::FlushSet(name) => of("flush the set", name),
        Operation::AddElements { set, elements } | Operation::DeleteElements { set, elements } => {
            let verb = if matches!(operation, Operation::AddElements { .. }) { "add" } else { "delete" };
            let Some((element, origin)) = place.element.and_then(|index| elements.get(index)) else {
                return (format!("to {verb} one of {} elements of {set}", elements.len()), None);
            };
            return (format!("to {verb} the element {:?} of {set}", element.key), Some(*origin));
        }
    };
    (object, Some(*origin))
}
