//! The kubelet's probes: `/probes/INDEX` on the admin port against applications of each kind.
#![allow(clippy::unwrap_used)]

mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_proxy::observe::exceptions::Exceptions;
use diy_mesh_proxy::observe::metrics::Metrics;
use diy_mesh_proxy::observe::probe::{KubeletProbe, Pod, add_routes};
use diy_mesh_runtime::{Admin, Readiness};
use diy_mesh_testkit::authority;
use diy_mesh_testkit::http::get;
use diy_mesh_testkit::net::{closed_address, listen, read_all, read_until};
use diy_mesh_testkit::wait::on_worker;
use support::{jump, on_worker_with_jumps, write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::TcpListenerStream;
use tonic_health::ServingStatus;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
/// A port of the proxy in these tests.
const PROXY_PORT: u16 = 4001;

/// Longer than the timeout of a test.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// The address of an admin server with these probes.
async fn admin(probes: &[String]) -> SocketAddr {
    admin_with(probes, &Metrics::new().exceptions).await
}

/// An admin server whose failed probes are exceptions.
async fn admin_with(probes: &[String], exceptions: &Arc<Exceptions>) -> SocketAddr {
    let probes: Vec<KubeletProbe> = probes.iter().map(|probe| probe.parse().unwrap()).collect();
    let pod = Pod {
        ip: Ipv4Addr::LOCALHOST.into(),
        proxy_ports: [4000, 5000, PROXY_PORT],
    };
    let admin = Admin::new(Readiness::default(), String::new);
    let admin = add_routes(admin, &probes, pod, exceptions);
    let (listener, address) = listen().await;
    tokio::spawn(admin.serve(listener));
    address
}

/// A probe of an application that responds.
fn probe(action: &str, app: SocketAddr, more: &str) -> String {
    probe_with_timeout(action, app, more, PROBE_TIMEOUT)
}

/// A probe of an application that does not respond.
fn timed_out_probe(action: &str, app: SocketAddr, more: &str) -> String {
    probe_with_timeout(action, app, more, Duration::from_secs(1))
}

fn probe_with_timeout(action: &str, app: SocketAddr, more: &str, timeout: Duration) -> String {
    let (port, seconds) = (app.port(), timeout.as_secs());
    format!(r#"{{"{action}":{{"port":{port}{more}}},"timeoutSeconds":{seconds}}}"#)
}

fn hook(app: SocketAddr) -> String {
    format!(r#"{{"httpGet":{{"port":{},"path":"stop"}}}}"#, app.port())
}

async fn request(admin: SocketAddr, line: &str) -> String {
    let mut client = TcpStream::connect(admin).await.unwrap();
    write(&mut client, &format!("{line} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
    read_all(&mut client).await
}

/// Performs one probe.
async fn perform(probe: String) -> (u16, String) {
    get(admin(&[probe]).await, "/probes/0").await
}

/// An application that responds to each connection with the next response, and sends the requests
/// to the returned channel.
async fn app<const N: usize>(
    responses: [String; N],
) -> (SocketAddr, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let (listener, address) = listen().await;
    let (sender, requests) = tokio::sync::mpsc::unbounded_channel();
    tokio::task::spawn_local(async move {
        for response in responses {
            let (mut stream, _) = listener.accept().await.unwrap();
            sender
                .send(read_until(&mut stream, "\r\n\r\n").await)
                .unwrap();
            write(&mut stream, &response).await;
        }
    });
    (address, requests)
}

fn redirect(location: impl std::fmt::Display) -> String {
    format!("HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n")
}

/// Accepts one TLS connection with a certificate of an unknown CA for another name.
async fn accept_tls(listener: TcpListener, alpn: &[u8]) -> TlsStream<TcpStream> {
    let mut config = authority::server("another.example").config;
    config.alpn_protocols = vec![alpn.to_vec()];
    let (stream, _) = listener.accept().await.unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    acceptor.accept(stream).await.unwrap()
}

#[test]
fn dead_application_fails_every_kind_of_probe() {
    on_worker(async {
        let dead = closed_address();
        for (action, more) in [
            ("tcpSocket", ""),
            ("grpc", ""),
            ("httpGet", ""),
            ("httpGet", r#","scheme":"HTTPS""#),
        ] {
            let (status, body) = perform(probe(action, dead, more)).await;
            assert_eq!(status, 503, "{action}{more}");
            assert!(
                body.contains(&format!("cannot connect to {dead}")),
                "{body}"
            );
        }
    });
}

#[test]
fn tcp_probe_succeeds_if_the_application_accepts() {
    on_worker(async {
        let (_listener, address) = listen().await;
        let answer = perform(probe("tcpSocket", address, "")).await;
        assert_eq!(answer, (200, "ok\n".to_owned()));
    });
}

#[test]
fn http_probe_is_the_request_of_the_kubelet() {
    on_worker(async {
        let (address, mut requests) = app([OK.to_owned(), OK.to_owned()]).await;
        assert_eq!(perform(probe("httpGet", address, "")).await.0, 200);
        assert_eq!(
            requests.recv().await.unwrap(),
            format!(
                "GET / HTTP/1.1\r\nUser-Agent: kube-probe/1 (diy-service-mesh)\r\nAccept: */*\r\nHost: {address}\r\nConnection: close\r\n\r\n"
            )
        );
        let headers = r#","path":"a b?c","httpHeaders":[{"name":"Host","value":"shop"},{"name":"User-Agent","value":"me"},
            {"name":"X-A","value":"1"},{"name":"X-A","value":"2"},{"name":"Accept","value":""},{"name":"Content-Length","value":"9"}]"#;
        assert_eq!(perform(probe("httpGet", address, headers)).await.0, 200);
        assert_eq!(
            requests.recv().await.unwrap(),
            "GET /a%20b?c HTTP/1.1\r\nX-A: 1\r\nX-A: 2\r\nUser-Agent: me\r\nHost: shop\r\nConnection: close\r\n\r\n"
        );
    });
}

#[test]
fn status_of_400_or_more_and_malformed_responses_fail() {
    on_worker(async {
        for (response, expected) in [
            ("HTTP/1.1 399 x\r\nContent-Length: 0\r\n\r\n", 200),
            ("HTTP/1.1 304 Not Modified\r\n\r\n", 200),
            ("HTTP/1.0 200\r\nA: b\r\n c\r\n\r\n", 200),
            ("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", 400),
            ("HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n", 500),
            ("SSH-2.0-x\r\n\r\n", 503),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", 503),
            ("", 503),
        ] {
            let (address, _requests) = app([response.to_owned()]).await;
            let (status, body) = perform(probe("httpGet", address, "")).await;
            assert_eq!(status, expected, "{response:?}: {body}");
        }
    });
}

#[test]
fn reads_only_the_start_of_an_endless_body() {
    on_worker(async {
        let endless = format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(20_000));
        let (address, _requests) = app([endless]).await;
        assert_eq!(perform(probe("httpGet", address, "")).await.0, 200);
    });
}

#[test]
fn follows_redirects_on_the_same_host_only() {
    on_worker(async {
        let (other, mut requests) = app([OK.to_owned()]).await;
        let (address, mut first) = app([
            redirect("/there?x#y"),
            redirect(format!("http://{other}/elsewhere")),
        ])
        .await;
        let host = r#","httpHeaders":[{"name":"Host","value":"shop"}]"#;
        assert_eq!(perform(probe("httpGet", address, host)).await.0, 200);
        assert!(first.recv().await.unwrap().contains("\r\nHost: shop\r\n"));
        let second = first.recv().await.unwrap();
        assert!(second.starts_with("GET /there?x HTTP/1.1\r\n") && second.contains("Host: shop"));
        let third = requests.recv().await.unwrap();
        assert!(third.starts_with("GET /elsewhere "), "{third}");
        assert!(third.contains(&format!("Host: {other}\r\n")), "{third}");

        let (listener, elsewhere) = listen().await;
        let location = format!("http://localhost:{}/", elsewhere.port());
        let (address, _requests) = app([redirect(location)]).await;
        assert_eq!(perform(probe("httpGet", address, "")).await.0, 200);
        let accepted = tokio::time::timeout(Duration::ZERO, listener.accept()).await;
        assert!(accepted.is_err(), "another host is not called");
    });
}

#[test]
fn redirect_loops_and_redirects_to_the_proxy_fail() {
    on_worker(async {
        let (address, _requests) = app(std::array::from_fn::<_, 12, _>(|_| redirect("/"))).await;
        let (status, body) = perform(probe("httpGet", address, "")).await;
        assert_eq!((status, &*body), (503, "more than 10 redirects\n"));

        for location in [
            format!("http://127.0.0.1:{PROXY_PORT}/probes/0"),
            "http://[".to_owned(),
        ] {
            let (address, _requests) = app([redirect(location)]).await;
            assert_eq!(perform(probe("httpGet", address, "")).await.0, 503);
        }
        let proxy = SocketAddr::from((Ipv4Addr::LOCALHOST, PROXY_PORT));
        let (status, body) = perform(probe("tcpSocket", proxy, "")).await;
        assert_eq!(status, 503);
        assert!(body.contains("port 4001 belongs to the proxy"), "{body}");
    });
}

#[test]
fn https_probe_accepts_any_certificate_and_either_http_version() {
    on_worker(async {
        let https = r#","scheme":"HTTPS""#;
        let (listener, address) = listen().await;
        let app = tokio::task::spawn_local(async move {
            let mut stream = accept_tls(listener, b"http/1.1").await;
            read_until(&mut stream, "\r\n\r\n").await;
            let _ = stream.write_all(OK.as_bytes()).await;
        });
        let answer = perform(probe("httpGet", address, https)).await;
        assert_eq!(answer, (200, "ok\n".to_owned()));
        app.await.unwrap();

        let (listener, address) = listen().await;
        let app = tokio::task::spawn_local(async move {
            let stream = accept_tls(listener, b"h2").await;
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let (request, mut respond) = connection.accept().await.unwrap().unwrap();
            let response = http::Response::builder().status(503).body(()).unwrap();
            let mut body = respond.send_response(response, false).unwrap();
            body.send_data(Bytes::from_static(b"no"), true).unwrap();
            // Sends what is left.
            let _ = connection.accept().await;
            request.uri().to_string()
        });
        let host =
            r#","scheme":"HTTPS","path":"/x","httpHeaders":[{"name":"Host","value":"shop"}]"#;
        let answer = perform(probe("httpGet", address, host)).await;
        assert_eq!(
            answer,
            (503, "HTTP status 503, expected 200 to 399\n".to_owned())
        );
        assert_eq!(app.await.unwrap(), "https://shop/x");

        // The application does not use TLS.
        let (address, _requests) = self::app(["HTTP/1.1 400 x\r\n\r\n".to_owned()]).await;
        let (status, body) = perform(timed_out_probe("httpGet", address, https)).await;
        assert_eq!(status, 504, "{body}");
    });
}

#[test]
fn grpc_probe_requires_the_status_serving() {
    on_worker(async {
        let (reporter, service) = tonic_health::server::health_reporter();
        for (name, status) in [
            ("up", ServingStatus::Serving),
            ("down", ServingStatus::NotServing),
        ] {
            reporter.set_service_status(name, status).await;
        }
        let (listener, address) = listen().await;
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        for (more, status, text) in [
            ("", 200, "ok"),
            (r#","service":"up""#, 200, "ok"),
            (r#","service":"down""#, 503, "health status NOT_SERVING"),
            (r#","service":"unknown""#, 503, "failed: NotFound"),
        ] {
            let answer = perform(probe("grpc", address, more)).await;
            assert_eq!(answer.0, status, "{more}: {answer:?}");
            assert!(answer.1.contains(text), "{more}: {answer:?}");
        }
        // The application does not use HTTP/2.
        let (address, _requests) = app(["HTTP/1.1 200 OK\r\n\r\n".to_owned()]).await;
        assert_ne!(perform(probe("grpc", address, "")).await.0, 200);
    });
}

#[test]
fn http_probe_of_protocol_http2_needs_no_tls() {
    on_worker(async {
        let (listener, address) = listen().await;
        let app = tokio::task::spawn_local(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let (request, mut respond) = connection.accept().await.unwrap().unwrap();
            let response = http::Response::new(());
            respond.send_response(response, true).unwrap();
            // Sends what is left.
            let _ = connection.accept().await;
            request.uri().to_string()
        });
        let more = r#","protocol":"HTTP2","path":"/x""#;
        let answer = perform(probe("httpGet", address, more)).await;
        assert_eq!(answer, (200, "ok\n".to_owned()));
        assert_eq!(app.await.unwrap(), format!("http://{address}/x"));

        // HTTP/1 is not HTTP/2.
        let (address, _requests) = self::app([OK.to_owned()]).await;
        assert_ne!(perform(probe("httpGet", address, more)).await.0, 200);
    });
}

#[test]
fn grpc_probe_of_mode_tls_accepts_any_certificate() {
    on_worker(async {
        let (_reporter, service) = tonic_health::server::health_reporter();
        let (listener, address) = listen().await;
        tokio::task::spawn_local(async move {
            let stream = accept_tls(listener, b"h2").await;
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(tokio_stream::once(Ok::<_, std::io::Error>(stream)))
                .await
        });
        let answer = perform(probe("grpc", address, r#","mode":"TLS""#)).await;
        assert_eq!(answer, (200, "ok\n".to_owned()));
    });
}

#[test]
fn silent_application_fails_with_a_timeout() {
    on_worker(async {
        let (_listener, address) = listen().await;
        for action in ["httpGet", "grpc"] {
            let answer = perform(timed_out_probe(action, address, "")).await;
            assert_eq!(answer, (504, "no response within 1s\n".to_owned()));
        }
    });
}

/// Otherwise a hanging application would collect one connection a period.
#[test]
fn probe_that_timed_out_closes_its_connection() {
    on_worker_with_jumps(async {
        for action in ["httpGet", "grpc"] {
            let (listener, address) = listen().await;
            let app = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.read_u8().await.unwrap();
                jump(PROBE_TIMEOUT).await;
                let _ = stream.read_to_end(&mut Vec::new()).await;
            };
            let (answer, ()) = tokio::join!(perform(probe(action, address, "")), app);
            assert_eq!(answer.0, 504, "{action}");
        }
        let (listener, address) = listen().await;
        let app = async {
            let stream = accept_tls(listener, b"h2").await;
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let pending = connection.accept().await.unwrap().unwrap();
            jump(PROBE_TIMEOUT).await;
            assert!(!matches!(connection.accept().await, Some(Ok(_))));
            drop(pending);
        };
        let https = probe("httpGet", address, r#","scheme":"HTTPS""#);
        let (answer, ()) = tokio::join!(perform(https), app);
        assert_eq!(answer.0, 504);
    });
}

#[test]
fn only_configured_indexes_are_probes() {
    on_worker(async {
        let (_listener, address) = listen().await;
        let admin = admin(&[probe("tcpSocket", address, "")]).await;
        for path in [
            "/probes/1",
            "/probes/",
            "/probes",
            "/probes/00",
            "/probes/-1",
            "/probes/0/",
            "/probes/18446744073709551617",
            "/probes/127.0.0.1:80",
        ] {
            assert_eq!(get(admin, path).await.0, 404, "{path}");
        }
        for line in ["POST /probes/0", "CONNECT 127.0.0.1:80", "DELETE /probes/0"] {
            let response = request(admin, line).await;
            assert!(response.starts_with("HTTP/1.1 405 "), "{line}: {response}");
        }
        assert_eq!(get(admin, "/probes/0?target=127.0.0.1").await.0, 200);
    });
}

#[test]
fn concurrent_requests_share_one_attempt() {
    on_worker(async {
        let (listener, address) = listen().await;
        let admin = admin(&[probe("httpGet", address, "")]).await;
        let mut clients = Vec::new();
        for _ in 0..20 {
            let mut client = TcpStream::connect(admin).await.unwrap();
            write(&mut client, "GET /probes/0 HTTP/1.1\r\nHost: a\r\n\r\n").await;
            clients.push(client);
        }
        let (mut app, _) = listener.accept().await.unwrap();
        read_until(&mut app, "\r\n\r\n").await;
        // The first client, whose request started the attempt, leaves.
        drop(clients.remove(0));
        assert_eq!(get(admin, "/live").await.0, 200);
        write(&mut app, OK).await;
        for mut client in clients {
            let response = read_all(&mut client).await;
            assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        }
        let more = tokio::time::timeout(Duration::ZERO, listener.accept()).await;
        assert!(more.is_err(), "the application got one request");
    });
}

#[test]
fn hook_fails_without_a_response_and_succeeds_with_any_status() {
    on_worker(async {
        let failing = "HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n".to_owned();
        let (address, mut requests) = app([failing]).await;
        assert_eq!(perform(hook(address)).await.0, 200);
        let seen = requests.recv().await.unwrap();
        assert!(
            seen.starts_with("GET /stop HTTP/1.1\r\nUser-Agent: kube-lifecycle/1 "),
            "{seen}"
        );
        let dead = closed_address();
        let admin = admin(&[hook(dead)]).await;
        assert_eq!(request(admin, "GET /probes/0").await, "");
    });
}

#[test]
fn failed_probes_are_exceptions_and_hooks_are_none() {
    on_worker(async {
        let limited = "HTTP/1.1 429 x\r\nContent-Length: 0\r\n\r\n".to_owned();
        let (address, _requests) = app([limited, OK.to_owned()]).await;
        let probes = [probe("httpGet", address, ""), hook(closed_address())];
        let metrics = Metrics::new();
        let admin = admin_with(&probes, &metrics.exceptions).await;
        assert_eq!(get(admin, "/probes/0").await.0, 429);
        assert_eq!(get(admin, "/probes/0").await.0, 200);
        assert_eq!(request(admin, "GET /probes/1").await, "");
        let report = metrics.exceptions.report(std::time::Instant::now());
        let [failed] = &report[..] else {
            panic!("{report:?}");
        };
        let destination = format!("HTTP GET / on port {}", address.port());
        assert_eq!(failed.destination, destination);
        assert_eq!(
            (
                failed.kind.name(),
                &*failed.reason,
                failed.count,
                failed.total
            ),
            ("probe", "status-429", 1, 2)
        );
        let labels = format!(
            "kind=\"probe\",destination=\"{destination}\",endpoint=\"\",reason=\"status-429\""
        );
        let text = metrics.render();
        for (name, value) in [("exceptions", 1), ("exception_attempts", 2)] {
            let line = format!("diy_mesh_proxy_{name}{{{labels}}} {value}\n");
            assert!(text.contains(&line), "{line}: {text}");
        }
    });
}

#[test]
fn hook_ends_when_its_client_leaves() {
    on_worker(async {
        let (listener, address) = listen().await;
        let admin = admin(&[hook(address)]).await;
        for _ in 0..2 {
            let mut client = TcpStream::connect(admin).await.unwrap();
            write(&mut client, "GET /probes/0 HTTP/1.1\r\nHost: a\r\n\r\n").await;
            let (mut app, _) = listener.accept().await.unwrap();
            read_until(&mut app, "\r\n\r\n").await;
            drop(client);
            assert_eq!(read_all(&mut app).await, "", "the connection is closed");
        }
    });
}
