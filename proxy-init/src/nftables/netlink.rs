//! Netlink: a batch of messages to nf_tables or one message about links, and the response. The
//! kernel carries out a batch as one transaction. `linux/netlink.h` and
//! `linux/netfilter/nfnetlink.h` define the format.

use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto,
    setsockopt, socket, sockopt,
};

// Message types.
const ERROR: u16 = 2;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// The subsystem, in the upper byte of the type of its messages, and in those that enclose a batch.
const NF_TABLES: u16 = 10;

// Flags of messages.
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

const FAMILY_INET: u8 = 1;
/// The bytes of a header: length, type, flags, sequence number and port.
const HEADER: usize = 16;
const FLAGS_OFFSET: usize = 6;
/// The item of the messages that enclose a batch.
const ALL: &str = "rules";
/// The flag of attributes that contain others.
const NESTED: u16 = 0x8000;

/// Sends a message about links, addresses or routes, and reads the response.
pub fn request(
    kind: u16,
    flags: u16,
    header: &[u8],
    write: impl FnOnce(&mut Attributes),
) -> nix::Result<()> {
    let mut message = Batch::empty();
    message.write(kind, ACKNOWLEDGE | flags, header, String::new(), write);
    match message.exchange(SockProtocol::NetlinkRoute)? {
        (_, 0) => Ok(()),
        (_, errno) => Err(Errno::from_raw(errno)),
    }
}

/// A batch of messages.
pub struct Batch {
    bytes: Attributes,
    /// The subject of each message, at the position of its sequence number.
    items: Vec<String>,
    /// The offset of the latest message.
    latest: usize,
}

impl Batch {
    /// Begins a batch.
    pub fn begin() -> Self {
        let mut batch = Self::empty();
        batch.write(
            BATCH_BEGIN,
            0,
            &header(0, NF_TABLES),
            ALL.to_owned(),
            |_| {},
        );
        batch
    }

    fn empty() -> Self {
        Self {
            bytes: Attributes(Vec::new()),
            items: Vec::new(),
            latest: 0,
        }
    }

    /// Adds a message about `item`.
    pub fn add(&mut self, message: u16, item: String, write: impl FnOnce(&mut Attributes)) {
        let (kind, header) = ((NF_TABLES << 8) | message, header(FAMILY_INET, 0));
        self.write(kind, CREATE | APPEND, &header, item, write);
    }

    /// Ends the batch. The kernel answers with the error of the first message that has one, else with
    /// the acknowledgement of the last message: one response in any case.
    pub fn end(&mut self) {
        let flags = self.latest + FLAGS_OFFSET;
        let acknowledged = REQUEST | CREATE | APPEND | ACKNOWLEDGE;
        self.bytes.0[flags..flags + 2].copy_from_slice(&acknowledged.to_ne_bytes());
        self.write(BATCH_END, 0, &header(0, NF_TABLES), ALL.to_owned(), |_| {});
    }

    /// Sends the batch and reads the response. The error has the item of the message that the kernel
    /// has rejected.
    pub fn send(mut self) -> Result<(), (String, Errno)> {
        match self.exchange(SockProtocol::NetlinkNetFilter) {
            Ok((_, 0)) => Ok(()),
            Ok((sequence, errno)) if sequence < self.items.len() => {
                Err((self.items.swap_remove(sequence), Errno::from_raw(errno)))
            }
            Ok((_, errno)) => Err((ALL.to_owned(), Errno::from_raw(errno))),
            Err(errno) => Err((ALL.to_owned(), errno)),
        }
    }

    /// The sequence number and the error of the response.
    fn exchange(&self, protocol: SockProtocol) -> nix::Result<(usize, i32)> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )?;
        // The first option exceeds the limit of the system, which requires privileges on the node. If
        // the buffer remains too small, sending fails.
        let size = self.bytes.0.len();
        setsockopt(&socket, sockopt::SndBufForce, &size)
            .or_else(|_| setsockopt(&socket, sockopt::SndBuf, &size))?;
        let (socket, kernel) = (socket.as_raw_fd(), NetlinkAddr::new(0, 0));
        sendto(socket, &self.bytes.0, &kernel, MsgFlags::empty())?;
        // The kernel responds while it takes the message. Further errors are of no interest.
        let mut response = [0; 64];
        let received = recv(socket, &mut response, MsgFlags::MSG_DONTWAIT)?;
        parse(&response[..received.min(response.len())]).ok_or(Errno::EBADMSG)
    }

    fn write(
        &mut self,
        kind: u16,
        flags: u16,
        header: &[u8],
        item: String,
        write: impl FnOnce(&mut Attributes),
    ) {
        let bytes = &mut self.bytes;
        let (start, sequence) = (bytes.0.len(), self.items.len());
        let sequence = u32::try_from(sequence).expect("rules are fewer than ports");
        bytes.0.extend([0; 4]);
        bytes.0.extend(kind.to_ne_bytes());
        bytes.0.extend((REQUEST | flags).to_ne_bytes());
        bytes.0.extend(sequence.to_ne_bytes());
        bytes.0.extend([0; 4]);
        bytes.0.extend(header);
        write(bytes);
        let length = u32::try_from(bytes.0.len() - start).expect("a rule is short");
        bytes.0[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.items.push(item);
        self.latest = start;
    }
}

/// The header of messages of netfilter.
fn header(family: u8, resource: u16) -> [u8; 4] {
    let [high, low] = resource.to_be_bytes();
    [family, 0, high, low]
}

/// The sequence number and the error number of a response, 0 for an acknowledgement. `None`, if it is
/// neither.
fn parse(response: &[u8]) -> Option<(usize, i32)> {
    let kind = u16::from_ne_bytes(response.get(4..6)?.try_into().ok()?);
    let sequence = u32::from_ne_bytes(response.get(8..12)?.try_into().ok()?);
    let negative = i32::from_ne_bytes(response.get(HEADER..HEADER + 4)?.try_into().ok()?);
    let sequence = usize::try_from(sequence).ok()?;
    (kind == ERROR).then_some((sequence, negative.saturating_neg()))
}

/// Attributes of a message: length, type and value, aligned to four bytes.
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// Adds a value.
    pub fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.write(kind, |bytes| bytes.extend(value));
    }

    /// Adds the header before the attributes of an inner message.
    pub fn header(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// Adds a number in network byte order.
    pub fn number(&mut self, kind: u16, value: i32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Adds a text, which ends with a zero.
    pub fn text(&mut self, kind: u16, value: &str) {
        self.write(kind, |bytes| {
            bytes.extend(value.as_bytes());
            bytes.push(0);
        });
    }

    /// Adds an attribute that contains those that `write` adds.
    pub fn nest(&mut self, kind: u16, write: impl FnOnce(&mut Self)) {
        let mut inner = Self(Vec::new());
        write(&mut inner);
        self.bytes(kind | NESTED, &inner.0);
    }

    fn write(&mut self, kind: u16, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.0.len();
        self.0.extend([0; 2]);
        self.0.extend(kind.to_ne_bytes());
        write(&mut self.0);
        let length = u16::try_from(self.0.len() - start).expect("a rule is short");
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_aligned_and_nested() {
        let mut attributes = Attributes(Vec::new());
        attributes.nest(4, |inner| {
            inner.text(1, "lo");
            inner.number(2, 7);
        });
        let length = |bytes: u16| bytes.to_ne_bytes();
        let expected = [
            &length(20)[..],
            &(4 | NESTED).to_ne_bytes(),
            &length(7),
            &1_u16.to_ne_bytes(),
            b"lo\0\0",
            &length(8),
            &2_u16.to_ne_bytes(),
            &[0, 0, 0, 7],
        ];
        assert_eq!(attributes.0, expected.concat());
    }

    #[test]
    fn response_has_the_position_of_a_message_and_its_error() {
        let response = |kind: u16, errno: i32| {
            let mut bytes = vec![0; HEADER];
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes[8..12].copy_from_slice(&3_u32.to_ne_bytes());
            bytes.extend(errno.to_ne_bytes());
            bytes
        };
        assert_eq!(parse(&response(ERROR, 0)), Some((3, 0)));
        assert_eq!(parse(&response(ERROR, -22)), Some((3, 22)));
        assert_eq!(parse(&response(BATCH_END, 0)), None);
        assert_eq!(parse(&response(ERROR, 0)[..HEADER + 3]), None);
    }
}
