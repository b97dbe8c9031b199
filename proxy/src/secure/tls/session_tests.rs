//! Sessions of this proxy with a peer that is rustls' own implementation, and with each other.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::BytesMut;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::handshake::Handshake;
use super::record::{ContentType, MAX_PLAINTEXT};
use super::session::Session;
use super::tests::memory;
use crate::secure::identity::testing::{Authority, WEB};
use crate::secure::identity::{ClientVerifier, ServerVerifier};
use crate::secure::io::Io;
use diy_mesh_testkit::net::connected;
use diy_mesh_testkit::wait::soon;

pub(super) struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

pub(super) fn configs() -> Configs {
    let authority = Authority::new("root");
    let (leaf, key) = authority.leaf_and_key(WEB, |_| {});
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let certified = Arc::new(CertifiedKey::from_der(vec![leaf], key, &super::provider()).unwrap());
    let resolver = Arc::new(SingleCertAndKey::from(certified));
    let versions = &[&rustls::version::TLS13];
    let server = ServerConfig::builder_with_provider(super::provider())
        .with_protocol_versions(versions)
        .unwrap();
    let verifier = ClientVerifier::new(authority.roots(), "cluster.local").unwrap();
    let mut server = server
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(resolver.clone());
    server.enable_secret_extraction = true;
    let client = ClientConfig::builder_with_provider(super::provider())
        .with_protocol_versions(versions)
        .unwrap()
        .dangerous();
    let verifier = ServerVerifier::new(authority.roots(), WEB.parse().unwrap());
    let mut client = client
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(resolver);
    client.enable_secret_extraction = true;
    Configs {
        client: Arc::new(client),
        server: Arc::new(server),
    }
}

/// A session under test with its socket.
struct Ours {
    session: Session,
    stream: TcpStream,
    scratch: Vec<u8>,
    /// Application data received with the handshake.
    early: BytesMut,
}

impl Ours {
    async fn new(handshake: Handshake, mut stream: TcpStream) -> Self {
        let mut early = BytesMut::new();
        let (_, session) = handshake.run(&mut stream, &mut early).await.unwrap();
        Self {
            session,
            stream,
            scratch: vec![0; 64 * 1024],
            early,
        }
    }

    async fn read(&mut self) -> std::io::Result<Vec<u8>> {
        if !self.early.is_empty() {
            return Ok(self.early.split().to_vec());
        }
        let Self {
            session,
            stream,
            scratch,
            ..
        } = self;
        let mut read = Vec::new();
        soon(poll_fn(|cx| {
            session.poll_read(cx, stream, scratch, |bytes, _| {
                read.extend_from_slice(bytes)
            })
        }))
        .await?;
        Ok(read)
    }

    async fn read_exactly(&mut self, length: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < length {
            let piece = self.read().await.unwrap();
            assert!(!piece.is_empty(), "an end after {} bytes", all.len());
            all.extend(piece);
        }
        all
    }

    async fn write(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let written = poll_fn(|cx| self.session.poll_write(cx, &mut self.stream, data))
                .await
                .unwrap();
            data = &data[written..];
        }
        poll_fn(|cx| self.session.poll_flush(cx, &mut self.stream))
            .await
            .unwrap();
    }

    /// Sends records with any content.
    async fn send_records(&mut self, records: &[Record<'_>]) {
        records
            .iter()
            .for_each(|(kind, plain)| self.session.queue_record(*kind, plain));
        poll_fn(|cx| self.session.poll_flush(cx, &mut self.stream))
            .await
            .unwrap();
    }

    async fn close(&mut self) {
        poll_fn(|cx| self.session.poll_shutdown(cx, &mut self.stream))
            .await
            .unwrap();
    }
}

/// A client under test, with a server of rustls.
async fn our_client(configs: &Configs) -> (Ours, TlsStream<TcpStream>) {
    let (near, far) = connected().await;
    let machine =
        rustls::client::UnbufferedClientConnection::new(configs.client.clone(), name()).unwrap();
    let theirs = TlsAcceptor::from(configs.server.clone());
    let (ours, theirs) = tokio::join!(
        async {
            let mut ours = Ours::new(Handshake::client(machine, memory()), near).await;
            // The last messages of the handshake wait for a write.
            ours.write(b"!").await;
            ours
        },
        async {
            let mut theirs = theirs.accept(far).await.unwrap();
            assert_eq!(theirs.read_u8().await.unwrap(), b'!');
            theirs
        }
    );
    (ours, theirs.into())
}

/// A server under test, with a client of rustls.
async fn our_server(configs: &Configs) -> (Ours, TlsStream<TcpStream>) {
    let (near, far) = connected().await;
    let machine = rustls::server::UnbufferedServerConnection::new(configs.server.clone()).unwrap();
    let theirs = TlsConnector::from(configs.client.clone());
    let (ours, theirs) = tokio::join!(
        Ours::new(Handshake::server(machine, BytesMut::new(), memory()), near),
        theirs.connect(name(), far)
    );
    (ours, theirs.unwrap().into())
}

/// A client and a server under test, which can send invalid records.
async fn ours(configs: &Configs) -> (Ours, Ours) {
    let (near, far) = connected().await;
    let client =
        rustls::client::UnbufferedClientConnection::new(configs.client.clone(), name()).unwrap();
    let server = rustls::server::UnbufferedServerConnection::new(configs.server.clone()).unwrap();
    let (client, mut server) = tokio::join!(
        async {
            let mut client = Ours::new(Handshake::client(client, memory()), near).await;
            client.write(b"!").await;
            client
        },
        Ours::new(Handshake::server(server, BytesMut::new(), memory()), far)
    );
    assert_eq!(server.read_exactly(1).await, b"!");
    (client, server)
}

/// Both ends of a connection with a session, over these sockets.
pub(super) async fn secured(configs: &Configs, (near, far): (TcpStream, TcpStream)) -> (Io, Io) {
    let client =
        rustls::client::UnbufferedClientConnection::new(configs.client.clone(), name()).unwrap();
    let server = rustls::server::UnbufferedServerConnection::new(configs.server.clone()).unwrap();
    let (client, server) = tokio::join!(
        async {
            let (mut io, _) = Io::new(near)
                .secure(Handshake::client(client, memory()))
                .await?;
            io.flush().await?;
            Ok::<_, std::io::Error>(io)
        },
        Io::new(far).secure(Handshake::server(server, BytesMut::new(), memory()))
    );
    (client.unwrap(), server.unwrap().0)
}

/// Content type and content of a record.
type Record<'a> = (ContentType, &'a [u8]);

fn name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into())
}

pub(super) fn bytes_of(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

/// Exchanges `length` bytes in both directions.
async fn exchange(ours: &mut Ours, theirs: &mut TlsStream<TcpStream>, length: usize) {
    let sent = bytes_of(length);
    // In turns, because the receiver may be slower than the sender.
    for piece in sent.chunks(100_000) {
        let mut received = vec![0; piece.len()];
        let (_, read) = tokio::join!(ours.write(piece), theirs.read_exact(&mut received));
        read.unwrap();
        assert!(received == piece);
        let (written, received) = tokio::join!(
            async { theirs.write_all(piece).await.and(theirs.flush().await) },
            ours.read_exactly(piece.len())
        );
        written.unwrap();
        assert!(received == piece);
    }
}

#[tokio::test]
async fn exchanges_bytes_and_half_closes_in_both_roles() {
    let configs = configs();
    for (mut ours, mut theirs) in [our_client(&configs).await, our_server(&configs).await] {
        exchange(&mut ours, &mut theirs, 700_000).await;
        // After a half-close, the other direction stays open.
        ours.close().await;
        assert_eq!(theirs.read(&mut [0]).await.unwrap(), 0);
        theirs.write_all(b"an answer after the end").await.unwrap();
        theirs.shutdown().await.unwrap();
        assert_eq!(ours.read_exactly(23).await, b"an answer after the end");
        assert_eq!(ours.read().await.unwrap(), b"");
        let refused = poll_fn(|cx| ours.session.poll_write(cx, &mut ours.stream, b"more")).await;
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    }
}

#[tokio::test]
async fn updates_keys_at_the_limit_and_on_request() {
    let configs = configs();
    for (mut ours, mut theirs) in [our_client(&configs).await, our_server(&configs).await] {
        for _ in 0..3 {
            // The limit is in the middle of a write of several records.
            ours.session.limit_records(2);
            exchange(&mut ours, &mut theirs, 5 * MAX_PLAINTEXT).await;
            match &mut theirs {
                TlsStream::Client(stream) => stream.get_mut().1.refresh_traffic_keys().unwrap(),
                TlsStream::Server(stream) => stream.get_mut().1.refresh_traffic_keys().unwrap(),
            }
            exchange(&mut ours, &mut theirs, 1000).await;
        }
        ours.session.request_key_update();
        exchange(&mut ours, &mut theirs, 1000).await;
    }
}

#[tokio::test]
async fn resumes_session_by_ticket() {
    let configs = configs();
    for kind in ["Full", "Resumed"] {
        let (near, far) = connected().await;
        let machine =
            rustls::client::UnbufferedClientConnection::new(configs.client.clone(), name())
                .unwrap();
        let theirs = TlsAcceptor::from(configs.server.clone());
        let ours = async {
            let mut near = near;
            let (negotiated, session) = Handshake::client(machine, memory())
                .run(&mut near, &mut BytesMut::new())
                .await
                .unwrap();
            assert!(negotiated.to_string().ends_with(kind), "{negotiated}");
            // The ticket precedes application data.
            let mut ours = Ours {
                session,
                stream: near,
                scratch: vec![0; 64 * 1024],
                early: BytesMut::new(),
            };
            assert_eq!(ours.read_exactly(5).await, b"hello");
        };
        let theirs = async {
            let mut theirs = theirs.accept(far).await.unwrap();
            theirs.write_all(b"hello").await.unwrap();
            theirs
        };
        tokio::join!(ours, theirs);
    }
}

#[tokio::test]
async fn rejects_invalid_records_with_an_alert() {
    let configs = configs();
    // A ticket to a server, an invalid key update, an interleaved message, two key updates in one
    // record, a truncated alert, an empty handshake record and an empty alert.
    let cases: [&[Record]; 7] = [
        &[(ContentType::Handshake, &[4, 0, 0, 1, 0])],
        &[(ContentType::Handshake, &[24, 0, 0, 1, 7])],
        &[
            (ContentType::Handshake, &[24, 0, 0]),
            (ContentType::ApplicationData, b"data"),
        ],
        &[(ContentType::Handshake, &[24, 0, 0, 1, 0, 24, 0, 0, 1, 0])],
        &[(ContentType::Alert, &[1])],
        &[
            (ContentType::Handshake, &[24, 0, 0]),
            (ContentType::Handshake, &[]),
        ],
        &[(ContentType::Alert, &[])],
    ];
    for records in cases {
        let (mut client, mut server) = ours(&configs).await;
        client.send_records(records).await;
        assert_eq!(
            server.read().await.unwrap_err().kind(),
            std::io::ErrorKind::InvalidData,
            "{records:?}"
        );
        let received = client.read().await.unwrap_err();
        assert_eq!(received.to_string(), "peer sent an alert", "{records:?}");
    }
}

#[tokio::test]
async fn too_many_records_without_data_end_the_session() {
    let configs = configs();
    let empty: Record = (ContentType::ApplicationData, &[]);
    let canceled: Record = (ContentType::Alert, &[1, 90]);
    for records in [empty, canceled] {
        let (mut client, mut server) = ours(&configs).await;
        // Data resets the count.
        for _ in 0..3 {
            client.send_records(&[records; 32]).await;
            client.write(b"data").await;
            assert_eq!(server.read_exactly(4).await, b"data");
        }
        client.send_records(&[records; 33]).await;
        assert_eq!(
            server.read().await.unwrap_err().to_string(),
            "peer sent too many records without data",
            "{records:?}"
        );
    }
    // Each adds a key update and an empty record.
    let (mut client, mut server) = ours(&configs).await;
    for _ in 0..17 {
        client.session.request_key_update();
        client.send_records(&[empty]).await;
    }
    assert_eq!(
        server.read().await.unwrap_err().to_string(),
        "peer sent too many records without data"
    );
    // A fragmented message.
    let (mut client, mut server) = ours(&configs).await;
    let begun: Record = (ContentType::Handshake, &[4, 0, 1, 0]);
    client.send_records(&[begun]).await;
    client
        .send_records(&[(ContentType::Handshake, &[0][..]); 32])
        .await;
    assert_eq!(
        server.read().await.unwrap_err().to_string(),
        "peer sent too many records without data"
    );
}

#[tokio::test]
async fn does_not_copy_an_incomplete_message_with_each_record() {
    let configs = configs();
    let (mut client, mut server) = ours(&configs).await;
    let first = [&[4, 0, 0xff, 0xff][..], &[0; 16_000]].concat();
    let mut places = Vec::new();
    // The second record grows the buffer to hold the following ones.
    for piece in [&first[..], &[0], &[0], &[0], &[0]] {
        client
            .send_records(&[(ContentType::Handshake, piece)])
            .await;
        while server.session.message().len() < first.len() + places.len() {
            server.stream.readable().await.unwrap();
            assert!(
                !server
                    .session
                    .has_received(&server.stream, &mut server.scratch)
            );
        }
        places.push(server.session.message().as_ptr());
    }
    assert!(
        places[1..].iter().all(|place| *place == places[1]),
        "{places:?}"
    );
}

#[tokio::test]
async fn nested_reads_use_separate_buffers() {
    let configs = configs();
    let ((mut outer, mut outer_peer), (mut inner, mut inner_peer)) =
        (our_client(&configs).await, our_server(&configs).await);
    outer_peer.write_all(b"outer").await.unwrap();
    inner_peer.write_all(b"inner").await.unwrap();
    inner.stream.readable().await.unwrap();
    let Ours {
        session,
        stream,
        scratch,
        ..
    } = &mut outer;
    let read = |outer_bytes: &[u8], cx: &mut Context<'_>| {
        let inner_read =
            inner
                .session
                .poll_read(cx, &mut inner.stream, &mut inner.scratch, |bytes, _| {
                    bytes.to_vec()
                });
        assert!(matches!(inner_read, Poll::Ready(Ok(bytes)) if bytes == b"inner"));
        assert_eq!(outer_bytes, b"outer");
    };
    let mut read = Some(read);
    poll_fn(|cx| {
        session.poll_read(cx, stream, scratch, |bytes, cx| {
            read.take().unwrap()(bytes, cx)
        })
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn reports_missing_close_notify_as_an_error() {
    let configs = configs();
    let (mut ours, theirs) = our_client(&configs).await;
    let TlsStream::Server(theirs) = theirs else {
        panic!("it is the server")
    };
    drop(theirs.into_inner().0);
    assert_eq!(
        ours.read().await.unwrap_err().kind(),
        std::io::ErrorKind::UnexpectedEof
    );
}
