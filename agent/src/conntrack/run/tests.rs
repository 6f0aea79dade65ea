//! Runs against a kernel that does what it is told to, and fails when it is told to.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use proptest::prelude::*;

use super::super::serving::{Endpoints, Frontend, Serving};
use super::super::wire::tests::{entry_bytes, message_bytes};
use super::*;

const ENTRY: u16 = 0x100;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const OVERRUN: u16 = 4;

/// What happens at the next dump or deletion instead of what should.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The receiver gets this error before anything else.
    Receive(Errno),
    /// The dump is marked as interrupted.
    Interrupted,
    /// The dump ends with this number.
    DumpEnds(i32),
    /// Messages were lost.
    Overrun,
}

#[derive(Default)]
struct Kernel {
    /// Client ports of stale entries in the table.
    table: Vec<u16>,
    /// What each socket's dump suffers, in their order; then all goes well.
    faults: VecDeque<Option<Fault>>,
    /// Answers to deletions, by client port; 0 otherwise.
    refusals: Vec<(u16, i32)>,
    /// Bytes sent as further entries.
    junk: Vec<Vec<u8>>,
    knows_filters: bool,
    opened: usize,
    largest_batch: usize,
}

/// A socket to that kernel.
struct Fake {
    kernel: Rc<RefCell<Kernel>>,
    inbox: VecDeque<Result<Vec<u8>, Errno>>,
}

impl Transport for Fake {
    fn send(&mut self, mut message: &[u8]) -> Result<(), Errno> {
        let mut kernel = self.kernel.borrow_mut();
        let mut batch = 0;
        while message.len() >= 20 {
            let length = u32::from_ne_bytes(message[..4].try_into().unwrap()) as usize;
            let (request, rest) = message.split_at(length);
            message = rest;
            let kind = u16::from_ne_bytes(request[4..6].try_into().unwrap());
            let flags = u16::from_ne_bytes(request[6..8].try_into().unwrap());
            let sequence = u32::from_ne_bytes(request[8..12].try_into().unwrap());
            if kind == 0x101 {
                self.inbox.extend(dump(&mut kernel, request.len() > 20, sequence));
                continue;
            }
            batch += 1;
            // The client's port is where the encoder puts it: after two addresses and the protocol.
            let port = u16::from_be_bytes(request[60..62].try_into().unwrap());
            let refusal = kernel.refusals.iter().find(|(refused, _)| *refused == port).map(|(_, code)| *code);
            let code = refusal.unwrap_or_else(|| {
                let before = kernel.table.len();
                kernel.table.retain(|entry| *entry != port);
                if kernel.table.len() == before { -2 } else { 0 }
            });
            if code != 0 || flags & 4 != 0 {
                let answer = [&code.to_ne_bytes(), request].concat();
                self.inbox.push_back(Ok(message_bytes(ERROR, 0, sequence, &answer)));
            }
        }
        kernel.largest_batch = kernel.largest_batch.max(batch);
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, Errno> {
        // A kernel that says nothing makes the socket time out.
        let datagram = self.inbox.pop_front().unwrap_or(Err(Errno::EAGAIN))?;
        let length = datagram.len().min(buffer.len());
        buffer[..length].copy_from_slice(&datagram[..length]);
        Ok(datagram.len())
    }
}

fn dump(kernel: &mut Kernel, filtered: bool, sequence: u32) -> Vec<Result<Vec<u8>, Errno>> {
    let fault = kernel.faults.pop_front().flatten();
    if filtered && !kernel.knows_filters {
        return vec![Ok(message_bytes(ERROR, 0, sequence, &(-22_i32).to_ne_bytes()))];
    }
    let flags = if matches!(fault, Some(Fault::Interrupted)) { 0x12 } else { 2 };
    let mut inbox = Vec::new();
    if let Some(Fault::Receive(errno)) = fault {
        inbox.push(Err(errno));
    }
    let entries = kernel.table.iter().map(|port| entry_bytes(*port));
    for chunk in entries.chain(kernel.junk.clone()).collect::<Vec<_>>().chunks(100) {
        inbox.push(Ok(chunk.iter().flat_map(|entry| message_bytes(ENTRY, flags, sequence, entry)).collect()));
    }
    if matches!(fault, Some(Fault::Overrun)) {
        inbox.push(Ok(message_bytes(OVERRUN, flags, sequence, &[])));
    }
    let code = if let Some(Fault::DumpEnds(code)) = fault { code } else { 0 };
    // Something else on the same socket, which nobody asked for.
    inbox.push(Ok(message_bytes(DONE, 0, sequence.wrapping_add(77), &0_i32.to_ne_bytes())));
    inbox.push(Ok(message_bytes(DONE, flags, sequence, &code.to_ne_bytes())));
    inbox
}

fn kernel(entries: u16) -> Kernel {
    Kernel { table: (1..=entries).collect(), knows_filters: true, ..Kernel::default() }
}

/// A run for a frontend that every entry of the table is stale at.
fn run_on(kernel: Kernel) -> (Result<Report, RunError>, Kernel) {
    let mut serving = Serving::default();
    let target = Frontend::new("10.96.0.10:53".parse().unwrap(), Protocol::Udp);
    serving.frontends.insert(target, Endpoints::default());
    let job = Job::new(IpFamily::IPv4, serving);
    let kernel = Rc::new(RefCell::new(kernel));
    let result = run_over(&job, || {
        kernel.borrow_mut().opened += 1;
        Ok(Fake { kernel: Rc::clone(&kernel), inbox: VecDeque::new() })
    });
    (result, Rc::into_inner(kernel).unwrap().into_inner())
}

fn cause(result: Result<Report, RunError>) -> Cause {
    result.unwrap_err().cause
}

#[test]
fn ct_5_one_request_lists_and_one_deletes_each() {
    let (result, kernel) = run_on(kernel(1000));
    let report = result.unwrap();
    assert_eq!((report.entries, report.deleted, report.requests), (1000, 1000, 1001));
    assert!(kernel.table.is_empty());
    assert_eq!((kernel.opened, kernel.largest_batch), (2, BATCH));
}

#[test]
fn nothing_to_do_needs_one_socket() {
    let (result, kernel) = run_on(kernel(0));
    assert_eq!((result.unwrap().requests, kernel.opened), (1, 1));
}

#[test]
fn without_frontends_the_kernel_is_not_asked() {
    let job = Job::new(IpFamily::IPv4, Serving::default());
    let report = run_over(&job, || Err::<Fake, _>(Errno::EPERM)).unwrap();
    assert_eq!(report.requests, 0);
}

#[test]
fn disturbed_listings_are_begun_again() {
    for fault in [
        Fault::Receive(Errno::ENOBUFS),
        Fault::Interrupted,
        Fault::DumpEnds(-4),
        Fault::DumpEnds(-105),
        Fault::Overrun,
    ] {
        let (result, left) = run_on(Kernel { faults: vec![Some(fault); 4].into(), ..kernel(300) });
        let report = result.unwrap();
        assert!(left.table.is_empty(), "{fault:?}");
        assert_eq!(report.deleted + report.vanished, 300, "{fault:?}");

        let (result, _) = run_on(Kernel { faults: vec![Some(fault); 5].into(), ..kernel(300) });
        assert_eq!(cause(result), Cause::Disturbed(5), "{fault:?}");
    }
}

#[test]
fn a_signal_does_not_disturb_a_listing() {
    let faults = vec![Some(Fault::Receive(Errno::EINTR))].into();
    let (result, _) = run_on(Kernel { faults, ..kernel(3) });
    assert_eq!(result.unwrap().requests, 4);
}

#[test]
fn an_entry_that_has_gone_by_itself_is_a_success() {
    let (result, _) = run_on(Kernel { refusals: vec![(2, -2), (5, -2)], ..kernel(5) });
    let report = result.unwrap();
    assert_eq!((report.deleted, report.vanished), (3, 2));
}

#[test]
fn a_refused_deletion_fails_the_run_after_all_others() {
    let (result, kernel) = run_on(Kernel { refusals: vec![(2, -16), (3, -1)], ..kernel(200) });
    let error = result.unwrap_err();
    assert_eq!(error.cause, Cause::DeleteRefused { count: 2, errno: Errno::EBUSY });
    assert_eq!(error.report.deleted, 198, "they count although the run failed");
    assert_eq!(kernel.table, [2, 3]);
}

#[test]
fn a_kernel_without_filters_lists_everything_once() {
    let (result, kernel) = run_on(Kernel { knows_filters: false, ..kernel(10) });
    let report = result.unwrap();
    assert_eq!((report.deleted, report.requests), (10, 12));
    assert!(kernel.table.is_empty());
}

#[test]
fn refusals_are_told() {
    let (result, _) = run_on(Kernel { faults: vec![Some(Fault::DumpEnds(-1))].into(), ..kernel(1) });
    assert_eq!(cause(result), Cause::DumpRefused(Errno::EPERM));
    let mut serving = Serving::default();
    serving.removed_frontends.insert(Frontend::new("10.96.0.10:53".parse().unwrap(), Protocol::Udp));
    let job = Job::new(IpFamily::IPv4, serving);
    assert_eq!(cause(run_over(&job, || Err::<Fake, _>(Errno::EPERM))), Cause::Open(Errno::EPERM));
}

#[test]
fn a_silent_kernel_does_not_hang_us() {
    let faults = vec![Some(Fault::Receive(Errno::EAGAIN))].into();
    let (result, _) = run_on(Kernel { faults, ..kernel(1) });
    assert_eq!(cause(result), Cause::Socket { doing: "receiving", errno: Errno::EAGAIN });
}

#[test]
fn entries_that_cannot_be_read_are_counted_and_left() {
    let (result, _) = run_on(Kernel { junk: vec![vec![2, 0, 0, 0], vec![1]], ..kernel(2) });
    let report = result.unwrap();
    assert_eq!((report.deleted, report.malformed), (2, 2));
    assert_eq!(report.first_malformed, Some(WireError::Missing("an original direction")));
}

#[test]
fn a_datagram_that_is_too_large_is_an_error() {
    let (result, _) = run_on(Kernel { junk: vec![vec![0; DATAGRAM]], ..kernel(0) });
    assert!(matches!(cause(result), Cause::TooLarge(_)));
}

proptest! {
    /// Datagrams of any bytes end a run, one way or the other.
    #[test]
    fn any_datagrams_are_survived(
        datagrams in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..8),
        junk in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..8),
    ) {
        let _ = run_on(Kernel { junk, ..kernel(3) });
        let mut serving = Serving::default();
        serving.frontends.insert(Frontend::new("10.96.0.10:53".parse().unwrap(), Protocol::Udp), Endpoints::default());
        let job = Job::new(IpFamily::IPv4, serving);
        let _ = run_over(&job, || {
            let mut inbox: VecDeque<_> = datagrams.iter().cloned().map(Ok).collect();
            inbox.push_back(Err(Errno::EAGAIN));
            Ok(Raw(inbox))
        });
    }
}

/// A socket that receives these datagrams whatever is sent.
struct Raw(VecDeque<Result<Vec<u8>, Errno>>);

impl Transport for Raw {
    fn send(&mut self, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, Errno> {
        let datagram = self.0.pop_front().unwrap_or(Err(Errno::EAGAIN))?;
        buffer[..datagram.len()].copy_from_slice(&datagram);
        Ok(datagram.len())
    }
}
