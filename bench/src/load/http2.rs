//! HTTP/2 client with a fixed number of requests in flight: GET requests or unary gRPC calls.

use std::{collections::HashMap, convert::Infallible, net::SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::Counter;
use crate::{
    http2::{END_STREAM, Field, Frame, PREFACE, Session, is_ok, kind, put_frame},
    server::BODY_LENGTH,
};

const AUTHORITY: Field = Field::Literal(":authority", "http-server.http-server.svc.cluster.local");
const AGENT: Field = Field::Literal("user-agent", "bench/1");
const GET: [Field; 6] = [
    Field::Static(2),
    Field::Static(6),
    AUTHORITY,
    Field::Literal(":path", "/bench/page"),
    AGENT,
    Field::Literal("accept", "*/*"),
];
const CALL: [Field; 7] = [
    Field::Static(3),
    Field::Static(6),
    AUTHORITY,
    Field::Literal(":path", "/bench.Origin/Page"),
    Field::Literal("content-type", "application/grpc"),
    Field::Literal("te", "trailers"),
    AGENT,
];
/// A gRPC message of 32 bytes.
const MESSAGE: [u8; 37] = {
    let mut message = [b'x'; 37];
    (message[0], message[1], message[2], message[3], message[4]) = (0, 0, 0, 0, 32);
    message
};

/// Kind of request.
#[derive(Clone, Copy)]
pub(super) enum Request {
    /// A GET without a body.
    Get,
    /// A unary call with a short message; the response has trailers.
    Call,
}

/// Sends requests on one connection until an error.
pub(super) async fn requests(
    target: SocketAddr,
    counter: Counter,
    streams: usize,
    request: Request,
) -> Result<Infallible> {
    let mut connection = Connection::open(target, streams, request).await?;
    loop {
        let completed = connection.step().await?;
        counter.set(counter.get() + completed);
        connection.client.send(&mut connection.output)?;
    }
}

/// A connection with requests in flight.
pub(super) struct Connection {
    stream: TcpStream,
    client: Client,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Connection {
    async fn open(target: SocketAddr, streams: usize, request: Request) -> Result<Self> {
        let stream = TcpStream::connect(target)
            .await
            .with_context(|| format!("connect to {target}"))?;
        stream.set_nodelay(true).context("set TCP_NODELAY")?;
        let client = Client {
            session: Session::new(MESSAGE.len()),
            request,
            next: 1,
            bodies: HashMap::new(),
            selected: streams,
        };
        let mut output = PREFACE.to_vec();
        client.session.send_settings(&mut output);
        Ok(Self {
            stream,
            client,
            input: Vec::with_capacity(64 * 1024),
            output,
        })
    }

    /// A connection after one request.
    pub async fn after_one_request(target: SocketAddr) -> Result<Self> {
        let mut connection = Self::open(target, 1, Request::Get).await?;
        while connection.step().await? == 0 {
            connection.client.send(&mut connection.output)?;
        }
        connection.input = Vec::new();
        Ok(connection)
    }

    /// Writes, and reads once. Returns the number of completed requests.
    async fn step(&mut self) -> Result<u64> {
        self.stream
            .write_all(&self.output)
            .await
            .context("send requests")?;
        self.output.clear();
        let read = self
            .stream
            .read_buf(&mut self.input)
            .await
            .context("read responses")?;
        ensure!(
            read > 0,
            "connection closed with {} requests in flight",
            self.client.bodies.len()
        );
        let (mut taken, mut completed) = (0, 0);
        while let Some((frame, length)) = Frame::parse(&self.input[taken..]) {
            completed += u64::from(self.client.receive(&frame, &mut self.output)?);
            taken += length;
        }
        self.input.drain(..taken);
        Ok(completed)
    }
}

struct Client {
    session: Session,
    request: Request,
    next: u32,
    /// Received body bytes of each stream in flight.
    bodies: HashMap<u32, usize>,
    selected: usize,
}

impl Client {
    /// Whether the frame completes a request.
    fn receive(&mut self, frame: &Frame, output: &mut Vec<u8>) -> Result<bool> {
        self.session.receive(frame, output)?;
        let Some(body) = self.bodies.get_mut(&frame.stream) else {
            return Ok(false);
        };
        match frame.kind {
            kind::HEADERS if *body == 0 => {
                ensure!(is_ok(frame.content()?), "response status is not 200")
            }
            kind::DATA => *body += frame.content()?.len(),
            kind::RST_STREAM => bail!("received RST_STREAM, error code {:?}", frame.content()?),
            _ => {}
        }
        if !frame.ends_stream() {
            return Ok(false);
        }
        let (received, expected) = (*body, self.expected());
        self.bodies.remove(&frame.stream);
        ensure!(
            received == expected,
            "received {received} body bytes, expected {expected}"
        );
        Ok(true)
    }

    /// Sends requests up to the configured number in flight.
    fn send(&mut self, output: &mut Vec<u8>) -> Result<()> {
        if !self.session.settings_received {
            return Ok(());
        }
        let most = self.session.max_streams as usize;
        ensure!(
            most >= self.selected,
            "the peer allows {most} streams, the case needs {}",
            self.selected
        );
        while self.bodies.len() < self.selected {
            match self.request {
                Request::Get => self
                    .session
                    .put_headers(output, self.next, END_STREAM, &GET),
                Request::Call if self.session.may_send(MESSAGE.len()) => {
                    self.session.put_headers(output, self.next, 0, &CALL);
                    put_frame(output, kind::DATA, END_STREAM, self.next, &MESSAGE);
                }
                Request::Call => return Ok(()),
            }
            self.bodies.insert(self.next, 0);
            self.next += 2;
        }
        Ok(())
    }

    fn expected(&self) -> usize {
        match self.request {
            Request::Get => BODY_LENGTH,
            Request::Call => BODY_LENGTH + 5,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> Client {
        let mut session = Session::new(MESSAGE.len());
        session.settings_received = true;
        Client {
            session,
            request: Request::Get,
            next: 1,
            bodies: HashMap::new(),
            selected: 2,
        }
    }

    fn receive(
        client: &mut Client,
        kind: u8,
        flags: u8,
        stream: u32,
        payload: &[u8],
    ) -> Result<bool> {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, kind, flags, stream, payload);
        client.receive(&Frame::parse(&bytes).unwrap().0, &mut Vec::new())
    }

    #[test]
    fn a_request_takes_the_place_of_one_that_was_answered() {
        let mut client = client();
        client.send(&mut Vec::new()).unwrap();
        assert!(!receive(&mut client, kind::HEADERS, 0, 3, &[0x88]).unwrap());
        assert!(receive(&mut client, kind::DATA, END_STREAM, 3, &[0; BODY_LENGTH]).unwrap());
        client.send(&mut Vec::new()).unwrap();
        let mut flying: Vec<_> = client.bodies.keys().copied().collect();
        flying.sort_unstable();
        assert_eq!(flying, [1, 5]);
    }

    #[test]
    fn a_short_body_and_a_bad_status_are_failures() {
        let mut client = client();
        client.send(&mut Vec::new()).unwrap();
        assert!(receive(&mut client, kind::DATA, END_STREAM, 1, &[0; 10]).is_err());
        assert!(receive(&mut client, kind::HEADERS, 0, 3, &[0x8d]).is_err());
    }

    #[test]
    fn a_peer_with_room_for_fewer_streams_is_reported() {
        let mut client = client();
        client.session.max_streams = 1;
        assert!(client.send(&mut Vec::new()).is_err());
    }
}
