//! http-client and http-server as processes on loopback.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use diy_mesh_testkit::process::Signal;
use diy_mesh_testkit::skip;
use diy_mesh_testkit::wait::{TEST_TIMEOUT, eventually_blocking};
use support::{HTTP_CLIENT, HTTP_SERVER, free_port, run, start, start_server};

#[test]
fn client_and_server_print_the_exchange() {
    let (mut server, port) = start_server(HTTP_SERVER, &[]);
    let mut client = start(
        HTTP_CLIENT,
        &[("ENDPOINT", &format!("http://127.0.0.1:{port}/hello"))],
    );
    let output = client.wait_for("Response #2");
    let first = output
        .split("Response #2")
        .next()
        .expect("has a first part");
    let (head, body) = first
        .split_once("\n\n")
        .expect("an empty line ends the head");
    assert!(head.starts_with("Response #1\nHTTP/1.1 200 OK\n"), "{head}");
    assert!(
        head.contains("\nContent-Type: text/plain") && head.contains("\nDate: "),
        "{head}"
    );
    assert_eq!(
        body,
        "Hello from the http-server service! Hostname: tester Version: 1.0\n"
    );

    let output = server.wait_for("---");
    let agent = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "Request #1\nGET /hello HTTP/1.1\nUser-Agent: diy-http-client/{agent}\nHost: 127.0.0.1:{port}\n\n---"
    );
    assert!(output.ends_with(&format!("{expected}\n")), "{output}");

    for process in [&mut client, &mut server] {
        process.signal(Signal::SIGTERM);
        assert_eq!(process.exit().code(), Some(0));
    }
}

#[test]
fn dump_shows_canonical_header_names_and_all_values() {
    let (server, port) = start_server(HTTP_SERVER, &[]);
    let message = "POST /hello?a=1 HTTP/1.1\r\nhOST: odd\r\nX-One: 1\r\nAccept: */*\r\nx-oNE: 2\r\nContent-Length: 5\r\n\r\nhowdy";
    let response = exchange(
        "127.0.0.1",
        port,
        &format!("{message}GET /hello HTTP/1.1\r\nHOST: next\r\nConnection: close\r\n\r\n"),
    );
    assert_eq!(response.matches("HTTP/1.1 200 OK").count(), 2, "{response}");
    let output = server.wait_for("Host: next");
    assert!(
        output.contains("POST /hello?a=1 HTTP/1.1\nHost: odd\nX-One: 1\nX-One: 2\nAccept: */*\nContent-Length: 5\n\nhowdy\n---\n"),
        "{output}"
    );
}

#[test]
fn returns_404_for_other_paths() {
    let (_server, port) = start_server(HTTP_SERVER, &[]);
    let response = exchange(
        "127.0.0.1",
        port,
        "GET /hello/more HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    );
    assert!(
        response.starts_with("HTTP/1.1 404 Not Found\r\n"),
        "{response}"
    );
}

#[test]
fn serves_ipv6() {
    let (_server, port) = start_server(HTTP_SERVER, &[]);
    if TcpListener::bind("[::1]:0").is_err() {
        return skip("this machine has no IPv6");
    }
    let response = exchange(
        "::1",
        port,
        "GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    );
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
}

#[test]
fn fail_rate_fails_requests() {
    let (server, port) = start_server(HTTP_SERVER, &[("FAIL_RATE", "100")]);
    let response = exchange(
        "127.0.0.1",
        port,
        "GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    );
    assert!(
        response.starts_with("HTTP/1.1 500 Internal Server Error\r\n"),
        "{response}"
    );
    assert!(
        server
            .wait_for("Failed to process request")
            .contains("Request #1\nGET /hello HTTP/1.1\nHost: a\nConnection: close\n\n---\nFailed")
    );
}

#[test]
fn responses_have_a_delay_that_requests_change() {
    let (server, port) = start_server(HTTP_SERVER, &[("DELAY_MS", "60000")]);
    let mut delayed = connect("127.0.0.1", port);
    delayed
        .write_all(b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n")
        .expect("sent");
    server.wait_for("Request #1");
    let post = |body: &str| {
        let length = body.len();
        let head = "POST /delay HTTP/1.1\r\nHost: a\r\nConnection: close";
        let message = format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}");
        exchange("127.0.0.1", port, &message)
    };
    for invalid in ["", "-1", "60001", "1 s"] {
        let response = post(invalid);
        assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
    }
    let response = post("0\n");
    assert!(response.ends_with("Delay: 0 ms\n"), "{response}");
    let response = exchange(
        "127.0.0.1",
        port,
        "GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    );
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    delayed.set_nonblocking(true).expect("a socket");
    let unanswered = delayed.read(&mut [0; 1]).expect_err("no response yet");
    assert_eq!(unanswered.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn shutdown_completes_requests_in_flight() {
    let (mut server, port) = start_server(HTTP_SERVER, &[]);
    let mut idle = connect("127.0.0.1", port);
    idle.write_all(b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n")
        .expect("sent");
    read_until(&mut idle, "Version: 1.0");
    let mut busy = connect("127.0.0.1", port);
    busy.write_all(
        b"POST /hello HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    )
    .expect("sent");
    read_until(&mut busy, "HTTP/1.1 100 Continue\r\n\r\n");

    server.signal(Signal::SIGTERM);
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).expect("closed normally");
    assert!(rest.is_empty(), "idle connections are closed");
    eventually_blocking("the port is closed", || {
        let connected = TcpStream::connect(("127.0.0.1", port));
        connected.is_err().then_some(()).ok_or("it is open")
    });
    assert!(!server.has_exited(), "a request is in flight");
    busy.write_all(b"hello").expect("sent");
    let mut response = String::new();
    busy.read_to_string(&mut response).expect("closed normally");
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert_eq!(server.exit().code(), Some(0));
}

#[test]
fn serves_http2_with_prior_knowledge() {
    let (_server, port) = start_server(HTTP_SERVER, &[]);
    let mut stream = connect("127.0.0.1", port);
    // The preface and an empty SETTINGS frame. The response is a SETTINGS frame: length, then
    // type 4.
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .expect("sent");
    let mut frame = [0; 9];
    stream.read_exact(&mut frame).expect("answered");
    assert_eq!(frame[3], 4);
}

#[test]
fn client_reuses_connection_and_sends_host_of_url() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let client = start(
        HTTP_CLIENT,
        &[("ENDPOINT", &format!("http://localhost:{port}/a?b=c"))],
    );
    let (mut connection, _) = listener.accept().expect("connected");
    for _ in 0..3 {
        let request = read_until(&mut connection, "\r\n\r\n");
        assert!(request.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{request}");
        assert!(
            request.contains(&format!("Host: localhost:{port}\r\n")),
            "{request}"
        );
        connection
            .write_all(b"HTTP/1.1 200 Fine\r\nx-ODD: 1\r\nContent-Length: 2\r\n\r\nok")
            .expect("sent");
    }
    let output = client.wait_for("Response #3");
    assert!(
        output.contains("HTTP/1.1 200 Fine\nX-Odd: 1\nContent-Length: 2\n\nok\n"),
        "{output}"
    );
}

#[test]
fn client_prints_errors_and_continues() {
    let port = free_port();
    let mut client = start(
        HTTP_CLIENT,
        &[("ENDPOINT", &format!("http://127.0.0.1:{port}/hello"))],
    );
    let failure = client.wait_for("Request failed");
    assert!(failure.contains("Connection refused"), "{failure}");
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("free a moment ago");
    let (mut silent, _) = listener.accept().expect("connected");
    read_until(&mut silent, "\r\n\r\n");
    client.wait_for("no answer within 5 s");
    let (mut next, _) = listener.accept().expect("connected");
    read_until(&mut next, "\r\n\r\n");
    next.write_all(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        .expect("sent");
    client.wait_for("Response #1\nHTTP/1.1 503 Busy");
    client.signal(Signal::SIGINT);
    assert_eq!(client.exit().code(), Some(0));
}

#[test]
fn rejects_invalid_configuration_with_exit_code_2() {
    for (program, args, variables, expected) in [
        (
            HTTP_SERVER,
            &[][..],
            &[("LISTEN_PORT", "http")][..],
            "'http' for '--listen-port",
        ),
        (
            HTTP_SERVER,
            &[],
            &[("FAIL_RATE", "120%")],
            "'120%' for '--fail-rate",
        ),
        (
            HTTP_CLIENT,
            &["--endpoint", "https://a/"],
            &[],
            "'https://a/' for '--endpoint",
        ),
        (HTTP_CLIENT, &["--no-such-flag"], &[], "--no-such-flag"),
    ] {
        let (code, _, report) = run(program, args, variables);
        assert_eq!(code, 2);
        assert!(report.contains(expected), "{report}");
    }
}

#[test]
fn empty_variables_mean_the_defaults() {
    let (server, _) = start_server(HTTP_SERVER, &[("FAIL_RATE", " "), ("VERSION", "")]);
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        server
            .output()
            .contains(&format!("http-server {version} listens on"))
    );
}

#[test]
fn names_port_in_use() {
    let (_server, port) = start_server(HTTP_SERVER, &[]);
    let (code, _, report) = run(HTTP_SERVER, &[], &[("LISTEN_PORT", &port.to_string())]);
    assert_eq!(code, 1);
    assert!(
        report.starts_with(&format!("http-server: cannot listen on port {port}: ")),
        "{report}"
    );
}

#[test]
fn prints_help_and_version() {
    for (program, name) in [(HTTP_SERVER, "http-server"), (HTTP_CLIENT, "http-client")] {
        let (code, version, _) = run(program, &["--version"], &[]);
        assert_eq!(
            (code, version),
            (0, format!("{name} {}\n", env!("CARGO_PKG_VERSION")))
        );
        let (code, help, _) = run(program, &["--help"], &[]);
        assert!(
            code == 0 && help.contains(&format!("Usage: {name} [OPTIONS]\n")),
            "{help}"
        );
    }
}

fn connect(host: &str, port: u16) -> TcpStream {
    let stream = TcpStream::connect((host, port)).expect("connected");
    stream
        .set_read_timeout(Some(TEST_TIMEOUT))
        .expect("a timeout");
    stream
}

/// Sends a message and reads until the server closes the connection.
fn exchange(host: &str, port: u16, message: &str) -> String {
    let mut stream = connect(host, port);
    stream.write_all(message.as_bytes()).expect("sent");
    let mut response = String::new();
    stream
        .read_to_string(&mut response)
        .expect("closed normally");
    response
}

fn read_until(stream: &mut TcpStream, end: &str) -> String {
    stream
        .set_read_timeout(Some(TEST_TIMEOUT))
        .expect("a timeout");
    let (mut text, mut byte) = (Vec::new(), [0]);
    while !text.ends_with(end.as_bytes()) {
        stream.read_exact(&mut byte).expect("more to come");
        text.push(byte[0]);
    }
    String::from_utf8(text).expect("UTF-8")
}
