//! ClientHellos that arrive late, with an application that speaks first: a lost packet, or a proxy
//! without CPU time.

use super::*;

const GREETING: &str = "220 mail.example ESMTP\r\n";

impl Pair {
    fn answered_in_plaintext(&self) -> u64 {
        let series =
            "diy_mesh_proxy_tls_handshakes_total{direction=\"outbound\",result=\"plaintext\"}";
        diy_mesh_testkit::metrics::value(&self.outbound.metrics.render(), series)
    }
}

#[test]
fn handshake_that_was_answered_in_plaintext_is_repeated() {
    on_worker(async {
        let pair = Pair::usual(speaks_first(GREETING.as_bytes()).await).await;
        pair.late.set(2);
        let mut client = pair.connect().await;
        assert_eq!(read_until(&mut client, "\r\n").await, GREETING);
        client.write_all(b"secret").await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(read_all(&mut client).await, "terces");
        assert_eq!(pair.answered_in_plaintext(), 2);
        assert!(!pair.saw("secret"));
    });
}

#[test]
fn server_that_always_answers_in_plaintext_gets_no_bytes_of_the_client() {
    on_worker(async {
        let pair = Pair::usual(speaks_first(GREETING.as_bytes()).await).await;
        pair.late.set(usize::MAX);
        let mut client = pair.connect().await;
        client.write_all(b"secret").await.unwrap();
        let ended = client.read(&mut [0]).await;
        assert!(ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
        // The proxy dials while the client is silent, and again when the client has sent.
        assert!([3, 6].contains(&pair.answered_in_plaintext()));
        assert!(!pair.saw("secret"));
    });
}

#[test]
fn callee_waits_longer_for_the_client_hello_of_a_known_proxy() {
    on_worker(async {
        let (server, app) = listen().await;
        let pair = Pair::usual(app).await;
        let mut client = pair.connect().await;
        client.write_all(b"PING\r\n").await.unwrap();
        let mut accepted = server.accept().await.unwrap().0;
        assert_eq!(read_until(&mut accepted, "PING\r\n").await, "PING\r\n");
        let address = client.local_addr().unwrap().ip();
        assert!(pair.inbound.worker.tls.is_known(address));
        // Another connection from the address sends nothing.
        let frozen = freeze();
        let begun = tokio::time::Instant::now();
        let _silent = TcpStream::connect(pair.address).await.unwrap();
        let mut next = std::pin::pin!(server.accept());
        let waited = loop {
            tokio::select! {
                biased;
                accepted = &mut next => {
                    drop(accepted.unwrap());
                    break begun.elapsed();
                }
                () = tokio::time::advance(Duration::from_millis(10)) => {}
            }
        };
        drop(frozen);
        assert!(waited >= Duration::from_secs(1), "dialed after {waited:?}");
        // It was no proxy.
        until(|| !pair.inbound.worker.tls.is_known(address)).await;
    });
}
