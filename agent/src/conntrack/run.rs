//! One run: lists the entries, deletes the stale ones.
//!
//! In: a [`Job`]. Out: entries deleted from the kernel, and a [`Report`]. One listing for each protocol that is due, which
//! the kernel filters; entries are judged as they arrive and deleted in batches meanwhile, so memory does not grow
//! with the table, nor with the number of deletions.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use pointsman_crds::proxy_node_status::IpFamily;

use super::netlink::{Cause, RunError, Socket, Transport};
use super::reconciler::Job;
use super::serving::{Protocol, stale};
use super::wire::{self, Body, DumpFilter, Entry, WireError};
use crate::netlink::socket::{DATAGRAM, from_code as errno};

/// Each deletion that fails is answered, and the answers must fit into the usual receive buffer of a socket.
const BATCH: usize = 128;

/// How often a listing is begun before the run fails, as in kube-proxy.
const ATTEMPTS: u32 = 5;

/// What a run did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The family whose entries were looked at (label `ip_family`).
    pub family: IpFamily,
    /// Entries that the kernel listed.
    pub entries: u64,
    /// Entries deleted (`conntrack_reconciler_deleted_entries_total`).
    pub deleted: u64,
    /// Stale entries that had gone by themselves when they were to be deleted.
    pub vanished: u64,
    /// Entries that could not be read, and were left alone.
    pub malformed: u64,
    /// Why, of the first of them.
    pub first_malformed: Option<WireError>,
    /// Requests sent to the kernel.
    pub requests: u64,
    /// How long it took (`conntrack_reconciler_sync_duration_seconds`).
    pub duration: Duration,
}

impl Report {
    /// A run that found nothing.
    #[must_use]
    pub fn new(family: IpFamily) -> Self {
        Self {
            family,
            entries: 0,
            deleted: 0,
            vanished: 0,
            malformed: 0,
            first_malformed: None,
            requests: 0,
            duration: Duration::ZERO,
        }
    }
}

/// Deletes the stale entries of the network namespace that the calling thread is in. Blocks.
pub fn run(job: &Job) -> Result<Report, RunError> {
    run_over(job, Socket::open)
}

/// Whether there is such an entry in the network namespace that the calling thread is in. Blocks.
pub fn has(family: IpFamily, wanted: impl Fn(&Entry) -> bool) -> Result<bool, Cause> {
    let mut socket = Socket::open().map_err(Cause::Open)?;
    send(&mut socket, &wire::dump_request(family, DumpFilter::Family, 1))?;
    let mut buffer = vec![0; DATAGRAM];
    loop {
        for message in wire::messages(receive(&mut socket, &mut buffer)?) {
            match message?.body {
                Body::Entry(payload) if wire::entry(payload)?.is_some_and(|entry| wanted(&entry)) => {
                    return Ok(true);
                }
                Body::Done(0) => return Ok(false),
                Body::Done(code) | Body::Outcome(code) if code != 0 => {
                    return Err(Cause::DumpRefused(errno(code)));
                }
                Body::Overrun => return Err(Cause::Disturbed(1)),
                _ => {}
            }
        }
    }
}

fn run_over<T: Transport>(job: &Job, open: impl FnMut() -> Result<T, Errno>) -> Result<Report, RunError> {
    let started = Instant::now();
    let mut run = Run {
        job,
        open,
        report: Report::new(job.family),
        sequence: 0,
        buffer: vec![0; DATAGRAM],
        pending: Vec::with_capacity(BATCH),
        deleter: None,
        answers: vec![0; DATAGRAM],
        refused: None,
    };
    let result = run.everything();
    let mut report = run.report;
    report.duration = started.elapsed();
    match result {
        Ok(()) => Ok(report),
        Err(cause) => Err(RunError { report: Box::new(report), cause }),
    }
}

struct Run<'a, T, O> {
    job: &'a Job,
    open: O,
    report: Report,
    sequence: u32,
    buffer: Vec<u8>,
    /// Stale entries of the batch that is being collected.
    pending: Vec<Entry>,
    /// A second socket, so that answers to deletions do not mix with a listing.
    deleter: Option<T>,
    answers: Vec<u8>,
    refused: Option<(u64, Errno)>,
}

impl<T: Transport, O: FnMut() -> Result<T, Errno>> Run<'_, T, O> {
    fn everything(&mut self) -> Result<(), Cause> {
        let due = |protocol: &&Protocol| self.job.serving.concerns(**protocol);
        let protocols: Vec<_> = self.job.protocols.iter().filter(due).copied().collect();
        for protocol in protocols {
            match self.list(DumpFilter::Protocol(protocol)) {
                // A kernel that knows filters, but not this one.
                Err(Cause::DumpRefused(Errno::EINVAL | Errno::EOPNOTSUPP)) => {
                    self.list(DumpFilter::Family)?;
                    break;
                }
                result => result?,
            }
        }
        match self.refused {
            None => Ok(()),
            Some((count, errno)) => Err(Cause::DeleteRefused { count, errno }),
        }
    }

    fn list(&mut self, filter: DumpFilter) -> Result<(), Cause> {
        for _ in 0..ATTEMPTS {
            match self.list_once(filter) {
                Err(Cause::Disturbed(_)) => {
                    // What was collected will be listed again; what is on its way to these sockets is void.
                    self.pending.clear();
                    self.deleter = None;
                }
                result => return result,
            }
        }
        Err(Cause::Disturbed(ATTEMPTS))
    }

    fn list_once(&mut self, filter: DumpFilter) -> Result<(), Cause> {
        let mut socket = (self.open)().map_err(Cause::Open)?;
        let sequence = self.next_sequence();
        self.report.requests += 1;
        send(&mut socket, &wire::dump_request(self.job.family, filter, sequence))?;
        let mut buffer = std::mem::take(&mut self.buffer);
        let result = self.read_list(&mut socket, &mut buffer, sequence);
        self.buffer = buffer;
        result?;
        self.delete_pending()
    }

    fn read_list(&mut self, socket: &mut T, buffer: &mut [u8], sequence: u32) -> Result<(), Cause> {
        let mut interrupted = false;
        loop {
            let datagram = receive(socket, buffer)?;
            for message in wire::messages(datagram) {
                let message = message?;
                if message.sequence != sequence {
                    continue;
                }
                interrupted |= message.interrupted;
                match message.body {
                    Body::Entry(payload) => self.judge(payload)?,
                    Body::Done(0) if interrupted => return Err(Cause::Disturbed(1)),
                    Body::Done(0) => return Ok(()),
                    Body::Outcome(0) | Body::Other => {}
                    Body::Overrun => return Err(Cause::Disturbed(1)),
                    Body::Done(code) | Body::Outcome(code) => {
                        return Err(match errno(code) {
                            Errno::EINTR | Errno::ENOBUFS => Cause::Disturbed(1),
                            errno => Cause::DumpRefused(errno),
                        });
                    }
                }
            }
        }
    }

    fn judge(&mut self, payload: &[u8]) -> Result<(), Cause> {
        self.report.entries += 1;
        match wire::entry(payload) {
            // The protocol is compared here too, for kernels that do not filter.
            Ok(Some(entry)) => {
                if self.job.protocols.contains(&entry.protocol) && stale(&entry, &self.job.serving) {
                    self.pending.push(entry);
                }
            }
            Ok(None) => {}
            Err(error) => {
                // One entry that cannot be read must not keep all others alive.
                self.report.malformed += 1;
                self.report.first_malformed.get_or_insert(error);
            }
        }
        if self.pending.len() < BATCH { Ok(()) } else { self.delete_pending() }
    }

    /// Deletes the batch with one call: only the last deletion is answered if all goes well.
    fn delete_pending(&mut self) -> Result<(), Cause> {
        let batch = std::mem::take(&mut self.pending);
        let Some(last) = batch.len().checked_sub(1) else { return Ok(()) };
        let first_sequence = self.sequence.wrapping_add(1);
        let mut bytes = Vec::with_capacity(batch.len() * 128);
        for (index, entry) in batch.iter().enumerate() {
            let sequence = self.next_sequence();
            bytes.extend(wire::delete_request(entry, sequence, index == last));
        }
        self.report.requests += count(batch.len());
        let mut deleter = match self.deleter.take() {
            Some(deleter) => deleter,
            None => (self.open)().map_err(Cause::Open)?,
        };
        send(&mut deleter, &bytes)?;
        let mut answers = std::mem::take(&mut self.answers);
        let failed = read_answers(&mut deleter, &mut answers, first_sequence, self.sequence);
        self.answers = answers;
        self.deleter = Some(deleter);
        let failed = failed?;
        self.report.deleted += count(batch.len().saturating_sub(failed.len()));
        for errno in failed {
            if errno == Errno::ENOENT {
                self.report.vanished += 1;
            } else {
                self.refused.get_or_insert((0, errno)).0 += 1;
            }
        }
        self.pending = batch;
        self.pending.clear();
        Ok(())
    }

    /// Never 0, which is the number of messages that answer nothing.
    fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        self.sequence
    }
}

/// The errors of those requests that failed, once the last one is answered.
fn read_answers(
    socket: &mut impl Transport,
    buffer: &mut [u8],
    first: u32,
    last: u32,
) -> Result<Vec<Errno>, Cause> {
    let mut failed = Vec::new();
    loop {
        let datagram = receive(socket, buffer)?;
        for message in wire::messages(datagram) {
            let message = message?;
            if !(first..=last).contains(&message.sequence) {
                continue;
            }
            match message.body {
                Body::Outcome(code) if code != 0 => failed.push(errno(code)),
                Body::Overrun => return Err(Cause::Disturbed(1)),
                _ => {}
            }
            if message.sequence == last {
                return Ok(failed);
            }
        }
    }
}

fn send(socket: &mut impl Transport, bytes: &[u8]) -> Result<(), Cause> {
    loop {
        match socket.send(bytes) {
            Err(Errno::EINTR) => {}
            result => return result.map_err(|errno| Cause::Socket { doing: "sending", errno }),
        }
    }
}

fn receive<'a>(socket: &mut impl Transport, buffer: &'a mut [u8]) -> Result<&'a [u8], Cause> {
    loop {
        match socket.receive(buffer) {
            Ok(length) => return buffer.get(..length).ok_or(Cause::TooLarge(length)),
            // A signal came first.
            Err(Errno::EINTR) => {}
            // Messages were dropped for want of room.
            Err(Errno::ENOBUFS) => return Err(Cause::Disturbed(1)),
            Err(errno) => return Err(Cause::Socket { doing: "receiving", errno }),
        }
    }
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
