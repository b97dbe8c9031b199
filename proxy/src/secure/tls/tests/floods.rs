//! Peers that flood a handshake, in both roles. rustls keeps the records of a message until it is
//! complete.

use super::fragments::{ALLOWED, Fragments, HostileClient, HostileServer, PADDED};
use super::slots::{FLOODER, GATEWAY, Slots};
use super::*;
use diy_mesh_testkit::wait::until;

impl Fragments {
    /// Sends this many records.
    async fn send(&mut self, stream: &mut TcpStream, count: usize) -> std::io::Result<()> {
        for _ in 0..count {
            stream.write_all(&self.next()).await?;
        }
        Ok(())
    }
}

/// A client whose handshake has come to its Certificate message.
async fn hostile_client(slots: &Slots, from: [u8; 4]) -> (TcpStream, Fragments) {
    let mut client = HostileClient::new(super::super::Alpn::Http2.name());
    let mut stream = slots.connect(from).await.unwrap();
    stream.write_all(&client.hello()).await.unwrap();
    loop {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).await.unwrap();
        assert!(read > 0, "no ServerHello");
        if let Some(fragments) = client.receive(&bytes[..read]) {
            return (stream, fragments);
        }
    }
}

/// A server that has sent its ServerHello.
async fn hostile_server(authority: &Authority, mut stream: TcpStream) -> (TcpStream, Fragments) {
    let (certificate, key) = authority.leaf_and_key(CART, |_| {});
    let alpn = super::super::Alpn::Http2.name();
    let mut server = HostileServer::new(alpn, certificate, key.serialize_der());
    loop {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).await.unwrap();
        if let Some((hello, fragments)) = server.receive(&bytes[..read]) {
            stream.write_all(&hello).await.unwrap();
            return (stream, fragments);
        }
    }
}

#[test]
fn server_bounds_and_charges_the_input_of_a_handshake() {
    on_worker(async {
        let slots = Slots::new(200, "").await;
        let used = || slots.inbound.admission.used_bytes(&[]);
        let (mut stream, mut fragments) = hostile_client(&slots, FLOODER).await;
        fragments.send(&mut stream, ALLOWED).await.unwrap();
        until(|| used() > ALLOWED * PADDED).await;
        // The proxy closes the connection, with an error where bytes are unread.
        while fragments.send(&mut stream, 1).await.is_ok() {
            assert!(fragments.sequence < 4000, "the handshake goes on");
        }
        until(|| used() == 0).await;
        let rejected = "failures_total{direction=\"inbound\",code=\"handshake-failed\"} 1";
        let page = slots.inbound.metrics.render();
        assert!(page.contains(rejected), "{page}");
        assert!(
            slots.call(FLOODER).await.is_ok(),
            "the next handshake succeeds"
        );
    });
}

#[test]
fn client_bounds_and_charges_the_input_of_a_handshake() {
    on_worker(async {
        let authority = Authority::new("root");
        let side = Side::new(
            Some(credentials(&authority, WEB, |_| {})),
            "",
            Discovery::off(),
        );
        let (listener, address) = listen().await;
        let memory = Charge::new(side.worker.slot());
        let used = || side.worker.admission.used_bytes(&[]);
        let server = async {
            let (mut stream, mut fragments) =
                hostile_server(&authority, listener.accept().await.unwrap().0).await;
            fragments.send(&mut stream, ALLOWED).await.unwrap();
            until(|| used() > ALLOWED * PADDED).await;
            let flood = fragments.send(&mut stream, 4000).await;
            assert!(flood.is_err(), "the handshake goes on");
        };
        let stream = TcpStream::connect(address).await.unwrap();
        let cart = CART.parse().unwrap();
        let tls = &side.worker.tls;
        let connect = tls.connect(
            Io::new(stream),
            address,
            &cart,
            super::super::Alpn::Http2,
            memory,
        );
        let (connected, ()) = tokio::join!(connect, server);
        let failure = connected.err().unwrap().to_string();
        assert!(failure.contains("more than 98304 bytes"), "{failure}");
        assert_eq!(used(), 0);
    });
}

#[test]
fn interleaved_record_fails_the_handshake() {
    on_worker(async {
        let slots = Slots::new(200, "").await;
        let (mut stream, mut fragments) = hostile_client(&slots, FLOODER).await;
        let records = [fragments.next(), fragments.seal(b"data\x17".to_vec())].concat();
        stream.write_all(&records).await.unwrap();
        let rejected = "failures_total{direction=\"inbound\",code=\"handshake-failed\"} 1";
        until(|| slots.inbound.metrics.render().contains(rejected)).await;
        assert!(
            slots.call(FLOODER).await.is_ok(),
            "the next handshake succeeds"
        );
    });
}

#[test]
fn floods_of_handshakes_stay_within_the_budget() {
    on_worker(async {
        let slots = Slots::with_memory(app().await, 400, 1024 * 1024, "").await;
        let admission = &slots.inbound.admission;
        let mut held = Vec::new();
        while slots.rejections() == 0 {
            let from = [127, 0, 1, held.len() as u8];
            let (mut stream, mut fragments) = hostile_client(&slots, from).await;
            let before = slots.rejections();
            fragments.send(&mut stream, ALLOWED).await.unwrap();
            held.push(stream);
            let (limit, used) = (admission.max_bytes(), || admission.used_bytes(&[]));
            let wanted = limit.min(held.len() * ALLOWED * PADDED);
            until(|| used() >= wanted || slots.rejections() > before).await;
            assert!(used() <= limit / 7 * 8, "{} of {limit} bytes", used());
        }
        assert!(held.len() > 2, "{} handshakes", held.len());
        let answer = slots.call_without_tls(GATEWAY).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    });
}
