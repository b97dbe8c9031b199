//! The implementations of TLS records under comparison, each used as a proxy would use it: reads
//! into a buffer that all connections of the thread share, and up to eight records per write.

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::BytesMut;
use diy_mesh_proxy::limits::memory::{Charge, Holder};
use diy_mesh_proxy::secure::io::Io;
use diy_mesh_proxy::secure::tls::Handshake;
use diy_mesh_runtime::admission::Admission;
use rustls::{
    ClientConfig, ServerConfig,
    client::UnbufferedClientConnection,
    server::UnbufferedServerConnection,
    unbuffered::{ConnectionState, EncodeError, UnbufferedStatus},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::server_name;

/// The length of the shared read buffer, as in the proxy.
const READ_LENGTH: usize = 256 * 1024;
/// The maximum plaintext of one write, as in the proxy.
const MAX_WRITE: usize = 128 * 1024;
/// Bytes that sealing adds to a write.
const MAX_OVERHEAD: usize = 4 * 1024;

thread_local! {
    static INPUT: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_LENGTH]);
    static PLAINTEXT: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_LENGTH]);
    static OUTPUT: RefCell<Vec<u8>> = RefCell::new(vec![0; MAX_WRITE + MAX_OVERHEAD]);
}

/// One end of a TLS connection.
pub trait Stream: Sized + 'static {
    /// Runs the handshake of a client.
    async fn connect(tcp: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self>;
    /// Runs the handshake of a server.
    async fn accept(tcp: TcpStream, config: Arc<ServerConfig>) -> io::Result<Self>;
    /// Reads once and discards the bytes. Returns their number, 0 at the end.
    async fn read(&mut self) -> io::Result<usize>;
    /// Writes all bytes.
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
}

fn memory() -> Charge {
    let slot = Admission::new(1).admit(&Holder::App.path());
    Charge::new(Rc::new(
        slot.expect("the only connection gets the only slot"),
    ))
}

/// The proxy's own records.
impl Stream for Io {
    async fn connect(tcp: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self> {
        let connection = UnbufferedClientConnection::new(config, server_name());
        let handshake = Handshake::client(connection.map_err(io::Error::other)?, memory());
        Ok(Io::new(tcp).secure(handshake).await?.0)
    }

    async fn accept(tcp: TcpStream, config: Arc<ServerConfig>) -> io::Result<Self> {
        let connection = UnbufferedServerConnection::new(config).map_err(io::Error::other)?;
        let handshake = Handshake::server(connection, BytesMut::new(), memory());
        Ok(Io::new(tcp).secure(handshake).await?.0)
    }

    async fn read(&mut self) -> io::Result<usize> {
        poll_fn(|cx| self.poll_read_with(cx, |bytes, _| bytes.len())).await
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes).await
    }
}

/// tokio-rustls, the usual choice.
impl Stream for TlsStream<TcpStream> {
    async fn connect(tcp: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self> {
        let connector = TlsConnector::from(config);
        Ok(connector.connect(server_name(), tcp).await?.into())
    }

    async fn accept(tcp: TcpStream, config: Arc<ServerConfig>) -> io::Result<Self> {
        Ok(TlsAcceptor::from(config).accept(tcp).await?.into())
    }

    async fn read(&mut self) -> io::Result<usize> {
        let read = |cx: &mut Context<'_>, input: &mut Vec<u8>| {
            let mut buf = ReadBuf::new(input);
            ready!(Pin::new(&mut *self).poll_read(cx, &mut buf))?;
            Poll::Ready(Ok(buf.filled().len()))
        };
        let mut read = read;
        poll_fn(|cx| INPUT.with_borrow_mut(|input| read(cx, input))).await
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes).await?;
        self.flush().await
    }
}

/// The unbuffered API of rustls: the caller owns the buffers of records.
pub struct Unbuffered {
    connection: Connection,
    tcp: TcpStream,
    /// Incomplete record.
    incoming: Vec<u8>,
    /// Plaintext bytes that followed the handshake.
    early: usize,
}

enum Connection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// The plaintext of one read. A relay passes it on with one write, so records are joined.
#[derive(Default)]
struct Plaintext {
    length: usize,
}

impl Plaintext {
    fn append(&mut self, payload: &[u8]) {
        let end = self.length + payload.len();
        PLAINTEXT.with_borrow_mut(|buffer| buffer[self.length..end].copy_from_slice(payload));
        self.length = end;
    }
}

/// The next need of the connection.
enum Next {
    /// Another step.
    Step,
    /// More input.
    Input,
    /// Nothing: data can be sent.
    Established,
}

impl Unbuffered {
    async fn handshake(connection: Connection, tcp: TcpStream) -> io::Result<Self> {
        let mut stream = Self {
            connection,
            tcp,
            incoming: Vec::new(),
            early: 0,
        };
        let mut incoming = Vec::new();
        loop {
            let (mut outgoing, mut plain) = (Vec::new(), Plaintext::default());
            let (used, next) = stream.process(&mut incoming, &mut outgoing, &mut plain)?;
            stream.early += plain.length;
            incoming.drain(..used);
            stream.tcp.write_all(&outgoing).await?;
            match next {
                Next::Established => break,
                Next::Input if stream.tcp.read_buf(&mut incoming).await? == 0 => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Next::Input | Next::Step => {}
            }
        }
        stream.incoming = incoming;
        Ok(stream)
    }

    /// Processes records until the connection needs input. Returns the number of consumed bytes.
    fn process(
        &mut self,
        incoming: &mut [u8],
        outgoing: &mut Vec<u8>,
        plain: &mut Plaintext,
    ) -> io::Result<(usize, Next)> {
        let mut used = 0;
        loop {
            let rest = &mut incoming[used..];
            let (discard, next) = match &mut self.connection {
                Connection::Client(connection) => {
                    step(connection.process_tls_records(rest), outgoing, plain)?
                }
                Connection::Server(connection) => {
                    step(connection.process_tls_records(rest), outgoing, plain)?
                }
            };
            used += discard;
            if !matches!(next, Next::Step) {
                return Ok((used, next));
            }
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>, input: &mut [u8]) -> Poll<io::Result<usize>> {
        if self.early > 0 {
            return Poll::Ready(Ok(std::mem::take(&mut self.early)));
        }
        loop {
            let before = self.incoming.len();
            input[..before].copy_from_slice(&self.incoming);
            let mut buf = ReadBuf::new(&mut input[before..]);
            ready!(Pin::new(&mut self.tcp).poll_read(cx, &mut buf))?;
            let filled = before + buf.filled().len();
            if filled == before {
                return Poll::Ready(Ok(0));
            }
            let (mut plain, mut outgoing) = (Plaintext::default(), Vec::new());
            let (used, _) = self.process(&mut input[..filled], &mut outgoing, &mut plain)?;
            self.incoming = input[used..filled].to_vec();
            if plain.length > 0 {
                return Poll::Ready(Ok(plain.length));
            }
        }
    }

    fn seal(&mut self, bytes: &[u8], output: &mut [u8]) -> io::Result<usize> {
        fn encrypt<Data>(
            status: UnbufferedStatus<'_, '_, Data>,
            bytes: &[u8],
            output: &mut [u8],
        ) -> io::Result<usize> {
            match status.state.map_err(io::Error::other)? {
                ConnectionState::WriteTraffic(mut traffic) => {
                    traffic.encrypt(bytes, output).map_err(io::Error::other)
                }
                other => Err(io::Error::other(format!("unexpected state: {other:?}"))),
            }
        }
        match &mut self.connection {
            Connection::Client(connection) => {
                encrypt(connection.process_tls_records(&mut []), bytes, output)
            }
            Connection::Server(connection) => {
                encrypt(connection.process_tls_records(&mut []), bytes, output)
            }
        }
    }
}

fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    outgoing: &mut Vec<u8>,
    plain: &mut Plaintext,
) -> io::Result<(usize, Next)> {
    let UnbufferedStatus {
        mut discard, state, ..
    } = status;
    let next = match state.map_err(io::Error::other)? {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record.map_err(io::Error::other)?;
                discard += record.discard;
                plain.append(record.payload);
            }
            Next::Step
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let at = outgoing.len();
            if let Err(EncodeError::InsufficientSize(size)) = data.encode(&mut []) {
                outgoing.resize(at + size.required_size, 0);
                data.encode(&mut outgoing[at..]).map_err(io::Error::other)?;
            }
            Next::Step
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Next::Step
        }
        ConnectionState::BlockedHandshake => Next::Input,
        ConnectionState::WriteTraffic(_) => Next::Established,
        other => return Err(io::Error::other(format!("unexpected state: {other:?}"))),
    };
    Ok((discard, next))
}

impl Stream for Unbuffered {
    async fn connect(tcp: TcpStream, config: Arc<ClientConfig>) -> io::Result<Self> {
        let connection = UnbufferedClientConnection::new(config, server_name());
        let connection = connection.map_err(io::Error::other)?;
        Self::handshake(Connection::Client(connection), tcp).await
    }

    async fn accept(tcp: TcpStream, config: Arc<ServerConfig>) -> io::Result<Self> {
        let connection = UnbufferedServerConnection::new(config).map_err(io::Error::other)?;
        Self::handshake(Connection::Server(connection), tcp).await
    }

    async fn read(&mut self) -> io::Result<usize> {
        poll_fn(|cx| INPUT.with_borrow_mut(|input| self.poll_read(cx, input))).await
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for bytes in bytes.chunks(MAX_WRITE) {
            // The socket usually takes the records at once.
            let unwritten = OUTPUT.with_borrow_mut(|output| {
                let length = self.seal(bytes, output)?;
                match self.tcp.try_write(&output[..length]) {
                    Ok(written) => Ok(output[written..length].to_vec()),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        Ok(output[..length].to_vec())
                    }
                    Err(error) => Err(error),
                }
            })?;
            self.tcp.write_all(&unwritten).await?;
        }
        Ok(())
    }
}
