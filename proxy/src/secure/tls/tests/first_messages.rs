//! First messages of clients whose protocol is not HTTP, between meshed and other pods: the proxies
//! forward them at once, unless the bytes can still become a request or a mesh handshake.

use super::*;

/// The first message of a client.
type Message = (&'static str, Vec<u8>);

/// A TLS ClientHello (RFC 8446, section 4.1.2) of this length, with a padding extension (RFC 7685).
fn client_hello(length: u16) -> Vec<u8> {
    let [record, handshake, padding] = [5, 9, 58].map(|offset| (length - offset).to_be_bytes());
    let extensions = (length - 54).to_be_bytes();
    let mut hello = vec![22, 3, 1, record[0], record[1]];
    hello.extend([1, 0, handshake[0], handshake[1], 3, 3]);
    hello.extend([7; 32]);
    hello.extend([0, 0, 4, 0x13, 1, 0x13, 2, 1, 0]);
    hello.extend(extensions);
    hello.extend([0, 21]);
    hello.extend(padding);
    hello.resize(length.into(), 0);
    hello
}

/// First messages that are forwarded without waiting for more bytes.
fn immediate() -> Vec<Message> {
    let messages: [(&str, &[u8]); 22] = [
        ("Redis, inline", b"PING\r\n"),
        ("Redis, RESP", b"*1\r\n$4\r\nPING\r\n"),
        ("PostgreSQL, SSLRequest", b"\0\0\0\x08\x04\xd2\x16\x2f"),
        ("PostgreSQL, GSSENCRequest", b"\0\0\0\x08\x04\xd2\x16\x30"),
        (
            "PostgreSQL, StartupMessage",
            b"\0\0\0\x17\0\x03\0\0user\0postgres\0\0",
        ),
        (
            "Kafka, ApiVersions",
            b"\0\0\0\x0e\0\x12\0\0\0\0\0\x01\0\x04test",
        ),
        (
            "MongoDB, OP_QUERY",
            b"\x3a\0\0\0\x01\0\0\0\0\0\0\0\xd4\x07\0\0\0\0\0\0admin.$cmd\0",
        ),
        (
            "MongoDB, OP_MSG whose length is a token",
            b"\x2a\0\0\0\x01\0\0\0\0\0\0\0\xdd\x07\0\0\0\0\0\0\0",
        ),
        ("MQTT, CONNECT", b"\x10\x0c\0\x04MQTT\x04\x02\0\x3c\0\0"),
        ("AMQP 0-9-1", b"AMQP\0\0\x09\x01"),
        ("AMQP 1.0", b"AMQP\0\x01\0\0"),
        ("memcached, text", b"get key\r\n"),
        (
            "memcached, binary",
            b"\x80\x0b\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        ),
        (
            "LDAP, anonymous bind",
            b"0\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\0\x80\0",
        ),
        (
            "XMPP",
            b"<?xml version='1.0'?><stream:stream to='example.org' version='1.0'>",
        ),
        ("NATS", b"CONNECT {\"verbose\":false}\r\nPING\r\n"),
        ("Cassandra, OPTIONS", b"\x04\0\0\0\x05\0\0\0\0"),
        ("ZooKeeper", b"\0\0\0\x2d\0\0\0\0\0\0\0\0\0\0\0\0"),
        ("Diameter", b"\x01\0\0\x14\x80\0\x01\x01"),
        ("git", b"0032git-upload-pack /it.git\0host=here\0"),
        ("one byte of binary", b"\0"),
        ("a line of text", b"hello there\n"),
    ];
    let messages = messages.map(|(name, bytes)| (name, bytes.to_vec()));
    let binary = |first| {
        let numbers = (0..1000_u32).map(|at| at.wrapping_mul(0x9e37_79b1).to_be_bytes()[0]);
        [vec![first], numbers.skip(1).collect()].concat()
    };
    let mut messages = Vec::from(messages);
    messages.extend([
        ("TLS, 200 bytes", client_hello(200)),
        ("TLS, 517 bytes", client_hello(517)),
        ("1,000 bytes of binary", binary(0)),
        ("1,000 bytes of binary, like text at first", binary(b'A')),
    ]);
    messages
}

/// First messages that may be the start of a request line.
const UNFINISHED: [&str; 4] = ["hello", "PRI * HT", "GET ke", "GE"];

/// How a client reaches the application.
#[derive(Clone, Copy, Debug)]
enum Ends {
    Meshed,
    MeshedClient,
    MeshedServer,
}

/// A connection of a client to the application.
async fn connect(ends: Ends, pair: &Pair, app: SocketAddr) -> TcpStream {
    match ends {
        Ends::Meshed => pair.connect().await,
        Ends::MeshedClient => pair.outbound.connect(&Backend::alone(app)).await,
        Ends::MeshedServer => TcpStream::connect(pair.address).await.unwrap(),
    }
}

#[test]
fn first_messages_are_forwarded_without_waiting_for_more() {
    on_worker(async {
        let (server, app) = listen().await;
        let pair = Pair::usual(app).await;
        for ends in [Ends::Meshed, Ends::MeshedClient, Ends::MeshedServer] {
            for (name, message) in immediate() {
                let frozen = freeze();
                let start = tokio::time::Instant::now();
                let mut client = connect(ends, &pair, app).await;
                client.write_all(&message).await.unwrap();
                let (mut accepted, _) = server.accept().await.unwrap();
                let mut received = vec![0; message.len()];
                accepted.read_exact(&mut received).await.unwrap();
                assert_eq!(received, message, "{name}, {ends:?}");
                accepted.write_all(b"answer").await.unwrap();
                assert_eq!(read_until(&mut client, "answer").await, "answer");
                let waited = start.elapsed();
                assert!(waited.is_zero(), "{name}, {ends:?}: waited {waited:?}");
                drop(frozen);
            }
        }
    });
}

/// The proxy of the client has waited.
#[test]
fn callee_does_not_wait_again_for_a_line_without_its_end() {
    on_worker(async {
        for message in UNFINISHED {
            let (server, app) = listen().await;
            let pair = Pair::usual(app).await;
            let frozen = freeze();
            let start = tokio::time::Instant::now();
            let mut client = pair.connect_as(super::super::Alpn::Inspected).await;
            client.write_all(message.as_bytes()).await.unwrap();
            let (mut accepted, _) = server.accept().await.unwrap();
            assert_eq!(read_until(&mut accepted, message).await, message);
            assert!(start.elapsed().is_zero(), "{message}");
            drop(frozen);
        }
    });
}

#[test]
fn caller_says_that_it_inspects_the_first_bytes() {
    on_worker(async {
        let (server, app) = listen().await;
        let pair = Pair::usual(app).await;
        let mut client = pair.connect().await;
        client.write_all(b"PING\r\n").await.unwrap();
        let (mut accepted, _) = server.accept().await.unwrap();
        assert_eq!(read_until(&mut accepted, "PING\r\n").await, "PING\r\n");
        assert!(pair.saw("diy-mesh/any") && !pair.saw("diy-mesh/tcp"));
    });
}
