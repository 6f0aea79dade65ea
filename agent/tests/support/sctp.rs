//! SCTP for kernels that have none: just enough to ask for an association and to be answered, by raw sockets. Rules and
//! connection tracking, which are what is tested, see the same packets as of a real association.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, socket};

const INIT: u8 = 1;
const INIT_ACK: u8 = 2;

/// A packet with one chunk, INIT or INIT ACK, with a text after the fixed part.
struct Packet<'a> {
    from: u16,
    to: u16,
    kind: u8,
    /// The verification tag: what the peer said in its INIT; 0 in an INIT.
    verification: u32,
    /// What the peer is to put there.
    tag: u32,
    text: &'a [u8],
}

impl<'a> Packet<'a> {
    fn bytes(&self) -> Vec<u8> {
        let length = u16::try_from(20 + self.text.len()).unwrap();
        let mut bytes = Vec::new();
        bytes.extend(self.from.to_be_bytes());
        bytes.extend(self.to.to_be_bytes());
        bytes.extend(self.verification.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend([self.kind, 0]);
        bytes.extend(length.to_be_bytes());
        bytes.extend(self.tag.to_be_bytes());
        // Window, numbers of streams, first sequence number.
        bytes.extend([0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
        bytes.extend(self.text);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let sum = crc32c(&bytes).to_le_bytes();
        bytes[8..12].copy_from_slice(&sum);
        bytes
    }

    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let number = |at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let long = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(Self {
            from: number(0)?,
            to: number(2)?,
            verification: long(4)?,
            kind: *bytes.get(12)?,
            tag: long(16)?,
            text: bytes.get(32..12 + usize::from(number(14)?))?,
        })
    }
}

/// The checksum of SCTP (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), bit))
}

/// A raw socket at an address, in the namespace of the thread. What is done with sockets of UDP can be done with it.
pub fn raw(address: IpAddr, protocol: SockProtocol) -> io::Result<UdpSocket> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let raw = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    bind(raw.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(address, 0)))?;
    Ok(raw.into())
}

fn open(address: IpAddr) -> io::Result<UdpSocket> {
    let socket = raw(address, SockProtocol::Sctp)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// What a raw socket of IPv4 hands over begins with the IP header.
fn payload(bytes: &[u8], v4: bool) -> &[u8] {
    let header = if v4 { bytes.first().map_or(0, |byte| usize::from(byte & 15) * 4) } else { 0 };
    bytes.get(header..).unwrap_or_default()
}

/// Something that answers at an address and port.
pub struct Listener {
    socket: UdpSocket,
    at: SocketAddr,
}

impl Listener {
    /// Opens it in the namespace of the thread.
    pub fn open(at: SocketAddr) -> io::Result<Self> {
        Ok(Self { socket: open(at.ip())?, at })
    }

    /// Answers every INIT with the name and the source, for ever.
    pub async fn serve(self, name: String) -> io::Result<()> {
        let socket = tokio::net::UdpSocket::from_std(self.socket)?;
        let mut buffer = [0; 2048];
        loop {
            let Ok((length, peer)) = socket.recv_from(&mut buffer).await else { continue };
            let Some(packet) = Packet::parse(payload(&buffer[..length], self.at.is_ipv4())) else { continue };
            if packet.kind != INIT || packet.to != self.at.port() {
                continue;
            }
            let text = format!("{name} {}", peer.ip());
            let answer = Packet {
                from: packet.to,
                to: packet.from,
                kind: INIT_ACK,
                verification: packet.tag,
                tag: 1,
                text: text.as_bytes(),
            };
            // An error is about an answer that could not be delivered.
            let _ = socket.send_to(&answer.bytes(), SocketAddr::new(peer.ip(), 0)).await;
        }
    }
}

/// Asks for an association; returns the text of the answer.
pub async fn ask(from: IpAddr, port: u16, to: SocketAddr) -> io::Result<String> {
    let socket = tokio::net::UdpSocket::from_std(open(from)?)?;
    socket.connect(SocketAddr::new(to.ip(), 0)).await?;
    let init = Packet { from: port, to: to.port(), kind: INIT, verification: 0, tag: 1, text: &[] };
    // The node's own rules drop or reject what it sends: which of the two, only the answer says.
    match socket.send(&init.bytes()).await {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        sent => drop(sent?),
    }
    let mut buffer = [0; 2048];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if let Some(packet) = Packet::parse(payload(&buffer[..length], to.is_ipv4()))
            && (packet.kind, packet.from, packet.to) == (INIT_ACK, to.port(), port)
        {
            return Ok(String::from_utf8_lossy(packet.text).into_owned());
        }
    }
}
