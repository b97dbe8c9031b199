//! Dumps and access logs as the telemetry of the pod says.

use std::sync::mpsc;

use diy_mesh_model::access::Format as LineFormat;
use diy_mesh_proto::telemetry::{AccessLogs, DumpSettings};

use super::*;
use crate::observe::ended::request_line;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn settings(mode: PolicyMode, filter: DumpFilter) -> Arc<Telemetry> {
    Arc::new(Telemetry {
        dump: Some(DumpSettings { mode, filter }),
        ..Telemetry::default()
    })
}

/// The dump of [`hello`].
fn dumped(mode: Mode, telemetry: &Arc<Telemetry>, caller: Option<&Identity>) -> String {
    let (dumps, output, _) = start(mode, Format::Text);
    if let Some(mut dump) = dumps.exchange(Some(telemetry), caller) {
        hello_filtered(&mut dump);
        dump.write(&Arc::new(ended(Direction::Inbound)), false);
    }
    dumps.flush(FLUSH_TIMEOUT);
    let shared = dumps.shared.as_ref().unwrap();
    assert_eq!(shared.concurrent.load(Ordering::Relaxed), 0);
    output.pieces().concat()
}

/// As [`hello`], with the head as the record of an exchange gives it.
fn hello_filtered(dump: &mut ExchangeDump) {
    let head = "POST /hello?a=b HTTP/1.1\r\nHost: http-server\r\n\r\n";
    let head = RequestHead::parse(head.into()).unwrap();
    dump.request_head(&head.view(), Edits::default());
    hello(dump);
}

#[test]
fn policy_switches_dumps_and_shows_no_bodies_beyond_the_arguments() {
    use PolicyMode::{Full, Headers, Off};
    for (argument, policy, has_dump, has_body) in [
        (Mode::Full, Full, true, true),
        (Mode::Full, Headers, true, false),
        (Mode::Full, Off, false, false),
        (Mode::Headers, Full, true, false),
        (Mode::Headers, Off, false, false),
        (Mode::Off, Full, true, false),
        (Mode::Off, Headers, true, false),
    ] {
        let settings = settings(policy, DumpFilter::default());
        let text = dumped(argument, &settings, None);
        let found = (text.contains("POST /hello"), text.contains("ping"));
        assert_eq!(found, (has_dump, has_body), "{argument:?} {policy:?}");
        assert_eq!(text.contains("?a=b"), has_body, "{text}");
    }
    let none = Arc::new(Telemetry::default());
    assert!(dumped(Mode::Full, &none, None).contains("ping"));
    assert_eq!(dumped(Mode::Off, &none, None), "");
}

#[test]
fn filters_select_what_is_dumped() {
    let web: Identity = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
    let is_dumped = |filter: DumpFilter| {
        let settings = settings(PolicyMode::Headers, filter);
        !dumped(Mode::Headers, &settings, Some(&web)).is_empty()
    };
    let none = DumpFilter::default;
    for (path, expected) in [("/hello", true), ("/hell", false), ("", true)] {
        let path = Some(path.to_owned());
        assert_eq!(is_dumped(DumpFilter { path, ..none() }), expected);
    }
    for (status, expected) in [((200, 299), true), ((500, 599), false)] {
        let status = Some(status);
        assert_eq!(is_dumped(DumpFilter { status, ..none() }), expected);
    }
    for (namespace, expected) in [("shop", true), ("bank", false)] {
        let caller = Some((namespace.to_owned(), String::new()));
        assert_eq!(is_dumped(DumpFilter { caller, ..none() }), expected);
    }
    let slower_than = Some(DAY);
    assert!(!is_dumped(DumpFilter {
        slower_than,
        ..none()
    }));
}

#[test]
fn what_a_filter_leaves_out_uses_no_budget() {
    let (dumps, output, metrics) = start(Mode::Headers, Format::Text);
    let settings = settings(
        PolicyMode::Headers,
        DumpFilter {
            slower_than: Some(DAY),
            ..DumpFilter::default()
        },
    );
    let ended = Arc::new(ended(Direction::Inbound));
    let exchange = |age: Duration| {
        let mut dump = dumps.exchange(Some(&settings), None).unwrap();
        hello(&mut dump);
        dump.started -= age;
        dump.write(&ended, false);
    };
    (0..1000).for_each(|_| exchange(Duration::ZERO));
    exchange(DAY);
    dumps.flush(FLUSH_TIMEOUT);
    assert_eq!(output.pieces().len(), 1);
    assert_eq!(metrics.dumps_suppressed.get(), 0);
}

#[test]
fn opaque_connections_have_no_path_and_no_status() {
    let (dumps, output, _) = start(Mode::Headers, Format::Text);
    let inbound = ended(Direction::Inbound);
    let inbound = Arc::new(Ended {
        protocol: Protocol::Tcp,
        ended: inbound.started + Duration::from_millis(20),
        ..inbound
    });
    let dump = |path: Option<&str>, slower_than: u64| {
        let settings = settings(
            PolicyMode::Headers,
            DumpFilter {
                path: path.map(str::to_owned),
                slower_than: Some(Duration::from_millis(slower_than)),
                ..DumpFilter::default()
            },
        );
        dumps.opaque(&inbound, Some(&settings));
    };
    dump(Some(""), 0);
    dump(None, 21);
    dump(None, 20);
    dumps.flush(FLUSH_TIMEOUT);
    assert_eq!(output.pieces().len(), 1);
}

/// Logs a request with this target.
fn log(dumps: &Dumps, target: &str) {
    let telemetry = Telemetry {
        access_logs: Some(AccessLogs {
            failures: false,
            format: LineFormat::parse("{method} \"{path}\" {status}").unwrap(),
        }),
        ..Telemetry::default()
    };
    let ended = Ended {
        line: request_line(&view::testing::request("GET", target)),
        status: Some(StatusCode::OK),
        ..ended(Direction::Inbound)
    };
    dumps.access(&ended, &telemetry);
}

#[test]
fn access_log_has_a_line_for_each_record_without_queries_and_forged_lines() {
    let (dumps, output, _) = start(Mode::Off, Format::Text);
    let targets = ["/a?token=x", "/b\r\nforged", "/c\"d", "*"];
    for target in targets {
        log(&dumps, target);
    }
    dumps.flush(FLUSH_TIMEOUT);
    assert_eq!(
        output.pieces().concat(),
        "GET \"/a?***\" 200\nGET \"/b\\r\\nforged\" 200\nGET \"/c\\x22d\" 200\nGET \"*\" 200\n"
    );
}

/// An output that waits for a permission before each write.
struct Blocked(mpsc::Receiver<()>, Output);

impl Write for Blocked {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        self.1.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn lines_beyond_the_queue_are_dropped_and_counted() {
    let (output, metrics) = (Output::default(), Metrics::new());
    let (permit, permits) = mpsc::channel();
    let config = DumpConfig {
        mode: Mode::Off,
        format: Format::Text,
        out: Box::new(Blocked(permits, output.clone())),
    };
    let dumps = Dumps::start(config, metrics.clone()).unwrap();
    // At most what waits, and what is being written.
    let sent = 3 * MAX_LINES / "GET \"/\" 200\n".len();
    for _ in 0..sent {
        log(&dumps, "/");
    }
    drop(permit);
    let dropped = usize::try_from(metrics.access_logs_dropped.get()).unwrap();
    assert!(dropped > 0);
    drop(dumps);
    let deadline = std::time::Instant::now() + FLUSH_TIMEOUT;
    let lines = || output.pieces().concat().lines().count();
    while lines() < sent - dropped && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(lines(), sent - dropped);
    assert_eq!(metrics.dumps_suppressed.get(), 0);
}
