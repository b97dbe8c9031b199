//! Clients and applications that send frames of any size, grant windows by hand, and record what they
//! receive.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::hostile::{END_HEADERS, END_STREAM, GET, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS};
use super::hostile::{GOAWAY, WINDOW_UPDATE, frame};
use super::*;

pub(super) const DATA: u8 = 0;
/// `:status: 200`, as an index of HPACK's static table.
pub(super) const OK: &[u8] = &[0x88];

/// The frames that one end of a connection has received.
#[derive(Default)]
pub(super) struct Seen {
    /// The streams with a head, in order.
    pub heads: RefCell<Vec<u32>>,
    pub data: RefCell<BTreeMap<u32, Vec<u8>>>,
    pub ended: RefCell<BTreeSet<u32>>,
    pub resets: RefCell<BTreeMap<u32, u32>>,
    /// The window that the peer has granted besides its first one: of the connection, or a stream.
    pub windows: RefCell<BTreeMap<u32, u64>>,
    pub pongs: Cell<usize>,
    /// The number of SETTINGS frames.
    pub settings: Cell<usize>,
    pub goaway: Cell<Option<u32>>,
    pub is_closed: Cell<bool>,
}

impl Seen {
    pub fn has_ended(&self, stream: u32) -> bool {
        self.ended.borrow().contains(&stream)
    }

    pub fn data_of(&self, stream: u32) -> Vec<u8> {
        self.data.borrow().get(&stream).cloned().unwrap_or_default()
    }
}

/// One end of a connection. It answers SETTINGS and PING frames while it reads.
pub(super) struct End {
    pub seen: Rc<Seen>,
    out: mpsc::UnboundedSender<Vec<u8>>,
}

impl End {
    /// A client of the proxy whose streams have this window at first.
    pub async fn client(
        mesh: &Mesh,
        destination: &Rc<Backend>,
        direction: Direction,
        window: u32,
    ) -> Self {
        let caller = match direction {
            Direction::Inbound => Caller::Unauthenticated,
            Direction::Outbound => Caller::App,
        };
        let stream = mesh.carry(direction, destination, caller).await;
        let preface = &PREFACE[..PREFACE.len() - 9];
        let hello = [preface, &settings(&[(4, window)])].concat();
        Self::start(stream, hello, |_, _| Vec::new())
    }

    /// An application that accepts one connection, sends this, and responds to each head with the frames
    /// that `respond` returns for the number of the stream and the flags.
    pub async fn app(
        hello: Vec<u8>,
        respond: impl Fn(u32, u8) -> Vec<u8> + 'static,
    ) -> (SocketAddr, impl Future<Output = Self>) {
        let (listener, address) = listen().await;
        let accepted = async move { Self::accept(&listener, hello, respond).await };
        (address, accepted)
    }

    /// The application's end of the next connection.
    pub async fn accept(
        listener: &TcpListener,
        hello: Vec<u8>,
        respond: impl Fn(u32, u8) -> Vec<u8> + 'static,
    ) -> Self {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut preface = [0; PREFACE.len() - 9];
        stream.read_exact(&mut preface).await.unwrap();
        Self::start(stream, hello, respond)
    }

    fn start(
        stream: TcpStream,
        hello: Vec<u8>,
        respond: impl Fn(u32, u8) -> Vec<u8> + 'static,
    ) -> Self {
        let (out, mut to_send) = mpsc::unbounded_channel::<Vec<u8>>();
        out.send(hello).unwrap();
        let (mut read, mut write) = stream.into_split();
        tokio::task::spawn_local(async move {
            while let Some(bytes) = to_send.recv().await {
                if write.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        });
        let (seen, answers) = (Rc::<Seen>::default(), out.clone());
        let record = seen.clone();
        tokio::task::spawn_local(async move {
            loop {
                let mut head = [0; 9];
                if read.read_exact(&mut head).await.is_err() {
                    break;
                }
                let [a, b, c, kind, flags, stream @ ..] = head;
                let stream = u32::from_be_bytes(stream);
                let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
                if read.read_exact(&mut payload).await.is_err() {
                    break;
                }
                let answer = receive(&record, kind, flags, stream, &payload);
                // Fails if the connection has ended.
                let _ = answers.send(answer);
                if kind == HEADERS {
                    let _ = answers.send(respond(stream, flags));
                }
            }
            record.is_closed.set(true);
        });
        Self { seen, out }
    }

    pub fn send(&self, bytes: impl Into<Vec<u8>>) {
        // Fails if the connection has ended.
        let _ = self.out.send(bytes.into());
    }

    /// Grants `size` for these streams, 0 for the connection.
    pub fn grant(&self, streams: &[u32], size: u32) {
        let update = |stream: &u32| frame(WINDOW_UPDATE, 0, *stream, &size.to_be_bytes());
        self.send(streams.iter().flat_map(update).collect::<Vec<u8>>());
    }

    /// Waits until the proxy has read everything that was sent.
    pub async fn sync(&self) {
        let before = self.seen.pongs.get();
        self.send(frame(PING, 0, 0, &[0; 8]));
        until(|| self.seen.pongs.get() > before || self.seen.is_closed.get()).await;
        assert_eq!(self.seen.goaway.get(), None);
        assert!(!self.seen.is_closed.get(), "the connection stays open");
    }

    /// Sends a request without a body, and waits for the end of its response.
    pub async fn get(&self, stream: u32) {
        self.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, GET));
        until(|| self.seen.has_ended(stream) || self.seen.is_closed.get()).await;
        assert!(self.seen.has_ended(stream), "{:?}", self.seen.goaway.get());
    }
}

fn receive(seen: &Seen, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let code = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
    match kind {
        DATA => {
            let mut data = seen.data.borrow_mut();
            data.entry(stream).or_default().extend(payload);
        }
        HEADERS => seen.heads.borrow_mut().push(stream),
        RST_STREAM => drop(seen.resets.borrow_mut().insert(stream, code(0))),
        SETTINGS if flags == 0 => {
            seen.settings.set(seen.settings.get() + 1);
            return frame(SETTINGS, 1, 0, &[]);
        }
        PING if flags == 0 => return frame(PING, 1, 0, payload),
        PING => seen.pongs.set(seen.pongs.get() + 1),
        GOAWAY => seen.goaway.set(Some(code(4))),
        WINDOW_UPDATE => {
            let mut windows = seen.windows.borrow_mut();
            *windows.entry(stream).or_default() += u64::from(code(0));
        }
        _ => {}
    }
    if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
        seen.ended.borrow_mut().insert(stream);
    }
    Vec::new()
}

pub(super) fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let setting = |(id, value): &(u16, u32)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
    let payload: Vec<u8> = values.iter().flat_map(setting).collect();
    frame(SETTINGS, 0, 0, &payload)
}
