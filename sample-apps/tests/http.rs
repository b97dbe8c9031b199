//! http-client and http-server as processes on loopback.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use support::{HTTP_CLIENT, HTTP_SERVER, PATIENCE, Process, free_port, run};

#[test]
fn client_and_server_show_the_same_exchange() {
    let (mut server, port) = Process::start_server(HTTP_SERVER, &[]);
    let mut client = Process::start(
        HTTP_CLIENT,
        &[("ENDPOINT", &format!("http://127.0.0.1:{port}/hello"))],
    );
    let heard = client.wait_for("Response #2");
    let first = heard.split("Response #2").next().expect("has a first part");
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

    let seen = server.wait_for("---");
    let agent = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "Request #1\nGET /hello HTTP/1.1\nUser-Agent: diy-http-client/{agent}\nHost: 127.0.0.1:{port}\n\n---"
    );
    assert!(seen.ends_with(&format!("{expected}\n")), "{seen}");

    for process in [&mut client, &mut server] {
        process.signal(Signal::SIGTERM);
        assert_eq!(process.exit().code(), Some(0));
    }
}

#[test]
fn requests_are_dumped_as_they_arrived() {
    let (server, port) = Process::start_server(HTTP_SERVER, &[]);
    let message = "POST /hello?a=1 HTTP/1.1\r\nhOST: odd\r\nX-One: 1\r\nAccept: */*\r\nx-oNE: 2\r\nContent-Length: 5\r\n\r\nhowdy";
    let answer = exchange(
        "127.0.0.1",
        port,
        &format!("{message}GET /hello HTTP/1.1\r\nHOST: next\r\nConnection: close\r\n\r\n"),
    );
    assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 2, "{answer}");
    let seen = server.wait_for("HOST: next");
    assert!(
        seen.contains("POST /hello?a=1 HTTP/1.1\nhOST: odd\nX-One: 1\nAccept: */*\nx-oNE: 2\nContent-Length: 5\n\nhowdy\n---\n"),
        "{seen}"
    );
}

#[test]
fn other_paths_are_not_found() {
    let (_server, port) = Process::start_server(HTTP_SERVER, &[]);
    let answer = exchange(
        "127.0.0.1",
        port,
        "GET /hello/more HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    );
    assert!(answer.starts_with("HTTP/1.1 404 Not Found\r\n"), "{answer}");
}

#[test]
fn ipv6_is_served_too() {
    let (_server, port) = Process::start_server(HTTP_SERVER, &[]);
    if TcpListener::bind("[::1]:0").is_err() {
        assert!(std::env::var_os("CI").is_none(), "CI machines have IPv6");
        println!("skipped: this machine has no IPv6");
        return;
    }
    let answer = exchange(
        "::1",
        port,
        "GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    );
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
}

#[test]
fn the_fail_rate_makes_requests_fail() {
    let (server, port) = Process::start_server(HTTP_SERVER, &[("FAIL_RATE", "100")]);
    let answer = exchange(
        "127.0.0.1",
        port,
        "GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    );
    assert!(
        answer.starts_with("HTTP/1.1 500 Internal Server Error\r\n"),
        "{answer}"
    );
    assert!(
        server
            .wait_for("Failed to process request")
            .contains("Request #1\nGET /hello HTTP/1.1\nHost: a\nConnection: close\n\n---\nFailed")
    );
}

#[test]
fn a_request_in_flight_is_finished_before_the_server_ends() {
    let (mut server, port) = Process::start_server(HTTP_SERVER, &[]);
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
    assert_eq!(
        idle.read(&mut [0; 1]).expect("closed in good order"),
        0,
        "idle connections are closed"
    );
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {
        assert!(Instant::now() < deadline, "the port stays open");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!server.has_exited(), "a request is in flight");
    busy.write_all(b"hello").expect("sent");
    let mut answer = String::new();
    busy.read_to_string(&mut answer)
        .expect("closed in good order");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert_eq!(server.exit().code(), Some(0));
}

#[test]
fn http2_is_served_where_the_client_begins_with_it() {
    let (_server, port) = Process::start_server(HTTP_SERVER, &[]);
    let mut stream = connect("127.0.0.1", port);
    // The preface and an empty SETTINGS frame; the answer is a SETTINGS frame: length, then type 4.
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .expect("sent");
    let mut frame = [0; 9];
    stream.read_exact(&mut frame).expect("answered");
    assert_eq!(frame[3], 4);
}

#[test]
fn the_client_keeps_its_connection_and_the_host_of_its_url() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let client = Process::start(
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
    let heard = client.wait_for("Response #3");
    assert!(
        heard.contains("HTTP/1.1 200 Fine\nx-ODD: 1\nContent-Length: 2\n\nok\n"),
        "{heard}"
    );
}

#[test]
fn failed_calls_are_printed_and_the_next_ones_made() {
    let port = free_port();
    let mut client = Process::start(
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
fn wrong_configuration_is_reported_whole_with_exit_code_2() {
    let (code, _, report) = run(
        HTTP_SERVER,
        &[],
        &[("LISTEN_PORT", "http"), ("FAIL_RATE", "120%")],
    );
    assert_eq!(code, 2);
    assert!(
        report.contains("LISTEN_PORT: `http`") && report.contains("FAIL_RATE: `120%`"),
        "{report}"
    );
    let (code, _, report) = run(HTTP_CLIENT, &["--endpoint", "https://a/"], &[]);
    assert_eq!(code, 2);
    assert!(report.contains("ENDPOINT: `https://a/`"), "{report}");
    assert_eq!(run(HTTP_CLIENT, &["--no-such-flag"], &[]).0, 2);
}

#[test]
fn a_port_in_use_is_a_clear_failure() {
    let (_server, port) = Process::start_server(HTTP_SERVER, &[]);
    let (code, _, report) = run(HTTP_SERVER, &[], &[("LISTEN_PORT", &port.to_string())]);
    assert_eq!(code, 1);
    assert!(
        report.starts_with(&format!("http-server: cannot listen on port {port}: ")),
        "{report}"
    );
}

#[test]
fn help_and_version_are_there() {
    for (program, name) in [(HTTP_SERVER, "http-server"), (HTTP_CLIENT, "http-client")] {
        let (code, version, _) = run(program, &["--version"], &[]);
        assert_eq!(
            (code, version),
            (0, format!("{name} {}\n", env!("CARGO_PKG_VERSION")))
        );
        let (code, help, _) = run(program, &["--help"], &[]);
        assert!(
            code == 0 && help.contains(&format!("Usage: {name}")),
            "{help}"
        );
    }
}

fn connect(host: &str, port: u16) -> TcpStream {
    let stream = TcpStream::connect((host, port)).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Sends bytes and reads until the server closes.
fn exchange(host: &str, port: u16, message: &str) -> String {
    let mut stream = connect(host, port);
    stream.write_all(message.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .expect("closed in good order");
    answer
}

fn read_until(stream: &mut TcpStream, end: &str) -> String {
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let (mut text, mut byte) = (Vec::new(), [0]);
    while !text.ends_with(end.as_bytes()) {
        stream.read_exact(&mut byte).expect("more to come");
        text.push(byte[0]);
    }
    String::from_utf8(text).expect("UTF-8")
}
