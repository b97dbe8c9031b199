//! A slow link for tests: `sandbox-delay QUEUE MILLISECONDS` takes packets from a queue of
//! netfilter (target NFQUEUE of iptables), and lets each one pass after a random time up to
//! MILLISECONDS, so that packets overtake each other. Prints a line for each packet that was
//! overtaken. The format is from `linux/netfilter/nfnetlink_queue.h`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{env, process};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto,
    setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

// Message types.
const ERROR: u16 = 2;
const PACKET: u16 = 0x300;
const VERDICT: u16 = 0x301;
const CONFIGURE: u16 = 0x302;

// Flags of messages.
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;

// Attributes, and their values.
const PACKET_HEADER: u16 = 1;
const VERDICT_HEADER: u16 = 2;
const COMMAND: u16 = 1;
const PARAMETERS: u16 = 2;
const BIND: u8 = 1;
/// Without the bytes of the packet.
const METADATA: u8 = 1;
const ACCEPT: u32 = 1;

/// The bytes of the headers of a message, and of an attribute.
const HEADERS: usize = 20;
const ATTRIBUTE: usize = 4;
/// The longest wait for a packet.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().collect();
    let [_, queue, milliseconds] = &arguments[..] else {
        usage()
    };
    let (Ok(number), Ok(milliseconds)) = (queue.parse(), milliseconds.parse()) else {
        usage()
    };
    let queue = Queue::open(number).with_context(|| format!("queue {number}"))?;
    // The packets that wait, by the time when they pass.
    let mut waiting = BinaryHeap::new();
    let mut latest = 0;
    loop {
        let now = Instant::now();
        while let Some(&Reverse((time, packet))) = waiting.peek()
            && time <= now
        {
            queue.accept(packet)?;
            waiting.pop();
            if packet < latest {
                println!("packet {packet} passes after {latest}");
            }
            latest = latest.max(packet);
        }
        let next = waiting.peek().map(|Reverse((time, _))| *time - now);
        if let Some(packet) = queue.packet(next.unwrap_or(IDLE_TIMEOUT))? {
            let delay = Duration::from_millis(milliseconds).mul_f64(fastrand::f64());
            waiting.push(Reverse((Instant::now() + delay, packet)));
        }
    }
}

fn usage() -> ! {
    eprintln!("usage: sandbox-delay QUEUE MILLISECONDS");
    process::exit(2);
}

struct Queue {
    socket: OwnedFd,
    number: u16,
}

impl Queue {
    fn open(number: u16) -> Result<Self> {
        let (netlink, flags) = (AddressFamily::Netlink, SockFlag::SOCK_CLOEXEC);
        let protocol = SockProtocol::NetlinkNetFilter;
        let socket = socket(netlink, SockType::Raw, flags, protocol)?;
        let queue = Self { socket, number };
        let attributes = [
            attribute(COMMAND, &[BIND, 0, 0, 0]),
            attribute(PARAMETERS, &[0, 0, 0, 0, METADATA]),
        ];
        queue.send(CONFIGURE, ACKNOWLEDGE, &attributes.concat())?;
        Ok(queue)
    }

    /// Waits for a packet, and returns its number.
    fn packet(&self, timeout: Duration) -> Result<Option<u32>> {
        // Zero is no limit.
        let microseconds = i64::try_from(timeout.as_micros())?.max(1);
        let timeout = TimeVal::microseconds(microseconds);
        setsockopt(&self.socket, sockopt::ReceiveTimeout, &timeout)?;
        let mut message = [0; 4096];
        match recv(self.socket.as_raw_fd(), &mut message, MsgFlags::empty()) {
            Ok(received) => parse(&message[..received]),
            // The kernel drops packets for which there is no room.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Lets a packet pass.
    fn accept(&self, packet: u32) -> Result<()> {
        let verdict = [ACCEPT.to_be_bytes(), packet.to_be_bytes()].concat();
        self.send(VERDICT, 0, &attribute(VERDICT_HEADER, &verdict))
    }

    fn send(&self, kind: u16, flags: u16, attributes: &[u8]) -> Result<()> {
        let length = u32::try_from(HEADERS + attributes.len())?;
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend((REQUEST | flags).to_ne_bytes());
        // The sequence number and the port, then family, version and queue.
        message.extend([0; 10]);
        message.extend(self.number.to_be_bytes());
        message.extend(attributes);
        let kernel = NetlinkAddr::new(0, 0);
        sendto(
            self.socket.as_raw_fd(),
            &message,
            &kernel,
            MsgFlags::empty(),
        )?;
        Ok(())
    }
}

/// An attribute: length, type and value, aligned to four bytes.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(ATTRIBUTE + value.len()).expect("values are short");
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The number of the packet of a message. `None` for an acknowledgement. Fails with the error of the
/// kernel.
fn parse(message: &[u8]) -> Result<Option<u32>> {
    let kind = message.get(4..6).context("a short message")?;
    match u16::from_ne_bytes(kind.try_into()?) {
        PACKET => {}
        ERROR => {
            let error = message.get(16..20).context("a short response")?;
            let error = i32::from_ne_bytes(error.try_into()?);
            return if error == 0 {
                Ok(None)
            } else {
                Err(Errno::from_raw(-error).into())
            };
        }
        other => bail!("unexpected message {other:#x}"),
    }
    // It is the first attribute.
    let header = message.get(HEADERS..).context("no attributes")?;
    let (kind, number) = (header.get(2..4), header.get(4..8));
    match (kind, number) {
        (Some(kind), Some(number)) if kind == PACKET_HEADER.to_ne_bytes() => {
            Ok(Some(u32::from_be_bytes(number.try_into()?)))
        }
        _ => bail!("no packet header: {header:?}"),
    }
}
