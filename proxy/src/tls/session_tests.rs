//! Sessions whose other end is rustls' own, which knows nothing of `session.rs`: what we seal, it opens, and the other way round.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::BytesMut;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::handshake::Handshake;
use super::record::{Kind, MOST_PLAIN};
use super::session::Session;
use crate::control::testing::soon;
use crate::identity::testing::{Authority, WEB};
use crate::identity::{ClientVerifier, ServerVerifier};

struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

fn configs() -> Configs {
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

/// Our end, with its socket.
struct Ours {
    session: Session,
    stream: TcpStream,
    scratch: Vec<u8>,
    /// What came with the handshake's end.
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
        // What is given to `take` is what was read, once.
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

    /// Sends these records, whatever they say.
    async fn say(&mut self, said: &[Said<'_>]) {
        said.iter()
            .for_each(|(kind, plain)| self.session.say(*kind, plain));
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

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (near, far) = tokio::join!(
        TcpStream::connect(listener.local_addr().unwrap()),
        listener.accept()
    );
    (near.unwrap(), far.unwrap().0)
}

/// Our client, rustls' server.
async fn our_client(configs: &Configs) -> (Ours, TlsStream<TcpStream>) {
    let (near, far) = sockets().await;
    let machine =
        rustls::client::UnbufferedClientConnection::new(configs.client.clone(), name()).unwrap();
    let theirs = TlsAcceptor::from(configs.server.clone());
    let (ours, theirs) = tokio::join!(
        async {
            let mut ours = Ours::new(Handshake::client(machine), near).await;
            // The handshake's last words wait for a write.
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

/// Our server, rustls' client.
async fn our_server(configs: &Configs) -> (Ours, TlsStream<TcpStream>) {
    let (near, far) = sockets().await;
    let machine = rustls::server::UnbufferedServerConnection::new(configs.server.clone()).unwrap();
    let theirs = TlsConnector::from(configs.client.clone());
    let (ours, theirs) = tokio::join!(
        Ours::new(Handshake::server(machine, BytesMut::new()), near),
        theirs.connect(name(), far)
    );
    (ours, theirs.unwrap().into())
}

/// A client and a server, both ours: rustls would not say all that they can.
async fn ours(configs: &Configs) -> (Ours, Ours) {
    let (near, far) = sockets().await;
    let client =
        rustls::client::UnbufferedClientConnection::new(configs.client.clone(), name()).unwrap();
    let server = rustls::server::UnbufferedServerConnection::new(configs.server.clone()).unwrap();
    let (client, mut server) = tokio::join!(
        async {
            let mut client = Ours::new(Handshake::client(client), near).await;
            client.write(b"!").await;
            client
        },
        Ours::new(Handshake::server(server, BytesMut::new()), far)
    );
    assert_eq!(server.read_exactly(1).await, b"!");
    (client, server)
}

/// A record's kind and content.
type Said<'a> = (Kind, &'a [u8]);

fn name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into())
}

fn bytes_of(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

/// So much each way, at once.
async fn exchange(ours: &mut Ours, theirs: &mut TlsStream<TcpStream>, length: usize) {
    let sent = bytes_of(length);
    // A receiver that is slower than the sender: they take turns.
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
async fn bytes_pass_both_ways_in_both_roles_and_an_end_is_an_end() {
    let configs = configs();
    for (mut ours, mut theirs) in [our_client(&configs).await, our_server(&configs).await] {
        exchange(&mut ours, &mut theirs, 700_000).await;
        // Half-closed by us: the other direction goes on.
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
async fn keys_are_renewed_when_they_are_worn_and_when_the_peer_asks() {
    let configs = configs();
    for (mut ours, mut theirs) in [our_client(&configs).await, our_server(&configs).await] {
        for _ in 0..3 {
            // Ours is worn in the middle of a write of several records.
            ours.session.wear(2);
            exchange(&mut ours, &mut theirs, 5 * MOST_PLAIN).await;
            match &mut theirs {
                TlsStream::Client(stream) => stream.get_mut().1.refresh_traffic_keys().unwrap(),
                TlsStream::Server(stream) => stream.get_mut().1.refresh_traffic_keys().unwrap(),
            }
            exchange(&mut ours, &mut theirs, 1000).await;
        }
        // An update that asks for one of ours.
        ours.session.owe_update();
        exchange(&mut ours, &mut theirs, 1000).await;
    }
}

#[tokio::test]
async fn a_ticket_resumes_the_session() {
    let configs = configs();
    for kind in ["Full", "Resumed"] {
        let (near, far) = sockets().await;
        let machine =
            rustls::client::UnbufferedClientConnection::new(configs.client.clone(), name())
                .unwrap();
        let theirs = TlsAcceptor::from(configs.server.clone());
        let ours = async {
            let mut near = near;
            let (negotiated, session) = Handshake::client(machine)
                .run(&mut near, &mut BytesMut::new())
                .await
                .unwrap();
            assert!(negotiated.to_string().ends_with(kind), "{negotiated}");
            // The ticket comes before what follows it.
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
async fn what_has_no_place_in_a_session_ends_it_and_the_peer_hears_why() {
    let configs = configs();
    // A ticket to a server, an update of no known kind, a message that another record interrupts, two updates in one record, half an
    // alert, an empty record of a message and of an alert.
    let cases: [&[Said]; 7] = [
        &[(Kind::Handshake, &[4, 0, 0, 1, 0])],
        &[(Kind::Handshake, &[24, 0, 0, 1, 7])],
        &[(Kind::Handshake, &[24, 0, 0]), (Kind::Data, b"data")],
        &[(Kind::Handshake, &[24, 0, 0, 1, 0, 24, 0, 0, 1, 0])],
        &[(Kind::Alert, &[1])],
        &[(Kind::Handshake, &[24, 0, 0]), (Kind::Handshake, &[])],
        &[(Kind::Alert, &[])],
    ];
    for said in cases {
        let (mut client, mut server) = ours(&configs).await;
        client.say(said).await;
        assert_eq!(
            server.read().await.unwrap_err().kind(),
            std::io::ErrorKind::InvalidData,
            "{said:?}"
        );
        let heard = client.read().await.unwrap_err();
        assert_eq!(
            heard.to_string(),
            "the peer broke the session off",
            "{said:?}"
        );
    }
}

#[tokio::test]
async fn too_many_records_without_data_end_the_session() {
    let configs = configs();
    let empty: Said = (Kind::Data, &[]);
    let canceled: Said = (Kind::Alert, &[1, 90]);
    for said in [empty, canceled] {
        let (mut client, mut server) = ours(&configs).await;
        // Data carries a session on.
        for _ in 0..3 {
            client.say(&[said; 32]).await;
            client.write(b"data").await;
            assert_eq!(server.read_exactly(4).await, b"data");
        }
        client.say(&[said; 33]).await;
        assert_eq!(
            server.read().await.unwrap_err().to_string(),
            "the peer sends too many records without data",
            "{said:?}"
        );
    }
    // Each brings a record with a new key, and an empty one after it.
    let (mut client, mut server) = ours(&configs).await;
    for _ in 0..17 {
        client.session.owe_update();
        client.say(&[empty]).await;
    }
    assert_eq!(
        server.read().await.unwrap_err().to_string(),
        "the peer sends too many records without data"
    );
    // A message in tiny pieces.
    let (mut client, mut server) = ours(&configs).await;
    let begun: Said = (Kind::Handshake, &[4, 0, 1, 0]);
    client.say(&[begun]).await;
    client.say(&[(Kind::Handshake, &[0][..]); 32]).await;
    assert_eq!(
        server.read().await.unwrap_err().to_string(),
        "the peer sends too many records without data"
    );
}

#[tokio::test]
async fn the_beginning_of_a_message_is_not_copied_again_with_each_record() {
    let configs = configs();
    let (mut client, mut server) = ours(&configs).await;
    let first = [&[4, 0, 0xff, 0xff][..], &[0; 16_000]].concat();
    let mut places = Vec::new();
    // The second record makes the buffer grow, so that there is room for those that follow.
    for piece in [&first[..], &[0], &[0], &[0], &[0]] {
        client.say(&[(Kind::Handshake, piece)]).await;
        while server.session.message().len() < first.len() + places.len() {
            server.stream.readable().await.unwrap();
            assert!(
                !server
                    .session
                    .has_spoken(&server.stream, &mut server.scratch)
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
async fn a_read_inside_of_a_read_has_a_buffer_of_its_own() {
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
async fn a_connection_that_is_cut_off_is_an_error_and_no_end() {
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
